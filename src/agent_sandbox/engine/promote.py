"""Promote the changes of a stored sandbox to the real tree, through the gate, and undo promotions.

The sandbox is locked from reading its changes to the last step, so that exactly the changes are promoted that were judged and shown. If the
real tree has drifted, the promotion is refused, unless the caller chose to merge or to force. Afterwards promoted paths are dropped from
the layers, so that the sandbox sees the real files again. A snapshot keeps the layers as they were before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial

from agent_sandbox._fast.collector import uncollected
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.recover import Leaving, UnderWay, let_go, not_let_go
from agent_sandbox.engine.repositories import CarriedRepositories, HistorySource, carry_history
from agent_sandbox.errors import Conflicted, Drift, PolicyError, SandboxError, WorkspaceError
from agent_sandbox.kernel.mount_plan import IMAGES
from agent_sandbox.policy.action import Promote, Undo
from agent_sandbox.policy.decide import Reason
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.policy.secrets import own_places
from agent_sandbox.workspace import protected
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind, place_of
from agent_sandbox.workspace.contents import Mixed
from agent_sandbox.workspace.diff.compare import MachineFiles
from agent_sandbox.workspace.digests import ContentDigests, checked, digest_of
from agent_sandbox.workspace.drift import MovedOn, judge
from agent_sandbox.workspace.git.records import relative_meanings
from agent_sandbox.workspace.git.repository import linked_repository
from agent_sandbox.workspace.layers.history import Snapshot
from agent_sandbox.workspace.layers.image import NoRoom
from agent_sandbox.workspace.merge.tree import Conflict, ConflictKind, MergedEntry, Version, merge_entry, resolve
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion import undo
from agent_sandbox.workspace.promotion.inspect import Protection, TreeContext, judge_changes, look_at
from agent_sandbox.workspace.promotion.plan import Expected, Plan, plan
from agent_sandbox.workspace.promotion.promote import Promotion, promote, refuse_impossible
from agent_sandbox.workspace.reality import Base, digest_of_open
from agent_sandbox.workspace.store import Holder
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from typing import Literal

    from agent_sandbox.engine.git_objects import RuntimeOf
    from agent_sandbox.workspace.merge.tree import Answer, Choice, Word

    Drifted = Literal["refuse", "merge", "force"]

LARGEST_MERGED = 8 << 20  # bytes of one file; beyond it a side is chosen or it stays a conflict

OpenBase = Callable[[Base], int]


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
    """Merge drifted changes with the real files. Return all changes, the merged paths, and the conflicts without an answer.

    `moved` are the drifted changes by path. Merged contents are put into `contents`. `how` answers conflicts, as for `merge.resolve`. If
    `how` is None, no conflict is answered.
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
    """Yield a conflict and the answer of `how`: the real file at `path` changed, but the sandbox removed its directory."""
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
    """Return `node` with the owner of `real`: a promotion never changes owners, so they cause no conflict."""
    return node if node is None or real is None else replace(node, uid=real.uid, gid=real.gid)


def _changes(change: Change, moved: MovedOn, entry: MergedEntry, contents: Mixed) -> Iterator[Change]:
    """Yield the change from the real file to the merged file; nothing if both are the same."""
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


_DRIFTED = ("refuse", "merge", "force")
_WORDS = ("ours", "theirs", "markers")


def _all(change: Change) -> bool:
    return True


@dataclass(frozen=True)
class Wanted:
    """The options of a promotion. `chosen` returns whether a change is to be promoted.

    `plan` is the digest of the simulated plan to promote. `expect` is the beginning of the digest that the changes must have.
    """

    chosen: Callable[[Change], bool] = _all
    system: bool = False  # also changes outside the project
    drift: Drifted = "refuse"
    resolve: Word | Choice | None = None  # answers the conflicts of a merge; if None, conflicts are refused
    approved: frozenset[str] = frozenset()  # the protected classes that were approved by name
    caches: bool = False  # also changes in caches
    plan: str = ""  # the digest of the plan whose changes are promoted; see `simulation`
    expect: str | None = None  # the first digits of the digest that the changes must have
    home: str = ""  # the user's home, where git reads configuration
    progress: Progress = NO_PROGRESS


