"""Which words differ between a line and the one that took its place."""

from __future__ import annotations

import re

from agent_sandbox.workspace.merging.edits import find_edits

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_LONGEST = 500  # characters; longer lines are not looked at
_STEPS = 20_000

Marks = tuple[tuple[int, int], ...]


def differing(old: str, new: str) -> tuple[Marks, Marks]:
    """The stretches of both lines that differ; none where too little is the same for that to help."""
    if max(len(old), len(new)) > _LONGEST:
        return (), ()
    before, after = _WORD.findall(old), _WORD.findall(new)
    edits = find_edits([_raw(word) for word in before], [_raw(word) for word in after], steps=_STEPS)
    gone = _stretches(before, [(edit.old_from, edit.old_to) for edit in edits])
    come = _stretches(after, [(edit.new_from, edit.new_to) for edit in edits])
    kept = len(old.strip()) - sum(stop - start for start, stop in gone)
    return (gone, come) if kept * 3 >= max(len(old.strip()), len(new.strip())) else ((), ())


def _raw(word: str) -> bytes:
    return word.encode(errors="surrogateescape")


def _stretches(words: list[str], edited: list[tuple[int, int]]) -> Marks:
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return tuple((offsets[start], offsets[stop]) for start, stop in edited if start < stop)
