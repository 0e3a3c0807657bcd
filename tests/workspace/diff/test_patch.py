"""A patch is what git takes: judged by git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.diff.compare import MachineFiles
from agent_sandbox.workspace.diff.patch import NotInPatch, is_gits, write_patch
from agent_sandbox.workspace.layers.readback import read_stack
from agent_sandbox.workspace.layers.stack import Stack
from agent_sandbox.workspace.nodes import EntryType
from tests.workspace.layers.overlays import edit, make_layer, userxattr

ENVIRONMENT = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"}

CONTENTS = st.one_of(
    st.sampled_from([b"", b"\n", b"one\n", b"one\ntwo\n", b"no newline", b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n", b"\r\n\r", b"\0\1\2" * 40]),
    st.lists(st.sampled_from([b"a", b"b", b"-- c", b"++ d", b"\\ No newline", b"\xff", b"", b" ", b"\x0c"]), max_size=12).map(b"\n".join),
    st.binary(max_size=60),
)
NAMES = st.sampled_from(
    [b"a", b"b", b"c", b"a b", b'q"u', b"back\\slash", b"new\nline", b"tab\t", b"\xff", "é".encode(), b"-x", b"\x1b[31m"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
STEPS = st.one_of(
    st.tuples(st.just("write"), PATHS, CONTENTS),
    st.tuples(st.just("run"), PATHS, CONTENTS),
    st.tuples(st.just("link"), PATHS, st.sampled_from([b"nowhere", b"../b", b"/etc/passwd", b"to\nwhere"])),
    st.tuples(st.just("remove"), PATHS, st.just(b"")),
    st.tuples(st.just("move"), PATHS, PATHS),
    st.tuples(st.just("toggle"), PATHS, st.just(b"")),
)


def perform(root: bytes, steps: list[tuple[str, bytes, bytes]]) -> None:
    """Do the steps in a tree; what stands in the way of one goes."""
    for step, path, argument in steps:
        place = os.path.join(root, path)
        if step in ("write", "run", "link"):
            make_way(root, path)
            if step == "link":
                os.symlink(argument, place)
            else:
                with open(place, "wb") as file:
                    file.write(argument)
                os.chmod(place, 0o755 if step == "run" else 0o644)
        elif step == "remove" and os.path.lexists(place):
            remove(place)
        elif step == "move" and os.path.isfile(place) and not os.path.islink(place) and path not in argument:
            make_way(root, argument)
            if os.path.lexists(place):
                os.rename(place, os.path.join(root, argument))
        elif step == "toggle" and os.path.isfile(place) and not os.path.islink(place):
            os.chmod(place, os.stat(place).st_mode ^ 0o111)


def remove(place: bytes) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    else:
        os.unlink(place)


def make_way(root: bytes, path: bytes) -> None:
    parts = path.split(b"/")
    for depth in range(1, len(parts)):
        above = os.path.join(root, *parts[:depth])
        if os.path.lexists(above) and (os.path.islink(above) or not os.path.isdir(above)):
            os.unlink(above)
        os.makedirs(above, exist_ok=True)
    if os.path.lexists(os.path.join(root, path)):
        remove(os.path.join(root, path))


def contents_of(root: Path) -> dict[bytes, tuple[str, bytes]]:
    """What git keeps of a tree: content, the executable bit, links."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for place, _, _ in os.walk(os.fsencode(root)):
        for entry in os.scandir(place):
            name = os.path.relpath(entry.path, os.fsencode(root))
            if entry.is_symlink():
                found[name] = ("link", os.readlink(entry.path))
            elif entry.is_file():
                kind = "program" if entry.stat().st_mode & 0o100 else "file"
                found[name] = (kind, Path(os.fsdecode(entry.path)).read_bytes())
    return found


@contextmanager
def place_to_work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=os.environ["PYTEST_DEBUG_TEMPROOT"]) as place:
        yield Path(place)


class Sandbox:
    """A base, and a real overlay over it in which somebody has worked."""

    def __init__(self, place: Path) -> None:
        self.place, self.base = place, place / "machine" / "project"
        self.base.mkdir(parents=True)
        (place / "layers").mkdir()
        self.layers = os.open(place / "layers", os.O_RDONLY | os.O_DIRECTORY)
        self.layer = place / "layers" / make_layer(self.layers, "/project")

    def work(self, steps: list[tuple[str, bytes, bytes]]) -> None:
        edit(self.base, self.layer, lambda merged: perform(os.fsencode(merged), steps))

    def changes(self) -> ChangeSet:
        with self.stack() as stack:
            return read_stack(stack, machine_root=str(self.place / "machine"))

    def stack(self) -> Stack:
        return Stack.of([self.layers], userxattr=userxattr())

    def patch(self, changes: ChangeSet) -> tuple[bytes, tuple[NotInPatch, ...]]:
        machine = MachineFiles(str(self.place / "machine"))
        written: list[bytes] = []
        one_by_one = [each for change in changes for each in machine.one_by_one(change, 10_000)]
        with self.stack() as stack:
            left = write_patch(one_by_one, stack, machine, project="/project", write=written.append)
        return b"".join(written), left

    def applied(self, patch: bytes) -> Path:
        """A copy of the base to which git has applied it."""
        copy = self.place / "copy"
        shutil.copytree(self.base, copy, symlinks=True)
        if patch:
            environment = {**ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(self.place)}
            done = subprocess.run(
                ["git", "apply", "--whitespace=nowarn"], cwd=copy, input=patch, env=environment, capture_output=True, check=False
            )
            assert done.returncode == 0, f"{done.stderr.decode(errors='replace')}\n{patch!r}"
        return copy