@dataclass(frozen=True)
class PromotionProposal:
    """A promotion that is checked for drift, conflicts and protected changes, and not carried out yet. Valid in the block of `proposed`."""

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
    around: TreeContext = TreeContext()  # what the changes were judged by
    already: ChangeSet = ChangeSet()  # the settled changes whose real file is the same already
    hashes: ContentDigests = ContentDigests()  # of the content of `changes` and `already`
    history: CarriedRepositories = field(default_factory=CarriedRepositories, hash=False, compare=False)
    tree: str = ""  # the directory above the project and its repository, if the project is a linked worktree of another place
    full: NoRoom | None = None  # why the promoted changes could not be dropped from the layers

    def plan(self) -> Plan:
        """Return the plan: its steps, the refused changes, and those that still need an approval. Cached: a proposal does not change."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        # With the digests that are shown: other content cannot be written.
        with uncollected():
            tree, digests = self.tree or self.root, self.hashes.by_path()
            classes = {**self.classes, tree: self.classes.get(self.root, frozenset())}  # those of the whole set
            result = plan(self.changes, self.expected, root=tree, classes=classes, approved=self.wanted.approved, digests=digests)
        meanings, place = relative_meanings(self.history.meanings, tree), os.path.relpath(self.root, tree) if self.tree else ""
        return replace(result, refused=(*result.refused, *self.history.refused), meanings=meanings, place=place)

    @property
    def digest(self) -> str:
        """The digest of the changes that would be promoted and of those that the real tree already has; "" if there is too much content.

        Of a git repository it covers what the sandbox has changed: values of references and HEAD, the entries of the index, lines of logs.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        files = (change for change in self.changes if change.path not in self.history.changes)
        if not self.hashes.complete:
            return ""
        return digest_of(ChangeSet((*files, *self.already)), self.hashes.by_path(), self.history.facts)

    def narrowed(self, keep: Callable[[str], bool]) -> PromotionProposal:
        """Return the proposal with only the changes whose path `keep` accepts, and the new directories that these lie in.

        The sandbox's own git files count as promoted only if all changes of repositories are kept.
        """
        changes = self.changes.chosen(lambda change: keep(change.path))
        paths = {change.path for change in changes}
        whole = all(path in paths for path in self.history.changes)
        history = self.history if any(path in paths for path in self.history.changes) else CarriedRepositories()
        judged = judge_changes(changes.within(self.root), self.expected, self.contents, root=self.root, around=self.around)
        return replace(
            self,
            changes=changes,
            classes={**judged.classes, **{path: kinds for path, kinds in history.classes.items() if path in paths}},
            moved={path: each for path, each in self.moved.items() if path in paths},
            remarks=judged.remarks,
            merged=tuple(path for path in self.merged if path in paths),
            settled=tuple(path for path in self.settled if keep(path) and (whole or path not in self.history.raw)),
            already=ChangeSet(tuple(change for change in self.already if keep(change.path))),
            history=history,
        )

    def protected(self) -> dict[str, tuple[str, ...]]:
        """Return the changed paths by protected class."""
        return Protection(self.classes).by_class()

    def approving(self, names: frozenset[str]) -> PromotionProposal:
        """Return a copy of the proposal in which these protected classes are approved, too."""
        return replace(self, wanted=replace(self.wanted, approved=self.wanted.approved | names))

    def action(self) -> Promote:
        """Return the action that the gate judges and the ledger records."""
        digest = self.wanted.plan or self.digest
        held = self.protected()
        approved = tuple(name for name in held if name in self.wanted.approved)
        return Promote(_text(self.root), digest, len(self.changes), tuple(held), approved, self.wanted.drift)


@dataclass(frozen=True)
class CarriedOver:
    """A finished promotion or undo, and the snapshot of the layers from before, if the layers were changed."""

    promotion: Promotion
    snapshot: Snapshot | None = None
    note: str = ""  # steps that could not be done yet, in words


