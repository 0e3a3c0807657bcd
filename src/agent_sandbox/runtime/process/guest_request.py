"""The request of a launch to init, with paths and limits and without a program; and the settings that go with code."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import mount_plan
from agent_sandbox.runtime.base import Hosted

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.policy.model import Limits
    from agent_sandbox.runtime.base import Launch

SCRATCH = ("/tmp", "/run")  # writable in every view: private to the run
DEVICES = ("/dev", "/dev/shm")  # writable and private, too; always at the top of the view, even if the program's root is a subdirectory


def request_for(launch: Launch, inner_root: str = "") -> dict[str, Any]:
    """Return the request to init. With `inner_root`, the program runs inside a process of ours and sees this directory as its root."""
    limits = launch.limits
    native, outer = not isinstance(launch.program, Hosted), launch.outer
    return {
        "plan": mount_plan.encode(launch.root),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "processes": None if limits.processes is None else limits.processes + 1,  # init is one of them, and not the guest's
        "open_files": limits.open_files,
        "sized": not isinstance(launch.root.layers, mount_plan.OnDisk),
        "in_memory": isinstance(launch.root.layers, mount_plan.ThrowAway),
        "file_bytes": None if outer and outer.agent else largest_file(limits),  # the memory of an agent's guest is one file
        "outer": () if outer is None else tuple(sorted(outer.capabilities)),
        "agent": outer is not None and outer.agent,
        "inner_root": inner_root,
        "may_fork": launch.processes or outer is not None,
        "may_exec": launch.processes or native,
        "system": launch.system,
        "python": not native,
        "readable": launch.writable,  # whether the written files will be read back
        "farewell": bool(inner_root) and (outer is None or outer.agent),  # our process outlives the program inside, and reports its end
        "observe": launch.observe,
        "network": launch.network,
        "inward": launch.inward,
        "checkpoints": launch.checkpoints,
        "inside": launch.inside,
        "scratch": None if launch.writable else [*(inner_root + path for path in SCRATCH), *(SCRATCH if outer else ()), *DEVICES],
        "tmp": f"{inner_root}/tmp",
        "executables": None if launch.processes or not native or outer else list(launch.executables),
        "terminal": (launch.terminal.rows, launch.terminal.columns) if launch.terminal else None,
    }


def largest_file(limits: Limits) -> int | None:
    """Return the size that no file may exceed, in bytes; None if there is no limit."""
    return max((value for value in (limits.disk_bytes, limits.memory_bytes) if value is not None), default=None)


def counted(launch: Launch) -> dict[str, Any]:
    """Return the settings for fuel and determinism that are sent to the guest with the code."""
    return {
        "fuel": launch.limits.fuel,
        "seed": launch.deterministic,
        "memory": launch.limits.memory_bytes,
        "watch": launch.watch_inputs,
    }


def watched(launch: Launch) -> tuple[str, int] | None:
    """Return the path of the layers that the keeper must measure, and their size limit; None if there are none.

    Only layers in a directory on disk are measured. Other layers are in a filesystem whose size is the limit.
    """
    if isinstance(launch.root.layers, mount_plan.OnDisk) and launch.limits.disk_bytes is not None:
        return launch.root.layers.path, launch.limits.disk_bytes
    return None
