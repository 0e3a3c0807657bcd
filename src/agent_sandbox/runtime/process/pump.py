"""The streams between the supervisor and a guest: output up to its limit, input as fast as the guest reads, and the reports at the end.

No buffer here grows with what a guest writes. Bytes beyond the limit are read and dropped, so that a program that prints too much can still
finish its work. A run that never stops printing is ended.
"""

from __future__ import annotations

import os
import select
import stat
import sys

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import ids
from agent_sandbox.kernel.wire import INPUTS, READY, REFUSAL_BYTES, REPORT_BYTES
from agent_sandbox.runtime.base import DEVNULL, Exit, ExitReason, Launch, Usage

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, Literal

    from agent_sandbox.kernel.cgroups import GroupUsage

CHUNK = 65536
PATIENCE_BYTES = 64 << 20  # a run that prints more than this and 16 times its limit is ended


def make_pipes(stdin: bytes | int, ours: dict[str, int], theirs: list[int]) -> None:
    """Make the guest's three streams. Adds each end to `ours` or `theirs` at once, so that it is closed even if a later step fails."""
    if stdin == DEVNULL:
        theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    else:
        reading, ours["stdin"] = os.pipe2(os.O_CLOEXEC)
        theirs.append(reading)
    for name in ("stdout", "stderr"):
        ours[name], writing = os.pipe2(os.O_CLOEXEC)
        theirs.append(writing)
    if os.geteuid() == 0:
        for fd in theirs:
            # A guest that opens /dev/stdin or /dev/stderr opens its pipe anew. Only the owner may do so: here the guest's root.
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                with suppress(OSError):  # if these ids do not exist, the launch fails later with a better message
                    os.fchown(fd, ids.FIRST_ID, ids.FIRST_ID)


class Sink:
    """Reads one output stream of a guest, up to a limit."""

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
        """Whether so much was dropped that the run must end."""
        return self._limit is not None and self._taken > max(16 * self._limit, PATIENCE_BYTES)

    def take(self) -> bool:
        """Read the bytes that are available. Returns False at the end of the stream."""
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
        """Read the remaining bytes, after all processes of the guest have ended."""
        before = -1
        while before != self._taken:
            before = self._taken
            if not self.take():
                return

    def take_what_is_there(self) -> None:
        """Read the bytes that are in the pipe now, and not those that are written meanwhile."""
        import fcntl  # only sessions need these modules
        import termios

        left = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        while left > 0:
            before = self._taken
            if not self.take() or self._taken == before:  # the guest may have opened its own pipe and read these bytes
                return
            left -= self._taken - before

    def kept(self) -> bytes:
        """Return the collected output."""
        return b"".join(self._parts)

    def close(self) -> None:
        """Close our end of the stream."""
        os.close(self.fd)


class Poller:
    """Calls a function whenever its descriptor is ready. A function that returns False is not called again.

    It does not use epoll: the kernel limits the epoll watches of each user. A rootless guest is the same user, and could use them all up.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], bool]] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._calls

    def add(self, fd: int, call: Callable[[], bool], *, event: int = select.POLLIN) -> None:
        """Call `call` whenever this descriptor is ready."""
        self._calls[fd] = call
        self._poll.register(fd, event)

    def drop(self, fd: int) -> None:
        """Stop watching a descriptor."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float | None) -> bool:
        """Wait at most `seconds`, and call the functions of ready descriptors. Returns whether there were any."""
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        for fd, _ in ready:
            call = self._calls.get(fd)
            if call is not None and not call():
                self.drop(fd)
        return bool(ready)


class Source:
    """Writes the guest's input: given bytes, or what a descriptor of the caller supplies. The guest never gets that descriptor."""

    def __init__(self, data: bytes | int, fd: int, poller: Poller) -> None:
        self._from = data if isinstance(data, int) else None
        self._pending = b"" if isinstance(data, int) else data
        self._fd: int | None = fd
        self._poller = poller
        os.set_blocking(fd, False)
        self._arrange()

    def _arrange(self) -> None:
        """Wait until pending bytes can be written; if none are pending, until more can be read. Close the input if nothing is left."""
        assert self._fd is not None
        if self._pending:
            self._poller.add(self._fd, self._write, event=select.POLLOUT)
        elif self._from is None:
            self.close()
        else:
            self._poller.add(self._from, self._read)

    def _read(self) -> bool:
        assert self._from is not None
        try:
            self._pending = os.read(self._from, CHUNK)
        except OSError:
            self._pending = b""
        self._poller.drop(self._from)
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
            self._poller.drop(self._fd)
            self._arrange()
        return True

    def close(self) -> None:
        """Close the guest's input."""
        if self._fd is not None:
            self._poller.drop(self._fd)
            if self._from is not None:
                self._poller.drop(self._from)
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True)
class GuestReport:
    """The final report of a guest. If its program could not start, `refused` is the exit code, else None; `why` is the reason."""

    inputs: bytes = b""
    refused: int | None = None
    why: str = ""


