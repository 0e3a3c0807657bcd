"""The payload socket is a stream: what its reader makes of bytes must not depend on how many of them arrive together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from agent_sandbox.kernel import guest_setup
from agent_sandbox.kernel.wire import INPUTS, READY
from agent_sandbox.runtime.process.pump import GuestReport, Reply


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, Reply]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Reply(ours)


def test_a_refusal_right_behind_ready_is_one_of_the_program(line: tuple[socket.socket, Reply]) -> None:
    guest, answer = line
    guest.sendall(READY + b"127 no such file")
    assert answer.refusal() is None
    guest.close()
    assert answer.said() == GuestReport(refused=127, why="no such file")


def test_a_report_right_behind_ready_is_kept(line: tuple[socket.socket, Reply]) -> None:
    guest, answer = line
    guest.sendall(READY + INPUTS + b"one\n")
    assert answer.refusal() is None
    guest.close()
    assert answer.said() == GuestReport(inputs=b"one\n")


def test_a_refusal_in_place_of_ready_is_read_to_its_end_byte_by_byte(line: tuple[socket.socket, Reply]) -> None:
    guest, answer = line

    def slowly() -> None:
        for byte in b"125 Read-only file system":
            guest.sendall(bytes([byte]))
        guest.close()

    thread = threading.Thread(target=slowly)
    thread.start()
    assert answer.refusal() == "Read-only file system"
    thread.join()


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), ValueError("Ready"), EOFError("")])
def test_no_reason_of_the_confinement_can_be_taken_for_ready(
    error: Exception, line: tuple[socket.socket, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, answer = line

    class Ended(BaseException):
        pass

    def end(_: int) -> None:
        raise Ended

    monkeypatch.setattr("os.write", lambda _, data: guest.sendall(data))
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(Ended):
        guest_setup._refuse(error)
    monkeypatch.undo()
    guest.close()
    assert answer.refusal() not in (None, "")


def test_a_guest_that_says_nothing_is_not_ready(line: tuple[socket.socket, Reply]) -> None:
    guest, answer = line
    guest.close()
    assert answer.refusal() == "it ended before it was ready"
