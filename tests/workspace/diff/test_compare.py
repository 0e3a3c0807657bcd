"""Where the old side of a change is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.diff.compare import Formerly, MachineFiles
from agent_sandbox.workspace.reality import Base, look


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/f").write_text("then\n")
    (tmp_path / "d/sub/g").write_text("deep\n")
    (tmp_path / "d/link").symlink_to("f")
    return tmp_path


def change_of(path: str) -> Change:
    return Change(path, Kind.MODIFIED, None, None)


def base_of(place: Path, path: str, *, digest: bool = True) -> Base:
    directory = os.open(place, os.O_RDONLY)
    seen = look(directory, path.lstrip("/"), now_ns=0, content=digest)
    os.close(directory)
    return Base(path, seen)


def content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def test_a_link_on_the_machine_is_not_followed(machine: Path) -> None:
    with pytest.raises(OSError):
        MachineFiles(str(machine)).open_old(change_of("/d/link"))
    assert content(MachineFiles(str(machine)).open_old(change_of("/d/f"))) == b"then\n"


def test_what_was_not_kept_is_read_on_the_machine_as_long_as_it_is_the_same(machine: Path) -> None:
    base = base_of(machine / "d", "/f")
    remembered = Formerly(str(machine), {"/d/f": base})
    assert content(remembered.open_old(change_of("/d/f"))) == b"then\n"
    (machine / "d/f").write_text("now\n")
    with pytest.raises(OSError, match="has changed since"):
        remembered.open_old(change_of("/d/f"))


def test_what_has_no_base_is_read_on_the_machine(machine: Path) -> None:
    unknown = replace(base_of(machine / "d", "/f"), known=False)
    for bases in ({}, {"/d/f": unknown}):
        assert content(Formerly(str(machine), bases).open_old(change_of("/d/f"))) == b"then\n"


def test_what_was_kept_is_read_there_and_what_is_damaged_there_on_the_machine(machine: Path) -> None:
    base = replace(base_of(machine / "d", "/f"), kept="1:0")

    def kept(wanted: Base) -> bytes:
        assert wanted == base
        return (machine / "d/sub/g").read_bytes()

    def damaged(wanted: Base) -> bytes:
        raise WorkspaceError("what it held before is damaged", hint="")

    assert content(Formerly(str(machine), {"/d/f": base}, kept).open_old(change_of("/d/f"))) == b"deep\n"
    assert content(Formerly(str(machine), {"/d/f": base}, damaged).open_old(change_of("/d/f"))) == b"then\n"


def test_a_directory_that_goes_is_told_one_by_one_unless_that_is_too_much_or_something_was_hidden(machine: Path) -> None:
    base = base_of(machine, "/d", digest=False)
    assert base.seen is not None
    change = Change("/d", Kind.DELETED, base.seen.node, None, inside=4)
    told = MachineFiles(str(machine)).one_by_one(change, 10)
    assert [each.path for each in told] == ["/d", "/d/f", "/d/link", "/d/sub", "/d/sub/g"] and told[0].inside == 0
    for folded, limit in ((change, 3), (replace(change, masks_real=True), 10), (replace(change, after=base.seen.node), 10)):
        assert MachineFiles(str(machine)).one_by_one(folded, limit) == (folded,)
