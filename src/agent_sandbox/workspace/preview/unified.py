"""One change as a unified diff for people, close to git's form.

The two lines with `---` and `+++` are left out: a removed line that begins with two dashes would look the same. What `git apply` takes is
made by `patch`.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.merging.edits import Edit
from agent_sandbox.workspace.preview.compare import DEFAULT, Binary, Limits, Preview
from agent_sandbox.workspace.preview.hunks import hunks
from agent_sandbox.workspace.preview.rows import ADDED, FACT, HUNK, NOTE, REMOVED, SAME, SIGNS, TITLE, WARNING, Cell, Row, decoded, ours
from agent_sandbox.workspace.preview.words import Marks, differing
from agent_sandbox.workspace.visible import named

_MOST_PAIRS = 100
NO_NEWLINE = "\\ No newline at end of file"


def unified(preview: Preview, *, relative_to: str = "/", limits: Limits = DEFAULT, words: bool = False) -> Iterator[Row]:
    """The rows of one change. Names are shown relative to a directory that the change lies in; `words` marks what differs in a line."""
    yield from opening(preview, relative_to)
    room = limits.added
    path = preview.change.path
    for hunk in hunks(preview.edits, len(preview.old)):
        yield ours(HUNK, hunk.title(preview.lines_before))
        for (start, stop), edit in hunk.stretches():
            for line in preview.old[start:stop]:
                yield from _content(SAME, line, path)
            if edit is None:
                continue
            gone, come = paired_marks(preview, edit) if words else ({}, {})
            for number in range(edit.old_from, edit.old_to):
                yield from _content(REMOVED, preview.old[number], path, gone.get(number, ()))
            shown = min(edit.new_to, edit.new_from + room)
            room -= shown - edit.new_from
            for number in range(edit.new_from, shown):
                yield from _content(ADDED, preview.new[number], path, come.get(number, ()), limits.columns)
            if shown < edit.new_to:
                yield ours(WARNING, f"\\ {edit.new_to - shown:,} more added lines are not shown (--all shows them)")
    yield from closing(preview)


def opening(preview: Preview, relative_to: str) -> Iterator[Row]:
    """The rows before the content: which file, what else is different about it, what sort it is."""
    new = _name(preview.change.path, relative_to)
    old = _name(preview.change.renamed_from, relative_to) if preview.change.renamed_from else new
    yield ours(TITLE, f"diff --git {named(f'a/{old}')} {named(f'b/{new}')}")
    for fact in preview.facts:
        yield ours(FACT, fact)
    for warning in preview.warnings:
        yield ours(WARNING, warning)
    if preview.binary is not None:
        yield ours(FACT, summed_up(preview.binary, preview.change))


def closing(preview: Preview) -> Iterator[Row]:
    """The rows after it: what is not shown."""
    if preview.more_bytes:
        yield ours(WARNING, f"\\ {preview.more_bytes:,} more bytes are added, too much to show")
    for why in preview.unshown:
        yield ours(WARNING, why)


def summed_up(binary: Binary, change: Change) -> str:
    """Content that is no text, in one sentence."""
    old = "text" if binary.old_size is None else f"{binary.old_size:,} bytes of {binary.old_sort}"
    new = "text" if binary.new_size is None else f"{binary.new_size:,} bytes of {binary.new_sort}"
    if change.before is None:
        return f"Binary content: {new}"
    if change.after is None:
        return f"Binary content goes away: {old}"
    return f"Binary contents differ: {old} → {new}, first at byte {binary.first_difference:,}"


def _name(path: str, relative_to: str) -> str:
    inside = relative_to.rstrip("/") + "/"
    return path.removeprefix(inside) if path.startswith(inside) else path.lstrip("/")


def paired_marks(preview: Preview, edit: Edit) -> tuple[dict[int, Marks], dict[int, Marks]]:
    """By line number. Lines are paired in their order; where there are many of them, pairs mean nothing."""
    if edit.old_to - edit.old_from > _MOST_PAIRS or edit.new_to - edit.new_from > _MOST_PAIRS:
        return {}, {}
    gone: dict[int, Marks] = {}
    come: dict[int, Marks] = {}
    for old, new in zip(range(edit.old_from, edit.old_to), range(edit.new_from, edit.new_to), strict=False):
        gone[old], come[new] = differing(decoded(preview.old[old]), decoded(preview.new[new]))
    return gone, come


def _content(kind: str, line: bytes, path: str, marks: Marks = (), columns: int | None = None) -> Iterator[Row]:
    text = decoded(line)
    cut = len(text) - columns if columns is not None else 0
    yield Row((Cell(kind, text[:columns] if cut > 0 else text, SIGNS[kind], marks),), path)
    if cut > 0:
        yield ours(WARNING, f"\\ {cut:,} more characters of this line are not shown (--all shows them)")
    if not line.endswith(b"\n"):
        yield ours(NOTE, NO_NEWLINE)
