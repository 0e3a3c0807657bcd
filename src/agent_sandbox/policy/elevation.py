"""Elevation: the rules that a person lifts for a time, and the policy that results. Pure.

The system's own policy file is the ceiling: everything that it denies stays denied, and no limit rises above the limit it sets. Approval
rules stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.policy.model import LIFTABLE, FileRules, Limits, Policy, ProgramRules, implied
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.programs import SHELLS
from agent_sandbox.policy.secrets import Mask, reveal


@dataclass(frozen=True)
class Elevation:
    """The rules to lift: programs to allow, limits to raise (by their names in `Limits`), and hidden or denied paths to show."""

    programs: tuple[str, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    paths: tuple[str, ...] = ()

    def sorts(self) -> tuple[str, ...]:
        """Return the kinds of rules that the elevation lifts, named as in the setting `approvals.elevate`."""
        return tuple(name for name in LIFTABLE if getattr(self, name))

    def only(self, sorts: Iterable[str] | None) -> Elevation:
        """Return the elevation reduced to these kinds of rules; for None, all of it."""
        return self if sorts is None else Elevation(**{name: getattr(self, name) for name in LIFTABLE if name in sorts})

    def describe(self) -> str:
        """Describe the elevation in words."""
        limits = [f"{name.replace('_', ' ')} up to {value:g}" for name, value in self.limits]
        return "; ".join(
            f"{sort} {', '.join(items)}"
            for sort, items in (("programs", self.programs), ("limits", limits), ("paths", self.paths))
            if items
        )


def elevated(policy: Policy, what: Elevation, ceiling: Policy) -> Policy:
    """Return the policy with these rules lifted, as far as the ceiling permits. The result never permits less than the policy."""
    programs = _programs(policy.programs, what.programs, ceiling.programs)
    limits = _limits(policy.limits, dict(what.limits), ceiling.limits)
    # Drop the guarantees implied by a limit that is gone. Keep those that other rules require.
    requires = (policy.requires - implied(policy.processes, policy.limits, policy.programs, policy.network)) | implied(
        policy.processes, limits, programs, policy.network
    )
    files = _files(policy.files, what.paths, ceiling.files)
    return replace(policy, name=f"{policy.name}+elevated", files=files, programs=programs, limits=limits, requires=requires)


def _programs(rules: ProgramRules, more: tuple[str, ...], ceiling: ProgramRules) -> ProgramRules:
    groups = tuple(group if group in ceiling.groups else tuple(dict.fromkeys((*group, *more))) for group in rules.groups)
    # A denied pattern is lifted only by its own name. Lifting the pattern for one program would allow the other programs that it matches.
    denied = tuple(each for each in rules.denied if each in ceiling.denied or each not in more)
    shell = rules.shell or (ceiling.shell and any(name in SHELLS for name in more))
    return ProgramRules(groups, denied, shell, rules.lines)


def _limits(limits: Limits, wanted: dict[str, float], ceiling: Limits) -> Limits:
    changes: dict[str, float] = {}
    for name, value in wanted.items():
        before, most = getattr(limits, name), getattr(ceiling, name)
        if before is not None and (allowed := value if most is None else min(value, most)) > before:
            changes[name] = allowed
    return replace(limits, **changes)  # type: ignore[arg-type]  # `Limits` checks that whole numbers are whole


def _files(files: FileRules, paths: tuple[str, ...], ceiling: FileRules) -> FileRules:
    denied = tuple(each for each in files.denied if each in ceiling.denied or not (isinstance(each, Tree) and each.path in paths))
    masks: tuple[Mask, ...] = files.masks
    for path in paths:
        if any(mask.path == path for mask in masks):
            masks = reveal(masks, path)
    return replace(files, denied=denied, masks=masks)
