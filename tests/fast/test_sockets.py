"""Our sockets are those of the interpreter, under the names of `socket`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import ast
import inspect
import os
import re
import socket
from collections.abc import Iterator
from typing import Any, TypeGuard

import pytest

from agent_sandbox._fast import sockets as untyped
from agent_sandbox.kernel import wire
from tests.architecture.sources import Module, modules

sockets: Any = untyped  # type checkers are told that it is `socket`


def test_every_constant_is_that_of_the_real_module() -> None:
    ours = {name: value for name, value in vars(sockets).items() if name.isupper() and name in vars(_socket) and isinstance(value, int)}
    assert len(ours) > 100
    assert {name: value for name, value in ours.items() if getattr(socket, name) != value} == {}


STAND_INS = {"socket": sockets, "signal": _signal}
# What the interpreter's own sockets lack.
LACKING = frozenset(dir(socket.socket)) - frozenset(dir(sockets.socket))


def users(name: str) -> Iterator[Module]:
    """Return the modules that import a stand-in under the name of the real module."""
    for module in modules():
        if re.search(rf"^    (from agent_sandbox._fast import sockets|import _signal) as {name}\b", module.text, re.MULTILINE):
            yield module


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_has_every_name_that_is_used_of_it(name: str) -> None:
    used = {node.attr for module in users(name) for node in ast.walk(module.tree) if is_attribute_of(node, name)}
    annotations = {"AddressFamily"}
    assert len(used) > 10
    assert {each for each in used - annotations if not hasattr(STAND_INS[name], each)} == set()


def is_attribute_of(node: ast.AST, name: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def test_no_user_of_our_sockets_calls_what_they_lack() -> None:
    called = {
        f"{module.name}:{node.lineno} {node.func.attr}"
        for module in modules()
        if re.search(r"^    import socket$", module.text, re.MULTILINE)  # for type checkers only: it may be given one of ours
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LACKING
        if not is_attribute_of(node.func, "os")
    }
    assert {"accept", "makefile", "dup"} <= LACKING
    assert called == set()


def test_descriptors_are_sent_by_a_function_of_the_same_form() -> None:
    ours, real = (list(inspect.signature(module.send_fds).parameters) for module in (sockets, socket))
    assert ours == real


def test_a_socket_is_closed_at_the_end_of_its_block_and_not_inherited() -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
        number = sock.fileno()
        assert not os.get_inheritable(number)
    assert sock.fileno() == -1
    with pytest.raises(OSError):
        os.fstat(number)


def test_descriptors_are_sent_with_a_value_and_not_inherited() -> None:
    ours, theirs = sockets.socketpair()
    reader, writer = os.pipe()
    try:
        assert sockets.send_fds(ours, [b"one"], [reader, writer]) == 3
        data, received = wire.receive_descriptors(theirs, 16)
        assert (data, len(received)) == (b"one", 2)
        assert not any(map(os.get_inheritable, received))
        os.write(received[1], b"through")
        assert os.read(reader, 16) == b"through"
        wire.close_all(received)
    finally:
        wire.close_all([reader, writer])
        ours.close()
        theirs.close()
