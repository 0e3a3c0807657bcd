"""The first program inside the user-space kernel: forks the guest's program, forwards signals to it, and reports its end.

It is given two sockets of the machine. On the first the guest's program arrives; the fork waits there before anybody needs it. From the
second come the numbers of signals, and the report of the end goes there. This program has no privilege that the guest's program lacks.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import socket
import sys

from agent_sandbox.kernel import seccomp
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.wire import FAREWELL, FAREWELL_FD, NOT_COUNTED, PAYLOAD_FD, READY
from agent_sandbox.runtime.guest import entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Fork the guest's program, and stay until it has ended."""
    _, kind, executable, prefix, packages, code, *preload = sys.argv[1:]
    del sys.path[0]
    if kind == "python":
        _find_packages(executable, prefix, packages)
    for name in preload:
        importlib.import_module(name)
    child = os.fork()
    if child == 0:
        _become_guest(bytes.fromhex(code), python=kind == "python")
    try:
        _stay(child)
    finally:
        os._exit(125)


def _find_packages(executable: str, prefix: str, packages: str) -> None:
    """Give this interpreter the packages and the name of the one that our host runs on."""
    sys.executable, sys.prefix, sys.exec_prefix = executable, prefix, prefix
    import site  # not before: it looks at these

    site.main()
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)


def _become_guest(code: bytes, *, python: bool) -> NoReturn:
    os.setsid()
    os.close(FAREWELL_FD)
    os.set_inheritable(PAYLOAD_FD, False)
    payload = socket.socket(fileno=PAYLOAD_FD)
    try:
        seccomp.install_code(code)  # which it has in every runtime
    except OSError as error:
        payload.sendall(f"125 the system call filter inside: {error.strerror}".encode())
        os._exit(125)
    entry.run(payload, python, lambda: payload.sendall(READY))


def _stay(child: int) -> None:
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # the guest has the same user, and must not reach the pipe through /proc
    os.closerange(0, FAREWELL_FD)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poller = select.poll()
    for fd in (woken, FAREWELL_FD):
        poller.register(fd, select.POLLIN)
    while (status := _reaped(child)) is None:
        ready = dict(poller.poll())
        if woken in ready:
            os.read(woken, 4096)
        if FAREWELL_FD in ready:
            for number in os.read(FAREWELL_FD, 64):
                _forward(child, number)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.write(FAREWELL_FD, FAREWELL.pack(status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, NOT_COUNTED, 0))
    signal.pause()  # init ends everything


def _reaped(child: int) -> int | None:
    """Reap all processes that have ended. Return the status of the guest's program, if it is one of them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def _forward(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except OSError:
        return
