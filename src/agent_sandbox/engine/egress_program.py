"""Start the egress program. Apart from its zygote, so that the command line can start it before it loads anything else."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.process.zygote import argv_for, packages

if TYPE_CHECKING:
    import socket

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
_PROGRAM = "agent_sandbox.egress.process"


@dataclass(frozen=True)
class EgressProgram:
    """An egress program that loads: its pid, and the socket for orders to it. It ends when the socket is closed."""

    pid: int
    control: socket.socket


def start_program(*, once: bool = False) -> EgressProgram:
    """Start our interpreter with the egress program, with a fixed environment. Set `once` for a single run. Raises OSError."""
    control, theirs = wire.message_pair()
    me = wire.above_streams(os.pidfd_open(os.getpid()))
    try:
        passed = (theirs.fileno(), me)
        kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in passed]  # each onto itself, so that exec does not close it
        nothing = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
        argv = argv_for(_PROGRAM, *map(str, passed), packages(), *(["once"] if once else []))
        return EgressProgram(os.posix_spawn(sys.executable, argv, _ENVIRONMENT, file_actions=[*kept, *nothing], setsid=True), control)
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
        os.close(me)
