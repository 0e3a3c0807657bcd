"""Confinement cannot be taken off, so each test of it happens in a child that ends with it."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest

from agent_sandbox.kernel import namespaces
from agent_sandbox.kernel import syscalls as sc

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


class ChildEnded(Exception):
    """The child ended without giving a value; `signal` is the one that killed it, or 0."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(f"signal {number}" if number else words)
        self.signal = number


def in_child(act: Callable[[], T]) -> T:
    """What `act` returns, done in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Some are meant to be killed, and a core dump of the test process would tell nothing.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.close(reader)
            os.write(writer, b"+" + pickle.dumps(act()))
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if not told.startswith(b"+") or status:
        raise ChildEnded(os.WTERMSIG(status), told.decode(errors="replace"))
    value: T = pickle.loads(told[1:])
    return value


def in_network_namespace(act: Callable[[], T]) -> T:
    """What `act` returns, done in a child with an empty network namespace. Skips where none can be made."""

    def live() -> tuple[T] | OSError:
        try:
            if os.geteuid() != 0:
                namespaces.enter_own_user_namespace()
            sc.unshare(sc.CLONE_NEWNET)
            namespaces.raise_loopback()
        except OSError as error:
            return error
        return (act(),)

    done = in_child(live)
    if isinstance(done, OSError):
        pytest.skip(f"this host lets nobody make a network namespace: {done}")
    return done[0]


def answer(number: int, *arguments: int) -> int:
    """Make a system call and return its errno, or 0. A call that makes a process makes one that ends at once."""
    ctypes.set_errno(0)
    words = [ctypes.c_ulong(argument & 0xFFFFFFFF_FFFFFFFF) for argument in (*arguments, *(0,) * (6 - len(arguments)))]
    parent = os.getpid()
    result = _libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        return ctypes.get_errno()
    if os.getpid() != parent:
        os._exit(0)
    return 0
