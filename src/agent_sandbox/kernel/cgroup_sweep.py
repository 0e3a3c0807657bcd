"""Before any run: clear away the cgroups that outlived their keeper, and find out by a live try what cgroups can do on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from agent_sandbox.kernel import cgroup_tree, cgroups
from agent_sandbox.kernel.cgroup_tree import PREFIX, Hierarchy
from agent_sandbox.kernel.cgroups import Cgroup, Part

_MOST_DIRECTORIES = 5000  # looked at in one sweep


def sweep(hierarchies: tuple[Hierarchy, ...]) -> int:
    """Remove the cgroups of keepers that no longer live, ending first what still runs in them. Returns how many directories went."""
    removed = 0
    for hierarchy in hierarchies:
        for path in list(_ours(hierarchy.top)):
            if cgroup_tree.is_forgotten(os.path.basename(path)):
                forgotten = Cgroup((Part(path, hierarchy.own, hierarchy.version, hierarchy.controllers),))
                with suppress(OSError):  # another user's, or another sweep was quicker
                    removed += forgotten.kill() and forgotten.remove()
    return removed


def probe(hierarchies: tuple[Hierarchy, ...], *, unique: str = "probe") -> Cgroup:
    """Try it: create a cgroup, limit it, put a process in, kill it there, remove it. Never raises.

    Two probes at once in one process need each a `unique`. Of the result, `enforces` and `missing` count; the cgroup itself is gone.
    """
    try:
        cgroup = cgroups.create(memory_bytes=64 << 20, processes=16, unique=unique, hierarchies=hierarchies)
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
    """Spawned, not forked: whoever asks may have threads. The shell waits for a line that never comes."""
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
        os.close(writing)  # which ends the shell, should it still live
        with suppress(ChildProcessError):  # the application may have set SIGCHLD to be ignored
            os.waitpid(child, 0)


def _ours(top: str) -> Iterator[str]:
    """Directories with our prefix, wherever their makers stood in the tree. Does not look inside them."""
    left = _MOST_DIRECTORIES
    pending = [top]
    while pending and left > 0:
        directory = pending.pop()
        left -= 1
        try:
            with os.scandir(directory) as entries:
                children = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for child in children:
            if child.name.startswith(PREFIX):
                yield child.path
            else:
                pending.append(child.path)
