"""Frames on a machine's serial port: what a hostile machine sends is refused at its first bytes, whatever follows."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.init import Watch
from agent_sandbox.kernel.wire import FAREWELL, FAREWELL_FD
from agent_sandbox.runtime.microvm import driver, frames
from agent_sandbox.runtime.microvm.frames import Garbled, PortReader
from agent_sandbox.runtime.microvm.machine import MachineFailed


@given(st.lists(st.tuples(st.sampled_from(sorted(frames.FROM_AGENT)), st.binary(max_size=300))), st.integers(1, 50))
def test_frames_survive_any_cutting_of_the_stream(sent: list[tuple[bytes, bytes]], piece: int) -> None:
    stream = b"".join(frames.frame(*each) for each in sent)
    reader, received = PortReader(frames.FROM_AGENT), []
    for start in range(0, len(stream), piece):
        reader.feed(stream[start : start + piece])
        while (each := reader.next()) is not None:
            received.append(each)
    assert received == sent


def test_an_unknown_kind_is_refused_before_its_content_has_come() -> None:
    reader = PortReader(frames.FROM_AGENT)
    reader.feed(frames.HEADER.pack(b"!", 5))
    with pytest.raises(Garbled, match="unknown kind"):
        reader.next()


def test_a_long_frame_is_refused_before_its_content_has_come() -> None:
    reader = PortReader(frames.FROM_AGENT)
    reader.feed(frames.HEADER.pack(frames.OUTPUT, frames.LONGEST + 1))
    with pytest.raises(Garbled, match=str(frames.LONGEST + 1)):
        reader.next()


def served(machine: Callable[[socket.socket], object], ports: tuple[int, ...] = ()) -> tuple[tuple[int, ...] | None, int, bytes, bytes]:
    """Let a driver serve this machine, which is a function. Return its farewell, its own status, and what reached stdout and stderr.

    `ports` are those of its doors.
    """
    ours, theirs = socket.socketpair()
    out, err, farewell = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            stand_in = os.fork()  # for QEMU: it ends when its machine does
            if stand_in == 0:
                theirs.close()
                machine(ours)
                os._exit(3)
            ours.close()
            payload, other = socket.socketpair()
            high = [os.dup(fd) for fd in (os.open(os.devnull, os.O_RDONLY), out[1], err[1], farewell[1])]
            link = socket.socket(fileno=os.dup2(theirs.fileno(), 100))
            kept = socket.socket(fileno=os.dup2(payload.fileno(), 101))
            for number, fd in zip((0, 1, 2, FAREWELL_FD), high, strict=True):
                os.dup2(fd, number)
            other.detach(), payload.detach(), theirs.detach()
            link.setblocking(False)
            driver.MachineSession(link, kept, stand_in, ports).serve()
        finally:
            os._exit(99)
    ours.close()
    theirs.close()
    for pipe in (out, err, farewell):
        os.close(pipe[1])
    said = [_rest(pipe[0]) for pipe in (out, err, farewell)]
    _, status = os.waitpid(child, 0)
    return (FAREWELL.unpack(said[2]) if said[2] else None), status, said[0], said[1]


def _rest(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def ends(code: int) -> bytes:
    return frames.frame(frames.EXIT, frames.ENDED.pack(code << 8, 0.5, 1000, 0))


def test_an_honest_machine_is_believed_as_far_as_its_end_goes() -> None:
    farewell, _, out, err = served(lambda link: link.sendall(frames.frame(frames.OUTPUT, b"out") + ends(7)))
    assert farewell is not None and farewell[0] == 7 << 8 and farewell[4] == 0
    assert (out, err) == (b"out", b"")


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(b"\xff" * 65536, id="bytes that are no frames"),
        pytest.param(frames.HEADER.pack(frames.OUTPUT, 0xFFFFFFFF), id="a frame of four gigabytes"),
        pytest.param(frames.frame(frames.EXIT, b"short"), id="an end that is too short"),
        pytest.param(frames.frame(frames.TAKEN, b""), id="an account that is too short"),
        pytest.param(frames.frame(frames.BOOTED), id="a second boot"),
        pytest.param(frames.frame(frames.EXIT, frames.ENDED.pack(0x7F, 0.0, 0, 0)), id="an end that is a stop"),
        pytest.param(frames.frame(frames.SETUP, b"{}"), id="an order to the driver"),
        pytest.param(frames.frame(frames.EXIT, frames.ENDED.pack(0, math.inf, 0, 0)), id="a time without end"),
        pytest.param(frames.frame(frames.EXIT, frames.ENDED.pack(0, math.nan, 0, 0)), id="a time that is no number"),
    ],
)
def test_a_machine_that_talks_nonsense_is_ended_as_garbled(flood: bytes) -> None:
    def machine(link: socket.socket) -> None:
        try:
            while True:
                link.sendall(flood + ends(0))
        except OSError:
            return

    farewell, _, _, err = served(machine)
    assert farewell is not None and farewell[0] == signal.SIGKILL and farewell[4] == wire.GARBLED_HIT, "an end of 0 was believed"
    assert b"the virtual machine sent" in err


def test_a_machine_that_ends_before_its_program_is_no_success() -> None:
    farewell, status, _, err = served(lambda link: link.sendall(frames.frame(frames.OUTPUT, b"half")))
    assert farewell is None and os.WIFSIGNALED(status), "the driver must end by a signal, as its machine did"
    assert b"has ended before its program did" in err


def prepared(machine: Callable[[socket.socket], None]) -> None:
    """Let a driver prepare this machine, which is a function. Raises as the driver does."""
    ours, theirs = socket.socketpair()
    payload, other = socket.socketpair()
    thread = threading.Thread(target=machine, args=(ours,))
    thread.start()
    try:
        with theirs, payload, other:
            driver.MachineSession(theirs, payload, 0).prepare({})
    finally:
        thread.join()
        ours.close()


def flooding(flood: bytes) -> Callable[[socket.socket], None]:
    """Return a machine that sends this until nobody listens."""

    def machine(link: socket.socket) -> None:
        try:
            while True:
                link.sendall(flood)
        except OSError:
            return

    return machine


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        pytest.param(lambda link: None, "does not answer", id="silent"),
        pytest.param(lambda link: link.close(), "QEMU has ended", id="gone"),
        pytest.param(lambda link: link.sendall(frames.HEADER.pack(frames.SAID, 100)), "does not answer", id="half a frame"),
        pytest.param(flooding(frames.frame(frames.OUTPUT, b"x" * 1000)), "before it was ready", id="output for ever"),
        pytest.param(flooding(frames.frame(frames.BOOTED)), "before it was ready", id="boots for ever"),
        pytest.param(flooding(frames.frame(frames.SAID)), "gave no reason", id="says nothing for ever"),
        pytest.param(flooding(b"\xff" * 65536), "unknown kind", id="no frames"),
        pytest.param(flooding(frames.frame(frames.FAILED, b"\x1b[2J no disk")), "could not be prepared", id="failed"),
    ],
)
def test_a_machine_that_does_not_get_ready_is_given_up(
    machine: Callable[[socket.socket], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RESTORE_SECONDS", 0.2)
    with pytest.raises((MachineFailed, Garbled), match=why):
        prepared(machine)
    prepared(lambda link: link.sendall(frames.frame(frames.SAID, wire.READY)))  # the control arm


def test_a_report_that_cannot_be_true_is_no_end_of_a_program() -> None:
    """Init reads it from a guest that may have been taken over, engine, machine and driver alike."""
    told = {}
    for name, words in {
        "honest": (7 << 8, 0.5, 1000),
        "time without end": (0, math.inf, 0),
        "time before time": (0, -1.0, 0),
        "time that is no number": (0, math.nan, 0),
        "more bytes than there are": (0, 0.0, (1 << 64) - 1),
        "a stop": (0x7F, 0.0, 0),
    }.items():
        reading, writing = os.pipe()
        os.write(writing, FAREWELL.pack(*words, wire.NOT_COUNTED, 0))
        os.close(writing)
        watch = object.__new__(Watch)
        watch.farewell = reading
        told[name] = watch.take_farewell(), watch._reported
    assert told.pop("honest") == (7 << 8, [0.5, 1000, wire.NOT_COUNTED, 0])
    assert set(map(str, told.values())) == {str((signal.SIGKILL.value, [0.0, 0, wire.NOT_COUNTED, wire.GARBLED_HIT]))}, told