@contextmanager
def proposed(stored: Stored, policy: Policy, wanted: Wanted, runtime: RuntimeOf) -> Iterator[PromotionProposal]:
    """Yield a proposed promotion. The sandbox is locked inside the block. Raises `Busy` while a run uses the sandbox.

    Drift, conflicts and protected classes raise nothing here: they are in the proposal. Raises `PolicyError` for unknown options, for an
    unknown protected class, and for a path with two changes, made under different file rules. `runtime` returns the runtime in which the
    git objects of the sandbox are read.
    """
    if wanted.drift not in _DRIFTED:
        raise PolicyError(f"unknown drift mode: {wanted.drift!r}", hint=f"there are: {', '.join(_DRIFTED)}")
    if wanted.resolve is not None and (wanted.drift != "merge" or not (callable(wanted.resolve) or wanted.resolve in _WORDS)):
        raise PolicyError('resolve needs drift="merge", and one of these words or a function', hint=f"there are: {', '.join(_WORDS)}")
    if wanted.expect is not None:
        checked(wanted.expect)
    if unknown := wanted.approved - protected.CLASSES.keys():
        raise PolicyError(f"there is no protected class {min(unknown)!r}", hint=f"there are: {', '.join(sorted(protected.CLASSES))}")
    with stored.state.lock(command="promote"), ExitStack() as ends, ExitStack() as looking:
        looking.enter_context(uncollected())
        stack, full = stored.open_for_promotion(ends, drops=not wanted.plan)
        everything, bases = stored.changes_in(stack, policy, wanted.progress), stored.bases(stack)
        root = "/" if wanted.system else stored.state.project
        asked_for, caches = selected(everything, stored.state.project, wanted)
        _refuse_unfit(asked_for, own_places(policy.files.masks))
        history, records = history_of(stored, policy, everything, asked_for, wanted, stack, runtime, ends)
        chosen = ChangeSet(tuple(each for each in asked_for if each.path not in history.raw))
        unsettled = chosen
        expected = look_at(root, chosen)
        hidden = {change.path for change in chosen if change.masks_real}  # hidden real files: there is no base to compare with
        verdicts = judge(chosen, bases, expected)
        moved = {path: each for path, each in verdicts.items() if isinstance(each, MovedOn) and path not in hidden}
        contents = Mixed(stack)
        chosen = ChangeSet(tuple(each for each in chosen if each.path not in moved or not is_so_already(each, moved[each.path], contents)))
        moved = {change.path: moved[change.path] for change in chosen if change.path in moved}
        differing = {change.path for change in chosen}
        already = ChangeSet(tuple(change for change in unsettled if change.path not in differing))
        merged: tuple[str, ...] = ()
        conflicts: tuple[Conflict, ...] = ()
        if moved and wanted.drift == "merge":
            chosen, merged, conflicts = brought_together(chosen, moved, contents, stored.open_base, wanted.resolve)
        above = _missing_above(chosen, root)
        if wanted.drift == "refuse":
            moved |= {path: MovedOn(Base(path, None), None, reason=_GONE) for path in above if path not in moved}
        else:
            chosen = ChangeSet((*chosen, *_new_directories(above)))
        conflicts += _answered(history, wanted)
        moved |= history.moved
        for path, content in history.contents.items():
            contents.put(path, content)
        chosen = ChangeSet((*chosen, *history.changes.values()))
        inner = chosen.within(root)
        if inner != unsettled:  # otherwise all of it was looked at
            expected = look_at(root, inner)
        around = TreeContext.of(stored.state.project, policy.files, wanted.home)
        protection = judge_changes(inner, expected, contents, root=root, around=around, progress=wanted.progress)
        classes = {**protection.classes, **history.classes}
        tree = "" if len(inner) == len(chosen) else os.path.commonpath([root, *history.changes])
        if tree:
            expected |= look_at(tree, chosen.outside(root))
        left = {change.path for change in chosen}
        records_left = {change.path for change in records} - left
        settled = (*(each.path for each in unsettled if each.path not in left), *sorted(records_left))
        hashes = ContentDigests((*chosen, *already), contents, progress=wanted.progress)
        looking.close()
        yield PromotionProposal(
            *(root, chosen, contents, wanted, expected, classes, moved, merged, conflicts, everything, settled, caches),
            *(protection.remarks, around, already, hashes, history, tree, full),
        )


def selected(everything: ChangeSet, project: str, wanted: Wanted) -> tuple[ChangeSet, tuple[str, ...]]:
    """Return the changes that a promotion or a diff with these options takes, and the changed paths in caches that it leaves out."""
    inside = everything.within("/" if wanted.system else project)
    inside = ChangeSet(
        tuple(change for change in inside if not change.path.startswith(IMAGES))
    )  # an image's files are nowhere on the machine
    noise = {change.path for change in inside if not wanted.caches and place_of(change.path, project) == "noise"}
    caches = tuple(change.path for change in inside if change.path in noise and wanted.chosen(change))
    return inside.chosen(lambda change: change.path not in noise and wanted.chosen(change)), caches


