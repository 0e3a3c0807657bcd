"""Promote the changes of a stored sandbox to the real tree, through the gate, and undo that.

The sandbox is locked from reading its changes to the last step, so that exactly the changes are promoted that were judged and shown. If the
real tree has drifted, the promotion is refused, unless the caller chose to merge or to force. Afterwards promoted paths are dropped from
the layers, so that the sandbox sees the real files again. A snapshot keeps the layers as they were before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from agent_sandbox._fast.encoding import digest_of_form
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.recover import Leaving, UnderWay, let_go, not_let_go
from agent_sandbox.errors import Conflicted, Drift, PolicyError, SandboxError, WorkspaceError
from agent_sandbox.policy.action import Promote, Undo
from agent_sandbox.policy.model import Policy
from agent_sandbox.workspace import protected
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind, place_of
from agent_sandbox.workspace.diff.compare import MachineFiles
from agent_sandbox.workspace.drift import MovedOn, judge
from agent_sandbox.workspace.layers.history import Snapshot
from agent_sandbox.workspace.merge.tree import Conflict, ConflictKind, MergedEntry, Version, merge_entry, resolve
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion import undo
from agent_sandbox.workspace.promotion.inspect import Protection, TreeContext, judge_changes, look_at
from agent_sandbox.workspace.promotion.plan import Expected, Plan, plan
from agent_sandbox.workspace.promotion.promote import Promotion, promote, refuse_impossible
from agent_sandbox.workspace.reality import Base, digest_of_open
from agent_sandbox.workspace.store import Holder
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from agent_sandbox.workspace.merge.tree import Answer, Choice, Word

LARGEST_MERGED = 8 << 20  # bytes of one file; beyond it a side is chosen or it stays a conflict

OpenBase = Callable[[Base], int]


class Mixed:
    """The contents of changed files: the sandbox's, and merged ones. Implements `changes.Contents`."""

    def __init__(self, sandbox: Contents) -> None:
        self._sandbox = sandbox
        self._made: dict[str, bytes] = {}

    def put(self, path: str, content: bytes) -> None:
        """Set the content of the file at `path`."""
        self._made[path] = content

    def open_file(self, change: Change) -> int:
        """See `Contents`."""
        if change.path not in self._made:
            return self._sandbox.open_file(change)
        fd = os.memfd_create("merged", os.MFD_CLOEXEC)
        with open(os.dup(fd), "wb") as file:
            file.write(self._made[change.path])
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def _read(node: Node | None, open_it: Callable[[], int], most: int) -> bytes | None:
    if node is None or node.type is not EntryType.FILE or node.size > most:
        return None
    try:
        with open(open_it(), "rb") as file:
            content = file.read(most + 1)
    except (OSError, WorkspaceError):
        return None
    return content if len(content) <= most else None


def brought_together(
    changes: ChangeSet, moved: Mapping[str, MovedOn], contents: Mixed, open_base: OpenBase, how: Word | Choice | None
) -> tuple[ChangeSet, tuple[str, ...], tuple[Conflict, ...]]:
    """Merge drifted changes. Return all changes, the merged paths, and the conflicts without an answer.

    Merged contents are put into `contents`. `how` answers conflicts, as for `merge.resolve`. If `how` is None, no conflict is answered.
    """
    result: list[Change] = []
    questions: list[Conflict] = []
    for change in changes:
        each = moved.get(change.path)
        if each is None:
            result.append(change)
        elif each.below:
            asked = [conflict for path in each.below for conflict in _lively(path, each, how)]
            questions += [conflict for conflict, answer in asked if answer not in ("ours", "theirs")]
            if not any(answer == "theirs" for _, answer in asked):  # otherwise the directory stays, with its whole content
                result.append(change)
        else:
            entry = _merge(change, each, contents, open_base)
            entry = resolve(entry, how) if how is not None else entry
            questions += entry.conflicts
            result += _changes(change, each, entry, contents)
    open_paths = {conflict.path for conflict in questions}
    merged = tuple(change.path for change in result if change.path in moved and change.path not in open_paths)
    return ChangeSet(tuple(result)), merged, tuple(questions)


def is_so_already(change: Change, moved: MovedOn, contents: Mixed) -> bool:
    """Return whether the real file already equals the result of the change. Owners are not compared: a promotion never changes them."""
    if moved.below or (change.after is None) != (moved.seen is None):
        return False
    if change.after is None or moved.seen is None:
        return True
    real = moved.seen.node
    if _owned(change.after, real) != real:
        return False
    ours = _version(change.after, lambda: contents.open_file(change))
    return real.type is not EntryType.FILE or (ours is not None and ours.holds_the_same(_theirs(change, moved)))


def _lively(path: str, moved: MovedOn, how: Word | Choice | None) -> Iterator[tuple[Conflict, Answer]]:
    """Yield a conflict and its answer. The conflict is a real file that changed in a directory which the sandbox removed."""
    conflict = Conflict(path, ConflictKind.DELETED_OURS, None, None, None, moved.base.known)
    yield conflict, how(conflict) if callable(how) else how


