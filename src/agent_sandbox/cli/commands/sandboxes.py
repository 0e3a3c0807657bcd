"""`list` and `prune`: list all sandboxes of this user, and remove those that are not needed."""

from __future__ import annotations

import time
from enum import StrEnum

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import policy_of, sort
from agent_sandbox.cli.options import PolicyOptions
from agent_sandbox.cli.prune_options import PruneOptions
from agent_sandbox.cli.render.messages import Console, counted, human_size, remark, shown
from agent_sandbox.cli.results import NOT_APPROVED, DeclinedResult, PathName, VerbResult
from agent_sandbox.engine.recover import interrupted
from agent_sandbox.errors import Busy, PolicyError, SandboxError
from agent_sandbox.kernel import usage
from agent_sandbox.policy.model import Policy, cloned
from agent_sandbox.server.detached_places import DetachedPlaces
from agent_sandbox.server.places import Places
from agent_sandbox.workspace import sandbox_inventory
from agent_sandbox.workspace.experiment_store import ExperimentStore
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.sandbox_inventory import KnownSandbox, Whereabouts
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from typing import Literal

_DAY = 24 * 3600.0
_PROMOTIONS = "before promotion "  # the label of the snapshots that a promotion takes; the project has what is in them


@dataclass(frozen=True)
class ListedSandbox:
    """A sandbox. `project_state` says whether its project exists; unreachable: perhaps a disk is not mounted.

    `changes` have not been promoted, and `snapshots` may hold more of them; null if they cannot be read, for the reason in `problem`.
    """

    sandbox: str
    project: PathName | None
    project_state: Whereabouts
    bytes: int
    changes: int | None
    caches: int | None
    snapshots: int | None
    created: float | None
    last_used: float
    in_use_by: str | None
    problem: str | None

    @property
    def is_unchanged(self) -> bool:
        """Whether the sandbox holds nothing that was not promoted, apart from caches."""
        return self.changes == 0 and self.snapshots == 0

    def loss(self) -> str:
        """Return what would be lost with the sandbox, in words."""
        if self.problem is not None:
            return f"its changes cannot be read and would be LOST: {self.problem}"
        parts = [counted(self.changes, "change")] if self.changes else []
        parts += [counted(self.snapshots, "snapshot")] if self.snapshots else []
        return f"{' and '.join(parts)} never promoted would be LOST" if parts else "no changes"


@dataclass(frozen=True)
class ListResult(VerbResult):
    """All sandboxes of this user."""

    kind = "list"

    sandboxes: tuple[ListedSandbox, ...]
    bytes: int
    state_dir: PathName

    def text(self, console: Console) -> None:
        now = time.time()
        rows = [("SANDBOX", "SIZE", "CHANGES", "LAST USED", "PROJECT"), *(_row(each, now) for each in self.sandboxes)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows if self.sandboxes else ():
            print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[4]]))
        amount = human_size(self.bytes) if self.bytes < usage.UNCOUNTABLE else "more than can be counted"
        console.note(f"{counted(len(self.sandboxes), 'sandbox', 'sandboxes')}, {amount} in {self.state_dir}")
        if any(each.project_state is Whereabouts.GONE for each in self.sandboxes):
            console.note("remove those whose project is gone: agent-sandbox prune")


class PruneReason(StrEnum):
    """Why a sandbox is removed."""

    NAMED = "named"
    GONE = "gone"
    UNFINISHED = "unfinished"
    UNUSED = "unused"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class PrunedSandbox:
    """A sandbox that was or would be removed, and why. `failure` says why it was not."""

    sandbox: ListedSandbox
    because: PruneReason
    failure: str | None = None


