"""A change is what a sandbox made of what was real when it came: what others did since is not the sandbox's."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.workspace.changes import Kind
from agent_sandbox.workspace.reality import Base, Bases, look
from tests.workspace.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.remove()


def bases(machine: Machine, *names: str, now_ns: int = 0) -> Bases:
    """What is real now at some paths of /data."""
    found = {}
    directory = os.open(machine.data, os.O_RDONLY)
    for name in names:
        path = Path("/data", name)
        inner = os.open(Path(name).parent, os.O_RDONLY, dir_fd=directory)
        found[str(path)] = Base(str(path), look(inner, path.name, now_ns=now_ns, content=True))
        os.close(inner)
    os.close(directory)
    return found


def kinds(machine: Machine, known: Bases) -> dict[str, str]:
    return {change.path.removeprefix("/data/"): change.kind.value for change in machine.changes(bases=known)}


def test_what_is_as_it_was_is_no_change_even_if_the_machine_moved_on(machine: Machine) -> None:
    (machine.data / "file").write_text("as it was")
    (machine.data / "mode").write_text("x")
    known = bases(machine, "file", "mode")

    def touch(view: Path) -> None:
        for name in ("file", "mode"):
            os.utime(view / name)

    machine.edit(touch)
    (machine.data / "file").write_text("as it is!")  # of the same size
    (machine.data / "mode").chmod(0o700)
    assert kinds(machine, {}) == {"file": "modified", "mode": "mode"}
    assert kinds(machine, known) == {}


def test_kind_and_before_tell_what_the_sandbox_did(machine: Machine) -> None:
    (machine.data / "edited").write_text("old")
    (machine.data / "typed").write_text("old")
    (machine.data / "deleted").write_text("old")
    known = bases(machine, "edited", "typed", "deleted", "made")

    def body(view: Path) -> None:
        (view / "edited").write_text("new text")
        (view / "typed").unlink()
        (view / "typed").mkdir()
        (view / "deleted").unlink()
        (view / "made").write_text("ours")

    machine.edit(body)
    (machine.data / "edited").unlink()
    (machine.data / "typed").unlink()
    (machine.data / "deleted").unlink()
    (machine.data / "made").write_text("theirs")
    found = {change.path: change for change in machine.changes(bases=known)}
    assert kinds(machine, known) == {"edited": "modified", "typed": "retyped", "deleted": "deleted", "made": "added"}
    before = found["/data/edited"].before
    assert before and before.size == 3 and found["/data/made"].before is None


def test_a_whiteout_over_what_was_not_there_deletes_nothing_that_came_later(machine: Machine) -> None:
    known = bases(machine, "passing")
    (machine.data / "passing").write_text("x")
    machine.edit(lambda view: (view / "passing").unlink())
    assert kinds(machine, {}) == {"passing": "deleted"}
    assert kinds(machine, known) == {}


def test_below_a_directory_that_was_not_there_everything_is_added(machine: Machine) -> None:
    known = bases(machine, "d")

    def body(view: Path) -> None:
        (view / "d/sub").mkdir(parents=True)
        (view / "d/sub/file").write_text("ours")

    machine.edit(body)
    (machine.data / "d").mkdir()
    (machine.data / "d/theirs").write_text("came later")
    assert kinds(machine, known) == {"d": "added", "d/sub": "added", "d/sub/file": "added"}


def test_what_an_opaque_directory_hides_is_told_by_its_base_too(machine: Machine) -> None:
    (machine.data / "d").mkdir()
    for name in ("gone", "kept"):
        (machine.data / "d" / name).write_text("x")
    known = bases(machine, "d", "d/gone", "d/kept")

    def body(view: Path) -> None:
        shutil.rmtree(view / "d")
        (view / "d").mkdir()
        (view / "d/kept").write_text("x")

    machine.edit(body)
    (machine.data / "d/gone").unlink()
    (machine.data / "d/kept").write_text("theirs")
    assert kinds(machine, known) == {"d/gone": "deleted"}


def test_a_base_that_could_not_be_kept_is_none(machine: Machine) -> None:
    (machine.data / "file").write_text("x")
    machine.edit(lambda view: os.utime(view / "file"))
    known = {"/data/file": Base("/data/file", None, known=False)}
    assert kinds(machine, known) == {}
    (machine.data / "file").write_text("y")
    assert kinds(machine, known) == {"file": "modified"}


def huge(path: Path, end: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - len(end))
        file.write(end)


def test_a_huge_sparse_file_is_compared_where_it_lies_while_that_is_untouched(machine: Machine) -> None:
    huge(machine.data / "huge", b"the end")
    huge(machine.layer / "upper/huge", b"the end")
    directory = os.open(machine.data, os.O_RDONLY)
    unread = look(directory, "huge", now_ns=time.time_ns() + 10_000_000_000)  # its times count as settled
    os.close(directory)
    known = {"/data/huge": Base("/data/huge", unread)}
    assert not machine.changes() and not machine.changes(bases=known)

    huge(machine.layer / "upper/huge", b"another")
    (change,) = machine.changes(bases=known)
    assert change.kind is Kind.MODIFIED and not change.unread

    huge(machine.layer / "upper/huge", b"the end")
    huge(machine.data / "huge", b"the end")  # touched: nobody has the old content, and a terabyte is not read to guess it
    (change,) = machine.changes(bases=known)
    assert change.kind is Kind.MODIFIED and change.unread
