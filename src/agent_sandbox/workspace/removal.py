"""Remove a tree that a guest made, and nothing else.

Each step is relative to a descriptor that `beneath` opened: nothing is unlinked by path, no link is followed and no mount entered. A tree
that is rearranged meanwhile can make the removal fail, but cannot lead it outside. Directories of mode 000 (overlayfs makes one,
`work/work`) are made accessible first, which their owner may do.
"""

from __future__ import annotations

import errno
import math
import os
import time
from dataclasses import dataclass, field

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.beneath import SWAPPED, Moved, enter, identity, parent

_BATCH = 4096  # names in memory per level
_PATIENCE = 10_000  # concurrent changes tolerated before an error


@dataclass(slots=True)
class _Level:
    name: str
    identity: tuple[int, int]
    names: list[str] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Removal:
    until: float
    failures: list[OSError] = field(default_factory=list)
    patience: int = _PATIENCE

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def surprised(self) -> None:
        self.patience -= 1
        if self.patience <= 0:
            raise WorkspaceError("a directory keeps changing while it is removed", hint="end what still writes there, then try again")


def remove_tree(directory: int, name: str, *, until: float = math.inf) -> bool:
    """Remove `name` in `directory` and everything below it. Returns False if the time ran out.

    Afterwards it is gone, or `WorkspaceError` says what could not be removed; everything else is removed even then. A missing name is no
    error. At `until`, on the monotonic clock, it stops half-way.
    """
    if name in ("", ".", "..") or "/" in name:
        raise WorkspaceError(f"not the name of an entry: {name!r}")
    removal = _Removal(until)
    while not removal.failures and _present(directory, name):
        if removal.late:
            return False
        try:
            _remove(directory, name, removal)
        except Moved:
            removal.surprised()
    if removal.failures:
        first = removal.failures[0]
        raise WorkspaceError(
            f"could not remove {len(removal.failures)} of the files of a sandbox; the first: {first.filename!r}: {first.strerror}",
            hint="they may be immutable (lsattr, chattr -i), in use as a mount, or owned by another user",
        ) from first
    return True


def _present(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(directory: int, name: str, removal: _Removal) -> None:
    top = _unlink_or_enter(directory, name, removal)
    if top is None:
        return
    current, levels = top, [_Level(name, identity(top))]
    try:
        while levels and not removal.late:
            level = levels[-1]
            if not level.names and not _refill(current, level):
                levels.pop()
                above = parent(current, levels[-1].identity) if levels else os.dup(directory)
                os.close(current)
                current = above
                if not _rmdir(current, level, removal) and levels:
                    levels[-1].stuck.add(level.name)
                continue
            child = level.names.pop()
            failed = len(removal.failures)
            inner = _unlink_or_enter(current, child, removal)
            if inner is not None:
                os.close(current)
                current = inner
                levels.append(_Level(child, identity(inner)))
            elif len(removal.failures) > failed:
                level.stuck.add(child)
    finally:
        os.close(current)


def _refill(directory: int, level: _Level) -> bool:
    """Read the next batch of names; False if none is left. One listing for all would lose entries while they are being removed."""
    with os.scandir(directory) as listing:
        for item in listing:
            if item.name not in level.stuck:
                level.names.append(item.name)
                if len(level.names) >= _BATCH:
                    break
    return bool(level.names)


def _unlink_or_enter(directory: int, name: str, removal: _Removal) -> int | None:
    """Unlink any entry; open a directory, which unlink refuses. The type is not checked first: it could be swapped."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        try:
            return enter(directory, name, 0o700)[0]
        except OSError as error:
            if error.errno in SWAPPED:
                removal.surprised()
                return None
            removal.failures.append(OSError(error.errno, error.strerror, name))
    except OSError as error:
        removal.failures.append(OSError(error.errno, error.strerror, name))
    return None


def _rmdir(directory: int, level: _Level, removal: _Removal) -> bool:
    """Remove an emptied directory. False means failed for good; True means gone, or changed meanwhile and listed again."""
    try:
        os.rmdir(level.name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if level.stuck:
            return False  # not empty, and the reason is already recorded
        if error.errno in (*SWAPPED, errno.ENOTEMPTY):
            removal.surprised()
            return True
        removal.failures.append(OSError(error.errno, error.strerror, level.name))
        return False
    return True