@dataclass(frozen=True)
class PruneResult(VerbResult):
    """The sandboxes that were removed, or would be. `bytes` is their size, and `returned` the space that killed runs had reserved."""

    kind = "prune"

    outcome: Literal["pruned", "nothing-to-do", "dry-run", "not-approved"]
    removed: tuple[PrunedSandbox, ...]
    failed: tuple[PrunedSandbox, ...]
    bytes: int
    returned: int
    leftovers: tuple[str, ...]

    @property
    def code(self) -> int:
        """3 if the removal was not approved, 1 if a sandbox could not be removed, else 0."""
        return NOT_APPROVED if self.outcome == "not-approved" else 1 if self.failed or self.leftovers else 0

    def text(self, console: Console) -> None:
        if self.outcome in ("dry-run", "not-approved"):
            what = "not pruned: needs --yes" if self.outcome == "not-approved" else "nothing was removed (--dry-run)"
            console.note(f"{what}; {counted(len(self.removed), 'sandbox', 'sandboxes')} would free {human_size(self.bytes)}")
        elif self.removed or self.returned:
            console.note(f"removed {counted(len(self.removed), 'sandbox', 'sandboxes')}, freed {human_size(self.bytes + self.returned)}")
        elif not self.failed:
            console.note("nothing to remove")
        for each in self.failed:
            remark(f"kept {each.sandbox.sandbox}: {each.failure}")
        for leftover in self.leftovers:
            remark(f"could not be removed: {leftover}")


def _row(each: ListedSandbox, now: float) -> tuple[str, str, str, str, str]:
    size = human_size(each.bytes) if each.bytes < usage.UNCOUNTABLE else "uncountable"
    changes = "unknown" if each.changes is None else f"{each.changes:,}"
    changes += f" + {counted(each.snapshots, 'snapshot')}" if each.snapshots else ""
    project = shown(each.project) if each.project is not None else "not known"
    state = {Whereabouts.GONE: "gone", Whereabouts.UNREACHABLE: "not found; perhaps its disk is not mounted"}.get(each.project_state)
    notes = "; ".join(note for note in (state, f"in use by {shown(each.in_use_by)}" if each.in_use_by else None) if note)
    return (each.sandbox, size, changes, _ago(now - each.last_used), f"{project} ({notes})" if notes else project)


