"""What was seen of a run, judged by the rules it ran under; and what the ledger has of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.egress.orders import FlowRecord
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.observation import judged, noted, with_flows
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import LedgerUnavailable
from agent_sandbox.kernel.mount_plan import MountPlan, ThrowAway
from agent_sandbox.ledger.event import Entry, Event, Intent, Noted, OutcomeEvent, tell
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import Limits, Policy, ProgramRules, cloned, locked
from agent_sandbox.policy.paths import Glob, Tree
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.base import Argv, Launch
from agent_sandbox.runtime.observe import CONNECT, EXECUTE, KINDS, LISTEN, READ, RESOLVE, WRITE, Observed, SeenAttempt
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.ledger.samples import read

ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    shared = ProcessRuntime()
    yield shared
    shared.close()


def session(runtime: ProcessRuntime, ledger: Path, policy: Policy) -> Session:
    return Session(Gate(policy, Ledger(ledger, clock=lambda: 0.0), clock=lambda: 0.0, sandbox="it"), only(runtime))


def allowed(
    runtime: ProcessRuntime, tmp_path: Path, policy: Policy, kind: str, *targets: str, argv: tuple[str, ...] = ("true",)
) -> list[bool]:
    plan = session(runtime, tmp_path / "ledger", policy).explain(Work(Command(argv), ENV))
    launch = Launch(Argv(argv), plan, "/", ENV, Limits(), frozenset())
    found = judged(((SeenAttempt(kind, target, "/bin/x"), 1) for target in targets), policy, launch)
    assert [each.target for each in found] == list(targets)
    return [each.allowed for each in found]


def test_of_a_clone_everything_may_be_read_and_written_but_what_is_masked(runtime: ProcessRuntime, tmp_path: Path) -> None:
    policy = cloned(masks=(Mask("/root/.ssh", "keys"),))
    for kind in (READ, WRITE):
        assert allowed(runtime, tmp_path, policy, kind, "/etc/passwd", "/root/.ssh/id_rsa", "/root/.ssh", "/root/.sshd") == [
            True,
            False,
            False,
            True,
        ]


def test_of_a_locked_view_the_interpreter_and_scratch_are_there_and_what_is_named(runtime: ProcessRuntime, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("x")
    policy = locked(read=True, allowed=(Tree(str(data)),), denied=(Glob(str(data), "*.key"),), processes=True)
    inside, hidden, denied = f"{data}/a.txt", f"{data}/.git/config", f"{data}/my.key"
    shown = allowed(runtime, tmp_path, policy, READ, inside, hidden, denied, "/usr/bin/env", "/tmp/x", "/dev/null", "/etc/shadow", "/usr")
    assert shown == [True, False, False, True, True, True, False, True]
    assert allowed(runtime, tmp_path, policy, WRITE, inside, "/tmp/x", "/usr/bin/env", "/etc/shadow") == [False, True, False, False]


def test_what_is_made_among_copies_is_there_too(runtime: ProcessRuntime, tmp_path: Path) -> None:
    """One file of a directory is shown by copying it; what every view has in that directory is then made beside it."""
    policy = locked(read=True, allowed=(Tree("/etc/passwd"),), allow_hidden=True, processes=True)
    shown = allowed(runtime, tmp_path, policy, READ, "/etc/passwd", "/etc/nsswitch.conf", "/etc/hosts", "/etc/shadow")
    assert shown == [True, True, True, False]


def test_with_write_and_without_read_what_is_named_can_be_written_only(runtime: ProcessRuntime, tmp_path: Path) -> None:
    policy = locked(write=True, allowed=(Tree(str(tmp_path)),), processes=True)
    assert allowed(runtime, tmp_path, policy, READ, f"{tmp_path}/a") == [False]
    assert allowed(runtime, tmp_path, policy, WRITE, f"{tmp_path}/a") == [True]


def test_programs_are_judged_by_their_rules_and_the_shell_that_reads_a_line_is_there(runtime: ProcessRuntime, tmp_path: Path) -> None:
    policy = cloned(masks=(), programs=ProgramRules((("git",),)))
    line = ("bash", "-c", "git status")
    assert allowed(runtime, tmp_path, policy, EXECUTE, "/usr/bin/git", "/usr/bin/curl", "/usr/bin/bash", argv=line) == [True, False, True]
    denied = cloned(masks=(), programs=ProgramRules(denied=("curl",)))
    assert allowed(runtime, tmp_path, denied, EXECUTE, "/usr/bin/git", "/usr/bin/curl") == [True, False]


def test_nothing_of_the_network_is_allowed(runtime: ProcessRuntime, tmp_path: Path) -> None:
    for kind in (CONNECT, RESOLVE, LISTEN):
        assert allowed(runtime, tmp_path, cloned(masks=()), kind, "localhost:1") == [False]


def test_what_arrived_at_the_egress_is_told_as_the_egress_tells_it() -> None:
    curl, ssh = "/usr/bin/curl", "/usr/bin/ssh"
    beside = Observed(CONNECT, "192.0.2.1:22", ssh, False)
    seen = (Observed(RESOLVE, "example.com", curl, False), Observed(CONNECT, "198.18.1.0:443", curl, False, 2), beside)
    flows = (
        FlowRecord("example.com", 443, "https"),
        FlowRecord("example.com", 443, "https"),
        FlowRecord("example.net", 0, "dns", refused="no"),
    )
    assert with_flows(seen, flows, (80, 443)) == (
        beside,
        Observed(CONNECT, "example.com:443", curl, True, 2),
        Observed(RESOLVE, "example.net", curl, False, 1),
    )


def test_equal_things_are_told_once_in_the_order_of_first_appearance() -> None:
    launch = Launch(Argv(("x",)), MountPlan(ThrowAway(1 << 20), ()), "/", ENV, Limits(), frozenset())
    seen = [
        (SeenAttempt(READ, "/b", "p"), 2),
        (SeenAttempt(READ, "/a", "p"), 1),
        (SeenAttempt(EXECUTE, "/bin/none-such", "p", there=False), 1),
    ]
    assert judged(seen, cloned(masks=()), launch) == (Observed(READ, "/b", "p", True, 2), Observed(READ, "/a", "p", True, 1))


def test_the_ledger_has_what_was_seen_between_the_intent_and_the_outcome(runtime: ProcessRuntime, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    name = "x\x1b[31m\u202e"
    code = f"import os\nfor path in ('/etc/none', {'/tmp/' + name!r}):\n    try: os.open(path, os.O_RDONLY)\n    except OSError: pass"
    outcome = session(runtime, ledger, locked()).run(Work(Code("python", code), ENV, observe=True, log_observed=True))
    events = [entry.event for entry in read(ledger)]
    assert isinstance(events[0], Intent) and isinstance(events[-1], OutcomeEvent)
    assert [type(event) for event in events[1:-1]] == [Noted] * len(outcome.observed)
    found = {told.target: told for told in map(tell, read(ledger)) if told.category == "file"}
    assert (found["/etc/none"].action, found["/etc/none"].allowed, found["/etc/none"].level) == ("read", False, "warning")
    assert (found[f"/tmp/{name}"].allowed, found[f"/tmp/{name}"].level, found[f"/tmp/{name}"].sandbox) == (True, "debug", "it")
    assert b"\x1b" not in ledger.read_bytes()


def test_a_run_that_is_observed_and_not_logged_leaves_the_ledger_as_ever(runtime: ProcessRuntime, tmp_path: Path) -> None:
    outcome = session(runtime, tmp_path / "ledger", locked()).run(Work(Code("python", "open('/tmp/x', 'w')"), ENV, observe=True))
    assert outcome.observed and [type(entry.event) for entry in read(tmp_path / "ledger")] == [Intent, OutcomeEvent]


def test_what_was_seen_and_cannot_be_recorded_is_an_error_of_ours(runtime: ProcessRuntime, tmp_path: Path) -> None:
    class Full(Ledger):
        def record(self, event: Event, *, lasting: bool = False) -> Entry:
            if isinstance(event, Noted):
                raise LedgerUnavailable("the disk is full", hint="make room")
            return super().record(event, lasting=lasting)

    gate = Gate(locked(), Full(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    with pytest.raises(LedgerUnavailable):
        Session(gate, only(runtime)).run(Work(Code("python", "open('/tmp/x', 'w')"), ENV, observe=True, log_observed=True))


def test_each_kind_has_a_category() -> None:
    assert {noted(Observed(kind, "x", "y", True))[0].partition(".")[0] for kind in KINDS} == {"file", "process", "network"}
