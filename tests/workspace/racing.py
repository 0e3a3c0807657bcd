"""A hostile neighbour for tests: a process that swaps a directory and a link as fast as the kernel lets it."""

from __future__ import annotations

import os
import signal
from mmap import mmap
from pathlib import Path
from types import TracebackType

from agent_sandbox.kernel import syscalls

RENAME_EXCHANGE = 2


class Swapper:
    """While the block lasts, a child exchanges two names, over and over. It is under way when the block begins."""

    def __init__(self, one: Path, other: Path) -> None:
        self.names = os.fsencode(one), os.fsencode(other)
        self._counted = mmap(-1, 8)

    @property
    def swaps(self) -> int:
        """How often it has tried so far."""
        return int.from_bytes(self._counted[:8], "little")

    def __enter__(self) -> Swapper:
        under_way, tell = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            try:
                here = syscalls.AT_FDCWD
                for _ in range(10):
                    syscalls.check(syscalls.libc.renameat2(here, self.names[0], here, self.names[1], RENAME_EXCHANGE), "renameat2")
                os.write(tell, b"x")
                swaps = 10
                while True:
                    syscalls.libc.renameat2(here, self.names[0], here, self.names[1], RENAME_EXCHANGE)
                    swaps += 1
                    self._counted[:8] = swaps.to_bytes(8, "little")
            finally:
                os._exit(0)
        os.close(tell)
        assert os.read(under_way, 1), "the names cannot be exchanged on this filesystem"
        os.close(under_way)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


def deep_tree(directory: int, levels: int) -> None:
    """Make nested directories deeper than any path can say, with a file at the bottom."""
    current = os.dup(directory)
    for _ in range(levels):
        os.mkdir("d", dir_fd=current)
        deeper = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
        os.close(current)
        current = deeper
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=current))
    os.close(current)
