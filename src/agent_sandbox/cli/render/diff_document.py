"""The document of a diff, written piece by piece: what it is about, change after change with its hunks as data, and how a run ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agent_sandbox.cli.render.changes import Material
from agent_sandbox.cli.render.json import change_document, schema, stream_fields
from agent_sandbox.workspace.diff.compare import Preview
from agent_sandbox.workspace.diff.formats import ADDED, REMOVED, SAME, Hunk, hunks

Write = Callable[[bytes], object]


def begin(write: Write, about: Mapping[str, Any], kind: str = "diff") -> None:
    """What stands before the changes."""
    fields = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in {"schema": schema(kind), **about}.items())
    write(f'{{\n{fields}  "changes": ['.encode())


def changes(write: Write, material: Material, also: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """The changes, each on a line of its own. Content is told of the project's, and with --all of every other's.

    `also` has more fields of some, by their path; what goes with a directory has those of the directory.
    """
    files = material.files
    first = True
    for place, group in (("project", files.project), ("elsewhere", files.elsewhere), ("noise", files.noise)):
        for whole in group:
            in_full = place == "project" or material.everything
            for change in material.one_by_one(whole) if in_full else (whole,):
                content = _content(material.preview(change), material.limits.added) if in_full else {"hunks": None}
                line = json.dumps({**change_document(change), "place": place, **content, **(also or {}).get(whole.path, {})})
                write(f"{'' if first else ','}\n    {line}".encode())
                first = False


def end(write: Write, after: Mapping[str, Any]) -> None:
    """What stands after them."""
    write(b"\n  ]")
    for name, value in after.items():
        write(f",\n  {json.dumps(name)}: {json.dumps(value)}".encode())
    write(b"\n}\n")


def _content(preview: Preview, most_added: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    room = most_added
    for hunk in hunks(preview.edits, len(preview.old)):
        document, room = _hunk(preview, hunk, room)
        found.append(document)
    binary = preview.binary
    return {
        "facts": list(preview.facts),
        "warnings": list(preview.warnings),
        "added": preview.added,
        "removed": preview.removed,
        "hunks": found,
        "binary": binary
        and {
            "before": None if binary.old_size is None else {"bytes": binary.old_size, "sort": binary.old_sort},
            "after": None if binary.new_size is None else {"bytes": binary.new_size, "sort": binary.new_sort},
            "first_difference": binary.first_difference,
        },
        "more_bytes": preview.more_bytes,
        "unshown": list(preview.unshown),
    }


def _hunk(preview: Preview, hunk: Hunk, room: int) -> tuple[dict[str, Any], int]:
    lines: list[dict[str, Any]] = []
    left_out = 0
    for (start, stop), edit in hunk.stretches():
        lines += [_line(SAME, line) for line in preview.old[start:stop]]
        if edit is not None:
            lines += [_line(REMOVED, line) for line in preview.old[edit.old_from : edit.old_to]]
            shown = min(edit.new_to, edit.new_from + room)
            lines += [_line(ADDED, line) for line in preview.new[edit.new_from : shown]]
            room -= shown - edit.new_from
            left_out += edit.new_to - shown
    first = preview.lines_before + 1
    document = {
        "old_start": hunk.old_from + first,
        "old_lines": hunk.old_to - hunk.old_from,
        "new_start": hunk.new_from + first,
        "new_lines": hunk.new_to - hunk.new_from,
        "added_left_out": left_out,
        "lines": lines,
    }
    return document, room


def _line(kind: str, line: bytes) -> dict[str, Any]:
    ended = line.endswith(b"\n")
    return {"kind": kind, **stream_fields("text", line.removesuffix(b"\n")), **({} if ended else {"newline": False})}
