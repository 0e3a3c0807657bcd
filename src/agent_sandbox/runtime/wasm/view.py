"""Where in its view a program inside WebAssembly lives: in a directory, so that it never meets its own host process.

The view of any other guest has /proc and /dev at its top, and through /proc/self/mem a program could rewrite the very engine that holds it.
Here the whole plan is moved one directory down, and only that directory is opened for the program: what the policy shows is all there is.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox._fast.values import replace
from agent_sandbox.kernel.mount_plan import Bind, Code, Devices, MountPlan, Proc, SealRoot, SkeletonRoot, Step

VIEW = "/view"  # what the program sees as its root
LIBRARY = "/library"  # its interpreter's standard library, and nothing else
COMPILED = "/compiled"  # the files that the engine has loaded, by name: each guest opens them again, read-only
LIBRARY_INSIDE = "/usr/local/lib"  # where the interpreter looks for it


def moved_down(plan: MountPlan, *, compiled: Mapping[str, str], library: str, name: str) -> MountPlan:
    """The same plan below `VIEW`, without /proc and /dev in it. `library` is the file of the standard library, `name` its name inside;
    `compiled` are the files of the modules, the first of which tells one kind of guest from another."""
    kept: dict[str, MountPlan] = plan.__dict__.setdefault("_moved_down", {})  # a plan is launched many times
    kind = next(iter(compiled))
    if kind not in kept:
        steps = [moved for step in plan.steps if (moved := _moved(step)) is not None]
        ours = Bind(library, f"{LIBRARY}/{name}"), *(Bind(path, f"{COMPILED}/{module}") for module, path in compiled.items())
        kept[kind] = replace(plan, steps=(SkeletonRoot(), *steps, *ours, SealRoot()))
    return kept[kind]


def _moved(step: Step) -> Step | None:
    match step:
        case SkeletonRoot() | SealRoot():
            return None  # there is one either way
        case Code():
            return None  # no program is ever executed there, and the engine is code
        case Devices() | Proc():
            return step  # init counts there; the program does not reach it
        case _:
            return replace(step, target=VIEW if step.target == "/" else VIEW + step.target)
