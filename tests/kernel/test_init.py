"""Init's account of the end of a run."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from agent_sandbox.kernel import init
from agent_sandbox.kernel.wire import FAREWELL, NOT_COUNTED


def test_the_status_in_a_farewell_counts_even_if_the_end_of_the_process_is_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that hosts a program ends with 0, whatever the program inside ended with."""
    monkeypatch.setattr(init, "_end_everything", lambda guest, *, wait: signal.SIGKILL)  # there is no pid namespace here: it would be real
    reader, writer = os.pipe()
    host = os.fork()
    if host == 0:
        os.write(writer, FAREWELL.pack(5 << 8, 0.0, 0, NOT_COUNTED, 0))
        os._exit(0)
    os.close(writer)
    os.waitid(os.P_PID, host, os.WEXITED | os.WNOWAIT)  # its end is there to be noticed
    limits = {"cpu_seconds": None, "memory_bytes": None, "processes": None, "enforced": (), "sized": False, "in_memory": False}
    request = {"readable": False, "agent": False, "tmp": str(tmp_path), **limits}
    layers = os.open(tmp_path, os.O_RDONLY)
    never, other = os.pipe()
    control, supervisor = socket.socketpair()
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        with control, supervisor:
            report = init._watch(init.Watch(request, layers, (), reader), init.Family(host), control, never, never)
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.set_wakeup_fd(-1)
        for fd in (layers, never, other):
            os.close(fd)
    assert (report["status"], report["reason"], report["reported"]) == (5 << 8, "exited", True)
