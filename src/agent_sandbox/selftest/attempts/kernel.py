"""Attempts on the kernel itself: system calls, namespaces, other processes' memory, terminals, settings.

System calls that must not reach the kernel are made with arguments that no kernel accepts. The seccomp filter answers EPERM or ENOSYS; any
other answer comes from the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from agent_sandbox.selftest.attempts import Deeds, content, later

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_PTRACE_SEIZE = 0x4206
_PR_SET_NAME = 15
_IPC_CREAT = 0o1000


def call_badly(numbers: dict[str, int]) -> Deeds:
    """Return ways to make each system call with -1 for every argument."""
    return {name: later(_answered, number) for name, number in numbers.items()}


def unshare(number: int, kinds: dict[str, int]) -> Deeds:
    """Return ways to make a namespace of each kind."""
    return {kind: later(_call, number, flag) for kind, flag in kinds.items()}


def own_namespaces(theirs: dict[str, str]) -> Deeds:
    """Return ways to find a namespace that this process shares with the self-test. `theirs` are the namespaces of the self-test."""
    return {kind: later(_shared, kind, identity) for kind, identity in theirs.items()}


def meddle(pid: int, address: int, numbers: dict[str, int]) -> Deeds:
    """Return ways to trace a process of the machine, to read its memory and environment, and to take a descriptor from it."""
    return {
        "ptrace": lambda: _call(numbers["ptrace"], _PTRACE_SEIZE, pid, 0, 0),
        "process_vm_readv": lambda: _read_memory(numbers["process_vm_readv"], pid, address),
        "/proc/PID/mem": lambda: _read_at(f"/proc/{pid}/mem", address),
        "/proc/PID/environ": lambda: content(f"/proc/{pid}/environ"),
        "pidfd_getfd": lambda: _call(numbers["pidfd_getfd"], os.pidfd_open(pid), 0, 0),
    }


def type_into_terminal(requests: dict[str, int]) -> Deeds:
    """Return ways to push a key into the terminal of this process, as if somebody had typed it."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # which makes it the terminal of this session
    return {name: later(_typed, request) for name, request in requests.items()}


def open_settings(paths: list[str]) -> Deeds:
    """Return ways to open settings of the kernel for writing, without writing."""
    return {path: later(_open_for_writing, path) for path in paths}


def take_name(name: str) -> Deeds:
    """Return a way to set the name of this process, by which the self-test finds the process from outside."""
    return {"name": lambda: _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)}


def leave_segment(number: int, key: int) -> Deeds:
    """Return a way to make a segment of System V shared memory with this key."""
    return {"System V": lambda: _call(number, key, 4096, _IPC_CREAT | 0o600)}


def find_segment(number: int, key: int) -> Deeds:
    """Return a way to find the System V segment with this key."""
    return {"System V": lambda: _call(number, key, 0, 0)}


def remove_segment(find: int, control: int, key: int) -> Deeds:
    """Return a way to remove the System V segment with this key."""
    return {"System V": lambda: _call(control, _call(find, key, 0, 0), 0, 0)}


def _call(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _answered(number: int) -> str:
    try:
        _call(number, *[-1] * 6)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise
        return f"the kernel answered {errno.errorcode.get(error.errno or 0, error.errno)}"
    return "the kernel did it"


def _shared(kind: str, identity: str) -> str:
    own = os.readlink(f"/proc/self/ns/{kind}")
    if own != identity:
        raise OSError(errno.EXDEV, "its own")
    return f"{own}, as its caller"


def _read_memory(number: int, pid: int, address: int) -> str:
    buffer = ctypes.create_string_buffer(256)
    local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 256)
    remote = (ctypes.c_void_p * 2)(address, 256)
    _call(number, pid, local, 1, remote, 1, 0)
    return buffer.raw.decode(errors="replace")


def _read_at(path: str, address: int) -> str:
    with open(path, "rb", buffering=0) as file:
        file.seek(address)
        return (file.read(256) or b"").decode(errors="replace")


def _typed(request: int) -> str:
    try:
        fcntl.ioctl(0, request, b"\xff")
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
        return f"the kernel answered {errno.errorcode.get(error.errno or 0, error.errno)}"
    return "typed"


def _open_for_writing(path: str) -> str:
    os.close(os.open(path, os.O_WRONLY))
    return "open for writing"
