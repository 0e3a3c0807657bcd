"""Who opens the network of a command, and who can only narrow it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox import policy_files
from agent_sandbox.cli import context
from agent_sandbox.cli.options import CommandOptions, PolicyOptions
from agent_sandbox.cli.parser import parse
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import Guarantee, Policy
from agent_sandbox.workspace.project import Project
from tests.e2e.program import Shell

ASKS = "[network]\noutbound = true\n"


class Machine:
    """A machine whose policy files a test writes."""

    def __init__(self, top: Path) -> None:
        self.project, self.user, self.system = top / "project", top / "config/agent-sandbox/policy.toml", top / "system.toml"
        for directory in (self.project, self.user.parent):
            directory.mkdir(parents=True)

    def write(self, *, system: str = "", user: str = "", project: str = "") -> None:
        for path, text in ((self.system, system), (self.user, user), (self.project / "agent-sandbox.toml", project)):
            path.write_text(text)

    def policy(self, *network: str, allow: bool = False, files: tuple[str, ...] = (), publish: tuple[str, ...] = ()) -> Policy:
        options = PolicyOptions(network=network, allow_network=allow, files=files, publish=publish)
        policy = context.policy_of(options, Project(str(self.project)))
        assert policy.network.outbound == (Guarantee.EGRESS_ONLY in policy.requires) != (Guarantee.NO_NETWORK in policy.requires)
        return policy

    def reached(self, *network: str, allow: bool = False, files: tuple[str, ...] = ()) -> set[str]:
        rules = self.policy(*network, allow=allow, files=files).network
        return {name for name in ("a.example", "b.example", "c.example") if not rules.objection(name, 443)}

    def warnings(self, *network: str, files: tuple[str, ...] = ()) -> tuple[str, ...]:
        return context.effective_of(PolicyOptions(network=network, files=files), Project(str(self.project))).warnings


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(policy_files, "SYSTEM", str(made.system))
    return made


def test_budgets_of_every_file_and_of_options_hold_together(machine: Machine) -> None:
    texts = {who: f'[network]\nbudgets = ["* {size}"]\n' for who, size in (("system", "30MB"), ("user", "20MB"), ("project", "10MB"))}
    machine.write(**texts)

    def budgets(*network: str) -> set[str]:
        options = PolicyOptions(network=network, budgets=("a.example 5/min",))
        return set(map(str, context.policy_of(options, Project(str(machine.project))).network.budgets))

    assert budgets() == set(), "without a network there is nothing to count"
    assert budgets("a.example") == {"* 30MB", "* 20MB", "* 10MB", "a.example 5/min"}
    machine.write(**{**texts, "user": texts["user"] + "outbound = true\n"})
    assert budgets() == {"* 30MB", "* 20MB", "* 10MB", "a.example 5/min"}
    machine.write(project='[network]\nbudgets = ["* lots"]\n')
    with pytest.raises(PolicyError, match="not a budget"):
        machine.policy("a.example")


ALL = {"a.example", "b.example", "c.example"}


def answers(machine: Machine, *network: str, capable: tuple[str, ...] = ()) -> list[str]:
    """Whether each of three hosts may be reached, is asked for, is answered for by a capability, or is refused."""
    policy = context.policy_of(PolicyOptions(network=network, capable=capable), Project(str(machine.project)))
    assert policy.asks_somebody == policy.network.questions
    found = []
    for name in ("a.example", "b.example", "c.example"):
        asked = "ask" if policy.network.asks_for(name, 443, person=True) else "capability" if policy.network.asks_for(name, 443) else "no"
        found.append("yes" if not policy.network.objection(name, 443) else asked)
    return found


def test_only_a_person_lets_somebody_be_asked_and_every_other_file_only_takes_away(machine: Machine) -> None:
    asking = f'{ASKS}hosts = ["a.example"]\nask = ["b.example"]\n'
    machine.write(user=asking)
    assert answers(machine) == ["yes", "ask", "no"]
    machine.write(project='[network]\nask = ["*"]\n', system='[network]\nask = ["*"]\n')
    assert answers(machine) == ["no"] * 3, "a project's file and the system's let nobody be asked"
    assert answers(machine, "a.example") == ["ask", "no", "no"], "the system's makes a question of what an option opens"
    machine.write(user=asking, project='[network]\nhosts = ["a.example", "c.example"]\n')
    assert answers(machine) == ["yes", "no", "no"]
    machine.write(project='[approvals]\nnetwork = ["a.example"]\n')
    assert answers(machine, "a.example", "b.example+ask") == ["ask", "ask", "no"], "an approval is needed whatever was typed"
    machine.write(project='[network]\ndenied_hosts = ["b.example"]\n')
    assert answers(machine, "a.example", "*+ask") == ["yes", "no", "ask"]


def test_hosts_of_a_capability_are_opened_beside_a_list_and_never_against_a_denial_or_the_system(machine: Machine) -> None:
    assert answers(machine, capable=("c.example",)) == ["no", "no", "capability"]
    machine.write(user=f'{ASKS}hosts = ["a.example"]\n', project='[network]\nhosts = ["a.example", "b.example"]\n')
    assert answers(machine, capable=("c.example",)) == ["yes", "no", "capability"]
    assert answers(machine, "b.example", capable=("c.example",)) == ["no", "yes", "capability"]
    for text in ('denied_hosts = ["c.example"]', "outbound = false"):
        machine.write(project=f"[network]\n{text}\n")
        assert answers(machine, capable=("c.example",))[2] == "no", text
    for text in ('hosts = ["a.example"]', "outbound = false", 'denied_hosts = ["*"]', "ports = [22]"):
        machine.write(system=f"[network]\n{text}\n")
        assert answers(machine, capable=("c.example",))[2] == "no", text
    machine.write(system='[network]\nhosts = ["a.example"]\nports = [80, 443]\n')
    assert answers(machine, "a.example", capable=("c.example",)) == ["yes", "no", "no"], "also where an option says the same as the system"
    machine.write(project='requires = ["no-network"]\n')
    assert answers(machine, capable=("c.example",)) == ["no"] * 3


def test_no_option_names_the_hosts_of_a_capability() -> None:
    words = ["run", "--network", "a.example", "--budget", "a.example requests:2", "--publish", "8000", "--no-dlp", "true"]
    policy = CommandOptions.read(parse(words)).policy
    assert (policy.network, policy.budgets, policy.capable) == (("a.example",), ("a.example requests:2",), ())


def test_without_a_word_there_is_none_and_options_open_what_they_name(machine: Machine) -> None:
    assert machine.reached() == set()
    assert machine.reached("a.example") == {"a.example"}
    assert machine.reached(allow=True) == ALL
    machine.write()
    assert machine.reached() == set() and machine.reached("a.example", "b.example") == {"a.example", "b.example"}


def test_the_users_own_file_opens_one_and_those_of_the_project_and_the_system_do_not(machine: Machine) -> None:
    machine.write(user=f'{ASKS}hosts = ["a.example"]\n')
    assert machine.reached() == {"a.example"}
    for asking in ({"project": ASKS}, {"system": ASKS}, {"project": 'extends = "high"\n'}, {"system": 'extends = "high"\n'}):
        machine.write(**asking)
        assert machine.reached() == set()
    machine.write(project=ASKS)
    assert machine.warnings() == (
        f"no network: a project's file ({machine.project}/agent-sandbox.toml) narrows one, and opens none; --network HOST does",
    )


def test_a_projects_file_narrows_the_users_network_and_lends_it_nothing(machine: Machine) -> None:
    machine.write(
        user=ASKS, project='[network]\nhosts = ["a.example:22", "b.example"]\nopaque = ["*"]\nprivate = ["*"]\nuninspected = ["*"]\n'
    )
    rules = machine.policy().network
    assert machine.reached() == {"b.example"} and rules.objection("a.example", 22)
    assert not (rules.passes_opaque("b.example", 443) or rules.may_be_private("b.example") or rules.passes_uninspected("b.example"))
    machine.write(user=f'{ASKS}private = ["b.example"]\n', project='[network]\nprivate = ["b.example"]\n')
    assert machine.policy().network.may_be_private("b.example"), "the user says so"


def test_an_option_overrides_the_files_of_the_user_and_the_project_but_not_what_they_deny(machine: Machine) -> None:
    machine.write(user='[network]\noutbound = false\ndenied_hosts = ["c.example"]\n', project='[network]\nhosts = ["b.example"]\n')
    assert machine.reached() == set()
    assert machine.reached("a.example", "c.example") == {"a.example"}
    assert machine.reached(allow=True) == {"a.example", "b.example"}


def test_nothing_overrides_the_systems_file_and_a_required_guarantee(machine: Machine) -> None:
    machine.write(system='[network]\nhosts = ["a.example"]\n')
    assert machine.reached(allow=True) == machine.reached("a.example", "b.example") == {"a.example"}
    for closing in (
        {"system": "[network]\noutbound = false\n"},
        {"user": 'requires = ["no-network"]\n'},
        {"project": 'requires = ["no-network"]\n'},
    ):
        machine.write(**closing)
        assert machine.reached("a.example", allow=True) == set()
        (warning,) = machine.warnings("a.example")
        assert warning.startswith("no network: ") and warning.endswith(".toml closes it")


def test_the_tiers_have_a_full_network_an_allowlist_and_none(machine: Machine) -> None:
    assert machine.reached(files=("high",)) == ALL
    assert machine.reached(files=("medium",)) == set(), "there is no list"
    assert machine.reached("a.example", files=("medium",)) == {"a.example"}
    assert machine.reached(allow=True, files=("medium",)) == set(), "that is no list either"
    assert machine.reached("a.example", files=("low",)) == machine.reached(allow=True, files=("low",)) == set()
    machine.write(user='extends = "medium"\n[network]\nhosts = ["b.example"]\n')
    assert machine.reached() == {"b.example"}
    machine.write(system='[network]\nhosts = ["a.example"]\n')
    assert machine.reached(files=("high",)) == {"a.example"}


def test_a_file_that_an_option_names_opens_what_it_lists(machine: Machine) -> None:
    own = machine.project.parent / "own.toml"
    own.write_text(f'{ASKS}presets = ["llm-apis"]\nhosts = ["a.example"]\nrequests = ["GET a.example/v1/*"]\n')
    rules = machine.policy(files=(str(own),)).network
    assert machine.reached(files=(str(own),)) == {"a.example"} and not rules.objection("api.openai.com", 443)
    assert rules.request_objection("a.example", "POST", "/v1/x") and not rules.request_objection("a.example", "GET", "/v1/x")


def test_a_bad_entry_is_a_sentence_on_the_command_line(project: Path, tmp_path: Path) -> None:
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    for options, why in (
        (("--network", "https://x.example"), b"is an address, not a host"),
        (("--network", ","), b"--network names no host"),
        (("--network", "packages+opaque"), b"takes no mark"),
    ):
        done = shell("run", *options, "--", "touch", "canary")
        assert done.returncode in (2, 125) and why in done.stderr and b"Traceback" not in done.stderr
    assert not os.path.exists(project / "canary") and shell("diff", "--name-only").stdout == b"", "nothing ran"
    assert shell("run", "--", "touch", "canary").returncode == 0 and b"canary" in shell("diff", "--name-only").stdout


def test_a_policy_file_with_a_bad_rule_is_refused_by_name(machine: Machine) -> None:
    for line, why in (
        ('requests = ["GET"]', "not a rule for requests"),
        ('presets = ["all"]', "no network preset"),
        ('hosts = ["a:0"]', "not a port"),
    ):
        machine.write(user=f"[network]\n{line}\n")
        with pytest.raises(PolicyError, match=why):
            machine.policy()


def test_a_typed_port_is_published_unless_the_systems_file_or_a_chosen_one_forbids_it(machine: Machine) -> None:
    def published(*network: str, files: tuple[str, ...] = ()) -> bool:
        return machine.policy(*network, files=files, publish=("8000",)).network.inbound

    closed = "[network]\ninbound = false\n"
    assert published() and published("a.example")
    machine.write(user=closed, project=closed)
    assert published() and published("a.example"), "an option overrides these two files"
    forbidding: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
        ({"system": closed}, ()),
        ({"system": 'requires = ["no-network"]\n'}, ()),
        ({}, ("medium",)),
    )
    for files, chosen in forbidding:
        machine.write(**files)
        with pytest.raises(PolicyError, match=r"no port may be published: .* forbids it"):
            published(files=chosen)
        assert not machine.policy(files=chosen).network.inbound, "the control: without the option, the run goes on"
    for where in ("user", "project"):
        machine.write(**{where: 'requires = ["no-network"]\n'})
        with pytest.raises(PolicyError, match="no port may be published"):
            published()


def test_no_file_publishes_a_port(machine: Machine) -> None:
    machine.write(**dict.fromkeys(("system", "user", "project"), "[network]\noutbound = true\ninbound = true\n"))
    assert not machine.policy().network.inbound and not machine.policy("a.example").network.inbound
    for where in ("system", "user", "project"):
        machine.write(**{where: "[network]\npublish = [8000]\n"})
        with pytest.raises(PolicyError, match=r"network\.publish"):
            machine.policy()
        machine.write()
