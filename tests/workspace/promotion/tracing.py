"""A child that is killed at the n-th system call it makes, or some time after it began.

Not strace: to start it for each of many hundreds of calls takes longer than everything else. The child is a fork of the test, so all it
needs is loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable

from agent_sandbox.kernel import syscalls

_TRACEME, _KILL_WITH_TRACER, _SYSCALL, _SETOPTIONS = 0, 1 << 20, 24, 0x4200
_MARK_CALLS = 1
FINISHED = -1


def killed_at_call(body: Callable[[], object], nth: int) -> int:
    """Run `body` in a child that dies when it enters its n-th call, before the kernel carries that out. Returns n, or `FINISHED`."""
    child = os.fork()
    if child == 0:
        try:
            _ptrace(_TRACEME, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, _KILL_WITH_TRACER | _MARK_CALLS)
    stops = 0
    while True:
        _ptrace(_SYSCALL, child, 0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "see the traceback of the child above"
            return FINISHED
        stops += 1
        if stops == 2 * nth - 1:  # each call stops twice: on the way in and on the way out
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return nth


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
