"""The network of a machine: connections arrive whole, and a hostile machine gets no further than the doors, and no memory."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from agent_sandbox.kernel import wire
from agent_sandbox.runtime.microvm import frames, streams
from agent_sandbox.runtime.microvm.door_relay import MOST_QUERIES, DoorRelay
from agent_sandbox.runtime.microvm.frames import Garbled
from agent_sandbox.runtime.microvm.streams import MOST, WINDOW, Streams
from tests.patience import until
from tests.runtime.microvm.test_frames import served

HERE = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])


@pytest.fixture
def door() -> Iterator[socket.socket]:
    """A listener that stands for a door. What connects to it waits."""
    with socket.create_server(("127.0.0.1", 0), backlog=MOST) as listener:
        yield listener


class TypedMachine:
    """The machine's side of a relay, typed by hand."""

    def __init__(self, door: socket.socket) -> None:
        self.port = door.getsockname()[1]
        self.heard: list[tuple[bytes, bytes]] = []
        self.relay = DoorRelay((self.port,), lambda kind, content: self.heard.append((kind, content)))

    def dial(self, number: int, port: int = 0, address: bytes = HERE) -> None:
        self.relay.obey(frames.DIAL, frames.DIALLED.pack(number, address, port or self.port))

    def tell(self, kind: bytes, number: int, content: bytes = b"") -> None:
        self.relay.obey(kind, frames.NUMBER.pack(number) + content)

    def turn(self) -> None:
        """Let the relay do what it can do now."""
        poller = select.poll()
        for fd, events in self.relay.wanted().items():
            poller.register(fd, events)
        self.relay.serve(dict(poller.poll(0)), lambda: True)

    def close(self) -> None:
        """Close what is left, as the end of the driver does."""
        for sock in (*(each.socket for each in self.relay._streams._open.values()), *self.relay._queries.values()):
            sock.close()

    def hears(self, kind: bytes, content: bytes) -> bool:
        def heard() -> bool:
            self.turn()
            return (kind, content) in self.heard

        return until(heard)


@pytest.fixture
def machine(door: socket.socket) -> Iterator[TypedMachine]:
    made = TypedMachine(door)
    yield made
    made.close()


def test_a_connection_to_a_door_is_passed_both_ways_and_each_end_is_told_of_the_others(door: socket.socket, machine: TypedMachine) -> None:
    machine.dial(7)
    machine.tell(frames.BYTES, 7, b"question")
    machine.tell(frames.BYTES_END, 7)
    inside, _ = door.accept()
    with inside:
        assert machine.hears(frames.PASSED, frames.NUMBER_PASSED.pack(7, 8))
        assert inside.makefile("rb").read() == b"question", "the door must see the end, too"
        inside.sendall(b"answer")
    assert machine.hears(frames.BYTES, frames.NUMBER.pack(7) + b"answer")
    assert machine.hears(frames.BYTES_END, frames.NUMBER.pack(7))
    assert machine.relay.wanted() == {}, "nothing of it is left"


def test_a_door_that_is_closed_cuts_the_connection(door: socket.socket, machine: TypedMachine) -> None:
    door.close()
    machine.dial(1)
    assert machine.hears(frames.CUT, frames.NUMBER.pack(1))


def after_a_dial(*told: tuple[bytes, bytes]) -> Callable[[TypedMachine], None]:
    def act(machine: TypedMachine) -> None:
        machine.dial(1)
        for kind, content in told:
            machine.tell(kind, 1, content)

    return act


def dials(*numbers: int) -> Callable[[TypedMachine], None]:
    def act(machine: TypedMachine) -> None:
        for number in numbers:
            machine.dial(number)

    return act


