"""Messages between our own processes arrive whole, with their descriptors, or not at all."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading

import pytest

from agent_sandbox.kernel import wire


def test_values_and_descriptors_arrive_together() -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        wire.send(ours, {"plan": [("overlay", {"masks": [("a\udcff", True)]})], "n": 1 << 40, "none": None}, [writing])
        os.close(writing)
        value, (received,) = wire.receive(theirs)
        assert value == {"plan": [("overlay", {"masks": [("a\udcff", True)]})], "n": 1 << 40, "none": None}
        os.write(received, b"through")
        os.close(received)
        assert os.read(reading, 16) == b"through"
        os.close(reading)


def test_a_received_descriptor_does_not_survive_exec() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:
        wire.send(ours, 1, [file.fileno()])
        _, (received,) = wire.receive(theirs)
        assert not os.get_inheritable(received)
        os.close(received)


def test_a_message_larger_than_the_socket_buffer_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    text = "x" * (8 << 20)
    with ours, theirs:
        sender = threading.Thread(target=wire.send, args=(ours, text))
        sender.start()
        assert wire.receive(theirs) == (text, [])
        sender.join()


def test_a_message_is_sent_although_its_receiver_has_read_it_and_gone() -> None:
    near, theirs = socket.socketpair()

    class HeldUp(socket.socket):
        def sendmsg(self, *arguments: object) -> int:
            sent = super().sendmsg(*arguments)  # type: ignore[arg-type]
            arrived.append(wire.receive(theirs))
            theirs.close()
            return sent

    arrived: list[tuple[object, list[int]]] = []
    with HeldUp(fileno=near.detach()) as ours, open(os.devnull) as file:
        wire.send(ours, "a value", [file.fileno()])
        ((value, descriptors),) = arrived
        assert value == "a value" and len(descriptors) == 1
        wire.close_all(descriptors)
        with pytest.raises(BrokenPipeError):  # the control arm: another message does not arrive
            wire.send(ours, "a value")


@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0\0\0\x10half"])
def test_a_sender_that_goes_away_is_noticed(part: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(part)
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs)


@pytest.mark.parametrize("sent", [2, 4, 7])
def test_a_stream_that_ends_inside_a_message_leaves_no_descriptor(sent: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [wire.pack("a value")[:sent]], [file.fileno()])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            wire.receive(theirs)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_memfd_is_sealed_although_somebody_holds_a_page_of_it_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    memfd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memfd, b"content")
    held = mmap.mmap(memfd, 7)
    monkeypatch.setattr(wire, "SEAL_SECONDS", 0.0)
    with pytest.raises(OSError) as refused:
        wire.seal(memfd)
    assert refused.value.errno == errno.EBUSY, "the control arm"
    monkeypatch.setattr(wire, "SEAL_SECONDS", 60.0)
    threading.Timer(0.3, held.close).start()
    wire.seal(memfd)
    with pytest.raises(PermissionError):
        os.write(memfd, b"other")
    os.close(memfd)
