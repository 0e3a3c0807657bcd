"""The reports on a run: the guest's own last words, and how it ended, from its init, its cgroup and our own reasons to end it."""

from __future__ import annotations

import os
import select
import socket

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel.wire import INPUTS, READY, REFUSAL_BYTES, REPORT_BYTES
from agent_sandbox.runtime.base import Exit, ExitReason, Usage

if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True)
class GuestReport:
    """The last words of a guest. `refused` is the exit code of a program that could not start, for the reason in `why`; else None."""

    inputs: bytes = b""
    refused: int | None = None
    why: str = ""


class Reply:
    """The bytes that a guest sends to its supervisor, read as they come, or at the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._kept = b""

    def refusal(self) -> str | None:
        """Wait for the first byte; return None if the guest is ready, else its reason. Raises TimeoutError.

        No byte beyond that one is taken from a guest that is ready: it may already have sent a refusal of the program behind it.
        """
        first = self._socket.recv(1)
        if first == READY:
            return None
        words = first
        while len(words) < REFUSAL_BYTES and (more := self._socket.recv(REFUSAL_BYTES - len(words))):
            words += more
        return parsed(words).why or "it ended before it was ready"

    def take(self) -> bool:
        """Read what there is. Returns False when the other side has closed."""
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
        """Return the complete report. Call it after the guest has ended; the report is empty if it was killed before sending one."""
        before = -1
        while len(self._kept) != before and self.take():
            before = len(self._kept)
        return parsed(self._kept)


def parsed(words: bytes) -> GuestReport:
    """Parse the last words of a guest."""
    if words.startswith(INPUTS):
        return GuestReport(words.removeprefix(INPUTS))
    if not words:
        return GuestReport()
    code, _, why = words[:REFUSAL_BYTES].decode(errors="replace").partition(" ")
    return GuestReport(b"", int(code) if code.isascii() and code.isdigit() and len(code) < 4 else 126, why or "it could not be started")


def exit_of(
    ended: dict[str, Any] | None, used: cgroups.GroupUsage, *, full: bool, cut: bool, killed: str, fuel: int | None, wall: float
) -> Exit:
    """Return how a run ended.

    `ended` is init's report; None if init was killed. `full`: the layers were full. `cut`: output was cut. `killed`: why we ended the run,
    or empty. `fuel`: its limit. `wall`: its duration as measured here."""
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
        # Init knows best when it ended the run; but one that ends by itself may do so before init has heard that it began.
        wall_seconds=ended["wall"] if ended and reason is ExitReason.TIMED_OUT else wall,
        cpu_seconds=used.cpu_seconds or (ended["cpu"] if ended else 0.0),
        peak_memory_bytes=used.peak_memory_bytes or (ended["memory"] if ended else 0),
        peak_processes=used.peak_processes,
        fuel=burnt,
    )
    return Exit(128 + number if number is not None else os.WEXITSTATUS(status), reason, number, tuple(hit), usage)


def await_end_of(init: int, seconds: float) -> None:
    """Wait for the end of an init that was killed: the kernel then ends everything in its namespace."""
    if not init:
        return
    try:
        handle = os.pidfd_open(init)
    except OSError:  # gone altogether
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll(seconds * 1000)
    finally:
        os.close(handle)
