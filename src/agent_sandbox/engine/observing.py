"""What was seen of a run, judged by the rules it ran under: each thing once, and whether it is let be there. Nothing rests on it.

Judged by names, as the rules are written. Whether the call then succeeded is not known here: what is allowed may not exist, and a link may
lead elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from agent_sandbox.kernel.mounts import Bind, Copies, File, MountPlan, Overlay, Symlink
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.programs import LINE_SHELLS
from agent_sandbox.runtime.observed import Observed, Seen
from agent_sandbox.workspace.draft import covers
from agent_sandbox.workspace.view import PRIVATE

_MADE_ANEW = tuple(place for place in PRIVATE if place != "/sys")  # for each run, and its own to write to


def judged(
    seen: Iterable[tuple[Seen, int]], policy: Policy, plan: MountPlan, *, started: tuple[str, ...] = (), line: bool = False
) -> tuple[Observed, ...]:
    """What was seen, in its order. `started` are programs that run whatever the rules say; with `line`, so is the shell that reads it.

    What was looked for along a search path and is nowhere is left out, unless it is on the machine and the rules keep it out.
    """
    judge = _Judge(policy, plan, started, line)
    found: dict[tuple[str, str, str, bool], int] = {}
    for each, times in seen:
        allowed = judge.allows(each)
        if each.there or not (allowed or not os.path.lexists(each.target)):
            key = (each.kind, each.target, each.program, allowed)
            found[key] = found.get(key, 0) + times
    return tuple(Observed(*key, times) for key, times in found.items())


class _Judge:
    def __init__(self, policy: Policy, plan: MountPlan, started: tuple[str, ...], line: bool) -> None:
        self._policy = policy
        self._started = {*started, *(os.path.realpath(path) for path in started)}
        self._line = line
        trees = (step.target for step in plan.steps if isinstance(step, Overlay | Bind | File | Symlink))
        copied = ((step, (*step.entries, *(name for name, _ in step.contents))) for step in plan.steps if isinstance(step, Copies))
        copies = (f"{step.target.rstrip('/')}/{entry}" for step, entries in copied for entry in entries)
        self._shown = (*_MADE_ANEW, "/sys", *trees, *copies)

    def allows(self, seen: Seen) -> bool:
        match seen.kind:
            case "read":
                return self._is_there(seen.target) and (self._policy.files.read or not self._policy.files.reaches(seen.target))
            case "write":
                return self._may_write(seen.target)
            case "execute":
                return self._may_start(seen.target)
            case _:  # until there is a way out, nothing of the network is
                return False

    def _is_there(self, path: str) -> bool:
        """Whether the view has a place for this name: what is shown, and the directories on the way to it."""
        files = self._policy.files
        if files.bars(path):
            return False
        return files.reaches(path) or files.leads_to(path) or any(covers(shown, path) or covers(path, shown) for shown in self._shown)

    def _may_write(self, path: str) -> bool:
        files = self._policy.files
        if files.bars(path):
            return False
        return any(covers(place, path) for place in _MADE_ANEW) or (files.write and (files.reaches(path) or files.leads_to(path)))

    def _may_start(self, path: str) -> bool:
        if path in self._started:
            return True
        name = path.rpartition("/")[2]
        permitted = self._policy.programs.permits(name) or (self._line and self._policy.programs.shell and name in LINE_SHELLS)
        return permitted and self._is_there(path)
