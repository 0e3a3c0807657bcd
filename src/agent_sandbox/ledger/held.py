"""The files of a ledger, kept open for the length of a block by a process that records much.

Opening two files for each entry is most of what an entry costs. Kept open they need three cares, which are taken here. A child that is
forked without exec would share the lock: it closes them at once, and opens its own. Threads would share it, too: they take turns. And the
ledger may be closed meanwhile, which its length tells, or moved away: its name is looked at again after a hundredth of a second.
"""

from __future__ import annotations

import _thread  # `threading` is slow to load
import fcntl
import os

from agent_sandbox.ledger.anchor import ANCHOR

_LOOK_SECONDS = 0.01
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Held:
    """Both files, open. `lock` is what threads take turns with; `ours` is whether this process has opened them, and not one that it was
    forked from; `opening` is another one whenever the ledger was opened again."""

    __slots__ = ("_looked", "anchor", "file", "identity", "lock", "opening", "ours")

    def __init__(self, path: str, keys: str) -> None:
        """Raises OSError when one of them is not there yet."""
        self.lock = _thread.allocate_lock()
        self.ours = True
        self._looked = 0.0
        self.opening = object()
        self.file, self.identity = _opened(path)
        try:
            self.anchor = os.open(f"{keys}/{ANCHOR}", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(self.file)
            raise
        if not _watched:
            _watched.append(True)
            os.register_at_fork(after_in_child=_let_go)
        _all.add(self)

    def locked(self, path: str, now: float, segment_bytes: int) -> int:
        """Lock the ledger, and how long it is. Raises OSError, with nothing locked, when it has no file of that name."""
        while True:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            try:
                size = os.lseek(self.file, 0, os.SEEK_END)
                # Asking for the name costs more than the rest together: the kernel then keeps finer times of the file.
                if size < segment_bytes and 0 <= now - self._looked < _LOOK_SECONDS:
                    return size
                status = os.stat(path)
                if (status.st_dev, status.st_ino) == self.identity:
                    self._looked = now
                    return status.st_size
            except BaseException:
                self.unlock()
                raise
            self.unlock()
            old = self.file
            self.file, self.identity = _opened(path)
            self.opening = object()
            os.close(old)

    def unlock(self) -> None:
        """Let others write."""
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both. Idempotent."""
        if self in _all:
            _all.discard(self)
            os.close(self.file)
            os.close(self.anchor)


_all: set[Held] = set()
_watched: list[bool] = []  # whether forks are; it cannot be taken back


def _opened(path: str) -> tuple[int, tuple[int, int]]:
    descriptor = os.open(path, _FLAGS)
    status = os.fstat(descriptor)
    return descriptor, (status.st_dev, status.st_ino)


def _let_go() -> None:
    for held in list(_all):
        held.ours = False
        held.close()
