"""The supervisor's shelf of mask layers that the runs of one keeper share: see `kernel.mask_layers`.

A plan that is used a second time is likely to be used again, so its second run is asked for its layers. They belong to the keeper's user
namespace: each keeper has a shelf of its own, which is emptied with it.
"""

from __future__ import annotations

import _thread
import os

from agent_sandbox._fast.contexts import contextmanager
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import mount_plan
from agent_sandbox.kernel.mount_plan import MountPlan, Overlay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_sandbox.kernel.mask_layers import Findings

_MOST_PLANS = 4
_FEW_MASKS = 20  # fewer are made as fast as they are compared
_MAKE, _REFUSED = "make", "refused"  # as in `kernel.mask_layers`, which loads ctypes


def _worth_sharing(plan: MountPlan) -> bool:
    """Return whether a plan has many masks, and no links that belong to one run."""
    overlays = [step for step in plan.steps if isinstance(step, Overlay)]
    return sum(len(each.masks) for each in overlays) >= _FEW_MASKS and not any(each.links_over or each.links_instead for each in overlays)


@dataclass(frozen=True)
class _Kept:
    """Mask layers and what they rest on. Without a descriptor: a plan of which no layers were asked for yet."""

    findings: dict[int, Findings]
    descriptor: int | None = None

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


class MaskShelf:
    """The mask layers of the plans used last. Safe to use from many threads.

    `lasting` says that the keeper serves more than a run or two; otherwise nothing is kept.
    """

    def __init__(self, *, lasting: bool) -> None:
        self._shares = lasting
        self._lock = _thread.allocate_lock()
        self._kept: dict[bytes, _Kept] = {}  # by encoded plan, the one used last at the end

    def take_answer(self, plan: MountPlan, answer: str | dict[int, Findings] | None, descriptors: list[int]) -> None:
        """Take init's answer about mask layers. If it has made some, their descriptor is the first of these, and is removed from them."""
        if isinstance(answer, dict):
            self.keep(plan, answer, descriptors.pop(0))
        elif answer:
            self.drop(plan, answer)

    @contextmanager
    def offer(self, plan: MountPlan) -> Iterator[tuple[str | dict[int, Findings] | None, list[int]]]:
        """Yield the request about mask layers for a run of this plan, and the descriptors to send with it."""
        given: list[int] = []
        request: str | dict[int, Findings] | None = None
        key = mount_plan.encode(plan)
        with self._lock:
            if self._shares and _worth_sharing(plan):
                kept = self._kept.pop(key, None)
                if kept is not None:
                    request = _MAKE if kept.descriptor is None else kept.findings
                    given = [] if kept.descriptor is None else [os.dup(kept.descriptor)]
                self._put(key, kept or _Kept({}))
        try:
            yield request, given
        finally:
            for fd in given:
                os.close(fd)

    def keep(self, plan: MountPlan, findings: dict[int, Findings], descriptor: int) -> None:
        """Keep the layers that a run of this plan has made. Takes the descriptor over."""
        layers = _Kept(findings, descriptor)
        with self._lock:
            if self._shares:
                self._put(mount_plan.encode(plan), layers)
            else:
                layers.close()

    def drop(self, plan: MountPlan, why: str) -> None:
        """Drop the layers of a plan, which a run could not use. If the kernel refused them, share none from now on."""
        with self._lock:
            if (kept := self._kept.pop(mount_plan.encode(plan), None)) is not None:
                kept.close()
            self._kept[mount_plan.encode(plan)] = _Kept({})
        if why == _REFUSED:
            self.close()

    def close(self) -> None:
        """Drop all layers, and keep none from now on."""
        with self._lock:
            self._shares, kept, self._kept = False, self._kept, {}
            for each in kept.values():
                each.close()

    def _put(self, key: bytes, layers: _Kept) -> None:
        """Put layers in the last place, instead of those of the same plan, and drop the oldest if there are too many."""
        if (old := self._kept.pop(key, None)) is not None:
            old.close()
        self._kept[key] = layers
        if len(self._kept) > _MOST_PLANS:
            self._kept.pop(next(iter(self._kept))).close()