def _merge(change: Change, moved: MovedOn, contents: Mixed, open_base: OpenBase) -> MergedEntry:
    theirs = _theirs(change, moved)
    real = theirs.node if theirs else None
    ours = _version(_owned(change.after, real), lambda: contents.open_file(change))
    base, was = moved.base, moved.base.seen
    before = _version(_owned(was.node, real), lambda: open_base(base), was.digest) if was is not None else None
    return merge_entry(change.path, before, ours, theirs, known=base.known)


def _theirs(change: Change, moved: MovedOn) -> Version | None:
    if moved.seen is None:
        return None
    real = moved.seen.node
    return _version(real, lambda: MachineFiles().open_old(replace(change, before=real)), moved.seen.digest)


def _version(node: Node | None, open_it: Callable[[], int], digest: str = "") -> Version | None:
    if node is None:
        return None
    content = _read(node, open_it, LARGEST_MERGED)
    if content is None and not digest and node.type is EntryType.FILE:
        try:
            fd = open_it()
        except (OSError, WorkspaceError):
            return Version(node)
        try:
            digest = digest_of_open(fd)
        finally:
            os.close(fd)
    return Version(node, content, digest)


def _owned(node: Node | None, real: Node | None) -> Node | None:
    """Return the node with the owner of the real one: a promotion never changes owners, so they cause no conflict."""
    return node if node is None or real is None else replace(node, uid=real.uid, gid=real.gid)


def _changes(change: Change, moved: MovedOn, entry: MergedEntry, contents: Mixed) -> Iterator[Change]:
    """Yield the change from the real file to the merged one; nothing if they are the same."""
    real, result = moved.seen.node if moved.seen else None, entry.result
    if result is None:
        if real is not None:
            yield replace(change, kind=Kind.DELETED, before=real, after=None)
        return
    if result.content is not None:
        contents.put(change.path, result.content)
    if real is None or result.node.type is not real.type:
        yield replace(change, kind=Kind.ADDED if real is None else Kind.RETYPED, before=real, after=result.node)
    elif entry.conflicts or result.node != real or not result.holds_the_same(_theirs(change, moved)):
        yield replace(change, kind=Kind.MODIFIED, before=real, after=result.node)


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
    """The options of a promotion. `chosen` selects the changes."""

    chosen: Callable[[Change], bool] = _all
    system: bool = False  # also changes outside the project
    drift: Drifted = "refuse"
    resolve: Word | Choice | None = None  # answers the conflicts of a merge; if None, conflicts are refused
    approved: frozenset[str] = frozenset()  # the protected classes that were approved by name
    caches: bool = False  # also changes in caches
    plan: str = ""  # the digest of the plan whose changes are promoted; see `simulation`
    home: str = ""  # the user's home, where git reads configuration


