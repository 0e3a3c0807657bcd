"""A list of changes that was kept is the list that the layers would give, or it is not used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import Workspace, shell
from agent_sandbox.assembly import here
from agent_sandbox.engine.promote import Wanted, carry_out, proposed
from agent_sandbox.workspace import stored_sandbox
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers import change_list
from agent_sandbox.workspace.progress import Progress
from agent_sandbox.workspace.stored_sandbox import WORTH_A_LIST, changes_of

MANY = shell(f"for i in $(seq {WORTH_A_LIST}); do echo $i > many-$i; done")


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def work(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    for name in ("a", "b", "c"):
        (project / name).write_text(f"{name}\n")
    (project / os.fsdecode(b"odd\xff\n")).write_text("odd\n")
    time.sleep(0.05)
    made = Workspace.over(project)
    yield made
    made.reset()


def _kept(work: Workspace) -> Path:
    return Path(work._stored.state.path, change_list.LIST)


def _read(work: Workspace) -> ChangeSet:
    """What the layers give, whatever was kept."""
    with work._stored.opened() as stack:
        return changes_of(stack, work._policy, work._stored.bases(stack))


def test_a_list_that_was_kept_is_that_of_the_layers(work: Workspace) -> None:
    work.run(shell("echo x >> a; rm b; mv c moved; chmod 700 src; ln -s a link; echo y >> odd*; mkdir -p new/deep; touch new/deep/file"))
    first = work.changes()
    assert _kept(work).exists() and len(first) > 8
    before = _kept(work).stat()
    assert work.changes() == first == _read(work)
    after = _kept(work).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it was used, not made again"


def test_whatever_changes_the_layers_makes_it_useless(work: Workspace) -> None:
    work.run(shell("echo x >> a"))
    assert len(work.changes()) == 1
    work.snapshot("one")
    work.run(shell("echo x >> b"))
    assert len(work.changes()) == 2
    work.rollback("one")
    assert len(work.changes()) == 1
    work.promote()
    assert len(work.changes()) == 0
    work.undo()
    assert len(work.changes()) == 1


def test_reality_is_asked_again_where_it_was_asked(work: Workspace, project: Path) -> None:
    (project / "a").write_text("saved in the very moment\n")  # so it has no base, and is compared with what is real now
    work.run(shell("cat a > kept; cat kept > a; touch a"))
    assert {Path(each.path).name for each in work.changes()} == {"kept"} == {Path(each.path).name for each in _read(work)}
    (project / "a").write_text("something else\n")
    assert work.changes() == _read(work)


def test_a_list_is_not_kept_where_it_depends_on_all_that_is_in_a_directory(work: Workspace, project: Path) -> None:
    work.run(shell("rm -r src && mkdir src && echo new > src/new.py"))
    work.changes()
    assert not _kept(work).exists()
    (project / "src/later.py").write_text("x")
    assert work.changes() == _read(work)


@pytest.mark.once
def test_a_torn_list_is_not_believed(work: Workspace) -> None:
    work.run(shell("echo x >> a; echo x >> b"))
    whole = work.changes()
    content = _kept(work).read_bytes()
    for damaged in (b"", content[:40], content[:-1], content[:-9] + b"x" * 9, b"0" * len(content)):
        _kept(work).write_bytes(damaged)
        assert work.changes() == whole


def test_while_a_run_goes_on_nothing_is_kept_or_used(work: Workspace) -> None:
    work.run(shell("echo x >> a"))
    work.changes()
    state = work._stored.state
    with open(os.path.join(state.bases, f"{state.history().active}.jsonl"), "ab") as file:
        file.write(b'{"run":1}\n')  # as at the beginning of one
    assert change_list.key_of(state.path, state.bases, state.history().layers, ()) is None


def _forge(work: Workspace) -> int:
    """Take a change out of the list, with a right checksum, so that whoever believes the list shows one too few. Return their number."""
    content = _kept(work).read_bytes()
    key, body = content[: change_list._KEY_BYTES], content[change_list._KEY_BYTES + change_list._CHECKSUM :]
    witnesses, rows = json.loads(body)
    forged = json.dumps([witnesses, rows[:-1]]).encode()
    _kept(work).write_bytes(key + change_list._checksum(forged) + forged)
    return len(rows) - 1


def test_a_run_that_changes_much_leaves_its_list(work: Workspace) -> None:
    work.run(shell("echo x >> a"))
    assert not _kept(work).exists(), "a small run writes none"
    work.run(MANY)
    written = _kept(work).stat()
    changes = work.changes()
    assert len(changes) == WORTH_A_LIST + 1 and changes == _read(work)
    used = _kept(work).stat()
    assert (written.st_ino, written.st_mtime_ns) == (used.st_ino, used.st_mtime_ns), "it was used, not made again"
    with work._stored.opened() as stack:
        assert work._stored.changes_in(stack, work._policy) == changes


def test_a_run_that_changes_too_much_leaves_the_list_to_whoever_asks(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_sandbox, "MOST_AT_END", WORTH_A_LIST - 1)
    work.run(MANY)
    assert not _kept(work).exists()
    assert len(work.changes()) == WORTH_A_LIST and _kept(work).exists()


def test_a_list_is_believed_only_for_the_layers_it_was_made_from(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    work.run(MANY)
    work.snapshot("one")
    work.changes()
    fewer = _forge(work)
    assert len(work.changes()) == fewer, "a list with the right key is believed, so that all below can fail"
    kept = _kept(work).read_bytes()

    with monkeypatch.context() as patch:  # the machine has stopped: what was not synced may be lost, of the layers or of the list
        patch.setattr(change_list, "boot_id", lambda: "another boot")
        assert len(work.changes()) == WORTH_A_LIST

    state = work._stored.state
    record = Path(state.bases, f"{state.history().active}.jsonl")
    before = record.read_bytes() if record.exists() else b""
    _kept(work).write_bytes(kept)
    record.write_bytes(before + b'{"run":1}\n')  # a run has begun, and was killed
    assert len(work.changes()) == WORTH_A_LIST
    record.write_bytes(before)

    _kept(work).write_bytes(kept)
    work.run(["true"])
    assert len(work.changes()) == WORTH_A_LIST

    _kept(work).write_bytes(kept)
    work.rollback("one")
    assert len(work.changes()) == WORTH_A_LIST


def test_a_guest_cannot_write_the_list(work: Workspace) -> None:
    work.run(MANY)
    kept = _kept(work).read_bytes()
    told = work.run(shell(f"mkdir -p {_kept(work).parent}; echo forged > {_kept(work)}; cat {_kept(work)}"))
    assert kept[:64] not in told.stdout.encode()
    assert _kept(work).read_bytes() == kept
    assert {Path(each.path).name for each in work.changes()} >= {"many-1", f"many-{WORTH_A_LIST}"}


class _Parts(Progress):
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.advanced: dict[str, int] = {}

    def begin(self, what: str, files: int = 0, size: int = 0, *, at_once: bool = False) -> None:
        self.begun.append(what)

    def advance(self, files: int = 0, size: int = 0) -> None:
        self.advanced[self.begun[-1]] = self.advanced.get(self.begun[-1], 0) + files


@pytest.mark.once
def test_every_part_of_a_promotion_says_what_it_does(work: Workspace) -> None:
    work.run(shell("echo x >> a; echo y > new"))
    parts = _Parts()
    wanted = Wanted(progress=parts)
    with proposed(work._stored, work._policy, wanted, here().process) as proposal:
        carry_out(proposal, work._stored, work._gate)
    assert parts.begun == [
        *("listing the changes", "judging the changes", "reading the changed files", "copying", "writing to disk"),
        *("putting everything in place", "writing to disk", "bringing the sandbox up to date"),
    ]
    counted = ("judging the changes", "reading the changed files", "copying", "putting everything in place")
    assert {part: parts.advanced[part] for part in counted} == dict.fromkeys(counted, 2)
    assert parts.advanced["listing the changes"] >= 2
