"""The keeper looks after each run by itself: trouble with one is not the others' trouble."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from agent_sandbox.kernel import keeper
from agent_sandbox.kernel.guest_setup import Identity


def never(*_: object) -> NoReturn:
    raise AssertionError("nothing is started here")


def test_layers_that_are_gone_end_their_own_run_and_no_other(tmp_path: Path) -> None:
    """Nothing else could hold that run to its limit: what it writes now has no name any more."""
    (tmp_path / "kept").mkdir()
    link, far = socket.socketpair()
    with link, far, subprocess.Popen(["sleep", "60"]) as lost, subprocess.Popen(["sleep", "60"]) as other:
        pipes = [os.pipe() for _ in range(2)]
        server = keeper.Keeper(link, -1, Identity(False, ()), never)
        layers = (str(tmp_path / "gone"), str(tmp_path / "kept"))
        for number, (process, path, (_, tell)) in enumerate(zip((lost, other), layers, pipes, strict=True)):
            server._runs[number] = keeper._Run(process.pid, keeper._Watched(path, 1 << 30, tell, time.monotonic()))
        server._look_at_disks()
        try:
            assert lost.wait() == -9 and os.read(pipes[0][0], 8) == b"f"
            assert other.poll() is None
        finally:
            other.kill()
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)
        os.close(server._alive)
        os.close(server._breath)
