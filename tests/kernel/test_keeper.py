"""The keeper looks after each run by itself: trouble with one is not the others' trouble."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from agent_sandbox.kernel import keeper
from agent_sandbox.kernel.cgroups import Hierarchy
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


def test_a_cgroup_that_stays_busy_is_given_up_only_while_somebody_could_wait_for_it(tmp_path: Path) -> None:
    """Once the supervisor has gone, nobody else would remove it: a killed caller of forks left its cgroup on a busy machine."""
    link, far = socket.socketpair()
    with link, far:
        server = keeper.Keeper(link, -1, Identity(False, (Hierarchy(2, frozenset(), str(tmp_path), str(tmp_path)),)), never)
        busy = tmp_path / f"{server._group}1" / "member"  # as a cgroup with a process, it cannot be removed yet
        for leaving in (False, True):
            busy.mkdir(parents=True)
            server._leaving = leaving
            server._runs[1] = keeper._Run(0, done=True, clear_by=time.monotonic() - 1)
            server._clear_away()
            assert bool(server._runs) is leaving
            busy.rmdir()
            server._clear_away()
            assert server._runs == {} and busy.parent.exists() is not leaving
            if busy.parent.exists():
                busy.parent.rmdir()
        os.close(server._alive)
        os.close(server._breath)
