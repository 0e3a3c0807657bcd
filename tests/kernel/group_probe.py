"""A live try of cgroups: whether this machine lets us limit memory and processes by them."""

from __future__ import annotations

import os
from contextlib import suppress

from agent_sandbox.kernel.cgroups import Cgroup, Hierarchy, create


def probe(hierarchies: tuple[Hierarchy, ...], *, unique: str = "probe") -> Cgroup:
    """Try cgroups live: create one, limit it, put a process in, kill it there, remove it. Never raises.

    Two simultaneous probes in one process each need their own `unique`. The result holds `enforces` and `missing`; the cgroup is gone.
    """
    try:
        cgroup = create(memory_bytes=64 << 20, processes=16, unique=unique, hierarchies=hierarchies)
    except OSError as error:
        return Cgroup(missing=dict.fromkeys(("memory", "processes"), str(error)))
    problem = ""
    try:
        if cgroup.enforces:
            problem = _try_killing_in(cgroup)
    except OSError as error:
        problem = f"a process cannot be moved into {cgroup.parts[0].path}: {error.strerror}"
    if not cgroup.remove():
        problem = problem or "a cgroup cannot be removed again"
    if problem:
        return Cgroup(missing=dict.fromkeys(("memory", "processes"), problem))
    return Cgroup(enforces=cgroup.enforces, missing=cgroup.missing)


def _try_killing_in(cgroup: Cgroup) -> str:
    """Kill a shell inside the cgroup. Return the problem, or an empty string. Raises OSError.

    The shell is spawned, not forked, because the caller may have threads. It waits for a line that never comes.
    """
    reading, writing = os.pipe()
    try:
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "read line"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)])
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    try:
        cgroup.join(child)
        return "" if child in cgroup.members() and cgroup.kill() else "a process in a cgroup could not be killed"
    finally:
        os.close(writing)  # ends the shell if it still lives
        with suppress(ChildProcessError):  # the application may ignore SIGCHLD
            os.waitpid(child, 0)
