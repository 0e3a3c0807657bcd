"""What a preview shows of any two contents: everything that goes away, nothing forged, within bounds."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from hashlib import sha256
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.diff import compare as compare_module
from agent_sandbox.workspace.diff import window as window_module
from agent_sandbox.workspace.diff.compare import DEFAULT, DiffLimits, Effort, Preview
from agent_sandbox.workspace.diff.formats import ADDED, REMOVED, SAME, Block, Row, decoded, measured, side_by_side, summary, unified
from agent_sandbox.workspace.diff.window import Window, read_window
from agent_sandbox.workspace.digests import content_digest
from agent_sandbox.workspace.merge import text as text_module
from agent_sandbox.workspace.merge.text import split_lines
from agent_sandbox.workspace.nodes import EntryType, Node
from tests.workspace.diff.previews import InMemory, preview_of

LINES = st.lists(
    st.sampled_from(
        ["a", "b", "", "-- c", "++ d", "@@ -1 +1 @@", "diff --git a/x b/x", "# Elsewhere on the machine: 0 changes", "\\ No newline"]
    )
    | st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=30),
    max_size=20,
).map(lambda lines: "\n".join(lines).encode())
TERABYTE = 1 << 40
LIMITS = st.builds(DiffLimits, added=st.integers(0, 5), columns=st.integers(1, 8))


def removed_lines(rows: list[Row]) -> Counter[str]:
    return Counter(cell.text for row in rows for cell in row.cells if cell.kind == REMOVED)


def rejoined(rows: list[Row]) -> Counter[str]:
    """The removed lines of two columns: what goes on in the next row belongs to the line above."""
    lines: list[str] = []
    for row in rows:
        cell = row.cells[0]
        if cell.kind == REMOVED and "↳" in cell.lead:
            lines[-1] += cell.text
        elif cell.kind == REMOVED:
            lines.append(cell.text)
    return Counter(lines)


def must_be_shown(old: bytes, new: bytes) -> Counter[str]:
    """At the least: every line that there is less of than before."""
    before, after = (Counter(map(decoded, split_lines(content))) for content in (old, new))
    return before - after


@given(LINES, LINES, LIMITS)
def test_a_line_that_goes_away_is_shown_in_full_whatever_is_added(old: bytes, new: bytes, limits: DiffLimits) -> None:
    preview = preview_of(old, new, limits)
    assert removed_lines(list(unified(preview, limits=limits))) >= must_be_shown(old, new)
    for columns in (0, 41, 90):
        assert rejoined(list(side_by_side(preview, columns, limits=limits))) >= must_be_shown(old, new)


@given(LINES, LINES, st.binary(max_size=200), st.integers(0, 30))
def test_neither_is_it_when_the_new_side_is_too_large_or_made_binary(old: bytes, new: bytes, junk: bytes, room: int) -> None:
    limits = DiffLimits(bytes=len(old) + room, added=3)
    flooded = new + b"\n" + b"\0\xff" * len(new) + junk * 20
    preview = preview_of(old, flooded, limits)
    assert removed_lines(list(unified(preview, limits=limits))) >= must_be_shown(old, flooded)


@given(LINES, LINES)
def test_the_edits_lead_from_the_old_side_to_the_new_one(old: bytes, new: bytes) -> None:
    preview = preview_of(old, new)
    made, at = [], 0
    for edit in preview.edits:
        made += [*preview.old[at : edit.old_from], *preview.new[edit.new_from : edit.new_to]]
        at = edit.old_to
    assert old == new or b"".join([*made, *preview.old[at:]]) == new


@given(LINES, LINES, st.booleans())
def test_no_content_can_be_taken_for_a_line_of_ours(old: bytes, new: bytes, two_columns: bool) -> None:
    preview = preview_of(old, new)
    for row in side_by_side(preview, 80) if two_columns else unified(preview):
        content = any(cell.kind in (SAME, REMOVED, ADDED) for cell in row.cells)
        assert row.plain[:1] in (" ", "-", "+") if content else row.plain[:1] not in (" ", "-", "+")
        assert row.plain.isprintable()


@given(LINES, st.text(max_size=20).map(lambda text: text.replace("\0", "")))
def test_no_name_can_be_taken_for_more_than_a_name(content: bytes, name: str) -> None:
    rows = list(unified(preview_of(None, content, path=f"/{name}")))
    assert rows[0].plain.startswith(("diff --git a/", 'diff --git "a/'))
    (line, _) = summary([measured(preview_of(None, b"x\n"), name)], 80)
    assert line.plain.startswith("A +1 -0 + ") and line.plain.isprintable()


def test_two_columns_fill_the_width_and_long_lines_go_on_below() -> None:
    preview = preview_of(b"short\n" + b"old " * 20 + b"\n", b"short\n" + "日本".encode() * 20 + b"\n")
    lines = [row.plain for row in side_by_side(preview, 60)]
    assert lines[2] == " 1 short                     │  1 short"
    assert lines[3] == "-2 old old old old old old o │ +2 " + "日本" * 6
    assert lines[4].startswith("-↳ ld old") and "│ +↳ 日本" in lines[4]
    assert all(sum(2 if ord(character) > 0x3000 else 1 for character in line) <= 60 for line in lines)


def test_a_missing_newline_is_told_of_each_side() -> None:
    lines = [row.plain for row in side_by_side(preview_of(b"a\n", b"a"), 60)]
    assert lines[-1] == "\\ No newline at end of file (new)"


def test_numbers_stand_before_the_name_and_bars_share_a_scale() -> None:
    files = [
        measured(preview_of(b"x\n" * old, b"y\n" * new), name) for old, new, name in ((0, 300, "many"), (1, 1, "few"), (100, 0, "gone"))
    ]
    assert [row.plain for row in summary(files, 60)] == [
        "M +300   -0 ++++++++++++++ many",
        "M   +1   -1 +-             few",
        "M   +0 -100 ----           gone",
        "# 3 changes: +301 -101 lines",
    ]


def test_a_binary_is_told_by_size_sort_and_where_it_differs() -> None:
    png = b"\x89PNG\r\n\x1a\n\0\0\0\x0d"
    lines = [row.plain for row in unified(preview_of(png + b"\0" * 20, png + b"\0" * 7 + b"\1" * 9))]
    assert lines[-2:] == [
        "Binary contents differ: 32 bytes of PNG image → 28 bytes of PNG image, first at byte 19",
        f"new content: 28 bytes, sha256 {sha256(png + bytes(7) + bytes([1] * 9)).hexdigest()}",
    ]
    assert preview_of(None, b"\x7fELF\0\0\xff\xff").binary == compare_module.Binary(None, 8, "", "ELF program", None)


def test_only_so_much_is_hashed_for_all_files_together_and_what_is_not_says_so() -> None:
    effort, binary = Effort(hashed=300), b"\0\xff" * 100
    lines = [[row.plain for row in unified(preview_of(None, binary, effort=effort))][-1] for _ in range(2)]
    assert lines == [
        f"new content: 200 bytes, sha256 {sha256(binary).hexdigest()}",
        "new content: 200 bytes, not hashed: it cannot be read, or is too large for a diff",
    ]


def test_a_file_that_grows_while_it_is_hashed_has_no_digest() -> None:
    sides = InMemory(b"", b"\0" * 5000)
    change = Change("/f", Kind.ADDED, None, Node(EntryType.FILE, 0o644, 0, 0, 5000))
    assert content_digest(change, sides) == sha256(bytes(5000)).hexdigest()
    with pytest.raises(OSError, match="has changed"):
        content_digest(replace(change, after=Node(EntryType.FILE, 0o644, 0, 0, 4999)), sides)


def test_a_line_in_a_huge_file_is_shown_by_its_number_and_neither_side_is_kept_whole() -> None:
    lines = [b"%d\n" % number for number in range(400_000)]
    old = b"".join(lines)
    new = b"".join([*lines[:299_999], b"changed\n", *lines[300_000:]])
    limits = DiffLimits(bytes=100_000)
    preview = preview_of(old, new, limits)
    assert len(preview.old) < 10
    assert [row.plain for row in unified(preview, limits=limits)][1:] == [
        "@@ -299997,7 +299997,7 @@",
        " 299996",
        " 299997",
        " 299998",
        "-299999",
        "+changed",
        " 300000",
        " 300001",
        " 300002",
    ]


@given(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=60), st.integers(1, 9))
def test_a_window_lies_between_a_common_beginning_and_a_common_end(start: bytes, old: bytes, new: bytes, end: bytes, most: int) -> None:
    start, end = start.replace(b"\1", b"\n"), end.replace(b"\2", b"\n")
    before, after = start + old + end, start + new + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module, "_CHUNK", 7)
        window = read(before, after, most)
    for content, part, left in ((before, window.old, window.old_left), (after, window.new, window.new_left)):
        assert content[window.start :].startswith(part)
        assert len(part) <= max(most, len(content)) and len(part) + left <= len(content)
    assert before[: window.start] == after[: window.start]
    assert window.lines == before[: window.start].count(b"\n")
    assert not window.start or before[window.start - 1 : window.start] == b"\n"
    old_end, new_end = (window.start + len(part) + left for part, left in ((window.old, window.old_left), (window.new, window.new_left)))
    assert before[old_end:] == after[new_end:]


def read(old: bytes, new: bytes, most: int) -> Window:
    sides = InMemory(old, new)
    change = Change("/f", Kind.MODIFIED, None, None)
    opened = [sides.open_old(change), sides.open_file(change)]
    try:
        return read_window(opened[0], opened[1], most)
    finally:
        for fd in opened:
            os.close(fd)


def test_a_file_that_changes_while_it_is_read_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_meddle(old: int | None, new: int | None, most: int) -> Window:
        window = read_window(old, new, most)
        assert new is not None
        os.write(new, b"more\n")
        return window

    monkeypatch.setattr(compare_module, "read_window", read_and_meddle)
    assert any("changed while it was being read" in row.plain for row in unified(preview_of(b"a\n", b"b\n")))


class Sparse:
    """Files of a terabyte, of which almost nothing is there; the new one has a byte in its midst."""

    def open_old(self, change: Change) -> int:
        fd = os.memfd_create("sparse", os.MFD_CLOEXEC)
        os.truncate(fd, TERABYTE)
        return fd

    def open_file(self, change: Change) -> int:
        fd = self.open_old(change)
        os.pwrite(fd, b"x", 5_000_000)
        return fd


def test_a_file_of_a_terabyte_is_told_by_its_size_and_where_it_differs() -> None:
    node = Node(EntryType.FILE, 0o644, 0, 0, TERABYTE)
    grown = compare_module.compare(Change("/f", Kind.ADDED, None, node), Sparse(), Sparse())
    assert grown.binary == compare_module.Binary(None, TERABYTE, "", "data") and grown.new == ()
    changed = compare_module.compare(Change("/f", Kind.MODIFIED, node, node), Sparse(), Sparse())
    assert changed.binary == compare_module.Binary(TERABYTE, TERABYTE, "data", "data", 5_000_000)


def test_an_old_side_that_is_too_large_is_said_to_go_and_not_shown_in_part() -> None:
    preview = preview_of(b"old\n" * 100, b"new\n", DiffLimits(bytes=50))
    assert [row.plain for row in unified(preview)][-2:] == [
        "old: 400 bytes from line 1 on are replaced or go away: too much to show",
        f"new content: 4 bytes, sha256 {sha256(b'new' + bytes([10])).hexdigest()}",
    ]
    assert preview.edits == ()


class Counting:
    """Counts the lines that are executed in the search for edits."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Counting | None:
        self.steps += event == "line"
        return self if frame.f_code.co_filename == text_module.__file__ else None


