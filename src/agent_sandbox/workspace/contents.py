"""The new contents of changed files: from a sandbox, from a merge, and from memory once a small file was read.

A diff and a promotion hash the content of every changed file first. What was hashed is then shown and written from memory: it is read once,
and nobody can be shown or given other bytes than those that have the digest.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.changes import Change, Contents

SMALLEST_UNREMEMBERED = 64 << 10  # bytes: of a larger file, opening it again is the smaller part
MOST_REMEMBERED = 64 << 20


@dataclass(frozen=True)
class ReadFile:
    """The content of a file that was read, its digest, and the file's modification time."""

    content: bytes
    digest: str
    mtime_ns: int

    # Written out, like `Change.__init__`, because there is one for each change.
    def __init__(self, content: bytes, digest: str, mtime_ns: int) -> None:
        values = self.__dict__
        values["content"], values["digest"], values["mtime_ns"] = content, digest, mtime_ns


class Mixed:
    """The new contents of changed files, from `sandbox` or from a merge. Implements `changes.Contents`."""

    def __init__(self, sandbox: Contents) -> None:
        self.sandbox = sandbox
        self._made: dict[str, bytes] = {}
        self._read: dict[str, ReadFile] = {}
        self._room = MOST_REMEMBERED

    def put(self, path: str, content: bytes) -> None:
        """Set the merged content of the file at `path`."""
        self._made[path] = content
        self._read.pop(path, None)

    def open_file(self, change: Change) -> int:
        """See `Contents`."""
        if change.path not in self._made:
            return self.sandbox.open_file(change)
        fd = os.memfd_create("merged", os.MFD_CLOEXEC)
        with open(os.dup(fd), "wb") as file:
            file.write(self._made[change.path])
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def remember(self, path: str, file: ReadFile) -> None:
        """Keep a file in memory, if it is small and there is room."""
        size = len(file.content)
        if size < SMALLEST_UNREMEMBERED and size <= self._room:
            self._room -= size
            self._read[path] = file

    def recall(self, path: str) -> ReadFile | None:
        """Return the file at `path` if it is in memory."""
        if path in self._read:
            return self._read[path]
        return self.sandbox.recall(path) if isinstance(self.sandbox, Mixed) and path not in self._made else None
