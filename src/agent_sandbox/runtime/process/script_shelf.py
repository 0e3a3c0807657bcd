"""The supervisor's shelf of setup scripts, for a keeper with the setup helper: see `kernel.setup_script`.

A plan is launched many times, so its script is composed once. A plan that the helper has declined is the reference's for a while: what was
in the way may have gone by then, such as a mask layer that no longer fits the machine.
"""

from __future__ import annotations

import _thread
import marshal
import os
import time

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import mount_plan, setup_script

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.kernel.mask_layers import Findings
    from agent_sandbox.kernel.mount_plan import MountPlan

_MOST_SCRIPTS, _MOST_DECLINED = 8, 64
DECLINED_SECONDS = 60.0


class ScriptShelf:
    """The scripts used last. Safe to use from many threads. `abi` is that of the kernel's Landlock."""

    def __init__(self, abi: int) -> None:
        self._abi = abi
        self._lock = _thread.allocate_lock()
        self._scripts: dict[tuple[bytes, bytes], tuple[object, bytes]] = {}  # by plan and request, with the findings; used last at the end
        self._declined: dict[bytes, float] = {}  # until when, by encoded plan

    def find(self, request: dict[str, Any], plan: MountPlan, masks: str | dict[int, Findings] | None) -> bytes | None:
        """Return the script of a run; None if it is the reference's. `masks` is the request about mask layers: none, or their findings."""
        encoded = mount_plan.encode(plan)
        if isinstance(masks, str) or time.monotonic() < self._declined.get(encoded, 0.0):
            return None
        key = encoded, marshal.dumps({name: value for name, value in request.items() if name != "plan"})
        with self._lock:
            findings, script = self._scripts.pop(key, (None, b""))
            if not script or findings is not masks:
                if not setup_script.is_possible(request, plan):
                    return None
                me = setup_script.Ids(True) if os.geteuid() == 0 else setup_script.Ids(False, os.geteuid(), os.getegid())
                try:
                    script = setup_script.compose(request, plan, masks, ids_of=me, abi=self._abi)
                except ValueError:  # the reference says what is wrong with the plan
                    return None
            self._scripts[key] = masks, script
            if len(self._scripts) > _MOST_SCRIPTS:
                del self._scripts[next(iter(self._scripts))]
        return script

    def decline(self, plan: MountPlan) -> None:
        """Find no script for this plan for a while."""
        with self._lock:
            if len(self._declined) >= _MOST_DECLINED:
                self._declined.clear()
            self._declined[mount_plan.encode(plan)] = time.monotonic() + DECLINED_SECONDS
