"""A worker of the daemon: a process that has loaded the program and forked its keeper, and performs one command line.

To the program it is as if it had been started by the client: with its arguments, streams, environment, directory and mask. Signals that the
client gets, the daemon sends to the worker. The worker ends with the daemon.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import socket
import sys
from typing import NoReturn

from agent_sandbox.cli.errand import TAKEN, stamp
from agent_sandbox.cli.main import main
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.process import zygote

# What the common verbs load, and what a keeper does: loaded by the daemon once, so that every worker has it.
_AHEAD = """
    cli.execute cli.commands.run cli.commands.code cli.commands.status cli.commands.diff engine.work engine.provisions
    kernel.keeper kernel.init kernel.guest_setup kernel.mount_steps kernel.seccomp kernel.cgroups kernel.usage runtime.guest.native
    runtime.process.runtime runtime.process.guest_handle workspace.stored_sandbox ledger.writer engine.stored_run workspace.dot_files
    workspace.secret_search policy.secret_content kernel.elf
"""
_REQUEST_SECONDS = 10.0  # for a client to say what it wants


def load_ahead() -> None:
    """Load what most command lines need. Whatever else one needs, its worker loads."""
    for name in _AHEAD.split():
        importlib.import_module(f"agent_sandbox.{name}")
    seccomp = importlib.import_module("agent_sandbox.kernel.seccomp")
    seccomp.compile_filter(processes=True, execute=True, system=False)
    gc.collect()
    gc.freeze()  # so that the collector of a worker does not touch, and so copy, what it shares with the daemon


def serve_one(link: socket.socket, daemon: int) -> NoReturn:
    """Wait for a client, perform its command line, and exit as it does. `link` leads to the daemon."""
    code = 125
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != daemon:  # it has ended meanwhile
            os._exit(0)
        os.setsid()  # the terminal of the daemon is not the client's
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        wire.close_others((link.fileno(),))
        zygote.keep_ready()
        (descriptor,) = wire.receive_descriptors(link, 1)[1] or (-1,)
        if descriptor < 0:  # the daemon stops, or needs fewer
            os._exit(0)
        with socket.socket(fileno=descriptor) as client:
            client.settimeout(_REQUEST_SECONDS)
            (installed, line, environment, mask), descriptors = wire.receive(client)
            if installed != stamp():  # it is of another version: it performs this itself
                os._exit(0)
            _become(descriptors, line, environment, mask)
            client.send(TAKEN)
        link.send(TAKEN)
        link.close()
        code = main()
    finally:
        os._exit(code)


def _become(descriptors: list[int], line: list[bytes], environment: list[tuple[bytes, bytes]], mask: int) -> None:
    """Take the place of the client."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.fchdir(descriptors[3])
    wire.close_all(descriptors)
    os.umask(mask)
    for name in set(os.environb):
        del os.environb[name]
    os.environb.update(environment)
    sys.argv[1:] = [os.fsdecode(word) for word in line]
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))


def _stream(number: int) -> io.TextIOWrapper:
    """A standard stream, as the interpreter opens it where it is no terminal."""
    raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace" if number == 2 else "surrogateescape", line_buffering=number == 2)
