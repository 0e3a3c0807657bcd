"""More than a policy permits, for a time: what a person lifts, and what that makes of a policy. Pure.

A ceiling stays: what the system's own file denies is denied, and a limit is raised no further than it says. What is asked about is asked
about as before.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.policy.approval_rules import LIFTABLE
from agent_sandbox.policy.limits import Limits
from agent_sandbox.policy.model import FileRules, Policy, implied
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.programs import SHELLS, ProgramRules
from agent_sandbox.policy.secrets import Mask, reveal


@dataclass(frozen=True)
class Elevation:
    """What is lifted: programs that may be started, limits by the names of `Limits`, paths that are shown although hidden or denied."""

    programs: tuple[str, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    paths: tuple[str, ...] = ()

    def sorts(self) -> tuple[str, ...]:
        """The sorts of rules that it lifts, as `approvals.elevate` names them."""
        return tuple(name for name in LIFTABLE if getattr(self, name))

    def only(self, sorts: Iterable[str] | None) -> Elevation:
        """What is left of it where only these sorts may be lifted; all of it for None."""
        return self if sorts is None else Elevation(**{name: getattr(self, name) for name in LIFTABLE if name in sorts})

    def describe(self) -> str:
        """In words."""
        limits = [f"{name.replace('_', ' ')} up to {value:g}" for name, value in self.limits]
        return "; ".join(
            f"{sort} {', '.join(items)}"
            for sort, items in (("programs", self.programs), ("limits", limits), ("paths", self.paths))
            if items
        )


def elevated(policy: Policy, what: Elevation, ceiling: Policy) -> Policy:
    """The policy with this lifted, as far as the ceiling permits. Never less than the policy permitted before."""
    programs = _programs(policy.programs, what.programs, ceiling.programs)
    limits = _limits(policy.limits, dict(what.limits), ceiling.limits)
    # What is implied by a limit that is gone is not missed, and what other rules require stays.
    requires = (policy.requires - implied(policy.processes, policy.limits, policy.programs)) | implied(policy.processes, limits, programs)
    files = _files(policy.files, what.paths, ceiling.files)
    return replace(policy, name=f"{policy.name}+elevated", files=files, programs=programs, limits=limits, requires=requires)


def _programs(rules: ProgramRules, more: tuple[str, ...], ceiling: ProgramRules) -> ProgramRules:
    groups = tuple(group if group in ceiling.groups else tuple(dict.fromkeys((*group, *more))) for group in rules.groups)
    # A pattern that denies several is lifted by its own name only: for one of them the others would be let in as well.
    denied = tuple(each for each in rules.denied if each in ceiling.denied or each not in more)
    shell = rules.shell or (ceiling.shell and any(name in SHELLS for name in more))
    return ProgramRules(groups, denied, shell, rules.lines)


def _limits(limits: Limits, wanted: dict[str, float], ceiling: Limits) -> Limits:
    changes: dict[str, float] = {}
    for name, value in wanted.items():
        before, most = getattr(limits, name), getattr(ceiling, name)
        if before is not None and (allowed := value if most is None else min(value, most)) > before:
            changes[name] = allowed
    return replace(limits, **changes)  # type: ignore[arg-type]  # whole numbers where Limits wants them: it checks


def _files(files: FileRules, paths: tuple[str, ...], ceiling: FileRules) -> FileRules:
    denied = tuple(each for each in files.denied if each in ceiling.denied or not (isinstance(each, Tree) and each.path in paths))
    masks: tuple[Mask, ...] = files.masks
    for path in paths:
        if any(mask.path == path for mask in masks):
            masks = reveal(masks, path)
    return replace(files, denied=denied, masks=masks)
