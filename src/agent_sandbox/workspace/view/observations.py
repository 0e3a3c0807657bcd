"""Observations of the disk on which a mount plan rests.

A plan is a function of the rules, of the machine's mounts, and of some hundred answers of the disk: what is a link, what is a directory,
what lies in it. Asking again is a tenth of the work of planning again. So the answers are kept with the plan, and while they still hold,
planning would give the same plan.
"""

from __future__ import annotations

import os
import stat

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import TypeVar

    T = TypeVar("T", bound=Hashable)

    Entry = tuple[str, int, str | bool]  # a name, its kind, and a link's target or whether this user can open the entry


class Observations:
    """Asks the disk each question once, and remembers the answers. Used by one planning at a time."""

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {"": stat.S_IFDIR, "/": stat.S_IFDIR}
        self._real: dict[str, str] = {"": "", "/": "/"}
        self._answers: dict[tuple[Callable[[str], Hashable], str], Hashable] = {}

    def hold(self) -> bool:
        """Return whether the disk still gives the same answer to every question."""
        return all(kind == kind_of(path) for path, kind in self._kinds.items() if path) and all(
            answer == question(path) for (question, path), answer in self._answers.items()
        )

    def ask(self, question: Callable[[str], T], path: str) -> T:
        """Return the answer to a question about a path. `question` must be a function of the disk alone, and raise nothing."""
        if (question, path) not in self._answers:
            self._answers[question, path] = question(path)
        return self._answers[question, path]  # type: ignore[return-value]

    def kind(self, path: str) -> int:
        """Return the kind of the entry at a path, whose parent must be a real path: see `kind_of`."""
        kind = self._kinds.get(path)
        if kind is None:
            parent = self._kinds.get(path.rpartition("/")[0], stat.S_IFDIR)
            if parent != stat.S_IFDIR:
                return 0  # nothing is there while the parent is what it is
            kind = self._kinds[path] = kind_of(path)
        return kind

    def real(self, path: str) -> str:
        """Return `os.path.realpath` of a normalised path. A directory is examined once, however many paths lead through it."""
        real = self._real.get(path)
        if real is None:
            parent, _, name = path.rpartition("/")
            real = f"{self.real(parent)}/{name}"
            if self.kind(real) == stat.S_IFLNK:
                real = self.ask(os.path.realpath, real)
            self._real[path] = real
        return real


def kind_of(path: str) -> int:
    """Return the kind of an entry, as the type bits of its mode; 0 if there is none, or if it cannot be examined. Follows no link."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return 0


def kind_behind(path: str) -> int:
    """Return the same of what a path leads to. Follows links."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except OSError:
        return 0


def entries_of(directory: str) -> tuple[Entry, ...] | None:
    """Return the links, directories and regular files of a directory, sorted by name. None if there is no such directory.

    A directory that this user may not list has no entries, as for a guest.
    """
    entries: list[Entry] = []
    try:
        with os.scandir(directory) as listing:
            for entry in listing:
                if entry.is_symlink():
                    try:
                        entries.append((entry.name, stat.S_IFLNK, os.readlink(entry.path)))
                    except FileNotFoundError:  # gone since it was listed
                        continue
                elif entry.is_dir(follow_symlinks=False):
                    entries.append((entry.name, stat.S_IFDIR, os.access(entry.path, os.R_OK | os.X_OK)))
                elif entry.is_file(follow_symlinks=False):
                    entries.append((entry.name, stat.S_IFREG, os.access(entry.path, os.R_OK)))
    except PermissionError:
        return ()
    except FileNotFoundError:
        return None
    return tuple(sorted(entries))


def writable_directories_of_others(directory: str) -> tuple[str, ...]:
    """Return the names of the directories right below a directory that others own, and that this user may write to."""
    me, names = os.geteuid(), list[str]()
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    # The bits of group and others include what an access control list permits, so most directories need no second look.
                    if status.st_uid != me and status.st_mode & 0o022 and os.access(entry.path, os.W_OK | os.X_OK):
                        names.append(entry.name)
    except OSError:
        return ()
    return tuple(sorted(names))
