"""A stack of layers reads as the overlay of them looks: as root with trusted attributes, as an ordinary user with `userxattr`."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.layers.stack import Stack
from tests.workspace.edits import STEPS, Steps, apply, perform
from tests.workspace.layers.overlays import in_namespace, userxattr
from tests.workspace.layers.stacks import TARGET, Stacked, picture
from tests.workspace.machine import Machine
from tests.workspace.racing import deep_tree

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
MANY = settings(RANDOM, max_examples=3000)


def on_a_stack(place: Path, body: Callable[[Stacked], None]) -> None:
    """Run a test with a stack of its own, in a mount namespace that ends with it."""
    in_namespace(lambda: body(Stacked(place)))


def content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def writing(text: str, *names: str) -> Callable[[Path], None]:
    def body(view: Path) -> None:
        for name in names:
            (view / name).write_text(text)

    return body


def removing(*names: str) -> Callable[[Path], None]:
    def body(view: Path) -> None:
        for name in names:
            (view / name).unlink()

    return body


def check_a_random_stack(before: Steps, layers: list[Steps]) -> None:
    def body(machine: Stacked) -> None:
        perform(machine.data, before)
        for steps in layers:
            machine.run(partial(perform, steps=steps))
        seen = machine.look()
        with machine.stack() as stack:
            apply(machine.changes(), stack, machine.data, target=TARGET)
        assert picture(machine.data) == seen
        assert machine.kinds() == {}

    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        on_a_stack(Path(place), body)


@pytest.mark.slow
@RANDOM
@given(before=STEPS, layers=st.lists(STEPS, min_size=1, max_size=4))
def test_applying_the_changes_of_a_stack_to_the_machine_gives_what_the_guest_saw(before: Steps, layers: list[Steps]) -> None:
    check_a_random_stack(before, layers)


@pytest.mark.torture
@MANY
@given(before=STEPS, layers=st.lists(STEPS, min_size=1, max_size=4))
def test_the_same_of_thousands_of_stacks(before: Steps, layers: list[Steps]) -> None:
    check_a_random_stack(before, layers)


def test_the_uppermost_layer_decides_and_a_whiteout_hides_what_is_below(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        for name in ("changed", "gone", "back"):
            (machine.data / name).write_text("real")
        machine.run(writing("first", "changed", "gone", "new", "passing"))
        machine.run(removing("gone", "back", "passing"))
        machine.run(writing("third", "changed", "back"))
        assert machine.kinds() == {"changed": "modified", "gone": "deleted", "back": "modified", "new": "added"}
        with machine.stack() as stack:
            found = {change.path: change for change in machine.changes()}
            assert content(stack.open_file(found["/data/changed"])) == b"third"
            assert content(stack.open_file(found["/data/new"])) == b"first"
            for path in ("/data/gone", "/data/passing", "/data/nothing", "/elsewhere"):
                with pytest.raises(OSError):
                    stack.open_file(Change(path, Kind.ADDED, None, None, TARGET))

    on_a_stack(tmp_path, body)


def test_a_directory_that_becomes_a_file_and_a_directory_again_holds_only_what_is_new(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        (machine.data / "d/sub").mkdir(parents=True)
        (machine.data / "d/real").write_text("x")

        def to_file(view: Path) -> None:
            shutil.rmtree(view / "d")
            (view / "d").write_text("a file")

        def to_directory(view: Path) -> None:
            (view / "d").unlink()
            (view / "d").mkdir()
            (view / "d/new").write_text("new")

        machine.run(writing("first", "d/first"))
        machine.run(to_file)
        assert machine.kinds() == {"d": "retyped"}
        machine.run(to_directory)
        machine.run(writing("newer", "d/newer"))
        assert machine.kinds() == {"d/new": "added", "d/newer": "added", "d/real": "deleted", "d/sub": "deleted"}
        with machine.stack() as stack, pytest.raises(OSError):
            stack.open_file(Change("/data/d/first", Kind.ADDED, None, None, TARGET))

    on_a_stack(tmp_path, body)


def test_metadata_of_a_directory_is_that_of_its_uppermost_layer(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        (machine.data / "d").mkdir(mode=0o755)
        (machine.data / "d/file").write_text("x")
        machine.run(lambda view: (view / "d").chmod(0o700))
        machine.run(lambda view: os.setxattr(view / "d", "user.colour", b"red"))
        machine.run(lambda view: (view / "d").chmod(0o755))
        (change,) = machine.changes()
        assert change.kind is Kind.XATTR and change.xattrs == ("user.colour",)

    on_a_stack(tmp_path, body)


def test_attributes_of_the_other_prefix_are_not_believed_in_any_layer(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        (machine.data / "d").mkdir()
        (machine.data / "d/file").write_text("x")
        upper = machine.add()
        (upper / "d").mkdir()
        (upper / "d/empty").touch()
        other = "trusted.overlay." if userxattr() else "user.overlay."
        if not userxattr():  # a user cannot set the other ones at all
            os.setxattr(upper / "d", other + "opaque", b"y")
            os.setxattr(upper / "d/empty", other + "whiteout", b"y")
        machine.add()
        kinds = machine.kinds()
        assert "deleted" not in kinds.values() and kinds["d/empty"] == "added"

    on_a_stack(tmp_path, body)


def test_a_deep_tree_of_many_layers_needs_few_descriptors(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        for _ in range(12):
            upper = os.open(machine.add(), os.O_RDONLY)
            deep_tree(upper, 600)
            os.close(upper)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 130, used + 130))
        changes = machine.changes().changes
        assert len(changes) == 601
        with machine.stack() as stack:
            assert content(stack.open_file(changes[-1])) == b""
        assert len(os.listdir("/proc/self/fd")) == used

    on_a_stack(tmp_path, body)


def test_a_walk_that_is_left_early_leaves_no_descriptor_and_puts_modes_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    def closed(view: Path) -> None:
        (view / "closed/inner").mkdir(parents=True)
        (view / "closed/inner/file").write_text("x")
        (view / "closed").chmod(0)

    try:
        machine.edit(closed)
        before = len(os.listdir("/proc/self/fd"))
        with machine.stack() as stack:
            walk = stack.walk("/data")
            assert [next(walk).name for _ in range(3)] == ["closed", "inner", "file"]
            walk.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert stat.S_IMODE((machine.layer / "upper/closed").stat().st_mode) == 0
    finally:
        machine.remove()


def test_a_file_that_its_owner_may_not_read_is_compared_and_opened_all_the_same(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        (machine.data / "file").write_text("x")
        machine.edit(lambda view: (view / "file").chmod(0))
        (change,) = machine.changes()
        assert change.kind is Kind.MODE and not change.unread
        with machine.stack() as stack:
            assert content(stack.open_file(change)) == b"x"
        assert stat.S_IMODE((machine.layer / "upper/file").stat().st_mode) == 0
    finally:
        machine.remove()


@pytest.mark.parametrize("damage", ["missing", "a file", "a link"])
def test_a_damaged_layer_is_an_error_that_says_so(tmp_path: Path, damage: str) -> None:
    machine = Machine(tmp_path)
    try:
        upper = machine.layer / "upper"
        upper.rmdir()
        if damage == "a file":
            upper.touch()
        elif damage == "a link":
            upper.symlink_to("/etc")
        with pytest.raises(WorkspaceError, match="damaged"):
            machine.changes()
        upper.unlink(missing_ok=True)
    finally:
        machine.remove()


def test_a_layer_that_was_never_finished_is_empty(tmp_path: Path) -> None:
    (tmp_path / "layers/%2Fdata").mkdir(parents=True)
    fd = os.open(tmp_path / "layers", os.O_RDONLY)
    with Stack.of([fd], userxattr=True) as stack:
        assert list(stack.walk("/data")) == []
    os.close(fd)


def test_the_changes_of_some_thousand_files_are_those_that_diff_finds(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    def body(view: Path) -> None:
        for number in range(0, 3000, 7):
            (view / f"d{number % 30}" / f"f{number}").write_text(f"changed {number}")
        for number in range(0, 3000, 11):
            (view / f"d{number % 30}" / f"f{number}").unlink()
        for number in range(100):
            (view / f"d{number % 30}" / f"new{number}").write_text("new")
        shutil.rmtree(view / "d13")
        shutil.copytree(view, tmp_path / "seen", symlinks=True)

    try:
        for number in range(3000):
            directory = machine.data / f"d{number % 30}"
            directory.mkdir(exist_ok=True)
            (directory / f"f{number}").write_text(f"content {number % 5}")
        machine.edit(body)
        command = ["diff", "--recursive", "--brief", "--no-dereference", str(machine.data), str(tmp_path / "seen")]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        by_diff = {line.replace(": ", "/").split()[-1 if line.startswith("Only") else 1] for line in told}
        by_diff = {path.replace(str(tmp_path / "seen"), "/data").replace(str(machine.data), "/data") for path in by_diff}
        assert {change.path for change in machine.changes(limit=10_000)} == by_diff and len(by_diff) > 500
    finally:
        machine.remove()
