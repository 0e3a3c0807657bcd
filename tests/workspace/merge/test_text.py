"""Three texts into one: examples, properties, and git's own merge as a witness."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.merge.text import Labels, Merged, TextConflict, find_edits, merge_text, split_lines

MANY = settings(max_examples=120, deadline=None)
# Few different lines make many ways to align them; the last line may lack its newline, and some end as on Windows.
LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"a\r\n"]), max_size=12)
TEXTS = st.builds(lambda lines, last: b"".join(lines) + last, LINES, st.sampled_from([b"", b"end", b"a"]))


@st.composite
def histories(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A text and two that grew out of it."""
    base = draw(TEXTS)
    return base, draw(edited(base)), draw(edited(base))


@st.composite
def edited(draw: st.DrawFn, base: bytes) -> bytes:
    lines = list(split_lines(base))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from([b"a\n", b"x\n", b"y\n"]), max_size=2))
    return b"".join(lines)


def mirrored(merged: Merged) -> Merged:
    pieces = (TextConflict(piece.base, piece.theirs, piece.ours) if isinstance(piece, TextConflict) else piece for piece in merged.pieces)
    return Merged(tuple(pieces), merged.why)


@MANY
@given(TEXTS, TEXTS)
def test_edits_lead_from_one_text_to_the_other(one: bytes, other: bytes) -> None:
    old, new = split_lines(one), split_lines(other)
    made: list[bytes] = []
    at = 0
    for edit in find_edits(old, new):
        assert edit.old_from > at or not made, "two edits that touch are one"
        made += [*old[at : edit.old_from], *new[edit.new_from : edit.new_to]]
        at = edit.old_to
    assert b"".join([*made, *old[at:]]) == other


@MANY
@given(TEXTS, TEXTS)
def test_a_change_of_one_side_alone_is_taken_and_the_same_change_on_both_once(base: bytes, changed: bytes) -> None:
    for merged in (merge_text(base, changed, base), merge_text(base, base, changed), merge_text(base, changed, changed)):
        assert merged.text() == changed


@MANY
@given(histories())
def test_swapping_the_sides_mirrors_the_conflicts_and_changes_nothing_else(history: tuple[bytes, bytes, bytes]) -> None:
    base, ours, theirs = history
    assert merge_text(base, theirs, ours) == mirrored(merge_text(base, ours, theirs))
    assert merge_text(None, theirs, ours).theirs() == ours == merge_text(None, ours, theirs).ours()


@MANY
@given(histories())
def test_no_line_that_a_side_added_is_lost_and_none_that_both_removed_comes_back(history: tuple[bytes, bytes, bytes]) -> None:
    base, ours, theirs = history
    merged = merge_text(base, ours, theirs)
    old = split_lines(base)
    for text, result in ((ours, merged.ours()), (theirs, merged.theirs())):
        new = split_lines(text)
        for edit in find_edits(old, new):
            assert b"".join(new[edit.new_from : edit.new_to]) in result
        assert set(split_lines(result)) <= {*split_lines(ours), *split_lines(theirs)}


@MANY
@given(histories())
def test_each_side_can_be_had_back_from_a_merge_that_conflicts_everywhere(history: tuple[bytes, bytes, bytes]) -> None:
    _, ours, theirs = history
    merged = merge_text(None, ours, theirs)
    assert merged.ours() == ours and merged.theirs() == theirs
    assert bool(merged.conflicts) == (ours != theirs)


@MANY
@given(histories())
def test_markers_show_both_sides_and_the_base_whole(history: tuple[bytes, bytes, bytes]) -> None:
    merged = merge_text(*history)
    text = merged.with_markers(Labels("mine", "old", "yours"))
    assert text.count(b"<<<<<<< mine") == text.count(b"||||||| old") == text.count(b">>>>>>> yours") == len(merged.conflicts)
    for conflict in merged.conflicts:
        for lines in (conflict.ours, conflict.base or (), conflict.theirs):
            assert b"".join(lines) in text.replace(b"\r\n", b"\n") or b"".join(lines) in text


def git_merge(place: Path, base: bytes, ours: bytes, theirs: bytes) -> tuple[int, bytes]:
    for name, content in (("base", base), ("ours", ours), ("theirs", theirs)):
        (place / name).write_bytes(content)
    labels = ["-L", "sandbox", "-L", "base", "-L", "real"]
    files = [str(place / name) for name in ("ours", "base", "theirs")]
    done = subprocess.run(["git", "merge-file", "-p", "--diff3", *labels, *files], capture_output=True)
    return done.returncode, done.stdout


