"""Squashed layers show the same tree as those they were made from, and what was carried over shows as the machine has it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers.squash import squash
from tests.workspace.edits import STEPS, Steps, apply, perform
from tests.workspace.layers.overlays import in_namespace
from tests.workspace.layers.stacks import TARGET, Stacked
from tests.workspace.machine import Machine
from tests.workspace.racing import deep_tree

RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
MANY = settings(RANDOM, max_examples=3000)
LAYERS = st.lists(STEPS, min_size=1, max_size=4)


def squashed(machine: Stacked, *, link: bool, without: Collection[str] = ()) -> Path:
    """Let a squashed generation take the place of all that the machine has. Returns its upper directory."""
    into = machine.fresh()
    fd = os.open(into, os.O_RDONLY)
    with machine.stack() as stack:
        squash(stack, fd, link=link, without=without, machine_root=str(machine.root))
    os.close(fd)
    machine.generations = [into]
    return next(into.iterdir()) / "upper"


def on_a_stack(place: Path, body: Callable[[Stacked], None]) -> None:
    in_namespace(lambda: body(Stacked(place)))


def check_a_random_squash(before: Steps, layers: list[Steps], link: bool) -> None:
    def body(machine: Stacked) -> None:
        perform(machine.data, before)
        for steps in layers:
            machine.run(partial(perform, steps=steps))
        seen, kinds = machine.look(), machine.kinds()
        squashed(machine, link=link)
        assert machine.look() == seen
        assert machine.kinds() == kinds

    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        on_a_stack(Path(place), body)


def check_a_random_promotion(before: Steps, layers: list[Steps], chosen: int, link: bool) -> None:
    """Some changes are carried over and forgotten: the guest sees the same tree as before, and only the others are left."""

    def body(machine: Stacked) -> None:
        perform(machine.data, before)
        for steps in layers:
            machine.run(partial(perform, steps=steps))
        seen, changes = machine.look(), machine.changes().changes
        carried = ChangeSet(tuple(change for number, change in enumerate(changes) if chosen >> number % 16 & 1))
        paths = {change.path for change in carried}
        # Whoever carries over a part brings the directories on the way there with it.
        needed = {change.path for change in changes if any(path.startswith(change.path + "/") for path in paths)}
        carried = ChangeSet(tuple(change for change in changes if change.path in paths | needed))
        with machine.stack() as stack:
            apply(carried, stack, machine.data, target=TARGET)
        squashed(machine, link=link, without=[change.path for change in carried])
        assert machine.look() == seen
        assert {change.path for change in machine.changes()} <= {change.path for change in changes} - {change.path for change in carried}

    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        on_a_stack(Path(place), body)


@pytest.mark.slow
@RANDOM
@given(before=STEPS, layers=LAYERS, link=st.booleans())
def test_a_squashed_stack_over_the_same_base_shows_the_same_tree(before: Steps, layers: list[Steps], link: bool) -> None:
    check_a_random_squash(before, layers, link)


@pytest.mark.slow
@RANDOM
@given(before=STEPS, layers=LAYERS, chosen=st.integers(0, 0xFFFF), link=st.booleans())
def test_what_was_carried_over_is_forgotten_and_the_rest_stays(before: Steps, layers: list[Steps], chosen: int, link: bool) -> None:
    check_a_random_promotion(before, layers, chosen, link)


@pytest.mark.torture
@MANY
@given(before=STEPS, layers=LAYERS, chosen=st.integers(0, 0xFFFF), link=st.booleans())
def test_the_same_of_thousands_of_stacks(before: Steps, layers: list[Steps], chosen: int, link: bool) -> None:
    check_a_random_squash(before, layers, link)
    check_a_random_promotion(before, layers, chosen, link)


def test_links_share_the_file_and_copies_keep_times_holes_and_links_among_themselves(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        def work(view: Path) -> None:
            (view / "d").mkdir()
            with (view / "d/sparse").open("wb") as file:
                file.truncate(1 << 30)
                file.seek(1 << 29)
                file.write(b"in the middle")
            os.link(view / "d/sparse", view / "second")
            os.utime(view / "d/sparse", ns=(1, 2))
            os.utime(view / "d", ns=(3, 4))

        machine.run(work)
        (first,) = machine.generations
        old = next(first.iterdir()) / "upper"
        linked = squashed(machine, link=True)
        assert (linked / "second").stat().st_ino == (old / "second").stat().st_ino
        copied = squashed(machine, link=False)
        new = (copied / "second").stat()
        assert new.st_ino == (copied / "d/sparse").stat().st_ino != (old / "second").stat().st_ino
        assert (new.st_size, new.st_mtime_ns) == (1 << 30, 2) and new.st_blocks * 512 < 1 << 20
        assert (copied / "d").stat().st_mtime_ns == 4
        with (copied / "second").open("rb") as file:
            file.seek(1 << 29)
            assert file.read(13) == b"in the middle"

    on_a_stack(tmp_path, body)


def test_the_new_generation_has_the_shape_that_a_run_expects(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        machine.run(lambda view: (view / "file").touch())
        (next(machine.generations[0].iterdir()) / "upper").chmod(0o751)
        upper = squashed(machine, link=True)
        assert sorted(path.name for path in upper.parent.iterdir()) == ["target", "upper", "work"]
        assert (upper.parent / "target").read_bytes() == os.fsencode(TARGET)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (upper.parent, upper.parent / "work", upper)] == [0o700, 0o700, 0o751]

    on_a_stack(tmp_path, body)


def test_a_directory_that_hid_everything_goes_on_hiding_all_but_what_was_carried_over(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        (machine.data / "d/sub").mkdir(parents=True)
        for name in ("d/one", "d/two", "d/sub/three"):
            (machine.data / name).write_text("real")

        def replaced(view: Path) -> None:
            shutil.rmtree(view / "d")
            (view / "d").mkdir()
            (view / "d/new").write_text("new")
            (view / "d/newer").write_text("newer")

        machine.run(replaced)
        seen = machine.look()
        (machine.data / "d/one").unlink()
        (machine.data / "d/new").write_text("new")
        squashed(machine, link=False, without=["/data/d/one", "/data/d/new"])
        assert machine.look() == seen
        assert machine.kinds() == {"d/two": "deleted", "d/sub": "deleted", "d/newer": "added"}
        (machine.data / "d/later").write_text("made by others, after the promotion")
        assert "d/later" not in machine.kinds()

    on_a_stack(tmp_path, body)


def test_when_everything_was_carried_over_nothing_is_left(tmp_path: Path) -> None:
    def body(machine: Stacked) -> None:
        (machine.data / "kept/deep").mkdir(parents=True)

        def work(view: Path) -> None:
            (view / "kept/deep/file").write_text("x")
            (view / "made/here").mkdir(parents=True)
            (view / "made/here/file").write_text("x")

        machine.run(work)
        changes = machine.changes()
        with machine.stack() as stack:
            apply(changes, stack, machine.data, target=TARGET)
        upper = squashed(machine, link=True, without=[change.path for change in changes])
        assert list(upper.iterdir()) == []

    on_a_stack(tmp_path, body)


def test_what_its_owner_may_not_read_is_copied_with_its_mode(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    def closed(view: Path) -> None:
        (view / "closed").mkdir()
        (view / "closed/file").write_text("secret")
        (view / "closed/file").chmod(0)
        (view / "closed").chmod(0)

    try:
        machine.edit(closed)
        (tmp_path / "layers/copy").mkdir()
        into = os.open(tmp_path / "layers/copy", os.O_RDONLY)
        with machine.stack() as stack:
            squash(stack, into, link=False, machine_root=str(machine.root))
        os.close(into)
        upper = next((tmp_path / "layers/copy").iterdir()) / "upper"
        assert stat.S_IMODE((upper / "closed").stat().st_mode) == 0
        (upper / "closed").chmod(0o700)
        assert stat.S_IMODE((upper / "closed/file").stat().st_mode) == 0
        (upper / "closed/file").chmod(0o600)
        assert (upper / "closed/file").read_text() == "secret"
    finally:
        machine.remove()


def test_a_very_deep_tree_is_squashed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        upper = os.open(machine.layer / "upper", os.O_RDONLY)
        deep_tree(upper, 1500)
        os.close(upper)
        (tmp_path / "layers/copy").mkdir()
        into = os.open(tmp_path / "layers/copy", os.O_RDONLY)
        with machine.stack() as stack:
            squash(stack, into, link=False, machine_root=str(machine.root))
            was = len(machine.changes(limit=10_000))
        os.close(machine.layers)
        machine.layers = into
        assert len(machine.changes(limit=10_000)) == was == 1501
    finally:
        machine.remove()