def history_of(
    stored: Stored,
    policy: Policy,
    everything: ChangeSet,
    asked_for: ChangeSet,
    wanted: Wanted,
    contents: Contents,
    runtime: RuntimeOf,
    until_the_end: ExitStack,
) -> tuple[CarriedRepositories, ChangeSet]:
    """Return the git history of a stored sandbox as changes to real repositories, and the sandbox's own changes that these replace.

    `asked_for` are the changes that would be promoted. The repository of a linked worktree may lie outside the project. The history can be
    used until the stack `until_the_end` is closed.
    """
    project, root = stored.state.project, "/" if wanted.system else stored.state.project
    common = linked_repository(root) if root != "/" else ""
    elsewhere = everything.within(common) if common and not contains(root, common) else ChangeSet()
    paths = {change.path for change in (*asked_for, *elsewhere.chosen(wanted.chosen))}
    masks = tuple(mask.path for mask in policy.files.masks)
    changes = ChangeSet((*everything.within(root), *elsewhere))
    source = HistorySource(project, changes, contents, stored.bases(), stored.open_base, masks, runtime)
    history = carry_history(source, lambda change: change.path in paths, until_the_end)
    return history, ChangeSet(tuple(change for change in changes if change.path in history.raw))


def with_history(changes: ChangeSet, contents: Contents, history: CarriedRepositories) -> tuple[ChangeSet, Mixed]:
    """Return changes and contents in which the sandbox's own git files are replaced by the files that a promotion writes for them."""
    mixed = Mixed(contents)
    for path, content in history.contents.items():
        mixed.put(path, content)
    return ChangeSet((*(change for change in changes if change.path not in history.raw), *history.changes.values())), mixed


_GONE = "the directory that it lies in has gone in reality"


def _missing_above(changes: ChangeSet, root: str) -> dict[str, list[str]]:
    """Return for each changed path the missing directories above it, the deepest first. Missing: neither real nor one of the changes."""
    after = {change.path for change in changes if change.after is not None and change.after.type is EntryType.DIRECTORY}
    known: dict[str, list[str]] = {root: []}

    def missing(directory: str) -> list[str]:
        if directory not in known:
            there = directory in after or (os.path.isdir(directory) and not os.path.islink(directory))
            known[directory] = [] if there or len(directory) <= len(root) else [directory, *missing(os.path.dirname(directory))]
        return known[directory]

    return {change.path: gone for change in changes if change.after is not None and (gone := missing(os.path.dirname(change.path)))}


def _new_directories(above: Mapping[str, list[str]]) -> Iterator[Change]:
    for path in sorted({path for gone in above.values() for path in gone}):
        if not os.path.lexists(path):
            yield Change(path, Kind.ADDED, None, Node(EntryType.DIRECTORY, 0o755, os.geteuid(), os.getegid()))


def _answered(history: CarriedRepositories, wanted: Wanted) -> tuple[Conflict, ...]:
    """Answer conflicts in git history by `wanted.resolve`, and return those without an answer. An answer takes one side whole."""
    if wanted.drift != "merge":
        return ()
    conflicts: list[Conflict] = []
    for path, each in history.moved.items():
        conflict = Conflict(path, ConflictKind.WHOLE, None, None, None, why=each.why())
        answer = wanted.resolve(conflict) if callable(wanted.resolve) else wanted.resolve
        if answer == "theirs":
            history.drop([path])
        elif answer != "ours":
            conflicts.append(conflict)
    return tuple(conflicts)


def refuse_unexpected(proposal: PromotionProposal, gate: Gate) -> None:
    """Raise `Denied`, and record the refusal, if the digest of the changes is not the expected one (`wanted.expect`)."""
    expected = proposal.wanted.expect
    if expected is not None and not proposal.digest.startswith(checked(expected)):
        digest = proposal.digest or "none: there is too much content"
        why = f"the digest of the changes is {digest}, and {expected} was expected; nothing was changed"
        gate.refuse(proposal.action(), Reason("expect", why, "look at the changes again: agent-sandbox diff"))


