"""The mount plan of a run in a machine: the view lies one directory down, and beside it lie the files of QEMU, each bound read-only.

QEMU's 9p device shows the machine that directory and nothing above it. A program that has broken out of the machine and of QEMU sees the
same view, and QEMU's own program and libraries.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.kernel.mount_plan import (
    Bind,
    Devices,
    Directory,
    ExecutableFiles,
    ImageRoot,
    MountPlan,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    Step,
    Symlink,
    Tmpfs,
)
from agent_sandbox.policy.paths import contains
from agent_sandbox.runtime.microvm.libraries import names_of

if TYPE_CHECKING:
    from agent_sandbox.runtime.microvm.template import Template

VIEW = "/view"  # the program's root
_TOP = ("bin", "sbin", "lib", "lib64")


def moved_down(plan: MountPlan, template: Template, qemu: str) -> MountPlan:
    """Return the plan moved below `VIEW`, with the files of QEMU beside it. /proc and /dev of the program are mounted in the machine."""
    plans: dict[str, MountPlan] = plan.__dict__.setdefault("_moved_down", {})  # cached: a plan is launched many times
    if template.directory not in plans:
        places = [Directory(f"{VIEW}/{name}") for name in ("proc", "dev")] if not _shows_root(plan) else []
        steps = [moved for step in plan.steps for moved in _moved(step)]
        links = [Symlink(f"/{name}", os.readlink(f"/{name}")) for name in _TOP if os.path.islink(f"/{name}")]
        files = [Bind(file, _placed(name)) for name, file in names_of(template.libraries, qemu).items()]
        steps = [SkeletonRoot(), *steps, *places, *links, *_once(files), SealRoot()]
        plans[template.directory] = replace(plan, steps=tuple(steps))
    return plans[template.directory]


def private_directories(plan: MountPlan) -> list[tuple[str, int, int]]:
    """Return the private directories of a plan, as path, size and mode: they are mounted inside the machine."""
    return [(step.target, step.size_bytes, step.mode) for step in plan.steps if isinstance(step, Tmpfs)]


def shown_in_private(plan: MountPlan) -> list[str]:
    """Return the paths that a plan shows inside its private directories, such as a project below /tmp."""
    private: list[str] = []
    shown: list[str] = []
    for step in plan.steps:
        target = getattr(step, "target", "")
        if isinstance(step, Tmpfs):
            private.append(target)
        elif any(target.startswith(f"{directory}/") for directory in private):
            shown.append(target)
    return shown


def exact_directories(plan: MountPlan, cwd: str) -> list[str]:
    """Return the directory with layers of its own in which a program works: the project, as opposed to the programs of the machine."""
    own = [step.target for step in plan.steps if isinstance(step, Overlay) and step.writable and step.target != "/"]
    return sorted((target for target in own if contains(target, cwd)), key=len)[-1:]


def shared_memory_bytes(plan: MountPlan) -> int:
    """Return the size of /dev/shm."""
    return next((step.shm_bytes for step in plan.steps if isinstance(step, Devices)), 1 << 20)


def _shows_root(plan: MountPlan) -> bool:
    return not any(isinstance(step, SkeletonRoot) for step in plan.steps)


def _moved(step: Step) -> list[Step]:
    match step:
        case SkeletonRoot() | SealRoot() | ImageRoot():
            return []  # `moved_down` adds its own; a launch with an image is refused before
        case ExecutableFiles():
            return []  # a policy with a list of programs is refused before
        case Devices() | Proc():
            return [step]  # stays at the top, where init measures usage
        case _:
            return [replace(step, target=VIEW if step.target == "/" else VIEW + step.target)]


def _placed(name: str) -> str:
    """Return where a file is bound: its directory is resolved, because /lib is a link in the view, too."""
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))


def _once(files: list[Bind]) -> list[Bind]:
    return list({step.target: step for step in files}.values())
