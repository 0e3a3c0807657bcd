"""Apply a document of `diff --json` to a copy of a tree: exactly what it shows, and nothing else."""

from __future__ import annotations

import os
import shutil
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def apply(document: Json, base: Path, copy: Path, pool: Mapping[str, bytes]) -> None:
    """Do to `copy` what the document shows of paths below `base`. Content that is shown by its digest comes from the pool."""
    changes = [each for each in document["changes"] if each["hunks"] is not None and _path(each, "path").is_relative_to(base)]
    for change in sorted(changes, key=lambda each: each["after"] is not None):  # what goes away makes room
        _apply(change, base, copy, pool)


def _apply(change: Json, base: Path, copy: Path, pool: Mapping[str, bytes]) -> None:
    path, after, before = _path(change, "path"), change["after"], change["before"]
    place = copy / path.relative_to(base)
    if after is None or (before is not None and before["type"] != after["type"]):
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)
    if after is None:
        return
    if after["type"] == "dir":
        place.mkdir(exist_ok=True)
    elif after["type"] == "symlink":
        place.unlink(missing_ok=True)
        place.symlink_to(
            os.fsdecode(_new(change, b"" if before is None or before["type"] != "symlink" else os.fsencode(os.readlink(path))))
        )
        return
    else:
        source = _path(change, "renamed_from") if "renamed_from" in change else path if before and before["type"] == "file" else None
        content = pool[change["content_sha256"]] if _by_digest(change) else _new(change, source.read_bytes() if source else b"")
        if change["kind"] in ("added", "modified", "retyped"):
            assert sha256(content).hexdigest() == change["content_sha256"]
        place.unlink(missing_ok=True)
        place.write_bytes(content)
    place.chmod(int(after["mode"], 8))


def _by_digest(change: Json) -> bool:
    binary = change["binary"]
    cut = any(hunk["added_left_out"] for hunk in change["hunks"]) or change["more_bytes"] or change["unshown"]
    return bool(cut or (binary is not None and binary["after"] is not None))


def _new(change: Json, old: bytes) -> bytes:
    """The new content that the hunks of a change show."""
    lines = old.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    if change["binary"] is not None and change["binary"]["before"] is not None:
        lines = []  # of a binary that becomes text, only the text is shown
    for hunk in reversed(change["hunks"]):
        start = hunk["old_start"] - 1
        lines[start : start + hunk["old_lines"]] = [_line(line) for line in hunk["lines"] if line["kind"] != "removed"]
    return b"".join(lines)


def _line(line: Json) -> bytes:
    text = b64decode(line["text_base64"]) if "text_base64" in line else line["text"].encode()
    return text if line.get("newline") is False else text + b"\n"


def _path(change: Json, name: str) -> Path:
    return Path(os.fsdecode(bytes.fromhex(change[f"{name}_hex"])) if f"{name}_hex" in change else change[name])
