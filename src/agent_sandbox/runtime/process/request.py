"""What init, the keeper and the guest are told of a run: paths, limits and permissions, here never code, environment or input."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import mount_plan
from agent_sandbox.runtime.base import Hosted, Launch

if TYPE_CHECKING:
    from typing import Any

SCRATCH = ("/tmp", "/run")  # writable in every view: private to the run
DEVICES = ("/dev", "/dev/shm")  # the same, and at the top even where the program's root is not


def request_for(launch: Launch, inner_root: str = "") -> dict[str, Any]:
    """Return the request to init. With an `inner_root` the program has that directory as its root, in a process of ours."""
    limits = launch.limits
    native = not isinstance(launch.program, Hosted)
    return {
        "plan": mount_plan.encode(launch.root),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "processes": None if limits.processes is None else limits.processes + 1,  # init is one of them, and not the guest's
        "open_files": limits.open_files,
        "sized": not isinstance(launch.root.layers, mount_plan.OnDisk),
        "in_memory": isinstance(launch.root.layers, mount_plan.ThrowAway),
        "file_bytes": max((value for value in (limits.disk_bytes, limits.memory_bytes) if value is not None), default=None),
        "may_fork": launch.processes,
        "may_exec": launch.processes or native,
        "system": launch.system,
        "python": not native,
        "readable": launch.writable,  # whether anybody will ask what was written
        "farewell": bool(inner_root),  # our process lives to its end, and reports the end of the program in it
        "observe": launch.observe,
        "scratch": None if launch.writable else [*(inner_root + path for path in SCRATCH), *DEVICES],
        "tmp": f"{inner_root}/tmp",
        "executables": None if launch.processes or not native else list(launch.executables),
        "terminal": (launch.terminal.rows, launch.terminal.columns) if launch.terminal else None,
    }


def counted(launch: Launch) -> dict[str, Any]:
    """What a guest that counts is told besides."""
    return {
        "fuel": launch.limits.fuel,
        "seed": launch.deterministic,
        "memory": launch.limits.memory_bytes,
        "watch": launch.watch_inputs,
    }


def watched(launch: Launch) -> tuple[str, int] | None:
    """Layers that the keeper has to measure, and what they may hold: those on disk have no size of their own."""
    if isinstance(launch.root.layers, mount_plan.OnDisk) and launch.limits.disk_bytes is not None:
        return launch.root.layers.path, launch.limits.disk_bytes
    return None
