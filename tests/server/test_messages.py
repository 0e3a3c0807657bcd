"""Messages between a command and a holder: whole or refused, and only from the user's own processes outside of sandboxes."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.server import messages
from agent_sandbox.server.messages import LARGEST, BrokenMessage


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_message_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    message = {"do": "run", "name": "\udcff", "data": messages.packed(bytes(range(256)))}
    messages.send(pair[0], message)
    received = messages.receive(pair[1])
    assert received == message and messages.unpacked(received["data"]) == bytes(range(256))
    pair[0].close()
    assert messages.receive(pair[1]) is None, "closed between two messages"


@pytest.mark.parametrize(
    "sent",
    (b"\0\0", struct.pack("!I", 9) + b"{}", struct.pack("!I", 2) + b"[]", struct.pack("!I", 2) + b"{]", struct.pack("!I", LARGEST + 1)),
)
def test_what_is_no_message_is_refused(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(BrokenMessage):
        messages.receive(pair[1])


@pytest.mark.parametrize(
    "error",
    (
        SandboxError("why", hint="do"),
        PolicyError("why", hint="do"),
        LaunchFailed("why", hint="do"),
        RuntimeUnavailable("why", missing=("x",), hint="do"),
    ),
)
def test_an_error_crosses_with_its_kind_and_hint(error: SandboxError) -> None:
    with pytest.raises(type(error)) as raised:
        messages.raise_failure(messages.failure(error)["failed"])
    assert vars(raised.value) == vars(error)


@contextmanager
def connected_by(become: Callable[[], None]) -> Iterator[socket.socket]:
    """Yield a connection from a child of ours that has become somebody else. It ends with the block."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name of the kernel's choice, which everybody can reach
        listener.listen()
        child = os.fork()
        if child == 0:
            try:
                become()
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(listener.getsockname())
                    link.recv(1)
            finally:
                os._exit(0)
        try:
            with listener.accept()[0] as link:
                yield link
        finally:
            os.waitpid(child, 0)


def become_process_of_a_sandbox() -> None:
    sc.unshare(sc.CLONE_NEWPID | (0 if os.geteuid() == 0 else sc.CLONE_NEWUSER))
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)


def test_only_a_process_of_the_user_outside_of_a_sandbox_is_served() -> None:
    with connected_by(lambda: None) as link:
        messages.check_peer(link)  # the control
    with connected_by(become_process_of_a_sandbox) as link, pytest.raises(OSError):
        messages.check_peer(link)


@pytest.mark.needs_root
def test_a_process_of_another_user_is_not_served() -> None:
    with connected_by(lambda: os.setresuid(65534, 65534, 65534)) as link, pytest.raises(PermissionError, match="user 65534 may not"):
        messages.check_peer(link)
