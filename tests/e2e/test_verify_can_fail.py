"""The self-test is no theatre: every probe fails where there is no sandbox, and each finds the wall that is missing and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.kernel import landlock, seccomp, syscall_rules
from agent_sandbox.kernel.syscall_rules import Rule
from agent_sandbox.policy.model import Guarantee, Policy, cloned
from agent_sandbox.selftest.bench import SCRIPTS, DecoyBench, Surroundings, set_up
from agent_sandbox.selftest.boxes import Attempt, Bare, Box, Found
from agent_sandbox.selftest.probe import Probe, judge, look
from agent_sandbox.selftest.probes import PROBES, counters
from agent_sandbox.selftest.probes.confinement import landlock_rules, seccomp_rules
from agent_sandbox.selftest.sandboxed import Cloned, Locked
from agent_sandbox.selftest.walls import ATTACKED, NOT_ATTACKED, WALLS, Wall
from agent_sandbox.workspace.store import SandboxState, Store
from tests import compiled
from tests.e2e.sabotage import NOTHING, ONLY_ROOT, SABOTAGES, leave_out

# The probes are the same for everybody; that each can fail is shown as root in `make test`, and for others too in `make torture`.
pytestmark = pytest.mark.torture if os.geteuid() else pytest.mark.slow

NAMED = {probe.name: probe for probe in PROBES}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoyBench]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    secret, home = tmp_path / "secret", tmp_path / "home"
    secret.write_text("hidden by the policy\n")
    home.mkdir()
    with set_up([str(tmp_path)], Surroundings((str(secret),), (str(home),)), forget=lambda bench: None) as made:
        yield made


class NoSandbox(Bare):
    """The bare machine under the name of a sandbox."""

    def __init__(self, bench: DecoyBench, name: str) -> None:
        super().__init__(bench.project, f"{bench.project}/{SCRIPTS}")
        self.name = name


@pytest.mark.parametrize("probe", [probe for probe in PROBES if not probe.own_control], ids=lambda probe: probe.name)
def test_it_fails_where_there_is_no_sandbox(bench: DecoyBench, monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    monkeypatch.setattr(counters, "_NOTICED", 0.0)  # nobody will, however long it waits
    box = NoSandbox(bench, probe.boxes[-1])
    control, found = look([probe], bench, bench.bare)[probe.name], look([probe], bench, box)[probe.name]
    result = judge(probe, box.name, control, found)
    if result.excused:
        pytest.skip(f"this machine refuses it without a sandbox too: {result.why}")
    assert (result.status, result.bad) == ("fail", True), result
    assert result.reached, "and what was seen is told"


def test_every_guarantee_and_every_probe_belongs_to_a_wall_and_every_attacked_wall_can_be_torn_down() -> None:
    assert {guarantee for wall in WALLS for guarantee in wall.guarantees} == set(Guarantee)
    assert len({wall.name for wall in WALLS}) == len(WALLS)
    assert {attack.partition(":")[0] for wall in ATTACKED for attack in wall.attacks} == NAMED.keys()
    assert SABOTAGES.keys() == {wall.name for wall in ATTACKED}
    assert [wall.name for wall in NOT_ATTACKED if wall.attacks or not wall.why] == []


def verified(tmp_path: Path, wall: str, *probes: str) -> tuple[int, dict[str, Any]]:
    """Run `verify` of a product in which this wall is torn down. Returns its exit code and its document."""
    places = {name: tmp_path / name for name in ("home", "bench", "project")}
    for place in places.values():
        place.mkdir(parents=True)
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    (places["project"] / "agent-sandbox.toml").touch()
    chosen = {
        "HOME": places["home"],
        "TMPDIR": places["bench"],
        "XDG_CACHE_HOME": tmp_path / "cache",
        "AGENT_SANDBOX_STATE": tmp_path / "state",
    }
    environment = {**os.environ, **{name: str(path) for name, path in chosen.items()}, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.sabotage", wall, *probes],
        cwd=places["project"],
        env=environment,
        capture_output=True,
        check=False,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    assert list(places["bench"].iterdir()) == [], "nothing is left"
    return done.returncode, document


@pytest.mark.parametrize("wall", ATTACKED, ids=lambda wall: wall.name)
def test_each_wall_that_is_torn_down_is_noticed_and_named(tmp_path: Path, wall: Wall) -> None:
    if wall.name in ONLY_ROOT and os.geteuid():
        pytest.skip("only root has this wall, or can start a sandbox without it")
    probes = {attack.partition(":")[0] for attack in wall.attacks}
    code, document = verified(tmp_path / "without", wall.name, *probes)
    (verdict,) = (each for each in document["walls"] if each["wall"] == wall.name)
    if verdict["status"] == "absent":  # only if it is not here either while nothing is torn down
        _, document = verified(tmp_path / "with", NOTHING, *probes)
        assert verdict in document["walls"], "a wall that was torn down must not pass for one that this machine lacks"
        pytest.skip(f"this wall is not here, which verify says: {verdict['why']}")
    assert verdict["status"] == "broken", json.dumps(document["results"])
    assert code == 1 and document["held"] is False


@pytest.mark.torture
@pytest.mark.parametrize("wall", ATTACKED, ids=lambda wall: wall.name)
def test_the_whole_of_verify_notices_each_wall_that_is_torn_down(tmp_path: Path, wall: Wall) -> None:
    if wall.name in ONLY_ROOT and os.geteuid():
        pytest.skip("only root has this wall, or can start a sandbox without it")
    code, document = verified(tmp_path, wall.name)
    assert code == 1 and wall.name in {each["wall"] for each in document["walls"] if each["status"] == "broken"}


RULES = sorted(syscall_rules.CONDITIONAL.keys() & syscall_rules.numbers(os.uname().machine).keys())


def weakened(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield the rule without each of its refused values, and without each of its other conditions. Each is named."""
    for place, group in enumerate(rule):
        for index, condition in enumerate(group):
            for refused in (None,) if condition.holds else condition.values:
                others = tuple(value for value in condition.values if value != refused)
                kept = (replace(condition, values=others),) if others and not condition.holds else ()
                name = f"group {place} without {condition.describe() if refused is None else f'argument {condition.argument} {refused:#x}'}"
                yield name, (*rule[:place], (*group[:index], *kept, *group[index + 1 :]), *rule[place + 1 :])