def _ago(seconds: float) -> str:
    """Return a time in the past as people say it.

    >>> _ago(30), _ago(7200), _ago(200000)
    ('just now', '2 hours ago', '2 days ago')
    """
    for size, name in ((_DAY, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= size:
            return f"{counted(int(seconds // size), name)} ago"
    return "just now"


def list_sandboxes() -> ListResult:
    """List all sandboxes of this user."""
    store = _store()
    found = tuple(_listed(known) for known in sandbox_inventory.sandboxes(store))
    return ListResult(found, min(sum(each.bytes for each in found), usage.UNCOUNTABLE), PathName(store.path))


def _store() -> Store:
    store = Store.open(here().host.state)
    for leftover in store.leftovers:
        remark(f"could not be removed: {leftover}")
    return store


def _listed(known: KnownSandbox) -> ListedSandbox:
    state, problem = known.state, ""
    changes: int | None = 0
    caches: int | None = 0
    snapshots: int | None = 0
    if known.finished:
        try:
            snapshots = sum(not (each.automatic and each.label.startswith(_PROMOTIONS)) for each in state.history().snapshots)
            files = sort(Stored(state).changes(_policy(known)), state.project)
            changes, caches = len(files.project) + len(files.elsewhere), len(files.noise)
        except (SandboxError, OSError) as error:
            changes, caches, snapshots, problem = None, None, None, error.message if isinstance(error, SandboxError) else str(error)
    project = PathName(state.project) if state.project else None
    in_use, size = known.in_use or None, min(known.size, usage.UNCOUNTABLE)
    return ListedSandbox(
        *(state.id, project, known.project, size, changes, caches, snapshots),
        *(known.created, known.last_used, in_use, problem or None),
    )


def _policy(known: KnownSandbox) -> Policy:
    """Return the policy under which the changes of a sandbox are read: as `diff` reads them, if the project is there."""
    if known.project is Whereabouts.THERE:
        try:
            return policy_of(PolicyOptions(), Project(known.state.project))
        except (SandboxError, OSError):  # its policy file is invalid, or unreadable
            pass
    return cloned(masks=here().masks((known.state.project or "/",), searched=None))


def prune(options: PruneOptions, console: Console) -> VerbResult:
    """Remove the sandboxes that are not needed. Show them first, and ask."""
    store = _store()
    Plans(store).sweep()
    ExperimentStore(store).sweep()
    Places(store).living()  # which removes what killed holders of sessions left
    chosen = _chosen(store, options)
    listed = [(known, PrunedSandbox(_listed(known), because)) for known, because in chosen]
    listed = [(known, each) for known, each in listed if each.because is not PruneReason.UNCHANGED or each.sandbox.is_unchanged]
    plan = tuple(each for _, each in listed)
    size = min(sum(each.sandbox.bytes for each in plan), usage.UNCOUNTABLE)
    if plan and console.shows:
        _show(plan, size)
    if options.dry_run:
        return PruneResult("dry-run", plan, (), size, 0, store.leftovers)
    if plan and not options.yes:
        if not console.asks:
            return PruneResult("not-approved", plan, (), size, 0, store.leftovers)
        if not console.says_yes(f"Remove {counted(len(plan), 'sandbox', 'sandboxes')}?"):
            return DeclinedResult("prune", NOT_APPROVED, "not approved")
    results = [_remove(known, each) for known, each in listed]
    removed, failed = (tuple(each for each in results if (each.failure is None) is done) for done in (True, False))
    sandbox_inventory.remove_unused_locks(store)
    DetachedPlaces(store).forget_ended()
    returned = sandbox_inventory.return_unused_blocks(store)
    outcome: Literal["pruned", "nothing-to-do"] = "pruned" if plan or returned else "nothing-to-do"
    return PruneResult(
        outcome, removed, failed, min(sum(each.sandbox.bytes for each in removed), usage.UNCOUNTABLE), returned, store.leftovers
    )


def _chosen(store: Store, options: PruneOptions) -> list[tuple[KnownSandbox, PruneReason]]:
    """Return the sandboxes that the options name, with the reason. Raises `PolicyError` for a name that is no sandbox."""
    if options.names:
        named = [
            sandbox_inventory.look_at(store, name) if "/" not in name and name not in ("", ".", "..") else None for name in options.names
        ]
        if None in named:
            raise PolicyError(f"there is no sandbox {options.names[named.index(None)]!r}", hint="names are in: agent-sandbox list")
        return [(known, PruneReason.NAMED) for known in named if known is not None]
    chosen: list[tuple[KnownSandbox, PruneReason]] = []
    for known in sandbox_inventory.sandboxes(store):
        if known.in_use:
            continue
        if not known.finished:
            chosen.append((known, PruneReason.UNFINISHED))
        elif known.project is Whereabouts.GONE:
            chosen.append((known, PruneReason.GONE))
        elif options.unused_days is not None and store.clock() - known.last_used >= options.unused_days * _DAY:
            chosen.append((known, PruneReason.UNUSED))
        elif options.unchanged:
            chosen.append((known, PruneReason.UNCHANGED))
    return chosen


_WHY = {
    PruneReason.NAMED: "named",
    PruneReason.GONE: "its project is gone, or was moved",
    PruneReason.UNFINISHED: "left behind by a crash",
    PruneReason.UNUSED: "not used for long",
    PruneReason.UNCHANGED: "without changes",
}


def _show(plan: tuple[PrunedSandbox, ...], size: int) -> None:
    now = time.time()
    for each in plan:
        name, amount, _, used, project = _row(each.sandbox, now)
        print(f"{name}  {amount}  {project}")
        print(f"    {_WHY[each.because]}; last used {used}; {shown(each.sandbox.loss())}")
    print(f"{counted(len(plan), 'sandbox', 'sandboxes')}, {human_size(size)} to free")


def _remove(known: KnownSandbox, each: PrunedSandbox) -> PrunedSandbox:
    """Remove a sandbox, and say why if it was kept."""
    try:
        if known.project is not Whereabouts.GONE and interrupted(known.state):
            why = "a promotion of it was cut off; any verb in its project finishes that"
        elif sandbox_inventory.remove(known):
            return each
        else:
            why = "it was used meanwhile"
    except Busy as busy:
        why = busy.message
    except (SandboxError, OSError) as error:
        why = error.message if isinstance(error, SandboxError) else str(error)
    return PrunedSandbox(each.sandbox, each.because, why)
