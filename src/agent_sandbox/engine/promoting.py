"""Carry what a stored sandbox changed over to reality, through the gate, and take it back.

The sandbox is held from the first look to the last step: what is judged and shown is what is carried over. Where reality has moved on
since a path was first covered, the default is to refuse; merging and forcing have to be asked for. Afterwards what was carried over is
dropped from the layers, so that the sandbox sees reality there again; a snapshot keeps the layers as they were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.merging import Mixed, brought_together, is_so_already
from agent_sandbox.engine.recovering import Leaving, UnderWay, let_go, not_let_go
from agent_sandbox.engine.stored import Stored
from agent_sandbox.errors import Conflicted, Drift, PolicyError, SandboxError
from agent_sandbox.policy.action import Promote, Undo
from agent_sandbox.policy.canonical import digest_of_plain
from agent_sandbox.policy.model import Policy
from agent_sandbox.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.workspace import protected
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.drift import Moved, judge
from agent_sandbox.workspace.layers.history import Snapshot
from agent_sandbox.workspace.lock import Holder
from agent_sandbox.workspace.merge import Conflict
from agent_sandbox.workspace.promotion import undo
from agent_sandbox.workspace.promotion.inspect import look_at, protected_classes
from agent_sandbox.workspace.promotion.plan import Expected, plan
from agent_sandbox.workspace.promotion.promote import Promotion, promote, refuse_impossible
from agent_sandbox.workspace.promotion.steps import Plan

if TYPE_CHECKING:
    from typing import Literal

    from agent_sandbox.workspace.merge.tree import Choice, Word

    Drifted = Literal["refuse", "merge", "force"]

_DRIFTED = ("refuse", "merge", "force")
_WORDS = ("ours", "theirs", "markers")


def _all(change: Change) -> bool:
    return True


@dataclass(frozen=True)
class Wanted:
    """Which changes are to be carried over, and how. `chosen` says of each change whether it is among them."""

    chosen: Callable[[Change], bool] = _all
    system: bool = False  # also what lies outside the project
    drift: Drifted = "refuse"
    resolve: Word | Choice | None = None  # what to do about the conflicts of a merge; without it they are refused
    approved: frozenset[str] = frozenset()  # the protected classes that somebody has agreed to by name
    plan: str = ""  # the digest of the plan that these are the changes of; see `simulation`


@dataclass(frozen=True)
class Proposal:
    """What would be done, judged and not yet done; good for the length of `proposed`."""

    root: str
    changes: ChangeSet
    contents: Mixed
    wanted: Wanted
    expected: Expected
    classes: Mapping[str, frozenset[str]]
    moved: Mapping[str, Moved] = field(default_factory=dict, hash=False)
    merged: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    pending: ChangeSet = ChangeSet()  # all that waits in the sandbox
    settled: tuple[str, ...] = ()  # chosen too, but nothing has to be done: reality is so already, or stays as it is

    def plan(self) -> Plan:
        """The steps, and what stands in their way."""
        return plan(self.changes, self.expected, root=self.root, classes=self.classes, approved=self.wanted.approved)

    def protected(self) -> dict[str, tuple[str, ...]]:
        """The paths of each protected class that some of the changes belong to."""
        found: dict[str, list[str]] = {}
        for path, names in self.classes.items():
            for name in names:
                found.setdefault(name, []).append(path)
        return {name: tuple(found[name]) for name in sorted(found)}

    def approving(self, names: frozenset[str]) -> Proposal:
        """The same when these classes are agreed to as well."""
        return replace(self, wanted=replace(self.wanted, approved=self.wanted.approved | names))

    def action(self) -> Promote:
        """What the gate judges and the ledger records."""
        digest = self.wanted.plan or digest_of_plain([[_hex(change.path), change.kind.value, *_spelt(change)] for change in self.changes])
        held = self.protected()
        approved = tuple(name for name in held if name in self.wanted.approved)
        return Promote(_text(self.root), digest, len(self.changes), tuple(held), approved, self.wanted.drift)


@dataclass(frozen=True)
class CarriedOver:
    """What was done, and the snapshot that has the layers as they were; None when there was nothing to keep."""

    promotion: Promotion
    snapshot: Snapshot | None = None
    note: str = ""  # what could not be done yet, in words


@contextmanager
def proposed(stored: Stored, policy: Policy, wanted: Wanted) -> Iterator[Proposal]:
    """What would be carried over, for the length of a block in which the sandbox is held. Raises `Busy` while a run has it.

    Nothing is refused here: what stands in the way is in the proposal. Raises `PolicyError` for a class that does not exist, and where
    runs under other rules about files have changed the same thing.
    """
    if wanted.drift not in _DRIFTED:
        raise PolicyError(f"not a way to treat drift: {wanted.drift!r}", hint=f"there are: {', '.join(_DRIFTED)}")
    if wanted.resolve is not None and (wanted.drift != "merge" or not (callable(wanted.resolve) or wanted.resolve in _WORDS)):
        raise PolicyError(
            "conflicts are resolved in a merge, by one of these words or by a function", hint=f"there are: {', '.join(_WORDS)}"
        )
    if unknown := wanted.approved - protected.CLASSES.keys():
        raise PolicyError(f"there is no protected class {min(unknown)!r}", hint=f"there are: {', '.join(sorted(protected.CLASSES))}")
    with stored.state.lock(command="promote"), stored.opened() as stack:
        everything, bases = stored.changes_in(stack, policy), stored.bases()
        root = "/" if wanted.system else stored.state.project
        chosen = everything.within(root).chosen(wanted.chosen)
        _refuse_twice(chosen)
        expected = look_at(root, chosen)
        hidden = {
            change.path for change in chosen if change.masks_real
        }  # nobody in the sandbox has seen what is there: it cannot have moved
        verdicts = judge(chosen, bases, expected)
        moved = {path: each for path, each in verdicts.items() if isinstance(each, Moved) and path not in hidden}
        contents = Mixed(stack)
        asked_for = chosen
        chosen = ChangeSet(tuple(each for each in chosen if each.path not in moved or not is_so_already(each, moved[each.path], contents)))
        moved = {change.path: moved[change.path] for change in chosen if change.path in moved}
        merged: tuple[str, ...] = ()
        conflicts: tuple[Conflict, ...] = ()
        if moved and wanted.drift == "merge":
            chosen, merged, conflicts = brought_together(chosen, moved, contents, stored.open_base, wanted.resolve)
            expected = look_at(root, chosen)
        classes = protected_classes(chosen, expected, contents, root=root)
        left = {change.path for change in chosen}
        settled = tuple(change.path for change in asked_for if change.path not in left)
        yield Proposal(root, chosen, contents, wanted, expected, classes, moved, merged, conflicts, everything, settled)


def _refuse_twice(changes: ChangeSet) -> None:
    """Layers belong to trees (`engine.unseen`): under other rules about files, the same may have been changed from its real state again."""
    seen: set[str] = set()
    for change in changes:
        if change.path in seen:
            why = f"{change.path!r} was changed under two rules about files (files.allowed), and only one change can be carried over"
            raise PolicyError(why, hint="see both: agent-sandbox diff; leave it out: --skip NAME")
        seen.add(change.path)


def carry_out(proposal: Proposal, stored: Stored, gate: Gate, *, details: Callable[[], str] = str) -> CarriedOver:
    """Do what was proposed, in the block of `proposed`. Raises `Denied`, `Drift`, `Conflicted`, and what `promote` raises; then nothing
    was changed. `details` is the diff, for whoever is asked.

    The changes of a plan are not in the layers of the project's sandbox, so nothing leaves them.
    """
    refuse_impossible(proposal.plan())  # first: no merging or forcing helps there
    _refuse_moved(proposal)
    return _done(
        stored,
        gate,
        proposal.action(),
        lambda: promote(proposal.plan(), proposal.contents, stored.state.promotions, holder=_holder("promote"), clock=time.time),
        None if proposal.wanted.plan else _leaving(proposal),
        details,
    )


def _done(
    stored: Stored,
    gate: Gate,
    action: Promote | Undo,
    deed: Callable[[], Promotion],
    leaving: Leaving | None,
    details: Callable[[], str] = str,
) -> CarriedOver:
    """Do it through the gate, and then to the layers what follows from it, if anything does.

    Wherever this is cut off, `recovering` goes on from there.
    """
    UnderWay.begin(stored, action.digest(), leaving, undo=isinstance(action, Undo))
    try:
        promotion = gate.perform(action, lambda allow: deed(), describe=_facts, details=details)
    except BaseException:
        note = UnderWay.recall(stored)
        if note is not None and note.done(stored) is None:
            UnderWay.finish(stored)
        raise
    snapshot = None
    if leaving is not None and (promotion.number or leaving.paths):
        try:
            snapshot = let_go(stored, gate, leaving, promotion.number, promotion.undoes)
        except (SandboxError, OSError) as error:
            return CarriedOver(promotion, note=not_let_go(error))
    UnderWay.finish(stored)
    return CarriedOver(promotion, snapshot, promotion.note)


def _leaving(proposal: Proposal) -> Leaving:
    """What can leave the layers: not a directory with something in it that was not carried over."""
    carried = {change.path for change in proposal.changes}.union(proposal.settled)
    staying: set[str] = set()
    for change in proposal.pending:
        path = change.path
        while change.path not in carried and path and path not in staying:
            staying.add(path)
            path = path.rpartition("/")[0]
    return Leaving(sorted(carried - staying), sorted(carried & staying))


def take_back(stored: Stored, gate: Gate) -> CarriedOver:
    """Undo the last promotion. What it carried over is in the sandbox again, unless something has run there since.

    Raises `Drift` when what it left has changed since, `WorkspaceError` when there is nothing to undo.
    """
    with stored.state.lock(command="undo"):
        journal = undo.last(stored.state.promotions)
        number = "" if journal is None else str(journal.number)
        action = Undo(_text(stored.state.project), number)
        return _done(stored, gate, action, lambda: undo.undo(stored.state.promotions, holder=_holder("undo"), clock=time.time), Leaving())


def _refuse_moved(proposal: Proposal) -> None:
    if proposal.conflicts:
        first, count = proposal.conflicts[0].sentence(), len(proposal.conflicts)
        what = "a change cannot" if count == 1 else f"{count:,} changes cannot"
        raise Conflicted(
            f"{what} be merged with what has changed in reality{'' if count == 1 else '; the first'}: {first}; nothing was changed",
            conflicts=proposal.conflicts,
            hint="choose a side with --resolve ours or theirs, put both into the files with --resolve markers, or leave them out",
        )
    if proposal.moved and proposal.wanted.drift == "refuse":
        paths = tuple(proposal.moved)
        what = repr(paths[0]) if len(paths) == 1 else f"{len(paths):,} files, the first of them {paths[0]!r},"
        raise Drift(
            f"{what} moved on in reality since the sandbox first touched {'it' if len(paths) == 1 else 'them'}; nothing was changed",
            paths=paths,
            hint="--merge brings both together, --force takes the sandbox's side, --only and --skip leave files out",
        )


def _holder(what: str) -> Holder:
    return Holder(os.getpid(), what, time.time())


def _facts(done: Promotion) -> dict[str, str | int]:
    return {"promotion": done.number, "undoes": done.undoes, "bytes": done.bytes, "content_sha256": done.digest, **done.counts}


def _spelt(change: Change) -> list[str | int]:
    node = change.after
    return [] if node is None else [node.type.value, node.mode, node.size, _hex(node.target)]


def _hex(path: str) -> str:
    return os.fsencode(path).hex()


def _text(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
