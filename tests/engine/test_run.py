"""One piece of work through the gate and back, on real guests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import Busy, Denied, LedgerUnavailable, PolicyError
from agent_sandbox.kernel import namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.ledger.event import Intent, OutcomeEvent, RefusalEvent
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import Guarantee, Policy, ProgramRules, cloned, locked
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.view.observations import Observations
from agent_sandbox.workspace.view.plan import MachineFacts
from tests.kernel.children import in_child
from tests.ledger.samples import read

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    shared = ProcessRuntime()
    yield shared
    shared.close()


def session(runtime: ProcessRuntime, ledger: Path, policy: Policy, **more: object) -> Session:
    return Session(Gate(policy, Ledger(ledger, clock=lambda: 0.0), clock=lambda: 0.0), only(runtime), **more)  # type: ignore[arg-type]


def test_the_intent_is_recorded_before_the_deed_and_the_outcome_after(runtime: ProcessRuntime, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    seen: list[type] = []
    work = Work(Code("python", "print(1)"), ENV, on_start=lambda _: seen.extend(type(e.event) for e in read(ledger)))
    assert session(runtime, ledger, locked()).run(work).stdout == b"1\n"
    assert seen == [Intent]
    _, outcome = (entry.event for entry in read(ledger))
    assert isinstance(outcome, OutcomeEvent)
    assert outcome.facts["exit_code"] == 0
    assert b"print" not in ledger.read_bytes(), "source is recorded by its digest only"


def test_what_is_refused_is_recorded_and_not_run(runtime: ProcessRuntime, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    with pytest.raises(Denied):
        session(runtime, ledger, locked()).run(Work(Command(("true",)), ENV))
    (entry,) = read(ledger)
    assert isinstance(entry.event, RefusalEvent)


def test_a_command_line_with_a_program_that_is_not_allowed_is_refused_with_the_line_that_would_allow_it(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    policy = locked(processes=True, programs=ProgramRules((("git", "curl"),)))
    with pytest.raises(Denied) as caught:
        session(runtime, tmp_path / "ledger", policy).run(Work(Code("bash", "git status && npm install"), ENV))
    assert "'npm'" in caught.value.message and caught.value.hint == "to allow it: --allow git,curl,npm"


def test_a_policy_that_names_programs_runs_where_they_are_confined(runtime: ProcessRuntime, tmp_path: Path) -> None:
    policy = locked(processes=True, programs=ProgramRules((("git",),)))
    assert Guarantee.PROGRAMS_CONFINED in policy.requires
    outcome = session(runtime, tmp_path / "ledger", policy).run(
        Work(Code("bash", "git --version; . /dev/stdin"), ENV, stdin=b"ls; echo $?")
    )
    assert outcome.stdout.startswith(b"git version") and outcome.stdout.endswith(b"\n127\n")


def test_what_cannot_be_recorded_is_not_run(runtime: ProcessRuntime, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    started: list[object] = []
    with pytest.raises(LedgerUnavailable):
        session(runtime, tmp_path / "file" / "ledger", locked()).run(Work(Code("python", "1"), ENV, on_start=started.append))
    assert started == []


def test_explaining_runs_nothing_and_records_nothing(runtime: ProcessRuntime, tmp_path: Path) -> None:
    plan = session(runtime, tmp_path / "ledger", locked()).explain(Work(Code("python", "1"), ENV))
    assert any("own /proc" in line for line in plan.describe())
    assert not (tmp_path / "ledger").exists()


def test_a_stored_sandbox_keeps_what_a_run_wrote_for_the_next_one_and_for_nobody_else(
    runtime: ProcessRuntime, project: Path, tmp_path: Path
) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(project))
    kept = session(runtime, tmp_path / "ledger", cloned(masks=()), project=str(project), state=state)
    thrown = session(runtime, tmp_path / "ledger", cloned(masks=()), project=str(project))
    kept.run(Work(Command(("sh", "-c", "echo changed > greeting.txt")), ENV, cwd=str(project)))
    read = Work(Command(("cat", "greeting.txt")), ENV, cwd=str(project))
    assert kept.run(read).stdout == b"changed\n"
    assert thrown.run(read).stdout == b"hello\n"
    assert (project / "greeting.txt").read_text() == "hello\n"


def test_a_throw_away_run_says_what_it_would_have_changed(runtime: ProcessRuntime, project: Path, tmp_path: Path) -> None:
    thrown = session(runtime, tmp_path / "ledger", cloned(masks=()), project=str(project))
    outcome = thrown.run(Work(Command(("sh", "-c", "rm greeting.txt; touch new")), ENV, cwd=str(project)))
    found = {(os.path.relpath(change.path, project), change.kind.value) for change in outcome.changes.within(str(project))}
    assert found == {("greeting.txt", "deleted"), ("new", "added")}


def test_two_runs_on_one_stored_sandbox_do_not_overlap(runtime: ProcessRuntime, project: Path, tmp_path: Path) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(project))
    kept = session(runtime, tmp_path / "ledger", cloned(masks=()), project=str(project), state=state)
    with state.lock(command="another run"), pytest.raises(Busy, match="another run"):
        kept.run(Work(Command(("true",)), ENV, cwd=str(project)))


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (Work(Code("python", "a\0b"), ENV), "NUL"),
        (Work(Code("python", "'\ud800'"), ENV), "surrogate"),
        (Work(Code("python", "1"), {"A": "x\0"}), "NUL"),
        (Work(Code("python", "1"), {"A=B": "x"}), "not a name"),
        (Work(Code("python", "1"), ENV, cwd="relative"), "not absolute"),
        (Work(Command(()), ENV), "first is a program"),
    ],
)
def test_what_no_sandbox_could_run_is_refused_before_anything_is_recorded(
    runtime: ProcessRuntime, tmp_path: Path, work: Work, why: str
) -> None:
    with pytest.raises(PolicyError, match=why):
        session(runtime, tmp_path / "ledger", locked()).run(work)
    assert not (tmp_path / "ledger").exists()


def _reads(session: Session, path: Path) -> bytes:
    return session.run(Work(Command(("sh", "-c", f"cat {path} 2>&1; true")), ENV, cwd="/")).stdout


@pytest.mark.parametrize("looking", [True, False], ids=["looking again", "the control arm: not looking"])
def test_a_secret_that_moves_behind_a_link_between_two_runs_is_hidden_in_the_second(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looking: bool
) -> None:
    secret = tmp_path / "elsewhere" / "key"
    secret.parent.mkdir()
    secret.write_text("CANARY")
    running = session(runtime, tmp_path / "ledger", cloned(masks=(Mask(f"{tmp_path}/.keys", "keys"),)), project=str(tmp_path))
    assert _reads(running, secret) == b"CANARY", "nothing says yet that it is a secret"
    (tmp_path / ".keys").symlink_to("elsewhere")
    if not looking:
        monkeypatch.setattr(Observations, "hold", lambda self: True)
    assert (b"CANARY" in _reads(running, secret)) is not looking


@pytest.mark.needs_root
@pytest.mark.parametrize("looking", [True, False], ids=["looking again", "the control arm: not looking"])
def test_a_filesystem_that_is_mounted_between_two_runs_is_shown_in_the_second_without_its_secrets(tmp_path: Path, looking: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def run() -> list[bytes]:
        namespaces.enter_private_mounts()
        facts = MachineFacts.look()
        runtime = ProcessRuntime()
        try:
            policy = cloned(masks=(Mask(f"{disk}/key", "keys"),))
            look = MachineFacts.look if looking else lambda: facts
            running = session(runtime, tmp_path / "ledger", policy, project=str(tmp_path), look=look)
            before = _reads(running, disk / "file")
            sc.mount("usb", str(disk), "tmpfs")
            for name in ("file", "key"):
                (disk / name).write_text(f"CANARY {name}")
            return [before, _reads(running, disk / "file"), _reads(running, disk / "key")]
        finally:
            runtime.close()

    before, file, key = in_child(run)
    assert b"CANARY" not in before
    assert (file == b"CANARY file") is looking
    assert b"CANARY" not in key
