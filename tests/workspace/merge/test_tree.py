"""One path, and whole trees: every pair of what two sides can do to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace.merge.text import Labels
from agent_sandbox.workspace.merge.tree import Conflict, ConflictKind, MergedEntry, Version, merge_entry, resolve
from agent_sandbox.workspace.nodes import EntryType, Node


def file(content: bytes, mode: int = 0o644, **others: int) -> Version:
    return Version(Node(EntryType.FILE, mode, others.get("uid", 1000), 1000, len(content)), content)


def link(target: str) -> Version:
    return Version(Node(EntryType.SYMLINK, 0o777, 1000, 1000, target=target))


def directory(mode: int = 0o755) -> Version:
    return Version(Node(EntryType.DIRECTORY, mode, 1000, 1000))


def kinds(entry: MergedEntry) -> list[ConflictKind]:
    return [conflict.kind for conflict in entry.conflicts]


BASE = file(b"one\ntwo\nthree\n")
OURS = file(b"ONE\ntwo\nthree\n")
THEIRS = file(b"one\ntwo\nTHREE\n")
CLASH = file(b"uno\ntwo\nthree\n")
VERSIONS = st.none() | st.sampled_from(
    [BASE, OURS, THEIRS, CLASH, file(b"\0"), file(b"one\n", 0o755), link("a"), link("b"), directory(), directory(0o700)]
)


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_a_side_that_changed_alone_wins_and_two_that_agree_are_no_question(base: Version | None, changed: Version | None) -> None:
    for ours, theirs in ((changed, base), (base, changed), (changed, changed)):
        assert merge_entry("/p", base, ours, theirs) == MergedEntry("/p", changed)


@settings(deadline=None, max_examples=300)
@given(VERSIONS, VERSIONS, VERSIONS, st.booleans())
def test_swapping_the_sides_mirrors_everything(base: Version | None, ours: Version | None, theirs: Version | None, known: bool) -> None:
    one, other = merge_entry("/p", base, ours, theirs, known=known), merge_entry("/p", base, theirs, ours, known=known)
    mirror = {ConflictKind.DELETED_OURS: ConflictKind.DELETED_THEIRS, ConflictKind.DELETED_THEIRS: ConflictKind.DELETED_OURS}
    assert [mirror.get(kind, kind) for kind in kinds(one)] == kinds(other)
    if not one.conflicts:
        assert one == other
    assert resolve(one, "ours").result == resolve(other, "theirs").result
    assert not resolve(one, "ours").conflicts and not resolve(one, "theirs").conflicts


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_without_a_base_every_difference_is_a_conflict_that_says_so(ours: Version | None, theirs: Version | None) -> None:
    entry = merge_entry("/p", BASE, ours, theirs, known=False)
    assert bool(entry.conflicts) == (ours != theirs)
    assert all("not known" in conflict.sentence() and conflict.base is None for conflict in entry.conflicts)
    assert resolve(entry, "ours").result == ours and resolve(entry, "theirs").result == theirs


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "kind"),
    [
        (BASE, OURS, CLASH, ConflictKind.CONTENT),
        (file(b"\0a"), file(b"\0b"), file(b"\0c"), ConflictKind.WHOLE),
        (None, OURS, CLASH, ConflictKind.ADDED),
        (None, OURS, directory(), ConflictKind.ADDED),
        (BASE, None, CLASH, ConflictKind.DELETED_OURS),
        (BASE, OURS, None, ConflictKind.DELETED_THEIRS),
        (BASE, link("a"), directory(), ConflictKind.TYPE),
        (BASE, link("a"), OURS, ConflictKind.TYPE),
        (link("a"), link("b"), link("c"), ConflictKind.TARGET),
        (directory(), directory(0o700), directory(0o711), ConflictKind.MODE),
        (BASE, file(b"one\ntwo\nthree\n", uid=1), file(b"one\ntwo\nthree\n", uid=2), ConflictKind.OWNER),
    ],
)
def test_what_both_sides_cannot_have_is_a_conflict_with_all_three(
    base: Version | None, ours: Version | None, theirs: Version | None, kind: ConflictKind
) -> None:
    (conflict,) = merge_entry("/p", base, ours, theirs).conflicts
    assert (conflict.kind, conflict.base, conflict.ours, conflict.theirs) == (kind, base, ours, theirs)
    assert conflict.sentence().startswith("'/p': ")


def test_content_and_mode_are_merged_each_for_itself() -> None:
    merged = merge_entry("/p", BASE, replace(OURS, node=replace(OURS.node, mode=0o755)), THEIRS)
    assert merged == MergedEntry("/p", Version(Node(EntryType.FILE, 0o755, 1000, 1000, 14), b"ONE\ntwo\nTHREE\n"))
    entry = merge_entry(
        "/p", BASE, replace(CLASH, node=replace(CLASH.node, mode=0o755)), replace(OURS, node=replace(OURS.node, mode=0o700))
    )
    assert kinds(entry) == [ConflictKind.CONTENT, ConflictKind.MODE]
    theirs = resolve(entry, "theirs").result
    assert theirs is not None and theirs.content == OURS.content and theirs.node.mode == 0o700


def test_attributes_are_merged_by_name() -> None:
    def with_xattrs(**xattrs: bytes) -> Version:
        return replace(BASE, node=replace(BASE.node, xattrs={f"user.{name}": value for name, value in xattrs.items()}))

    merged = merge_entry("/p", with_xattrs(a=b"1", b=b"1"), with_xattrs(a=b"2", b=b"1"), with_xattrs(a=b"1", c=b"3"))
    assert merged.result is not None and merged.result.node.xattrs == {"user.a": b"2", "user.c": b"3"} and not merged.conflicts
    assert kinds(merge_entry("/p", with_xattrs(), with_xattrs(a=b"1"), with_xattrs(a=b"2"))) == [ConflictKind.XATTRS]


def test_a_file_whose_content_is_not_at_hand_is_compared_by_its_digest() -> None:
    def large(digest: str) -> Version:
        return Version(Node(EntryType.FILE, 0o644, 0, 0, 1 << 40), None, digest)

    assert merge_entry("/p", large("a"), large("b"), large("a")).result == large("b")
    entry = merge_entry("/p", large("a"), large("b"), large("c"))
    assert kinds(entry) == [ConflictKind.WHOLE] and "too large" in entry.conflicts[0].sentence()
    assert resolve(entry, "theirs").result == large("c")
    assert resolve(entry, "markers") == entry, "there is no text to put markers in"
    unread = Version(large("").node)
    assert kinds(merge_entry("/p", unread, unread, unread)) == [ConflictKind.WHOLE], "what cannot be told counts as different"


def test_conflicts_are_answered_by_markers_by_a_function_or_left() -> None:
    entry = merge_entry("/p", BASE, OURS, CLASH)
    marked = resolve(entry, "markers", Labels("agent", "before", "disk")).result
    assert marked is not None and marked.content is not None and marked.node.size == len(marked.content)
    assert marked.content.startswith(b"<<<<<<< agent\nONE\n||||||| before\none\n=======\nuno\n>>>>>>> disk\n")
    asked: list[Conflict] = []

    def choose(conflict: Conflict) -> bytes:
        asked.append(conflict)
        return b"one, indeed\n"

    answered = resolve(entry, choose)
    assert answered.result is not None and answered.result.content == b"one, indeed\n" and not answered.conflicts
    assert asked == list(entry.conflicts)
    assert resolve(entry, lambda conflict: None) == entry
    assert resolve(entry, lambda conflict: "theirs").result == CLASH
    with pytest.raises(ValueError, match="mine"):
        resolve(entry, "mine")  # type: ignore[arg-type]


def test_content_is_no_answer_to_a_question_about_permissions() -> None:
    entry = merge_entry("/p", directory(), directory(0o700), directory(0o711))
    assert resolve(entry, lambda conflict: b"text") == entry == resolve(entry, "markers")


def test_a_function_can_keep_a_file_that_one_side_deleted() -> None:
    entry = merge_entry("/p", BASE, None, CLASH)
    kept = resolve(entry, lambda conflict: b"kept\n").result
    assert kept is not None and kept.content == b"kept\n" and kept.node.type is EntryType.FILE
    assert resolve(entry, "ours").result is None


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_a_path_that_one_side_changed_alone_is_the_result(base: Version | None, changed: Version | None) -> None:
    for ours, theirs in ((changed, base), (base, changed), (changed, changed)):
        assert merge_entry("/p", base, ours, theirs) == MergedEntry("/p", changed)


@settings(deadline=None, max_examples=300)
@given(VERSIONS, VERSIONS, VERSIONS)
def test_what_merges_without_a_conflict_is_the_same_both_ways(base: Version | None, ours: Version | None, theirs: Version | None) -> None:
    one, other = merge_entry("/p", base, ours, theirs), merge_entry("/p", base, theirs, ours)
    assert bool(one.conflicts) == bool(other.conflicts)
    if not one.conflicts:
        assert one == other
    if base == ours:
        assert one.result == theirs, "what only reality changed is reality's"
