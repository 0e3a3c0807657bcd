"""Whether this process is inside a sandbox of this program already. There, another one cannot be made, and is not needed.

The answer rests on facts of the kernel only. A variable would not do: a project's settings can set variables of a coding agent.
"""

from __future__ import annotations

import os

from agent_sandbox.kernel.ids import FIRST_ID

HOSTNAME = "sandbox"  # of every guest, as in `kernel.guest_setup`, which loads too much
_FILTERED = ("\nNoNewPrivs:\t1\n", "\nSeccomp:\t2\n")


def is_inside() -> bool:
    """Whether we are in a sandbox: by the id map that root's guests have, or by the name, the filters and the single id of a user's."""
    return looks_inside(_read("/proc/self/uid_map"), _read("/proc/self/status"), os.uname().nodename)


def looks_inside(uid_map: str, status: str, name: str) -> bool:
    """Whether these are the facts of a process in a sandbox. A container has another id map, even one with this name and such filters."""
    fields = uid_map.split()
    if len(fields) != 3 or not all(each in status for each in _FILTERED):
        return False
    return fields[1] == str(FIRST_ID) or (name == HOSTNAME and fields[2] == "1")


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
