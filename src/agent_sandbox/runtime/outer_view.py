"""The mount plan of a launch with an outer program: the view is a directory, and beside it lies what the outer program needs.

The outer program sees the machine's programs and libraries read-only, devices and a /proc of its own, and a private /run. It sees none of
the machine's other files, and the guest's program sees only what is below `VIEW`: what the policy shows.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import replace
from agent_sandbox.kernel.mount_plan import (
    Devices,
    Directory,
    ExecutableFiles,
    MountPlan,
    NewFile,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    Step,
    Symlink,
    Tmpfs,
    quote_target,
)

VIEW = "/view"  # the root of the guest's program
RUN, TMP = "/run", "/tmp"  # private to the outer program
_PROGRAMS = "/usr"
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_RUN_BYTES = 64 << 20
_NO_CGROUPS = "/sys/fs/cgroup"  # init has placed the run in its cgroup; an empty directory here keeps OCI runtimes from looking for others
_ACCOUNTS = b"root:x:0:0:root:/run:/bin/sh\n"


def around(plan: MountPlan, *, trees: tuple[str, ...] = (), run_bytes: int = _RUN_BYTES) -> MountPlan:
    """Return the plan moved below `VIEW`, inside the view of an outer program.

    `trees` are further directories of the machine that the outer program needs, read-only. The guest's /dev and /proc are empty places:
    the outer program fills them. A plan in which only some files can be executed loses that rule. The names of the upper layers stay, so
    the changes of a run are found as always.
    """
    moved = tuple(step for each in plan.steps if (step := _moved(each)) is not None)
    devices = next((step for step in plan.steps if isinstance(step, Devices)), Devices(run_bytes))
    return replace(plan, steps=(SkeletonRoot(), *_machine(trees), *_private(run_bytes), devices, Proc(sealed=False), *moved, SealRoot()))


def _machine(trees: tuple[str, ...]) -> tuple[Step, ...]:
    shown: list[Step] = []
    for name in _TOP:
        if os.path.islink(f"/{name}"):
            shown.append(Symlink(f"/{name}", os.readlink(f"/{name}")))
        elif os.path.isdir(f"/{name}"):
            trees = (*trees, f"/{name}")
    return (*shown, *(Overlay(tree, tree, f"outer{quote_target(tree)}", writable=False) for tree in (_PROGRAMS, *trees)))


def _private(run_bytes: int) -> tuple[Step, ...]:
    return (
        Tmpfs(TMP, run_bytes, 0o1777),
        Tmpfs(RUN, run_bytes),
        NewFile("/etc/passwd", _ACCOUNTS),
        Directory(VIEW),
        Tmpfs(_NO_CGROUPS, 65536),
    )


def _moved(step: Step) -> Step | None:
    match step:
        case SkeletonRoot():
            return Tmpfs(VIEW, _RUN_BYTES)
        case SealRoot():
            return SealRoot(VIEW)
        case Devices():
            return Directory(f"{VIEW}/dev")
        case Proc():
            return Directory(f"{VIEW}/proc")
        case ExecutableFiles():
            return None
        case _:
            return replace(step, target=VIEW if step.target == "/" else VIEW + step.target)
