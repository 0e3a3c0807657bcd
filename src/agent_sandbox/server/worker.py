"""A worker of the daemon: a process that has loaded the program and forked its keeper, and performs one command line.

To the program it is as if it had been started by the client: with its arguments, streams, environment, directory and mask. Signals that the
client gets, the daemon sends to the worker. The worker ends with the daemon. A worker that performs `run --detach` goes on as the process
that holds the sandbox.

While it waits, a worker rehearses: it explains a run in the directory of the last one, for nobody. Then most of the memory that a run needs
is its own and not the daemon's, which would be copied page by page, and the interpreter has seen the code. Nothing is kept that the disk
could contradict.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import NoReturn

from agent_sandbox.cli.errand import ENDED, TAKEN, stamp
from agent_sandbox.cli.main import main
from agent_sandbox.engine.plan_launch import forget_looks
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.process import zygote
from agent_sandbox.server import background

# What the verbs that a worker performs load, and what a keeper does: loaded by the daemon once, so that every worker has it.
_AHEAD = """
    cli.execute cli.commands.run cli.commands.code cli.commands.status cli.commands.diff engine.work engine.provisions
    cli.commands.snapshots cli.commands.sandboxes cli.commands.log cli.commands.sim cli.commands.detached cli.detached_options
    cli.log_options cli.prune_options cli.render.json engine.simulation.run engine.observation
    kernel.keeper kernel.init kernel.guest_setup kernel.mount_steps kernel.seccomp kernel.cgroups kernel.usage runtime.guest.native
    runtime.process.runtime runtime.process.guest_handle workspace.stored_sandbox ledger.writer engine.stored_run workspace.dot_files
    workspace.secret_search workspace.layers.stack workspace.layers.change_list workspace.originals.capture workspace.sandbox_inventory
    workspace.layers.readback workspace.layers.renames workspace.layers.squash runtime.observe.observer policy.secret_content kernel.elf
    engine.egress engine.egress_program
"""
_ALSO = ("pwd", "encodings.ascii")
_REQUEST_SECONDS = 10.0  # for a client to say what it wants
# What the daemon sends: a client, as a descriptor; or a directory.
PERFORM, REHEARSE = b"c", b"r"
LONGEST_MESSAGE = 8192  # bytes: a path and some more
LARGEST_REQUEST = 32 << 20  # bytes: the kernel takes a command line and environment of 6 MiB, the HTTP interface 16
_EXPLAINED = ("run", "--explain", "--quiet", "--", "true")
_RUNNING = frozenset({"run", "code"})  # verbs after which others of them are to be expected in the same place


def load_ahead() -> None:
    """Load what most command lines need. Whatever else one needs, its worker loads."""
    for name in _AHEAD.split():
        importlib.import_module(f"agent_sandbox.{name}")
    for name in _ALSO:
        importlib.import_module(name)
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
        with socket.socket(fileno=_next_client(link)) as client:
            client.settimeout(_REQUEST_SECONDS)
            (installed, line, environment, mask), descriptors = wire.receive(client, LARGEST_REQUEST)
            if installed != stamp():  # it is of another version: it performs this itself
                os._exit(0)
            _become(descriptors, line, environment, mask)
            client.send(TAKEN)
        link.send(TAKEN)
        background.serve_daemon(link)
        directory = _directory_of_a_run()
        code = main()
        link.send(ENDED + bytes([code]) + directory)
    finally:
        os._exit(code)


def _directory_of_a_run() -> bytes:
    """Return the directory, if the command line runs something there; else nothing."""
    with suppress(OSError):  # it was removed
        return b"" if _RUNNING.isdisjoint(sys.argv) else os.getcwdb()
    return b""


def _next_client(link: socket.socket) -> int:
    """Wait for a client, and return its connection. Exit if there will be none."""
    while True:
        what, descriptors = wire.receive_descriptors(link, LONGEST_MESSAGE)
        if descriptors:
            return descriptors[0]
        if not what:  # the daemon stops, or needs fewer
            os._exit(0)
        rehearse(what.removeprefix(REHEARSE))


def rehearse(directory: bytes) -> None:
    """Explain a run in a directory, for nobody. Does nothing if that is impossible there."""
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        os.chdir(directory)
        main(_EXPLAINED)
    except OSError:  # it has gone
        pass
    finally:
        sys.stdout, sys.stderr = before
        forget_looks()
        os.chdir("/")  # so that nothing is kept from being unmounted


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
    time.tzset()  # the rehearsal has read the time zone of the daemon
    sys.argv[1:] = [os.fsdecode(word) for word in line]
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))


def _stream(number: int) -> io.TextIOWrapper:
    """A standard stream, as the interpreter opens it where it is no terminal."""
    raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace" if number == 2 else "surrogateescape", line_buffering=number == 2)
