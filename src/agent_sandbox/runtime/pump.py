"""Streams between the supervisor and a guest: output cut at its limit, input fed as fast as it is read.

Nothing here grows with what a guest writes: beyond the limit bytes are read and dropped, so that a program that prints too much may still
finish its work; one that never stops is ended after a multiple of the limit.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from agent_sandbox.runtime.base import Launch
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Literal

CHUNK = 65536
PATIENCE_BYTES = 64 << 20  # dropped output after which a run is ended


class Sink:
    """One output stream of a guest."""

    def __init__(self, name: str, fd: int, limit: int | None, launch: Launch) -> None:
        self.name: Literal["stdout", "stderr"] = "stdout" if name == "stdout" else "stderr"
        self.fd = fd
        self.cut = False
        self._limit = limit
        self._taken = 0
        self._parts: list[bytes] = []
        self._collect = launch.collect
        self._on_output = launch.on_output
        os.set_blocking(fd, False)

    @property
    def overflowing(self) -> bool:
        """Whether patience with this stream has ended."""
        return self._limit is not None and self._taken > max(16 * self._limit, PATIENCE_BYTES)

    def take(self) -> bool:
        """Take what there is. False when the stream has ended."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose last writer has gone answers EIO
            return False
        if not data:
            return False
        room = len(data) if self._limit is None else max(0, self._limit - self._taken)
        self._taken += len(data)
        if room < len(data):
            self.cut = True
            data = data[:room]
        if data:
            if self._collect:
                self._parts.append(data)
            if self._on_output is not None:
                self._on_output(self.name, data)
        return True

    def drain(self) -> None:
        """Take what is left, after every writer has gone."""
        before = -1
        while before != self._taken:
            before = self._taken
            if not self.take():
                return

    def kept(self) -> bytes:
        """What was collected."""
        return b"".join(self._parts)

    def close(self) -> None:
        """Close our end."""
        os.close(self.fd)


class Source:
    """The guest's input: given bytes, or what a descriptor of the caller's yields. The guest never holds that descriptor itself."""

    def __init__(self, data: bytes | int, fd: int) -> None:
        self._from = data if isinstance(data, int) else None
        self._pending = b"" if isinstance(data, int) else data
        self._fd: int | None = fd
        self._selector: selectors.BaseSelector | None = None
        os.set_blocking(fd, False)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Begin to feed."""
        self._selector = selector
        self._arrange()

    def _arrange(self) -> None:
        """Wait for room when there is something to write, else for something to read; close when both are over."""
        assert self._selector is not None and self._fd is not None
        if self._pending:
            self._watch(self._fd, selectors.EVENT_WRITE, self._write)
        elif self._from is None:
            self.close()
        else:
            self._watch(self._from, selectors.EVENT_READ, self._read)

    def _watch(self, fd: int, event: int, call: Callable[[], bool]) -> None:
        assert self._selector is not None
        self._selector.register(fd, event, call)

    def _read(self) -> bool:
        assert self._from is not None
        try:
            self._pending = os.read(self._from, CHUNK)
        except OSError:
            self._pending = b""
        self._forget(self._from)
        if not self._pending:
            self._from = None
        self._arrange()
        return True

    def _write(self) -> bool:
        assert self._fd is not None
        try:
            self._pending = self._pending[os.write(self._fd, self._pending[:CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # the guest has closed its input: not an error
            self.close()
            return True
        if not self._pending:
            self._forget(self._fd)
            self._arrange()
        return True

    def _forget(self, fd: int) -> None:
        registered = self._selector.get_map() if self._selector is not None else None  # None, too, once the selector is closed
        if self._selector is not None and registered is not None and fd in registered:
            self._selector.unregister(fd)

    def close(self) -> None:
        """Close the guest's input."""
        if self._fd is not None:
            self._forget(self._fd)
            if self._from is not None:
                self._forget(self._from)
            os.close(self._fd)
            self._fd = None
