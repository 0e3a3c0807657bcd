"""The process of a run in a machine, outside the machine and inside the walls of the process runtime: it starts QEMU and passes streams.

It restores the machine before it reports that it is ready, so a guest that waits in the pool is a machine that waits. What comes from the
machine is hostile. Frames are short, at most one is kept, and their content is only ever passed on, or unpacked as plain numbers. Of a
connection, as much is kept as its window allows (`streams`).
"""

from __future__ import annotations

import marshal
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import FAREWELL, FAREWELL_FD, NOT_COUNTED, READY, REFUSAL_BYTES
from agent_sandbox.runtime.microvm import frames
from agent_sandbox.runtime.microvm.door_relay import DoorRelay
from agent_sandbox.runtime.microvm.frames import Garbled, PortReader
from agent_sandbox.runtime.microvm.machine import Hardware, MachineFailed, Monitor
from agent_sandbox.runtime.microvm.view import VIEW

if TYPE_CHECKING:
    from typing import Any, NoReturn

RESTORE_SECONDS = 45.0
_LAST_WORDS_SECONDS = 2.0  # that a door may take for what the program sent last
_CHUNK = 32768
_MOST_OUTGOING = 1 << 18  # bytes that the machine does not take; one that takes them leaves less than half of it
_ENTROPY_BYTES = 64
_FORWARDED = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)]


class MachineGuest:
    """Runs a program in a restored machine. The zygote makes it, with the template in memory; each fork calls it once.

    `descriptors` are the sealed memory and state of the template. They stay open in a fork, although all others are closed.
    """

    def __init__(self, qemu: str, hardware: Hardware, ram: int, state: int) -> None:
        self._qemu, self._hardware = qemu, hardware
        self._ram, self._state = ram, state
        self.descriptors = (ram, state)
        self._setup: dict[str, Any] = {}

    def take(self, request: dict[str, Any]) -> None:
        """Take what the run's request says about its machine."""
        self._setup = marshal.loads(request["inside"])

    def __call__(self, payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
        """Restore the machine, report that we are ready, and serve the run to its end."""
        try:
            link, qemu = self._start()
            session = MachineSession(link, payload, qemu, self._setup["network"])
            session.prepare({**self._setup, "python": python})
            ready()
        except BaseException as error:
            with suppress(OSError):
                payload.sendall(f"125 {error}".encode(errors="replace")[:REFUSAL_BYTES])
            os._exit(125)
        session.serve()

    def _start(self) -> tuple[socket.socket, int]:
        """Start QEMU, restore the machine, and return its port and QEMU's pid."""
        link, port = socket.socketpair()
        control, monitor = socket.socketpair()
        words = self._hardware.words(
            ram=f"/proc/self/fd/{self._ram}", shared=False, port=port.fileno(), monitor=monitor.fileno(), view=VIEW
        )
        kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (self._ram, port.fileno(), monitor.fileno())]
        said = os.memfd_create("qemu-errors", os.MFD_CLOEXEC)
        nothing = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(2)] + [(os.POSIX_SPAWN_DUP2, said, 2)]
        argv = [self._qemu, *words, "-incoming", "defer"]
        qemu = os.posix_spawn(self._qemu, argv, {"PATH": "/usr/bin"}, file_actions=[*nothing, *kept], setpgroup=0)
        port.close()
        monitor.close()
        state = os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)  # anew: others read the same file
        os.close(self._ram)
        os.close(self._state)
        order = Monitor(control)
        try:
            order.begin(RESTORE_SECONDS)
            order.restore(state, RESTORE_SECONDS)
        except MachineFailed as error:
            last = os.pread(said, REFUSAL_BYTES, max(0, os.fstat(said).st_size - REFUSAL_BYTES)).decode(errors="replace").strip()
            raise MachineFailed(f"{error}: {last}" if last else str(error)) from error
        wire.close_all([state, said])
        os.set_inheritable(control.detach(), False)  # stays open: QEMU would end with its monitor
        return link, qemu


