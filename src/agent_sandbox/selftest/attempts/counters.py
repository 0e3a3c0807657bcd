"""Attempts to take what only the whole machine bounds: socket buffers, asynchronous requests, filters, huge pages.

Only the socket buffers are really taken. The system calls have arguments that no kernel accepts, and the answer tells who refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import time

from agent_sandbox.selftest.attempts import Deeds, later

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_NO_ADDRESS = 1  # of no memory
_PRIVATE_HUGE = 0x40022  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB
_SOL_SOCKET, _SO_ATTACH_FILTER, _SECCOMP_SET_MODE_FILTER = 1, 26, 1


def fill_sockets(megabytes: int, pairs: int, seconds: float) -> Deeds:
    """Return a way to leave this much unread in connections to itself, and then to go on for some seconds."""
    return {"loopback": lambda: _fill_sockets(megabytes << 20, pairs, seconds)}


def take_shared(numbers: dict[str, int]) -> Deeds:
    """Return ways to get asynchronous requests, filters of calls and packets, and huge pages, given the numbers of the system calls."""
    return {
        "asynchronous requests": later(_ask, errno.ENOSYS, numbers["io_setup"], 1, _NO_ADDRESS),
        "a filter of calls": later(_ask, errno.EINVAL, numbers["seccomp"], _SECCOMP_SET_MODE_FILTER, 0, _NO_ADDRESS),
        "a filter of packets": later(_ask, errno.EPERM, numbers["setsockopt"], -1, _SOL_SOCKET, _SO_ATTACH_FILTER, 0, 0),
        "huge pages": later(_ask, errno.EPERM, numbers["mmap"], 0, 0, 0, _PRIVATE_HUGE, -1, 0),
    }


def _fill_sockets(most: int, pairs: int, seconds: float) -> str:
    kept: list[socket.socket] = []
    total = 0
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        while total <= most and len(kept) < 2 * pairs:
            here = socket.create_connection(listener.getsockname())
            kept += [here, listener.accept()[0]]
            here.setblocking(False)
            try:
                while total <= most:
                    total += here.send(bytes(65536))
            except BlockingIOError:
                pass
    if total <= most:
        raise OSError(errno.ENOBUFS, f"only {total >> 20} MiB")
    time.sleep(seconds)
    return f"{total >> 20} MiB"


def _ask(refusal: int, number: int, *words: int) -> str:
    """Make a system call that no kernel carries out. Raises OSError if its answer is the one that the filter gives."""
    if _LIBC.syscall(*(ctypes.c_long(word) for word in (number, *words))) != -1:
        return "the kernel did it"
    answer = ctypes.get_errno()
    if answer == refusal:
        raise OSError(answer, os.strerror(answer))
    return f"the kernel answered {errno.errorcode.get(answer, answer)}"
