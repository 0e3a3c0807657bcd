"""The frozen project in the view of a run: an overlay over the copy, at the place of the real project.

Everything that the plan hides, links or makes room for inside the project is carried over to that overlay. The layer that it writes has the
project as its target, so its changes are changes of the real project, like those of every other run.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.mount_plan import Copies, ExecutableFiles, MountPlan, Overlay, PathMask, SealRoot, Step, quote_target
from agent_sandbox.policy.paths import contains

if TYPE_CHECKING:
    from agent_sandbox.runtime.base import Launch
    from agent_sandbox.workspace.frozen_tree import FrozenTree


class FrozenBase(Attachment):
    """Shows every run the same copy of the project."""

    def __init__(self, frozen: FrozenTree) -> None:
        self._frozen = frozen

    def before(self, launch: Launch) -> Launch:
        """Return the launch with the frozen project in its view. Raises `PolicyError` if the view cannot show it."""
        frozen = self._frozen
        return replace(launch, root=with_frozen(launch.root, frozen.project, frozen.path, frozen.live))


def with_frozen(plan: MountPlan, project: str, frozen: str, live: tuple[str, ...] = ()) -> MountPlan:
    """Return the plan with the copy `frozen` in the place of the project, and in it the `live` trees of the real one.

    Raises `PolicyError` if no overlay shows the project.
    """
    copied = [step.target for step in plan.steps if isinstance(step, Copies) and _meet(step.target, project)]
    covering = [step for step in plan.steps if isinstance(step, Overlay) and contains(step.target, project)]
    if copied or not covering:
        why = f"{copied[0]} is copied entry by entry, because a pattern hides some of them" if copied else "the policy does not show it"
        raise PolicyError(
            f"the project cannot be frozen: {why}", hint="deny whole paths instead of patterns, or use the live files: --live all"
        )
    outer = max(covering, key=lambda step: len(step.target))
    if _is_hidden(outer, project):
        raise PolicyError("the project cannot be frozen: the policy hides it", hint="name another project, or deny less")
    made = [_inner(outer, project, frozen), *(_inner(outer, tree, tree) for tree in live if not _is_hidden(outer, tree))]
    targets = {overlay.target for overlay in made}
    steps = [step for step in plan.steps if not (isinstance(step, Overlay) and step.target in targets)]
    at = next((index for index, step in enumerate(steps) if _comes_after(step, project)), len(steps))
    return replace(plan, steps=(*steps[:at], *made, *steps[at:]))


def _inner(outer: Overlay, target: str, source: str) -> Overlay:
    """Return the overlay of `source` at `target`, with what the outer overlay says about paths there."""
    start = target[len(outer.target.rstrip("/")) + 1 :]
    if not start:
        return replace(outer, source=source)
    inside = f"{start}/"

    def own(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path[len(inside) :] for path in paths if path.startswith(inside))

    def pairs(links: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((path[len(inside) :], to) for path, to in links if path.startswith(inside))

    masks = tuple(PathMask(mask.path[len(inside) :], mask.keep) for mask in outer.masks if mask.path.startswith(inside))
    return Overlay(
        source,
        target,
        quote_target(target),
        masks,
        own(outer.places),
        own(outer.files),
        pairs(outer.links),
        pairs(outer.links_over),
        pairs(outer.links_instead),
        writable=outer.writable,
    )


def _is_hidden(outer: Overlay, target: str) -> bool:
    """Return whether a mask of the outer overlay hides a tree. An overlay on top of the mask would show it again."""
    path = target[len(outer.target.rstrip("/")) :]
    return any(contains(f"/{mask.path}", path) for mask in outer.masks)


def _comes_after(step: Step, project: str) -> bool:
    """Return whether a step must follow the mount of the project: it lies inside, or it seals the view."""
    if isinstance(step, ExecutableFiles | SealRoot):
        return True
    target = getattr(step, "target", "")
    return bool(target) and target != project and contains(project, target)


def _meet(one: str, other: str) -> bool:
    return contains(one, other) or contains(other, one)
