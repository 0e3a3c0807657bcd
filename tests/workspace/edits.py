"""Random work in a tree, as Hypothesis draws it: what a program does to files, and the plain carrying over of a change set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from hypothesis import strategies as st

from agent_sandbox.workspace.changes import ChangeSet, Contents, Kind
from agent_sandbox.workspace.nodes import EntryType

Steps = list[tuple[str, str, str]]
_NAMES = st.sampled_from(["a", "b", "c", "line\nfeed", os.fsdecode(b"\xff\xfe")])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)
_COMMON = ["write", "mkdir", "remove"]
_VERBS = [*_COMMON, *_COMMON, "link", "replace", "rename", "mode", "attribute", "hard-link", "fifo", "holes"]
STEPS = st.lists(st.tuples(st.sampled_from(_VERBS), _PATHS, _PATHS), max_size=8)


def perform(root: Path, steps: Steps) -> None:
    """What a program does to a tree; steps that cannot be done are left out."""
    for verb, first, second in steps:
        path = root / first
        try:
            _step(verb, path, root / second, second)
        except (OSError, shutil.SameFileError):
            continue


def _step(verb: str, path: Path, other: Path, word: str) -> None:
    match verb:
        case "write":
            with _opened(path, os.O_TRUNC) as file:
                file.write(os.fsencode(word))
        case "mkdir":
            path.mkdir()
        case "link":
            path.symlink_to(word)
        case "remove":
            _remove(path)
        case "replace":  # a directory that hides what was in it
            _remove(path)
            path.mkdir()
        case "rename":
            path.rename(other)
        case "mode":
            if not path.is_symlink():
                path.chmod(0o700 + len(word))
        case "attribute":
            os.setxattr(path, "user.colour", os.fsencode(word), follow_symlinks=False)
        case "hard-link":
            os.link(path, other, follow_symlinks=False)
        case "fifo":
            os.mkfifo(path)
        case "holes":
            with _opened(path, 0) as file:
                file.truncate(3 << 20)
                file.seek(2 << 20)
                file.write(os.fsencode(word))


def _opened(path: Path, flags: int) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | flags, 0o644), "wb")  # nobody reads from a FIFO here


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def apply(changes: ChangeSet, contents: Contents, onto: Path, *, target: str) -> None:
    """A plain promotion, for the comparison only."""
    for change in changes:
        real, after = onto / change.path.removeprefix(target + "/"), change.after
        if change.kind in (Kind.DELETED, Kind.RETYPED, Kind.MODIFIED):
            _remove(real)
        if after is None:
            continue
        match after.type:
            case EntryType.SYMLINK:
                if change.kind in (Kind.ADDED, Kind.RETYPED, Kind.MODIFIED):
                    real.symlink_to(after.target)
                continue
            case EntryType.DIRECTORY:
                real.mkdir(exist_ok=True)
            case EntryType.FIFO:
                if change.kind in (Kind.ADDED, Kind.RETYPED):
                    os.mkfifo(real)
            case _:
                if change.kind in (Kind.ADDED, Kind.RETYPED, Kind.MODIFIED):
                    with open(contents.open_file(change), "rb") as file:
                        real.write_bytes(file.read())
        for name in set(os.listxattr(real)) - set(after.xattrs):
            os.removexattr(real, name)
        for name, value in after.xattrs.items():
            os.setxattr(real, name, value)
        real.chmod(after.mode)