@dataclass(frozen=True)
class PromotionProposal:
    """A promotion that is judged and not done yet. Valid in the block of `proposed`."""

    root: str
    changes: ChangeSet
    contents: Mixed
    wanted: Wanted
    expected: Expected
    classes: Mapping[str, frozenset[str]]
    moved: Mapping[str, MovedOn] = field(default_factory=dict, hash=False)
    merged: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    pending: ChangeSet = ChangeSet()  # all unpromoted changes of the sandbox
    settled: tuple[str, ...] = ()  # chosen paths without a step: the real file is the same already, or stays as it is
    caches: tuple[str, ...] = ()  # caches below the root that are not promoted
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)  # on protected changes, by path

    def plan(self) -> Plan:
        """Return the plan: its steps and the obstacles. Cached, because a proposal does not change."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        return plan(self.changes, self.expected, root=self.root, classes=self.classes, approved=self.wanted.approved)

    def protected(self) -> dict[str, tuple[str, ...]]:
        """Return the changed paths of each protected class."""
        return Protection(self.classes).by_class()

    def approving(self, names: frozenset[str]) -> PromotionProposal:
        """Return the proposal with these classes approved, too."""
        return replace(self, wanted=replace(self.wanted, approved=self.wanted.approved | names))

    def action(self) -> Promote:
        """Return the action that the gate judges and the ledger records."""
        digest = self.wanted.plan or digest_of_form([[_hex(change.path), change.kind.value, *_spelt(change)] for change in self.changes])
        held = self.protected()
        approved = tuple(name for name in held if name in self.wanted.approved)
        return Promote(_text(self.root), digest, len(self.changes), tuple(held), approved, self.wanted.drift)


@dataclass(frozen=True)
class CarriedOver:
    """A promotion that was done, and the snapshot of the layers before it, if there was anything to keep."""

    promotion: Promotion
    snapshot: Snapshot | None = None
    note: str = ""  # steps that could not be done yet, in words


@contextmanager
def proposed(stored: Stored, policy: Policy, wanted: Wanted) -> Iterator[PromotionProposal]:
    """Yield a proposed promotion. The sandbox is locked inside the block. Raises `Busy` while a run uses the sandbox.

    Drift, conflicts and protected classes raise nothing here: they are in the proposal. Raises `PolicyError` for unknown options, for an
    unknown protected class, and for a path that was changed under two rules on files.
    """
    if wanted.drift not in _DRIFTED:
        raise PolicyError(f"unknown drift mode: {wanted.drift!r}", hint=f"there are: {', '.join(_DRIFTED)}")
    if wanted.resolve is not None and (wanted.drift != "merge" or not (callable(wanted.resolve) or wanted.resolve in _WORDS)):
        raise PolicyError('resolve needs drift="merge", and one of these words or a function', hint=f"there are: {', '.join(_WORDS)}")
    if unknown := wanted.approved - protected.CLASSES.keys():
        raise PolicyError(f"there is no protected class {min(unknown)!r}", hint=f"there are: {', '.join(sorted(protected.CLASSES))}")
    with stored.state.lock(command="promote"), stored.opened() as stack:
        everything, bases = stored.changes_in(stack, policy), stored.bases(stack)
        root = "/" if wanted.system else stored.state.project
        project = stored.state.project
        inside = everything.within(root)
        noise = {change.path for change in inside if not wanted.caches and place_of(change.path, project) == "noise"}
        caches = tuple(change.path for change in inside if change.path in noise and wanted.chosen(change))
        chosen = inside.chosen(lambda change: change.path not in noise and wanted.chosen(change))
        _refuse_twice(chosen)
        expected = look_at(root, chosen)
        hidden = {change.path for change in chosen if change.masks_real}  # hidden real files: there is no base to compare with
        verdicts = judge(chosen, bases, expected)
        moved = {path: each for path, each in verdicts.items() if isinstance(each, MovedOn) and path not in hidden}
        contents = Mixed(stack)
        asked_for = chosen
        chosen = ChangeSet(tuple(each for each in chosen if each.path not in moved or not is_so_already(each, moved[each.path], contents)))
        moved = {change.path: moved[change.path] for change in chosen if change.path in moved}
        merged: tuple[str, ...] = ()
        conflicts: tuple[Conflict, ...] = ()
        if moved and wanted.drift == "merge":
            chosen, merged, conflicts = brought_together(chosen, moved, contents, stored.open_base, wanted.resolve)
            expected = look_at(root, chosen)
        protection = judge_changes(chosen, expected, contents, root=root, around=TreeContext.of(project, policy.files, wanted.home))
        classes, remarks = protection.classes, protection.remarks
        left = {change.path for change in chosen}
        settled = tuple(change.path for change in asked_for if change.path not in left)
        yield PromotionProposal(
            root, chosen, contents, wanted, expected, classes, moved, merged, conflicts, everything, settled, caches, remarks
        )


def _refuse_twice(changes: ChangeSet) -> None:
    """Raise `PolicyError` for a path with two changes. Layers belong to trees, so runs under other file rules may use other layers."""
    seen: set[str] = set()
    for change in changes:
        if change.path in seen:
            why = f"{change.path!r} was changed under two rules about files (files.allowed), and only one change can be carried over"
            raise PolicyError(why, hint="see both: agent-sandbox diff; leave it out: --skip NAME")
        seen.add(change.path)


def carry_out(proposal: PromotionProposal, stored: Stored, gate: Gate, *, details: Callable[[], str] = str) -> CarriedOver:
    """Carry out the proposal, inside the block of `proposed`. `details` returns the diff, for an approver.

    Raises `Denied`, `Drift` and `Conflicted`; then nothing was changed. Raises what `promote` and `Gate.perform` raise; after `Unfinished`,
    `LedgerUnavailable` or `LedgerBroken`, files may have been changed.

    Promoted changes are dropped from the sandbox's layers. Changes of a plan are not in these layers, so none is dropped for a plan.
    """
    refuse_impossible(proposal.plan())  # first: neither merging nor forcing removes these obstacles
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
    """Do an action through the gate, and then update the layers.

    If the process dies at any step, `recover.recovered` does the remaining steps.
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


def _leaving(proposal: PromotionProposal) -> Leaving:
    """Return the promoted paths to drop from the layers, and separately the promoted directories that still hold other changes."""
    carried = {change.path for change in proposal.changes}.union(proposal.settled)
    staying: set[str] = set()
    for change in proposal.pending:
        path = change.path
        while change.path not in carried and path and path not in staying:
            staying.add(path)
            path = path.rpartition("/")[0]
    return Leaving(sorted(carried - staying), sorted(carried & staying))


def take_back(stored: Stored, gate: Gate) -> CarriedOver:
    """Undo the last promotion. Its changes are in the sandbox again, unless something has run there since.

    Raises `Drift` when the promoted files have changed since, `WorkspaceError` when there is nothing to undo.
    """
    with stored.state.lock(command="undo"):
        journal = undo.last(stored.state.promotions)
        number = "" if journal is None else str(journal.number)
        action = Undo(_text(stored.state.project), number)
        return _done(stored, gate, action, lambda: undo.undo(stored.state.promotions, holder=_holder("undo"), clock=time.time), Leaving())


def _refuse_moved(proposal: PromotionProposal) -> None:
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
            f"{what} changed in reality since the sandbox first touched {'it' if len(paths) == 1 else 'them'}; nothing was changed",
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
