"""The review of a change set is the change set: whoever applies only what is shown gets the bytes of the sandbox."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.changes import ChangeSet, Kind
from agent_sandbox.workspace.diff.compare import EVERYTHING, MachineFiles, Preview, compare, pair_renames
from agent_sandbox.workspace.layers.renames import find_renames
from agent_sandbox.workspace.nodes import EntryType
from tests.workspace.diff.test_patch import PATHS, STEPS, Sandbox, contents_of, perform, place_to_work

TEXT = b"".join(b"line %d\n" % number for number in range(20))
Steps = list[tuple[str, bytes, bytes]]
# A file that is moved and edited: a rename is found only where most lines are the same.
TEXTS = st.tuples(st.just("write"), PATHS, st.integers(0, 19).map(lambda at: TEXT.replace(b"line %d\n" % at, b"edited\n")))
MOST_STEPS = st.lists(st.one_of(STEPS, TEXTS), max_size=8)


def previews(sandbox: Sandbox, changes: ChangeSet) -> list[Preview]:
    """Return the previews of all changes, with one for each entry of a removed directory."""
    machine = MachineFiles(str(sandbox.place / "machine"))
    with sandbox.stack() as stack:
        each = [one for change in pair_renames(changes) for one in machine.one_by_one(change, EVERYTHING.inside)]
        return [compare(change, stack, machine, limits=EVERYTHING) for change in each]


def apply(preview: Preview, base: Path, copy: Path, binaries: dict[str, bytes]) -> None:
    """Do to a copy of the base what a preview shows, and nothing else. Binary content is taken as shown."""
    change = preview.change
    place = copy / change.path.removeprefix("/project/")
    assert not preview.unshown and not preview.more_bytes
    if change.after is None or (change.before is not None and change.before.type is not change.after.type):
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)
    if change.after is None:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if change.after.type is EntryType.DIRECTORY:
        place.mkdir(exist_ok=True)
    elif change.after.type is EntryType.SYMLINK:
        place.unlink(missing_ok=True)
        place.symlink_to(os.fsdecode(b"".join(preview.new)) if change.kind is not Kind.OWNER else change.after.target)
    else:
        source = base / (change.renamed_from or change.path).removeprefix("/project/")
        has_source = source.is_file() and not source.is_symlink() and (change.before is not None or bool(change.renamed_from))
        content = source.read_bytes() if has_source else b""
        if preview.binary is not None and preview.binary.new_size is not None:
            content = binaries[change.path]
            assert len(content) == preview.binary.new_size
        elif preview.edits or preview.binary is not None:
            content = b"".join(preview.new)
            assert preview.lines_before == 0
        place.write_bytes(content)
        place.chmod(change.after.mode)


def check(before: Steps, steps: Steps) -> None:
    with place_to_work() as place:
        sandbox = Sandbox(place)
        perform(os.fsencode(sandbox.base), before)
        sandbox.work(steps)
        expected = place / "expected"
        shutil.copytree(sandbox.base, expected, symlinks=True)
        perform(os.fsencode(expected), steps)
        with sandbox.stack() as stack:
            changes = find_renames(sandbox.changes(), stack, machine_root=str(place / "machine"))
        copy = place / "copy"
        shutil.copytree(sandbox.base, copy, symlinks=True)
        binaries = {f"/project/{os.fsdecode(name)}": content for name, (_, content) in contents_of(expected).items()}
        shown = previews(sandbox, changes)
        os.close(sandbox.layers)
        for preview in sorted(shown, key=lambda each: each.change.after is not None):  # what goes away makes room
            apply(preview, sandbox.base, copy, binaries)
        assert contents_of(copy) == contents_of(expected)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MOST_STEPS, MOST_STEPS)
@example([("write", b"a", TEXT)], [("move", b"a", b"b/c"), ("write", b"b/c", TEXT.replace(b"line 7\n", b"evil()\n"))])
def test_applying_what_is_shown_gives_what_would_be_promoted(before: Steps, steps: Steps) -> None:
    check(before, steps)


@pytest.mark.torture
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(STEPS, TEXTS), max_size=12), st.lists(st.one_of(STEPS, TEXTS), max_size=12))
def test_applying_what_is_shown_gives_what_would_be_promoted_in_many_more_cases(before: Steps, steps: Steps) -> None:
    check(before, steps)
