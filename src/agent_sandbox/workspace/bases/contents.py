"""What files held, one after the other in one file for each generation: a file each would cost many times what it costs to write them."""

from __future__ import annotations

import os

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.spelling import sha256
from agent_sandbox.workspace.bases import lines
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.seen import Base

_SUFFIX = ".content"


def contents_of(directory: str, generation: int) -> str:
    """The file with what files held when this generation first covered them."""
    return os.path.join(directory, f"{generation}{_SUFFIX}")


class ContentWriter:
    """Adds to the contents of a generation. `most` are the bytes that all generations together may have: a guest chooses what it covers."""

    def __init__(self, directory: str, generation: int, most: int) -> None:
        self._directory, self._generation, self._most = directory, generation, most
        self._fd = -1
        self._left = 0

    def add(self, content: bytes) -> str:
        """Keep it, and say where; empty when there is no room for it. Raises WorkspaceError."""
        # Whoever calls takes an OSError as reality's: this one is our own disk's, and then there is no base at all.
        with explained(f"keep content in {self._directory!r}"):
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(contents_of(self._directory, self._generation), flags, 0o600)
                with os.scandir(self._directory) as entries:
                    self._left = self._most - sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX))
            if len(content) > self._left:
                return ""
            self._left -= len(content)
            place = f"{self._generation}:{os.fstat(self._fd).st_size}"
            while content:
                content = content[os.write(self._fd, content) :]
            return place

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_content(directory: str, base: Base) -> int:
    """A descriptor of what a file held. Raises WorkspaceError when it was not kept or is damaged: then there is no base to merge with."""
    place = lines.place_of(base.kept)
    if base.seen is None or place is None:
        raise WorkspaceError(f"what {base.path!r} held before was not kept", hint="choose one side")
    with explained(f"open what {base.path!r} held before"):
        with open(os.open(contents_of(directory, place[0]), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            content = os.pread(file.fileno(), base.seen.node.size, place[1])
        if sha256(content).hexdigest() != base.seen.digest:
            raise WorkspaceError(f"what {base.path!r} held before is damaged in the store", hint="choose one side")
        with open(os.memfd_create("base", os.MFD_CLOEXEC), "wb") as memory:
            memory.write(content)
            memory.flush()
            return os.open(f"/proc/self/fd/{memory.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
