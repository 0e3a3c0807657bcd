"""A child that is killed at the n-th system call it makes, or some time after it began.

Not strace: to start it for each of many hundreds of calls takes longer than everything else. The child is a fork of the test, so all it
needs is loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable
from functools import cache

from agent_sandbox.kernel import seccomp, syscall_rules, syscalls

_TRACEME, _CONTINUE, _SYSCALL, _SETOPTIONS = 0, 7, 24, 0x4200
_KILL_WITH_TRACER, _MARK_CALLS, _TELL_OF_FILTER = 1 << 20, 1, 0x80
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
FINISHED = -1
# What changes nothing on a disk: killed at one of these, a program leaves the same as killed at the next one that does.
SILENT = (
    *(
        "read",
        "pread64",
        "close",
        "fstat",
        "newfstatat",
        "statx",
        "lseek",
        "openat2",
        "getdents64",
        "readlink",
        "readlinkat",
        "fcntl",
        "flock",
    ),
    *(
        "getxattr",
        "lgetxattr",
        "fgetxattr",
        "listxattr",
        "llistxattr",
        "flistxattr",
        "access",
        "faccessat",
        "faccessat2",
        "statfs",
        "fstatfs",
    ),
    *(
        "mmap",
        "munmap",
        "mremap",
        "mprotect",
        "madvise",
        "brk",
        "futex",
        "getrandom",
        "clock_gettime",
        "prlimit64",
        "getcwd",
        "dup",
        "uname",
    ),
    *("getpid", "getppid", "gettid", "getuid", "geteuid", "getgid", "getegid", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn"),
)


def killed_at_call(body: Callable[[], object], nth: int, *, silent: bool = False) -> int:
    """Run `body` in a child that dies when it enters its n-th call, before the kernel carries that out. Returns n, or `FINISHED`.

    Only calls that may change something on a disk are counted; with `silent`, all, which takes many times as long.
    """
    child = os.fork()
    if child == 0:
        try:
            _ptrace(_TRACEME, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            if not silent:
                syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
                seccomp.install(_telling())
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, _KILL_WITH_TRACER | (_MARK_CALLS if silent else _TELL_OF_FILTER))
    stops = 0
    while True:
        _ptrace(_SYSCALL if silent else _CONTINUE, child, 0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "see the traceback of the child above"
            return FINISHED
        stops += 1
        if stops == (2 * nth - 1 if silent else nth):  # without the filter each call stops twice: on the way in and on the way out
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return nth


@cache
def _telling() -> seccomp.Program:
    """A filter that tells the tracer of every call but the silent ones, and those that open a file without making or emptying it."""
    numbers = syscall_rules.numbers(syscalls.MACHINE)
    silent = [numbers[name] for name in SILENT if name in numbers]
    code = [(0x20, 0, 0, 0)]  # load the number of the call
    code += [(0x15, len(silent) - at + 3, 0, number) for at, number in enumerate(silent)]  # silent: to the last line
    code += [
        (0x15, 0, 2, numbers["openat"]),  # anything else: two lines on
        (0x20, 0, 0, 16 + 2 * 8),  # load its flags
        (0x45, 0, 1, os.O_CREAT | os.O_TRUNC),  # neither of them: to the last line
        (0x06, 0, 0, _TRACE),
        (0x06, 0, 0, _ALLOW),
    ]
    return seccomp.Program(syscalls.MACHINE, (), b"".join(struct.pack("=HBBI", *line) for line in code))


def killed_after(body: Callable[[], object], seconds: float) -> bool:
    """Run `body` in a child that is killed after some time. Whether it was still at it."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "see the traceback of the child above"
    return os.waitstatus_to_exitcode(status) != 0


def _ptrace(request: int, pid: int, data: int) -> None:
    syscalls.check(syscalls.libc.ptrace(request, pid, None, ctypes.c_void_p(data)), "ptrace")
