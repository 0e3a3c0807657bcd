"""A command that goes on in the background after its result was printed.

Somebody waits for its exit code: the first process of the command, which has forked, or the daemon, if a worker performs the command line.
Once the code is told, this process goes on without the caller's streams. What the daemon waits for, it owns from then on: it ends with the
daemon.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import forks
from agent_sandbox.kernel import syscalls as sc

HELD = b"h"  # then the exit code, a byte: this process goes on
OWNED = b"o"  # with a descriptor: a process that was started, and that goes on
_FAILED = 125


class _Waiting:
    """The process that waits for our exit code. A process performs one command line, so there is one."""

    link: socket.socket | None = None
    daemon = False


def serve_daemon(link: socket.socket) -> None:
    """Note that the daemon waits for this process, and that `link` leads to it. For a worker."""
    _Waiting.link, _Waiting.daemon = link, True


def owner() -> int | None:
    """Return a descriptor of the daemon that owns what this process starts; None if there is none. The caller closes it."""
    if not _Waiting.daemon:
        return None
    parent = os.getppid()
    process = os.pidfd_open(parent)
    if os.getppid() != parent:  # it was killed just now, and so are we
        os._exit(_FAILED)
    return process


def entrust(child: int) -> None:
    """Let the daemon own a child of this process that goes on. Does nothing without a daemon."""
    if _Waiting.daemon and _Waiting.link is not None:
        process = os.pidfd_open(child)
        with suppress(OSError):
            socket.send_fds(_Waiting.link, [OWNED], [process])
        os.close(process)


def follow(process: int) -> None:
    """End this process as soon as another one has ended. `process` is its descriptor. The keepers then end what this one holds."""

    def watch() -> None:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        poller.poll()
        os._exit(_FAILED)

    threading.Thread(target=watch, name="agent-sandbox-owner", daemon=True).start()


def fork_away() -> None:
    """Go on in a process and a session of its own, unless the daemon waits for this process. The caller must have one thread.

    The first process waits for the exit code, and exits with it. If it is killed before that, so is the second one.
    """
    if _Waiting.daemon:
        return
    ours, theirs = socket.socketpair()
    first = os.getpid()
    mask = forks.hold_signals()
    pid = os.fork()
    forks.release_signals(mask)
    if pid:
        theirs.close()
        os._exit(_code_of(pid, ours))
    ours.close()
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != first:
        os._exit(_FAILED)
    os.setsid()
    _Waiting.link = theirs


def _code_of(pid: int, link: socket.socket) -> int:
    """Wait until the second process has told its exit code, or has ended. A signal ends it."""

    def pass_on(number: int, frame: object) -> None:
        os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    told = b""
    while len(told) < 2 and (part := link.recv(2)):
        told += part
    if len(told) == 2:
        return told[1]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def leave(code: int, log: int) -> None:
    """Tell the exit code, and go on without the caller: its streams, its directory. Complaints go to the descriptor `log`.

    Raises `SandboxError` if nobody waits any more: then nobody knows that this goes on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard, replacement in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(replacement, standard)
    os.close(nothing)
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    try:
        assert _Waiting.link is not None
        if not _Waiting.daemon:
            sc.prctl(sc.PR_SET_PDEATHSIG, 0)
        _Waiting.link.sendall(HELD + bytes([code]))
    except OSError as error:
        raise SandboxError("the command that started this was ended", hint="start it again") from error