def _refuse_unfit(changes: ChangeSet, own: tuple[str, ...]) -> None:
    """Raise `PolicyError` for a path with two changes, which runs under different file rules can make, and for one in our own places."""
    seen: set[str] = set()
    below = tuple(place.rstrip("/") + "/" for place in own)
    for change in changes:
        if change.path.startswith(below) or change.path in own:
            why = f"{change.path!r} lies in the sandbox's own state, which nothing that ran in a sandbox may write"
            raise PolicyError(why, hint="leave it out: --skip NAME")
        if change.path in seen:
            why = f"{change.path!r} was changed under two rules about files (files.allowed), and only one change can be carried over"
            raise PolicyError(why, hint="see both: agent-sandbox diff; leave it out: --skip NAME")
        seen.add(change.path)


def carry_out(proposal: PromotionProposal, stored: Stored, gate: Gate, *, details: Callable[[], str] = str) -> CarriedOver:
    """Carry out the proposal, inside the block of `proposed`. `details` returns the diff, for an approver.

    Raises `Denied`, `Drift`, `Conflicted` and `NoRoom`; then nothing was changed. Raises what `promote` and `Gate.perform` raise; after
    `Unfinished`, `LedgerUnavailable` or `LedgerBroken`, files may have been changed.

    Promoted changes are dropped from the sandbox's layers. The changes of a simulated plan were never in these layers, so they are not
    dropped.
    """
    refuse_impossible(proposal.plan())  # first: neither merging nor forcing removes these obstacles
    _refuse_moved(proposal)
    refuse_unexpected(proposal, gate)
    if proposal.full is not None:
        raise NoRoom(f"{proposal.full.message}; nothing was changed", hint=proposal.full.hint)
    return _done(
        stored,
        gate,
        proposal.action(),
        lambda: _written(proposal, stored),
        None if proposal.wanted.plan else _leaving(proposal),
        details,
        proposal.wanted.progress,
    )


def _written(proposal: PromotionProposal, stored: Stored) -> Promotion:
    proposal.history.prepare(proposal.tree or proposal.root)
    journals = stored.state.promotions
    return promote(proposal.plan(), proposal.contents, journals, holder=_holder("promote"), progress=proposal.wanted.progress)


def _done(
    stored: Stored,
    gate: Gate,
    action: Promote | Undo,
    deed: Callable[[], Promotion],
    leaving: Leaving | None,
    details: Callable[[], str] = str,
    progress: Progress = NO_PROGRESS,
) -> CarriedOver:
    """Perform a promotion or an undo (`deed`) through the gate, then drop promoted paths (`leaving`) from the layers.

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
        progress.begin("bringing the sandbox up to date")
        try:
            snapshot = let_go(stored, gate, leaving, promotion.number, promotion.undoes)
        except (SandboxError, OSError) as error:
            return CarriedOver(promotion, note=not_let_go(error))
    UnderWay.finish(stored)
    return CarriedOver(promotion, snapshot, promotion.note)


def _leaving(proposal: PromotionProposal) -> Leaving:
    """Return the promoted paths to drop from the layers. Promoted directories that still hold unpromoted changes are listed separately."""
    carried = {change.path for change in proposal.changes}.union(proposal.settled)
    staying: set[str] = set()
    for change in proposal.pending:
        path = change.path
        while change.path not in carried and path and path not in staying:
            staying.add(path)
            path = path.rpartition("/")[0]
    return Leaving(sorted(carried - staying), sorted(carried & staying))


def take_back(stored: Stored, gate: Gate, progress: Progress = NO_PROGRESS) -> CarriedOver:
    """Undo the last promotion. Its changes are pending in the sandbox again, unless something has run there since.

    Raises `Drift` if the promoted files have changed since, and `WorkspaceError` if there is nothing to undo.
    """
    with stored.state.lock(command="undo"):
        journal = undo.last(journals := stored.state.promotions)
        number = "" if journal is None else str(journal.number)
        action = Undo(_text(stored.state.project), number)
        deed = partial(undo.undo, journals, holder=_holder("undo"), progress=progress)
        return _done(stored, gate, action, deed, Leaving(), progress=progress)


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


def _text(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
