"""Let a plan execute nothing but the files that may be.

Three things are done to the plan. Nothing that it mounts can be executed. The files of what is allowed are bound over themselves, from the
machine and not from what a guest has written, and those can. And the directories of PATH show nothing else, so that what is not allowed is
not found rather than found and refused.
"""

from __future__ import annotations

import os

from agent_sandbox.kernel.mount_plan import Bind, Code, Mask, Overlay
from agent_sandbox.values import replace
from agent_sandbox.workspace.draft import Draft, covers
from agent_sandbox.workspace.executables import Executables


def gate(plan: Draft, executables: Executables) -> None:
    """Gate the plan, which is otherwise complete."""
    hidden = {place for place in executables.directories if not plan.rules.bars(place)}
    bound = {step.target for step in plan.steps if isinstance(step, Bind)}

    def shown(paths: tuple[str, ...]) -> tuple[str, ...]:
        there = (path for path in paths if path in bound or any(covers(overlay.target, path) for overlay in plan.overlays))
        return tuple(path for path in there if not plan.rules.bars(path))

    code = Code(shown(executables.programs), shown(executables.libraries))
    files = [*code.programs, *code.libraries]
    plan.overlays[:] = [_showing_only(overlay, hidden, files, executables.links) for overlay in plan.overlays]
    plan.steps.append(code)
    plan.notes += executables.notes


def _showing_only(overlay: Overlay, hidden: set[str], files: list[str], links: tuple[tuple[str, str], ...]) -> Overlay:
    """The overlay with the directories of PATH in it emptied, and places in them for what is allowed."""
    inside = [
        place for place in sorted(hidden, key=lambda place: place.count("/")) if place != overlay.source and covers(overlay.source, place)
    ]
    if not inside:
        return overlay
    start = len(overlay.source.rstrip("/")) + 1
    masked = {mask.path for mask in overlay.masks if not mask.keep}
    emptied = {mask.path for mask in overlay.masks}
    masks = [Mask(place[start:], keep=True) for place in inside if place[start:] not in emptied]
    masks = [mask for mask in masks if not any(covers(path, mask.path) for path in masked)]
    names = {f"{overlay.source.rstrip('/')}/{mask.path}" for mask in masks}
    narrower = [mask for mask in overlay.masks if not any(mask.path != each.path and covers(each.path, mask.path) for each in masks)]
    return replace(
        overlay,
        masks=tuple(sorted([*narrower, *masks], key=lambda mask: mask.path.count("/"))),
        files=(*overlay.files, *(path[start:] for path in files if any(covers(place, path) for place in names))),
        links=tuple((path[start:], to) for path, to in links if os.path.dirname(path) in names),
    )