HOSTILE: dict[str, Callable[[TypedMachine], object]] = {
    "a port that is no door": lambda machine: machine.dial(1, port=1),
    "a number twice": dials(2, 2),
    "a number that goes back": dials(2, 1),
    "a connection that nobody opened": lambda machine: machine.tell(frames.BYTES, 3, b"x"),
    "more bytes than the window holds": after_a_dial(*[(frames.BYTES, bytes(32768))] * 1000),
    "bytes after the end": after_a_dial((frames.BYTES_END, b""), (frames.BYTES, b"more")),
    "an account of bytes that were never sent": after_a_dial((frames.PASSED, b"\xff\xff\xff\xff")),
    "an account that is too short": after_a_dial((frames.PASSED, b"\0")),
    "a frame without a number": lambda machine: machine.relay.obey(frames.BYTES, b""),
    "a connection that is too short": lambda machine: machine.relay.obey(frames.DIAL, b"\0" * 3),
    "a query without content": lambda machine: machine.relay.obey(frames.QUERY, frames.ASKED.pack(1, HERE)),
    "a query that is too long": lambda machine: machine.relay.obey(frames.QUERY, frames.ASKED.pack(1, HERE) + bytes(5000)),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_an_honest_machine_never_sends_is_refused(machine: TypedMachine, hostile: str) -> None:
    with pytest.raises(Garbled):
        HOSTILE[hostile](machine)


def test_a_machine_has_so_many_connections_and_queries_and_no_more(machine: TypedMachine) -> None:
    for number in range(1, MOST + 100):
        machine.dial(number)
    assert machine.heard == [(frames.CUT, frames.NUMBER.pack(number)) for number in range(MOST + 1, MOST + 100)]
    assert len(machine.relay.wanted()) == MOST
    for number in range(10 * MOST_QUERIES):
        machine.relay.obey(frames.QUERY, frames.ASKED.pack(number, HERE) + b"query")
    assert len(machine.relay.wanted()) <= MOST + MOST_QUERIES
    machine.tell(frames.CUT, 1)
    machine.dial(10_000)
    assert len(machine.heard) == 99, "one has gone, so another may come"


def test_a_machine_that_asks_and_takes_no_answers_is_ended_as_garbled(door: socket.socket) -> None:
    """A refused connection is answered. The driver keeps few answers, however many are not taken."""
    port = door.getsockname()[1]

    def machine(link: socket.socket) -> None:
        number = 0
        try:
            while True:
                batch = b"".join(frames.frame(frames.DIAL, frames.DIALLED.pack(number + each, HERE, port)) for each in range(1, 500))
                number += 499
                link.sendall(batch)
        except OSError:
            return

    farewell, _, _, err = served(machine, (port,))
    assert farewell is not None and farewell[0] == signal.SIGKILL and farewell[4] == wire.GARBLED_HIT
    assert b"takes no answers" in err


def test_a_machine_without_a_network_is_ended_for_a_connection() -> None:
    def machine(link: socket.socket) -> None:
        link.sendall(frames.frame(frames.DIAL, frames.DIALLED.pack(1, HERE, 80)))
        link.recv(1)

    farewell, *_ = served(machine)
    assert farewell is not None and farewell[4] == wire.GARBLED_HIT


def test_what_the_program_sent_last_reaches_the_door_before_the_end_is_reported(door: socket.socket) -> None:
    port = door.getsockname()[1]
    sent = frames.frame(frames.DIAL, frames.DIALLED.pack(1, HERE, port)) + frames.frame(frames.BYTES, frames.NUMBER.pack(1) + b"last words")
    end = frames.frame(frames.EXIT, frames.ENDED.pack(0, 0.0, 0, 0))

    def machine(link: socket.socket) -> None:
        link.sendall(sent + end)
        while link.recv(4096):  # QEMU does not end by itself
            continue

    farewell, *_ = served(machine, (port,))
    assert farewell is not None and farewell[0] == 0
    inside, _ = door.accept()
    with inside:
        assert inside.recv(100) == b"last words"


def test_any_amount_passes_two_sides_with_small_windows_unchanged() -> None:
    """Both sides as they are in the driver and in the agent, with a program that is quicker than its server, and the other way round."""
    content = os.urandom(5 * WINDOW + 17)
    near, far = Pipe(), Pipe()
    near.other, far.other = far, near
    threads = [threading.Thread(target=echo, args=(each.theirs, content)) for each in (near, far)]
    for thread in threads:
        thread.start()
    held = 0
    while near.streams or far.streams:
        for side in (near, far):
            side.turn()
            held = max(held, *(len(each.pending) for each in side.streams._open.values()), 0)
    for thread, side in zip(threads, (near, far), strict=True):
        thread.join()
        side.theirs.close()
    assert held <= WINDOW


class Pipe:
    """One side, with a program at its socket."""

    other: Pipe

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.arrived: list[tuple[bytes, bytes]] = []
        self.streams = Streams(lambda kind, content: self.other.arrived.append((kind, content)))
        self.streams.new_number(1)
        self.streams.add(1, ours)

    def turn(self) -> None:
        arrived, self.arrived = self.arrived, []
        for each in arrived:
            self.streams.obey(*each)
        poller = select.poll()
        for fd, events in self.streams.wanted().items():
            poller.register(fd, events)
        self.streams.serve(dict(poller.poll(10)))


def echo(sock: socket.socket, content: bytes) -> None:
    """Send the content, and read as much, which must be the same."""

    def send() -> None:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    got = b""
    while data := sock.recv(7777):
        got += data
    sender.join()
    assert got == content


def test_the_windows_of_all_connections_fit_into_the_drivers_memory() -> None:
    assert MOST * WINDOW <= 8 << 20 and streams.WINDOW <= frames.LONGEST