class Reply:
    """Reads the bytes that a guest sends to its supervisor: first whether it is ready, later its final report."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._kept = b""

    def refusal(self) -> str | None:
        """Wait for the guest's first byte. Return None if the guest is ready, else the reason why it is not. Raises TimeoutError.

        From a ready guest only this byte is read: the next bytes may already be the reason why the program could not start.
        """
        first = self._socket.recv(1)
        if first == READY:
            return None
        words = first
        while len(words) < REFUSAL_BYTES and (more := self._socket.recv(REFUSAL_BYTES - len(words))):
            words += more
        return parsed(words).why or "it ended before it was ready"

    def take(self) -> bool:
        """Read the bytes that are available. Returns False when the guest has closed its end."""
        self._socket.settimeout(0)
        try:
            said = self._socket.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._kept += said[: REPORT_BYTES - len(self._kept)]
        return bool(said)

    def said(self) -> GuestReport:
        """Return the final report, after the guest has ended. It is empty if the guest sent none."""
        before = -1
        while len(self._kept) != before and self.take():
            before = len(self._kept)
        return parsed(self._kept)


def parsed(words: bytes) -> GuestReport:
    """Parse the final report of a guest."""
    if words.startswith(INPUTS):
        return GuestReport(words.removeprefix(INPUTS))
    if not words:
        return GuestReport()
    code, _, why = words[:REFUSAL_BYTES].decode(errors="replace").partition(" ")
    return GuestReport(b"", int(code) if code.isascii() and code.isdigit() and len(code) < 4 else 126, why or "it could not be started")


def exit_of(ended: dict[str, Any] | None, used: GroupUsage, *, full: bool, cut: bool, killed: str, fuel: int | None, wall: float) -> Exit:
    """Return how a run ended.

    `ended` is init's report; None if init was killed. `full` says that the layers exceeded their limit, `cut` that output was dropped.
    `killed` is why we ended the run, or empty. `fuel` is the limit on fuel. `wall` is the duration as measured here."""
    hit = [*(ended["hit"] if ended else ()), *(["disk"] if full else [])]
    hit += sorted(used.hit.difference(hit))
    if cut:
        hit.append("output")
    status = ended["status"] if ended else 9
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    reason = ExitReason(ended["reason"]) if ended else ExitReason.KILLED
    if reason is ExitReason.EXITED and number is not None:
        reason = ExitReason.SIGNALLED
    if used.oom_kills and (number == 9 or not ended) and reason in (ExitReason.SIGNALLED, ExitReason.KILLED):
        reason = ExitReason.OUT_OF_MEMORY
    if full:
        reason = ExitReason.DISK_LIMIT
    if reason is ExitReason.KILLED and killed and killed != "killed":
        reason = ExitReason(killed)
    burnt = ended["fuel"] if ended else None
    if reason is ExitReason.SIGNALLED and burnt is not None and fuel is not None and burnt >= fuel:
        reason = ExitReason.FUEL_LIMIT
        hit.append("fuel")
    if reason is ExitReason.CPU_LIMIT and "cpu" not in hit:
        hit.append("cpu")
    if reason is ExitReason.OUT_OF_MEMORY and "memory" not in hit:
        hit.append("memory")
    usage = Usage(
        # If init ended the run at its deadline, its measurement is the best. A run that ends by itself may end before init has received the
        # start time, so our own measurement counts.
        wall_seconds=ended["wall"] if ended and reason is ExitReason.TIMED_OUT else wall,
        cpu_seconds=used.cpu_seconds or (ended["cpu"] if ended else 0.0),
        peak_memory_bytes=used.peak_memory_bytes or (ended["memory"] if ended else 0),
        peak_processes=used.peak_processes,
        fuel=burnt,
    )
    return Exit(128 + number if number is not None else os.WEXITSTATUS(status), reason, number, tuple(hit), usage)