HOSTILE = {
    "two letters at random": lambda choose: ([choose((b"a\n", b"b\n")) for _ in range(3000)] for _ in range(2)),
    "the same lines in another order": lambda choose: ([b"%d\n" % (number * step % 3001) for number in range(3000)] for step in (7, 11)),
    "one line over and over": lambda choose: ([b"a\n"] * 3000, [b"a\n", b"b\n"] * 1500),
    "nothing in common but order": lambda choose: ([b"%d\n" % n for n in range(3000)], [b"%d\n" % n for n in range(2999, -1, -1)]),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_lines_made_to_be_slow_take_no_more_steps_than_they_may(make: Any) -> None:
    old, new = make(random.Random(3).choice)
    counting = Counting()
    before = sys.gettrace()
    sys.settrace(counting)
    try:
        preview = preview_of(b"".join(old), b"".join(new), effort=Effort(20_000))
    finally:
        sys.settrace(before)
    assert preview.removed - preview.added == len(old) - len(new)
    assert counting.steps < 20 * 20_000 + 400 * (len(old) + len(new)), "the square of the lines is 9,000,000"


def test_all_files_together_have_a_bound_too() -> None:
    choose = random.Random(5).choice
    effort = Effort(50_000)
    for _ in range(4):
        old, new = (b"".join(choose((b"a\n", b"b\n")) for _ in range(2000)) for _ in range(2))
        preview_of(old, new, effort=effort)
    assert effort.left <= 0
    assert preview_of(b"a\nb\nc\n", b"x\nb\ny\n", effort=effort).removed >= 2, "and even then everything is shown"


def test_hundreds_of_thousands_of_lines_are_compared() -> None:
    old = b"".join(b"%d\n" % number for number in range(300_000))
    preview = preview_of(old, old.replace(b"\n200000\n", b"\nchanged\n"), DEFAULT)
    assert (preview.removed, preview.added) == (1, 1)


def test_a_line_of_many_megabytes_is_shown_whole_where_it_goes_and_cut_where_it_comes() -> None:
    rows = list(unified(preview_of(b"x" * 3_000_000 + b"\n", b"y" * 3_000_000 + b"\n")))
    by_kind = {cell.kind: len(cell.text) for row in rows for cell in row.cells}
    assert (by_kind[REMOVED], by_kind[ADDED]) == (3_000_000, 2_000)
    assert "2,998,000 more characters" in rows[-2].plain
    assert rows[-1].plain == f"new content: 3,000,001 bytes, sha256 {sha256(b'y' * 3_000_000 + bytes([10])).hexdigest()}"


def test_differing_words_are_marked_and_the_text_is_the_same_with_and_without() -> None:
    preview = preview_of(b"return count + 1  # one more\n", b"return total + 1  # one more\n")
    rows = {row.cells[0].kind: row for row in unified(preview, words=True)}
    assert [row.cells[0].text[slice(*row.cells[0].marks[0])] for row in (rows[REMOVED], rows[ADDED])] == ["count", "total"]
    assert [row.plain for row in unified(preview, words=True)] == [row.plain for row in unified(preview)]


RENAMED = Change("/new", Kind.ADDED, None, Node(EntryType.FILE, 0o644, 0, 0, 2), renamed_from="/o l d")
RENAME = ['diff --git "a/o l d" b/new', "new file mode 100644", 'renamed from "/o l d"']


def test_a_rename_is_told_and_every_edit_in_it_is_shown() -> None:
    def lines(sides: InMemory) -> list[str]:
        return [row.plain for row in unified(compare_module.compare(RENAMED, sides, sides))]

    assert lines(InMemory(b"x\ny\n", b"x\ny\n")) == RENAME
    assert lines(InMemory(b"x\ny\n", b"x\nevil()\n")) == [*RENAME, "@@ -1,2 +1,2 @@", " x", "-y", "+evil()"]


def test_a_rename_whose_old_content_cannot_be_read_is_shown_whole() -> None:
    class Gone(InMemory):
        def open_old(self, change: Change) -> int:
            raise FileNotFoundError(2, "No such file or directory")

    sides = Gone(b"", b"x\nevil()\n")
    lines = [row.plain for row in unified(compare_module.compare(RENAMED, sides, sides))]
    assert lines == [*RENAME, "@@ -0,0 +1,2 @@", "+x", "+evil()"]


def test_a_rename_is_one_only_where_the_old_path_goes_away_with_it() -> None:
    gone = Change("/o l d", Kind.DELETED, Node(EntryType.FILE, 0o644, 0, 0, 2), None)
    above = Change("/dir", Kind.DELETED, Node(EntryType.DIRECTORY, 0o755, 0, 0), None)
    inside = replace(RENAMED, renamed_from="/dir/sub/file")
    for kept in (ChangeSet((gone, RENAMED)), ChangeSet((above, inside)), ChangeSet((gone,)), ChangeSet()):
        assert compare_module.pair_renames(kept) == kept
    assert compare_module.pair_renames(ChangeSet((RENAMED,))) == ChangeSet((replace(RENAMED, renamed_from=""),))
    assert compare_module.pair_renames(ChangeSet((gone, inside))) == ChangeSet((gone, replace(inside, renamed_from="")))


def test_a_preview_of_nothing_is_its_title() -> None:
    change = Change("/f", Kind.MODE, Node(EntryType.FILE, 0o644, 0, 0), Node(EntryType.FILE, 0o755, 0, 0))
    assert [row.plain for row in unified(Preview(change))] == ["diff --git a/f b/f"]


@given(st.none() | LINES, LINES | st.just(b"plain\ntext\n"), LIMITS | st.just(DEFAULT), st.sampled_from(["f", 'a "b"', "\x1b[31m", "日本"]))
def test_lines_that_are_put_together_are_the_same_text(old: bytes | None, new: bytes, limits: DiffLimits, name: str) -> None:
    preview = preview_of(old, new, path=f"/{name}")
    apart = [row.plain for row in unified(preview, limits=limits)]
    assert "\n".join(row.plain for row in unified(preview, limits=limits, blocks=True)).split("\n") == apart


@pytest.mark.parametrize("line", [b"\x1b[31m", b"\r", b"tab\t", b"\xff", "\u202e".encode(), b"\x7f"])
def test_a_line_that_must_be_escaped_is_never_put_together(line: bytes) -> None:
    content = b"plain\n" + line + b"\nplain\n"
    for old in (b"", None):
        assert not any(isinstance(row, Block) for row in unified(preview_of(old, content), blocks=True))
        assert any(isinstance(row, Block) for row in unified(preview_of(old, b"plain\nplain\n"), blocks=True))