@st.composite
def distinct_histories(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Every line occurs once, so there is one way to align them, and whoever merges has to find the same."""
    base = [b"line %d\n" % number for number in range(draw(st.integers(0, 14)))]
    sides = []
    for name in (b"o", b"t"):
        side: list[bytes] = []
        for number, line in enumerate(base):
            change = draw(st.sampled_from(["keep", "keep", "keep", "remove", "change", "insert"]))
            shared = draw(st.booleans())
            word = b"both" if shared else name
            side += {"keep": [line], "remove": [], "change": [b"%s %d\n" % (word, number)], "insert": [b"%s+%d\n" % (word, number), line]}[
                change
            ]
        sides.append(b"".join(side))
    return b"".join(base), sides[0], sides[1]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=distinct_histories())
def test_we_merge_as_git_does_where_there_is_one_way_to_read_the_edits(tmp_path: Path, history: tuple[bytes, bytes, bytes]) -> None:
    conflicts, text = git_merge(tmp_path, *history)
    merged = merge_text(*history)
    assert len(merged.conflicts) == conflicts
    assert merged.with_markers() == text


@MANY
@given(distinct_histories())
def test_each_inserted_line_is_in_the_result_or_in_a_conflict_and_each_removed_one_is_gone(history: tuple[bytes, bytes, bytes]) -> None:
    base, ours, theirs = (set(split_lines(text)) for text in history)
    merged = merge_text(*history)
    settled = {line for piece in merged.pieces if isinstance(piece, tuple) for line in piece}
    mine, yours = ({line for conflict in merged.conflicts for line in getattr(conflict, side)} for side in ("ours", "theirs"))
    assert ours - base <= settled | mine and theirs - base <= settled | yours
    assert settled <= ours | theirs
    assert not settled & (base - ours) and not settled & (base - theirs)
    assert base & ours & theirs <= settled | mine & yours


BASE = b"one\ntwo\nthree\nfour\nfive\n"


def test_edits_that_touch_are_a_conflict_and_edits_with_a_line_between_are_not() -> None:
    apart = merge_text(BASE, BASE.replace(b"one", b"ONE"), BASE.replace(b"three", b"THREE"))
    assert apart.text() == b"ONE\ntwo\nTHREE\nfour\nfive\n"
    touching = merge_text(BASE, BASE.replace(b"two", b"TWO"), BASE.replace(b"three", b"THREE"))
    assert touching.conflicts == (TextConflict((b"two\n", b"three\n"), (b"TWO\n", b"three\n"), (b"two\n", b"THREE\n")),)
    assert touching.ours() == BASE.replace(b"two", b"TWO")


def test_markers_are_those_that_every_tool_knows() -> None:
    merged = merge_text(b"a\nx\nz\n", b"a\nours\nz\n", b"a\ntheirs\nz\n")
    assert merged.with_markers() == b"a\n<<<<<<< sandbox\nours\n||||||| base\nx\n=======\ntheirs\n>>>>>>> real\nz\n"
    unknown = merge_text(None, b"a\nours\nz\n", b"a\ntheirs\nz\n")
    assert unknown.with_markers() == b"a\n<<<<<<< sandbox\nours\n=======\ntheirs\n>>>>>>> real\nz\n"


def test_line_ends_are_kept_and_markers_follow_them() -> None:
    base = b"one\r\ntwo\r\nthree\r\nfour"
    assert merge_text(base, b"ONE\r\ntwo\r\nthree\r\nfour", b"one\r\ntwo\r\nthree\r\nFOUR").text() == b"ONE\r\ntwo\r\nthree\r\nFOUR"
    marked = merge_text(b"x\r\n", b"a\r\n", b"b\r\n").with_markers()
    assert marked.count(b"\r\n") == marked.count(b"\n") == 7


def test_a_missing_newline_at_the_end_is_a_change_like_any_other() -> None:
    assert merge_text(b"a\nb\nc\n", b"A\nb\nc\n", b"a\nb\nc").text() == b"A\nb\nc"
    marked = merge_text(b"c\n", b"c", b"d").with_markers()
    assert marked == b"<<<<<<< sandbox\nc\n||||||| base\nc\n=======\nd\n>>>>>>> real\n"


def test_what_is_not_text_or_too_large_conflicts_as_a_whole_unless_one_side_changed_it() -> None:
    assert merge_text(b"\0old", b"\0old", b"\0new").text() == b"\0new"
    binary = merge_text(b"\0\nold", b"\0\nmine", b"\0\nyours")
    assert binary.why == "it is not text"
    assert binary.conflicts == (TextConflict((b"\0\nold",), (b"\0\nmine",), (b"\0\nyours",)),)
    large = merge_text(b"\n" * 500_000, b"a" + b"\n" * 500_000, b"\n" * 500_000 + b"b")
    assert "too large" in large.why and len(large.conflicts) == 1


@pytest.mark.parametrize("steps", [0, 50])
def test_without_time_to_search_the_merge_is_coarser_and_still_right(steps: int) -> None:
    base = [b"%d\n" % (number % 7) if number % 5 else b"unique %d\n" % number for number in range(200)]
    ours = b"".join([*base[:20], b"added\n", *base[20:][::-1]])
    theirs = b"".join([b"first\n", *base])
    merged = merge_text(b"".join(base), ours, theirs, steps=steps)
    assert merged.ours().removeprefix(b"first\n") == ours
    assert merged.ours().startswith(b"first\n")


def test_hostile_texts_end_in_bounded_work() -> None:
    zigzag = [b"%d\n" % (number // 2) for number in range(20_000)]
    ours, theirs = b"".join(reversed(zigzag)), b"".join(zigzag[10_000:] + zigzag[:10_000])
    assert merge_text(b"".join(zigzag), ours, theirs).conflicts
    blank = b"\n" * 100_000
    assert merge_text(blank, blank + b"a\n", b"b\n" + blank).text() == b"b\n" + blank + b"a\n"