WEAKENED = [(call, name, rule) for call in RULES for name, rule in weakened(syscall_rules.CONDITIONAL[call])]


@pytest.mark.parametrize("call", RULES)
def test_each_rule_of_the_filter_that_is_missing_is_found(bench: DecoyBench, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    rules = {name: rule for name, rule in syscall_rules.CONDITIONAL.items() if name != call}
    assert blamed(bench, monkeypatch, rules, syscall_rules.ALLOWED | {call}) == {call}


@pytest.mark.parametrize(("call", "name", "rule"), WEAKENED, ids=[f"{call} {name}" for call, name, _ in WEAKENED])
def test_each_condition_of_a_rule_that_is_missing_is_found(
    bench: DecoyBench, monkeypatch: pytest.MonkeyPatch, call: str, name: str, rule: Rule
) -> None:
    found = blamed(bench, monkeypatch, {**syscall_rules.CONDITIONAL, call: rule}, syscall_rules.ALLOWED)
    if os.geteuid() and not found and call in ("prlimit64", "setpriority"):
        pytest.skip("the machine itself lets only root do this to its init")
    assert found == {call}


def blamed(bench: DecoyBench, monkeypatch: pytest.MonkeyPatch, rules: Mapping[str, Rule], allowed: frozenset[str]) -> set[str]:
    """Return the system calls that get through a filter with these rules. None does with the product's own."""
    assert seccomp_rules(bench, None).reached == {}
    monkeypatch.setattr(syscall_rules, "CONDITIONAL", rules)
    monkeypatch.setattr(syscall_rules, "ALLOWED", allowed)
    seccomp._compiled.cache_clear()
    try:
        return {way.partition(":")[0] for way in seccomp_rules(bench, None).reached}
    finally:
        monkeypatch.undo()
        seccomp._compiled.cache_clear()


@pytest.mark.parametrize("right", [*landlock.RIGHTS, *landlock.SCOPES])
def test_each_rule_of_landlock_that_is_missing_is_found(bench: DecoyBench, monkeypatch: pytest.MonkeyPatch, right: str) -> None:
    control = landlock_rules(bench, None)
    if right not in control.refused or right == "REFER":
        pytest.skip("this machine or this user cannot show it alone")
    monkeypatch.setattr(landlock, "plan", landlock.plan)
    leave_out(right)
    found = landlock_rules(bench, None)
    assert control.reached == {} and set(found.reached) == {right}, found


def statuses(bench: DecoyBench, box: Cloned | Locked, *names: str) -> dict[str, str]:
    probes = [NAMED[name] for name in names]
    control, found = look(probes, bench, bench.bare), look(probes, bench, box)
    return {probe.name: judge(probe, box.name, control[probe.name], found[probe.name]).status for probe in probes}


class Forgetful(Cloned):
    """A sandbox that hides nothing of what was planted."""

    def __init__(self, bench: DecoyBench, policy: Policy, environment: Mapping[str, str], state: SandboxState) -> None:
        super().__init__(bench, policy, environment, state)
        self.policy = policy


def test_a_policy_that_forgets_to_hide_is_found_and_nothing_else_is_blamed(bench: DecoyBench, tmp_path: Path) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(bench.project)
    reading, others = ("read-by-path", "read-through-link", "read-through-proc"), ("write", "tcp", "powers")
    told = []
    for kind in (Cloned, Forgetful):
        with kind(bench, cloned(masks=()), {"PATH": os.defpath, "HOME": bench.home}, state) as box:
            told.append(statuses(bench, box, *reading, *others))
    held, forgot = told
    assert held == dict.fromkeys((*reading, *others), "pass")
    assert forgot == {**dict.fromkeys(reading, "fail"), **dict.fromkeys(others, "pass")}


def test_a_permission_that_was_given_by_mistake_is_found_and_nothing_else_is_blamed(bench: DecoyBench) -> None:
    names = ("start-processes", "read-by-path", "see-processes")
    with Locked(bench) as box:
        assert statuses(bench, box, *names) == dict.fromkeys(names, "pass")
    with Locked(bench, allow_subprocess=True) as box:
        assert statuses(bench, box, *names) == {**dict.fromkeys(names, "pass"), "start-processes": "fail"}


def test_an_attempt_that_says_nothing_is_not_believed(bench: DecoyBench) -> None:
    def silent(bench: DecoyBench, box: Box) -> Found:
        return Found(box.run(Attempt("files", "no_such_function")).reached)

    found = look([Probe("silent", "A claim.", "says nothing", silent)], bench, bench.bare)["silent"]
    assert isinstance(found, str) and "gave no answer" in found
