"""The mount plan of a wasm guest: the program's root is a subdirectory, so that it cannot reach its own host process.

Other guests have /proc and /dev at the top of their view; through /proc/self/mem a program could rewrite the engine that confines it. Here
the whole plan moves one directory down, and only that directory is opened for the program. The program sees only what the policy shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox._fast.values import replace
from agent_sandbox.kernel.mount_plan import Bind, Devices, ExecutableFiles, MountPlan, Proc, SealRoot, SkeletonRoot, Step

VIEW = "/view"  # the program's root
LIBRARY = "/library"  # the interpreter's standard library, and nothing else
COMPILED = "/compiled"  # the files that the engine has loaded, by name; each guest reopens them read-only
LIBRARY_INSIDE = "/usr/local/lib"  # where the interpreter looks for its library


def moved_down(plan: MountPlan, *, compiled: Mapping[str, str], library: str, name: str) -> MountPlan:
    """Return the plan moved below `VIEW`, without /proc and /dev in the program's root.

    `library` is the path of the standard library, `name` its file name inside. `compiled` maps module names to files; its first name
    identifies the kind of guest.
    """
    plans: dict[str, MountPlan] = plan.__dict__.setdefault("_moved_down", {})  # cached: a plan is launched many times
    kind = next(iter(compiled))
    if kind not in plans:
        steps = [moved for step in plan.steps if (moved := _moved(step)) is not None]
        ours = Bind(library, f"{LIBRARY}/{name}"), *(Bind(path, f"{COMPILED}/{module}") for module, path in compiled.items())
        plans[kind] = replace(plan, steps=(SkeletonRoot(), *steps, *ours, SealRoot()))
    return plans[kind]


def _moved(step: Step) -> Step | None:
    match step:
        case SkeletonRoot() | SealRoot():
            return None  # `moved_down` adds its own
        case ExecutableFiles():
            return None  # no program is executed in this view, and the engine itself is code
        case Devices() | Proc():
            return step  # stays at the top, where init measures usage; the program cannot reach it
        case _:
            return replace(step, target=VIEW if step.target == "/" else VIEW + step.target)