def with_renames(sandbox: Sandbox, changes: ChangeSet) -> ChangeSet:
    """As a reader that finds renames tells them: of a file whose content was at a path that is gone."""
    gone: dict[bytes, str] = {}
    for change in changes:
        for each in MachineFiles(str(sandbox.place / "machine")).one_by_one(change, 1000):
            if each.kind is Kind.DELETED and each.before and each.before.type is EntryType.FILE:
                gone[Path(f"{sandbox.place}/machine{each.path}").read_bytes()] = each.path

    def told(change: Change) -> Change:
        if change.kind is not Kind.ADDED or not change.after or change.after.type is not EntryType.FILE:
            return change
        with sandbox.stack() as stack, open(stack.open_file(change), "rb") as file:
            return replace(change, renamed_from=gone.get(file.read(), ""))

    return ChangeSet(tuple(map(told, changes)))


def _remove_empty_directories(tree: Path) -> None:
    for directory, _, _ in os.walk(tree, topdown=False):
        if Path(directory) != tree and not os.listdir(directory):
            os.rmdir(directory)


def check_round_trip(before: list[tuple[str, bytes, bytes]], steps: list[tuple[str, bytes, bytes]], renames: bool) -> None:
    with place_to_work() as place:
        sandbox = Sandbox(place)
        perform(os.fsencode(sandbox.base), before)
        _remove_empty_directories(sandbox.base)  # which git does not know, and stumbles over
        sandbox.work(steps)
        expected = place / "expected"
        shutil.copytree(sandbox.base, expected, symlinks=True)
        perform(os.fsencode(expected), steps)
        changes = with_renames(sandbox, sandbox.changes()) if renames else sandbox.changes()
        patch, left = sandbox.patch(changes)
        os.close(sandbox.layers)
        assert not any(each.content for each in left)
        assert contents_of(sandbox.applied(patch)) == contents_of(expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=8), st.lists(STEPS, max_size=8), st.booleans())
def test_a_patch_applied_by_git_gives_the_tree_of_the_sandbox(
    before: list[tuple[str, bytes, bytes]], steps: list[tuple[str, bytes, bytes]], renames: bool
) -> None:
    check_round_trip(before, steps, renames)


@pytest.mark.torture
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=12), st.lists(STEPS, max_size=12), st.booleans())
def test_a_patch_applied_by_git_gives_the_tree_of_the_sandbox_in_many_more_cases(
    before: list[tuple[str, bytes, bytes]], steps: list[tuple[str, bytes, bytes]], renames: bool
) -> None:
    check_round_trip(before, steps, renames)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    os.close(made.layers)


def test_a_rename_is_told_as_one(sandbox: Sandbox) -> None:
    (sandbox.base / "old").write_text("content\n")
    sandbox.work([("move", b"old", b"new name")])
    patch, left = sandbox.patch(with_renames(sandbox, sandbox.changes()))
    assert patch == b'diff --git a/old "b/new name"\nsimilarity index 100%\nrename from old\nrename to "new name"\n'
    assert left == ()


def test_a_rename_whose_content_is_not_the_same_after_all_is_told_in_full(sandbox: Sandbox) -> None:
    (sandbox.base / "old").write_text("content\n")
    sandbox.work([("move", b"old", b"new")])
    changes = with_renames(sandbox, sandbox.changes())
    (sandbox.base / "old").write_text("another\n")
    patch, _ = sandbox.patch(changes)
    assert b"rename" not in patch and b"-another\n" in patch and b"+content\n" in patch


def test_what_a_patch_cannot_carry_is_told(sandbox: Sandbox) -> None:
    (sandbox.base / "script").write_text("x\n")

    def work(merged: Path) -> None:
        (merged / "empty").mkdir()
        (merged / "script").chmod(0o600)
        os.mkfifo(merged / "fifo")
        (merged / ".git").mkdir()
        (merged / ".git" / "config").write_text("[core]\n\tfsmonitor = evil\n")
        (merged / ".GIT").write_text("the same on other filesystems\n")
        os.setxattr(merged / "script", "user.note", b"x")

    edit(sandbox.base, sandbox.layer, work)
    patch, left = sandbox.patch(sandbox.changes())
    assert patch == b""
    told = {(each.path.removeprefix("/project/"), each.what, each.content) for each in left}
    own = "git takes no patch for what is its own"
    assert told >= {
        ("empty", "an empty directory", False),
        ("script", "its mode 0600", False),
        ("script", "extended attributes", False),
        ("fifo", "a fifo", True),
        (".git/config", own, True),
        (".GIT", own, True),
    }


def test_a_directory_with_something_hidden_in_it_is_left_out_whole_and_not_half_removed(sandbox: Sandbox) -> None:
    (sandbox.base / "d").mkdir()
    (sandbox.base / "d/.env").write_text("SECRET\n")
    sandbox.work([("write", b"d", b"a file now\n")])
    changes = ChangeSet(tuple(replace(change, masks_real=True) for change in sandbox.changes()))
    patch, left = sandbox.patch(changes)
    assert patch == b"" and [(each.path, each.content) for each in left] == [("/project/d", True)]


@pytest.mark.parametrize("name", [".git", ".GIT", ".git ", ".git.", "git~1", ".g\u200cit", ".git::$INDEX_ALLOCATION"])
def test_names_that_some_filesystem_takes_for_gits_own_are_known(name: str) -> None:
    assert is_gits(f"a/{name}/config")
    assert not is_gits("a/.gitignore") and not is_gits("digit") and not is_gits(".github/workflows")
