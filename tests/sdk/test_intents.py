"""What an agent outside of the sandbox declares and proposes, while runs and sessions go on in an internet of our own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import AskRules, AsyncSandbox, Denied, NetworkIntent, PolicyError, Sandbox, SandboxConfig, Workspace, policy_files
from agent_sandbox.audit import AuditLog
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.policy.action import Action, OpenNetwork
from agent_sandbox.policy.decide import Ask
from tests.egress.world import OTHER, PUBLIC, World, in_world
from tests.sdk.test_asking import at_the_inbox

pytest.importorskip("h2", reason="needs the extra `network`")

NAMES = {"good.example": PUBLIC, "other.example": OTHER}
GET = """
import urllib.error, urllib.request
def get(url, **fields):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=fields), timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.read().decode().strip()
    except urllib.error.URLError as error:
        return f"no address: {error.reason}"
"""
READ, SEND = NetworkIntent("read good", hosts=["good.example"]), NetworkIntent("send other", hosts=["other.example"])
BOTH = ["good.example", "other.example"]


def asked(sandbox: Sandbox, *hosts: str) -> list[Any]:
    code = GET + f"print([get('http://' + each + '/') for each in {hosts!r}])"
    result = sandbox.execute(code)
    assert result.success, result
    answers: list[Any] = eval(result.stdout)
    return answers


def changes(log: AuditLog) -> list[tuple[str, bool]]:
    return [(entry.target, entry.allowed) for entry in log.get_entries() if (entry.category, entry.action) == ("network", "intent")]


def test_only_the_declared_intent_is_open_and_a_change_is_recorded() -> None:
    def act(world: World) -> tuple[Any, ...]:
        with Sandbox(network=BOTH, intents=[READ, SEND], validate_code=False) as sandbox:
            none = asked(sandbox, *BOTH)
            sandbox.intent("  Read GOOD ")
            first = asked(sandbox, *BOTH)
            with pytest.raises(PolicyError, match="there is no intent 'erase'; the policy names 'read good', 'send other'"):
                sandbox.intent("erase")
            kept = asked(sandbox, "good.example")
            sandbox.intent("send other")
            second = asked(sandbox, *BOTH)
            sandbox.intent(None)
            last = asked(sandbox, *BOTH)
            assert sandbox.audit is not None
            return none, first, kept, second, last, changes(sandbox.audit), world.heard, set(world.asked)

    none, first, kept, second, last, recorded, heard, resolved = in_world(NAMES, act)
    assert none == last and all("no intent is declared" in str(each) for each in none)
    assert first[0] == kept[0] == 200 and "the intent 'read good' does not open other.example:80" in first[1]
    assert "the intent 'send other' does not open good.example:80" in second[0] and second[1] == 200
    assert recorded == [("read good", True), ("send other", True), ("", True)]
    assert len(heard) == 3 and resolved == {"good.example", "other.example"}


def test_a_session_follows_from_turn_to_turn_and_its_program_cannot_choose() -> None:
    def act(world: World) -> tuple[Any, ...]:
        short = NetworkIntent("read good", hosts=["good.example"], seconds=0.01)
        with (
            Sandbox(network=BOTH, intents=[READ, SEND], validate_code=False) as sandbox,
            Sandbox(network=BOTH, intents=[short, SEND], validate_code=False) as brief,
            sandbox.session() as session,
            brief.session() as late,
        ):
            session.run(GET)
            by_field = session.run("get('http://other.example/', **{'Agent-Sandbox-Intent': 'SEND other'})").value
            sandbox.intent("read good")
            first = session.run("[get('http://good.example/'), get('http://other.example/')]").value
            other = session.run("get('http://other.example/', **{'Agent-Sandbox-Intent': 'send other'})").value
            sandbox.intent("send other")
            second = session.run("[get('http://good.example/'), get('http://other.example/')]").value
            late.run(GET)
            brief.intent("read good")
            expired = late.run("import time; time.sleep(0.05); get('http://good.example/')").value
            assert brief.audit is not None
            return by_field, first, other, second, expired, changes(brief.audit), world.heard

    by_field, first, other, second, expired, recorded, heard = in_world(NAMES, act)
    assert by_field == 200 and first[0] == 200 and second[1] == 200 and len(heard) == 3
    assert "does not open other.example" in first[1] and "does not open good.example" in second[0]
    assert "declared from outside" in other
    assert "the intent 'read good' has expired" in expired and recorded == [("read good", True), ("read good", False)]


class Decider:
    """Answers proposals, and remembers what it was shown."""

    def __init__(self, *answers: bool) -> None:
        self.answers, self.shown = list(answers), list[tuple[Action, str]]()

    def __call__(self, action: Action, question: Ask) -> bool:
        self.shown.append((action, question.details))
        return self.answers.pop(0)


def test_a_proposal_is_shown_decided_and_open_at_once_and_for_its_time() -> None:
    def act(world: World) -> tuple[Any, ...]:
        decide = Decider(False, True, True)
        with Sandbox(network=["good.example"], approver=decide, validate_code=False) as sandbox, sandbox.session() as session:
            session.run(GET)
            ask = "get('http://other.example/page')"
            before = session.run(ask).value
            with pytest.raises(Denied, match="not approved"):
                sandbox.propose_network("other.example")
            refused = session.run(ask).value
            lines = sandbox.propose_network("other.example", requests=["GET other.example/page"], reason="the manual\nis there")
            opened = session.run(f"[{ask}, get('http://other.example/else')]").value
            later = asked(sandbox, "other.example")
            sandbox.propose_network("third.example", seconds=0.01)
            expired = session.run("import time; time.sleep(0.05); get('http://third.example/')").value
            return before, refused, lines, opened, later, expired, decide.shown, set(world.asked), len(world.heard)

    before, refused, lines, opened, later, expired, shown, resolved, heard = in_world(NAMES, act)
    assert before == refused and "no address" in before
    assert opened[0] == 200 and "does not allow GET /else" in opened[1] and "does not allow GET /" in later[0]
    assert "no address" in expired and heard == 1
    assert resolved == {"other.example"}, "a name that was proposed and refused, or has expired, is never resolved"
    assert [type(action) for action, _ in shown] == [OpenNetwork] * 3
    assert (
        shown[1][1].splitlines()
        == list(lines)
        == [
            "network: other.example can be reached through the egress, at the ports 80 and 443, if it names no other",
            "network: requests only as: GET other.example/page",
            "network: names are reached at public addresses only",
        ]
    )
    assert isinstance(shown[1][0], OpenNetwork) and shown[1][0].reason == "the manual\nis there"


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (
            ["db.example:5432"],
            ["any bytes: db.example:5432", "at port 5432 from the next run on", "every request can be sent to db.example"],
        ),
        (["10.1.2.3"], ["10.1.2.3 is a private address"]),
        (["11.1.2.3"], ["11.1.2.3 is a public address"]),
        (["index.example+private"], ["may lie on a private address: index.example"]),
        (["pinned.example+uninspected"], ["TLS passed on unread: pinned.example"]),
        (["git-hosts"], ["github.com", "salsa.debian.org", "requests only as: GET,HEAD github.com", "POST salsa.debian.org/**/git-upload"]),
    ],
)
def test_the_question_shows_what_would_become_reachable(hosts: list[str], words: list[str]) -> None:
    decide = Decider(True)
    with Sandbox(network=["good.example"], approver=decide) as sandbox:
        lines = "\n".join(sandbox.propose_network(*hosts))
    assert lines == decide.shown[0][1] and all(each in lines for each in words)


def test_a_proposal_that_cannot_be_is_refused_before_anybody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Decider()
    system = tmp_path / "system.toml"
    monkeypatch.setattr(policy_files, "SYSTEM", str(system))
    with Sandbox(network=["good.example"], approver=decide) as sandbox:
        for hosts, settings in (
            (["https://x"], {}),
            ([], {}),
            ([5], {}),
            (["a.example"], {"seconds": 0}),
            (["a.example"], {"requests": ["a.example"]}),
            (["a.example"], {"requests": "GET a.example"}),
            (["localhost"], {}),
        ):
            with pytest.raises(PolicyError):
                sandbox.propose_network(*hosts, **settings)
        system.write_text('[network]\nhosts = ["good.example"]\n')
        with pytest.raises(Denied, match=r"it would open nothing: the policy does not allow other\.example"):
            sandbox.propose_network("other.example")
    system.write_text('[approvals]\nelevate = ["programs"]\n')
    with (
        Sandbox(network=["good.example"], approver=decide) as sandbox,
        pytest.raises(Denied, match="does not let the network be opened further"),
    ):
        sandbox.propose_network("other.example")
    system.unlink()
    with Sandbox(asks=AskRules(tools=("x",)), approver=decide) as sandbox, pytest.raises(PolicyError, match="this sandbox has no network"):
        sandbox.propose_network("other.example")
    assert decide.shown == []


def test_without_an_approver_a_person_decides_at_the_inbox_and_sees_all_of_it() -> None:
    with at_the_inbox(Decision.ONCE) as seen, Sandbox(network=["good.example"]) as sandbox:
        assert sandbox.propose_network("other.example", requests=["GET other.example/"], reason="evil\nbecause  it is harmless")
    (shown,) = {each.text for each in seen}
    assert 'hosts     ["other.example"]' in shown and "  | network: requests only as: GET other.example/" in shown
    assert [line for line in shown.splitlines() if line.startswith("because")] == [
        "because   the policy 'locked' requires approval: it opens the network further (approvals.network)"
    ]
    with at_the_inbox(Decision.NO), Sandbox(network=["good.example"]) as sandbox, pytest.raises(Denied, match="not approved"):
        sandbox.propose_network("other.example")


def test_a_tool_proposes_for_the_program_that_calls_it() -> None:
    def act(world: World) -> tuple[Any, ...]:
        with Sandbox(network=["good.example"], approver=Decider(True), validate_code=False) as sandbox:

            def propose(host: str) -> str:
                return "\n".join(sandbox.propose_network(host))

            code = GET + "print([get('http://other.example/'), 'other' in propose('other.example'), get('http://other.example/')])"
            return eval(sandbox.execute(code, tools={"propose": propose}).stdout), len(world.heard)

    (before, shown, after), heard = in_world(NAMES, act)
    assert "no address" in before and shown is True and after == 200 and heard == 1


def test_what_is_denied_stays_denied_whoever_agrees() -> None:
    decide = Decider(True)
    from agent_sandbox.policy.network import network_rules

    rules = network_rules(outbound=True, hosts=["*.example"], denied=["evil.example"])
    with Sandbox(network=rules, approver=decide) as sandbox, pytest.raises(Denied, match=r"the policy denies evil\.example"):
        sandbox.propose_network("evil.example")
    assert decide.shown == []


def test_a_capability_decides_in_place_of_a_person() -> None:
    with Sandbox(network=["good.example"], approver=lambda action, question: False) as sandbox:
        sandbox.grant("network *", seconds=60)
        with pytest.raises(Denied):
            sandbox.propose_network("other.example")  # which would stay open when the capability is revoked
        sandbox.grant("propose 300 other.example", seconds=60)
        assert sandbox.propose_network("other.example", seconds=300)
        for hosts, seconds in ((["third.example"], 300), (["other.example", "third.example"], 300), (["other.example"], 301)):
            with pytest.raises(Denied):
                sandbox.propose_network(*hosts, seconds=seconds)


def test_a_workspace_and_asyncio_do_the_same(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "config/agent-sandbox/policy.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[network]\nhosts = ["good.example", "other.example"]\n')
    config = SandboxConfig(network=BOTH[:1], intents=[READ, SEND], allow_file_read=True, allow_file_write=True)
    decide = Decider(True)
    with Workspace.over(project, config=config, approver=decide) as work:
        work.intent("read good")
        assert work.propose_network("other.example")
        with pytest.raises(Denied, match=r"does not allow third\.example"):
            work.propose_network("third.example")
        with pytest.raises(PolicyError, match="there is no intent"):
            work.intent("x")

    async def main() -> None:
        async with AsyncSandbox(network=BOTH, intents=[READ], approver=Decider(True)) as sandbox:
            await sandbox.intent("read good")
            assert await sandbox.propose_network("third.example")

    asyncio.run(main())


def test_intents_are_settings_of_a_network() -> None:
    with pytest.raises(PolicyError, match="intents are parts of a network, and there is none"):
        SandboxConfig(intents=[READ])
    with pytest.raises(PolicyError, match="what is no NetworkIntent"):
        SandboxConfig(network=BOTH, intents=["read"])  # type: ignore[list-item]
    with pytest.raises(PolicyError, match="this sandbox has no network"):
        Sandbox().intent("read good")
    with Sandbox(network=BOTH) as sandbox, pytest.raises(PolicyError, match="the policy names none"):
        sandbox.intent("read good")
