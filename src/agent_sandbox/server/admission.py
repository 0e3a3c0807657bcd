"""Whether one more sandbox may be kept running: decided before it starts, so that the machine does not suffer. Pure but for `look`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from agent_sandbox._fast.values import dataclass

MOST_DETACHED = 64  # sandboxes of one user that stay alive, if nothing else is said
MOST = "AGENT_SANDBOX_MOST_DETACHED"  # the variable that says something else
SHORT_MEMORY = 256 << 20  # bytes: with less, nothing new is begun while others are under way
SHORT_DISK = 256 << 20  # bytes, on the filesystem of the state directory
_SMALLEST = 1 << 20


@dataclass(frozen=True)
class MachineRoom:
    """The room that a machine has left, in bytes."""

    memory: int
    total_memory: int
    disk: int

    @classmethod
    def look(cls, state: str) -> MachineRoom:
        """Look at this machine, and at the filesystem of a directory."""
        disk = os.statvfs(state)
        memory = meminfo()
        return cls(memory.get("MemAvailable", 0), memory.get("MemTotal", 0), disk.f_bavail * disk.f_frsize)


def meminfo() -> dict[str, int]:
    """Return what the kernel says about memory, in bytes. A value that it does not tell is missing."""
    found: dict[str, int] = {}
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            name, _, value = line.decode("ascii", "replace").partition(":")
            found[name] = int(value.split()[0]) << 10
    return found


def memory_is_short() -> bool:
    """Whether so little memory is left that nothing new should begin."""
    return meminfo().get("MemAvailable", SHORT_MEMORY) < SHORT_MEMORY


def most_detached(env: Mapping[str, str]) -> int:
    """Return how many sandboxes of this user may stay alive."""
    text = env.get(MOST, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else MOST_DETACHED


def objection(room: MachineRoom, running: int, most: int) -> str:
    """Return why no further sandbox may be kept running; empty if one may.

    >>> objection(MachineRoom(8 << 30, 16 << 30, 1 << 40), 3, 64)
    ''
    >>> objection(MachineRoom(8 << 30, 16 << 30, 1 << 40), 64, 64)
    '64 detached sandboxes run already, which is the most'
    """
    if running >= most:
        return f"{running} detached sandbox{'es' if running != 1 else ''} run{'s' if running == 1 else ''} already, which is the most"
    if room.memory < SHORT_MEMORY:
        return f"only {room.memory // _SMALLEST} MiB of memory are left on this machine, and {SHORT_MEMORY // _SMALLEST} are needed"
    if room.disk < SHORT_DISK:
        return f"only {room.disk // _SMALLEST} MiB are left on the disk of the state directory, and {SHORT_DISK // _SMALLEST} are needed"
    return ""
