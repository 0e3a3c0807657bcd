"""Run a command apart from everything else on this machine, so that a test can tell what it has left from what others do.

Its orphans come to us, and not to process 1: whatever it started descends from us. As root, where cgroups are of version 1, it stands in
cgroups of its own, and those of its sandboxes are below. Nothing is different for who runs elsewhere or without this: tests then look at
less (`tests/leftovers.py`).

Usage: python -m scripts.apart COMMAND...
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel import syscalls as sc

VARIABLE = "AGENT_SANDBOX_TESTS_APART"  # in its environment: our pid
PREFIX = "tests-of-agent-sandbox-"  # of our cgroups, before that pid
PR_SET_CHILD_SUBREAPER = 36


def command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs another one apart. As root it has mounts of its own, so that nobody else's come or go in them.

    They are shared mounts, as most machines have them, so that what leaks from a sandbox is seen.
    """
    mounts = ("unshare", "--mount", "--propagation")
    before = (*mounts, "private", *mounts, "shared") if os.geteuid() == 0 and shutil.which("unshare") else ()
    return (*before, sys.executable, "-m", "scripts.apart", *words)


def enter_cgroups() -> list[str]:
    """Make cgroups and move there, where we may. Those of somebody who was killed are removed by the way."""
    entered = []
    for hierarchy in cgroups.here():
        if hierarchy.version != 1:  # in version 2 it would take the controllers from those below
            continue
        place = f"{hierarchy.own}/{PREFIX}{os.getpid()}"
        with suppress(OSError):
            for name in os.listdir(hierarchy.own):
                if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.removeprefix(PREFIX)}"):
                    remove(f"{hierarchy.own}/{name}")
            os.mkdir(place)
            cgroups.write(f"{place}/cgroup.procs", str(os.getpid()))
            entered.append(place)
    return entered


def leave(places: list[str]) -> None:
    """Move back, and remove them."""
    for place in places:
        with suppress(OSError):
            cgroups.write(f"{os.path.dirname(place)}/cgroup.procs", str(os.getpid()))
        remove(place)


def remove(top: str) -> None:
    """Remove a tree of cgroups. One that still holds processes stays."""
    for directory, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)


def main(command: list[str]) -> int:
    """Run it, and return how it ended as a shell would."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the command, and its end is ours
        signal.signal(number, lambda *_: None)
    sc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    places = enter_cgroups()
    try:
        child = os.posix_spawnp(command[0], command, {**os.environ, VARIABLE: str(os.getpid())})
        while True:
            ended, status = os.wait()
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code
    finally:
        leave(places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