class MachineSession:
    """Passes input, output and the payload between the supervisor's pipes and the machine's port, and connections to the doors.

    `ports` are those of the doors; empty for a run without a network.
    """

    def __init__(self, link: socket.socket, payload: socket.socket, qemu: int, ports: tuple[int, ...] = ()) -> None:
        self._link, self._payload, self._qemu = link, payload, qemu
        self._frames = PortReader(frames.FROM_AGENT)
        self._poller = select.poll()
        self._outgoing = bytearray()  # frames that QEMU has not taken yet
        self._credit = frames.WINDOW
        self._input_open = self._payload_open = True
        self._relay = DoorRelay(ports, self._send) if ports else None

    def prepare(self, setup: dict[str, Any]) -> None:
        """Send the setup, and return when the seat in the machine is confined. Raises `MachineFailed` if it cannot be."""
        setup = {**setup, "time": time.time(), "entropy": os.urandom(_ENTROPY_BYTES), "uid": os.getuid(), "gid": os.getgid()}
        try:
            self._link.sendall(frames.frame(frames.SETUP, marshal.dumps(setup)))
        except OSError as error:
            raise MachineFailed(f"QEMU has ended: {error.strerror}") from error
        self._link.settimeout(RESTORE_SECONDS)
        kind, content = self._await_frame()
        if kind == frames.FAILED:
            raise MachineFailed(f"the machine could not be prepared: {content.decode(errors='replace')}")
        if kind != frames.SAID:  # not even once: a machine that sends others for ever would never be given up
            raise MachineFailed(f"the machine sent a frame of the kind {kind!r} before it was ready")
        if content != READY:
            raise MachineFailed(content.decode(errors="replace") or "the machine gave no reason")
        self._link.setblocking(False)

    def _await_frame(self) -> tuple[bytes, bytes]:
        while (each := self._frames.next()) is None:
            try:
                data = self._link.recv(_CHUNK)
            except TimeoutError:
                raise MachineFailed("the machine does not answer") from None
            except OSError:
                data = b""
            if not data:
                raise MachineFailed("QEMU has ended")
            self._frames.feed(data)
        return each

    def serve(self) -> NoReturn:
        """Serve the run until the program in the machine has ended, or QEMU has."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in _FORWARDED:
            with suppress(OSError):
                signal.signal(number, lambda *_: None)
        while True:
            self._poller = select.poll()
            self._poller.register(woken, select.POLLIN)
            self._poller.register(self._link, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            if not self._outgoing:  # no more is read while QEMU does not take what was read
                if self._input_open and self._credit:
                    self._poller.register(0, select.POLLIN)
                if self._payload_open:
                    self._poller.register(self._payload, select.POLLIN)
            self._watch_doors()
            ready = dict(self._poller.poll())
            if woken in ready:
                for each in os.read(woken, 4096):
                    self._send(frames.SIGNAL, bytes([each]))
            if self._link.fileno() in ready:
                self._flush()
                self._take()
            if 0 in ready:
                self._read_input()
            if self._payload.fileno() in ready:
                self._read_payload()
            if self._relay is not None:
                self._relay.serve(ready, lambda: not self._outgoing)

    def _watch_doors(self) -> None:
        if self._relay is not None:
            for fd, events in self._relay.wanted().items():
                events &= select.POLLOUT if self._outgoing else ~0
                if events:
                    self._poller.register(fd, events)

    def _send(self, kind: bytes, content: bytes = b"") -> None:
        self._outgoing += frames.frame(kind, content)
        self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._outgoing:
                try:
                    del self._outgoing[: self._link.send(self._outgoing)]
                except BlockingIOError:
                    return
                except OSError:
                    self._lose()

    def _read_input(self) -> None:
        data = os.read(0, min(_CHUNK, self._credit))
        self._credit -= len(data)
        self._input_open = bool(data)
        self._send(frames.INPUT if data else frames.INPUT_END, data)

    def _read_payload(self) -> None:
        try:
            data = self._payload.recv(_CHUNK)
        except OSError:
            data = b""
        self._payload_open = bool(data)
        self._send(frames.PAYLOAD if data else frames.PAYLOAD_END, data)

    def _take(self) -> None:
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
        self._frames.feed(data)
        try:
            while (each := self._frames.next()) is not None:
                self._obey(*each)
                if len(self._outgoing) > _MOST_OUTGOING:
                    raise Garbled("requests, and takes no answers")
        except Garbled as error:
            self._end_as_garbled(str(error))

    def _obey(self, kind: bytes, content: bytes) -> None:
        match kind:
            case frames.OUTPUT | frames.ERRORS:
                _write_all(1 if kind == frames.OUTPUT else 2, content)
            case frames.SAID:
                with suppress(OSError):  # the supervisor has what it wanted
                    self._payload.sendall(content)
            case frames.SAID_END:
                with suppress(OSError):
                    self._payload.shutdown(socket.SHUT_WR)
            case frames.TAKEN:
                if len(content) != frames.COUNT.size:
                    raise Garbled("an account of input that is none")
                self._credit = min(frames.WINDOW, self._credit + frames.COUNT.unpack(content)[0])
            case frames.EXIT:
                if len(content) != frames.ENDED.size:
                    raise Garbled("a report of the end that is none")
                self._finish(*frames.ENDED.unpack(content))
            case _ if kind in frames.OF_NETWORK and self._relay is not None:
                self._relay.obey(kind, content)
            case _:
                raise Garbled(f"a frame of the kind {kind!r}, at a time when none may come")

    def _finish(self, status: int, seconds: float, peak: int, limits: int) -> NoReturn:
        """Report the end of the program, and end."""
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            raise Garbled("an end that is none")
        if not math.isfinite(seconds):
            raise Garbled("a time that is none")
        self._finish_sending()
        hit = wire.MEMORY_HIT if limits & frames.OUT_OF_MEMORY else 0
        hit |= wire.PROCESSES_HIT if limits & frames.OUT_OF_PROCESSES else 0
        self._leave(status, seconds if seconds >= 0 else 0.0, peak, hit)

    def _finish_sending(self) -> None:
        """Let the doors take what the program sent before it ended, so that it is judged and recorded."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._relay is not None and self._relay.unsent and (left := deadline - time.monotonic()) > 0:
            self._poller = select.poll()
            for fd in (fd for fd, events in self._relay.wanted().items() if events & select.POLLOUT):
                self._poller.register(fd, select.POLLOUT)
            self._relay.serve(dict(self._poller.poll(left * 1000)), lambda: False)

    def _end_as_garbled(self, why: str) -> NoReturn:
        _write_all(2, f"agent-sandbox: the virtual machine sent {why}\n".encode(errors="replace"))
        self._leave(signal.SIGKILL, 0.0, 0, wire.GARBLED_HIT)

    def _lose(self) -> NoReturn:
        """End as QEMU has ended: by the same signal, so that init and the supervisor find the reason."""
        _, status = os.waitpid(self._qemu, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT
        _write_all(2, b"agent-sandbox: the virtual machine has ended before its program did\n")
        for each in _FORWARDED:
            with suppress(OSError):
                signal.signal(each, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        self._leave(number, 0.0, 0, 0)

    def _leave(self, status: int, seconds: float, peak: int, hit: int) -> NoReturn:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with suppress(OSError):  # the reader has gone
            os.write(FAREWELL_FD, FAREWELL.pack(status, used.ru_utime + used.ru_stime + seconds, peak, NOT_COUNTED, hit))
        os._exit(0)


def _write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a pipe of the supervisor, who reads until we end. Waits while it is full; a signal is forwarded later."""
    left = memoryview(data)
    with suppress(OSError):  # the reader has gone
        while left:
            left = left[os.write(fd, left) :]
