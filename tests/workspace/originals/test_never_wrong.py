"""Reality and a sandbox change at random, runs are killed at random: a base is what was real when a path was first covered, or unknown."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.originals import files
from agent_sandbox.workspace.reality import Base
from tests.workspace.originals.machine import Machine

FILES = ("a", "b", "d/x", "d/y", "e/z")
DIRECTORIES = ("d", "e")
Actions = list[tuple[str, str]]
Story = list[tuple[Actions, Actions, Actions, bool]]
ACTIONS = st.tuples(st.sampled_from(["write", "remove", "replace", "swap", "touch"]), st.sampled_from((*FILES, *DIRECTORIES)))


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """For each run: what happens in reality before it, in the sandbox, and in reality meanwhile; and whether its bases are kept."""
    few = st.lists(ACTIONS, max_size=3)
    return draw(st.lists(st.tuples(few, few, few, st.booleans()), min_size=1, max_size=3))


def act(root: Path, actions: Actions, text: str) -> None:
    for number, (action, name) in enumerate(actions):
        path = root / name
        with suppress(OSError):  # what cannot be done, such as writing to a directory, is not done
            match action:
                case "write":
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(f"{text} {number}")
                case "replace":
                    (root / "new").write_text(f"{text} {number}")
                    (root / "new").replace(path)
                case "swap":
                    (root / "d").rename(root / "away")
                    (root / "e").rename(root / "d")
                    (root / "away").rename(root / "e")
                case "touch":
                    os.utime(path, (1, 1))
                case _:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def state(root: Path) -> dict[str, str | None]:
    """What is at each name: the text of a file, "dir", or None."""
    found: dict[str, str | None] = {}
    for name in (*FILES, *DIRECTORIES):
        path = root / name
        found[name] = "dir" if path.is_dir() else path.read_text() if path.exists() else None
    return found


def said(machine: Machine, base: Base) -> str | None:
    if base.seen is None:
        return None
    if base.seen.node.type is EntryType.DIRECTORY:
        return "dir"
    return machine.content(base.path).decode() if base.kept else f"{base.seen.node.size} bytes"


def check(story: Story) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        machine = Machine(Path(place))
        act(machine.data, [("write", name) for name in FILES], "old")
        first: dict[str, tuple[str | None, bool]] = {}  # what was there when it was first covered, and whether all was quiet then
        for number, (before, inside, meanwhile, kept) in enumerate(story):
            act(machine.data, before, f"before {number}")
            real = state(machine.data)
            machine.begin()
            machine.edit(lambda merged, inside=inside, number=number: act(merged, inside, f"sandbox {number}"))  # type: ignore[misc]
            act(machine.data, meanwhile, f"during {number}")
            upper = machine.layer / "upper"
            for name in (*FILES, *DIRECTORIES):
                if os.path.lexists(upper / name):
                    first.setdefault(name, (real[name], not meanwhile))
            if kept:
                machine.keep()
        found = files.recall(machine.directory, [1])
        for path in found:
            base, name = found[path], path.removeprefix("/data/")
            if name in first and base.known:
                was = first[name][0]
                assert said(machine, base) in (was, f"{len(was or '')} bytes"), (name, base)
        if all(kept for *_, kept in story):
            assert all(found[f"/data/{name}"].known for name, (_, quiet) in first.items() if quiet)
        machine.remove()


# A directory is moved away before a run and back during it, and at the end all looks as if it had never been away.
AWAY = [([], [("write", "d/y")], [], False), ([("swap", "a")], [("write", "d/x")], [("swap", "a")], True)]
AWAY_AND_KNOWN = [([], [("write", "d/y")], [], True), AWAY[1]]
AWAY_AND_WRITTEN_TO = [AWAY_AND_KNOWN[0], ([("swap", "a")], [("write", "d/x")], [("swap", "a"), ("write", "d/y")], True)]


@pytest.mark.needs_root  # for a user the overlay does not note which directories it looked into: see `keeping`
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@example(AWAY)
@example(AWAY_AND_KNOWN)
@example(AWAY_AND_WRITTEN_TO)
@given(stories())
def test_a_base_is_what_was_real_when_a_path_was_first_covered_or_it_is_unknown(
    story: Story,
) -> None:
    check(story)


@pytest.mark.needs_root
@pytest.mark.torture
@settings(max_examples=2000, deadline=None)
@given(stories())
def test_the_same_for_many_stories(story: Story) -> None:
    check(story)
