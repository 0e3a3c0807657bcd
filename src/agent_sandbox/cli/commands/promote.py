"""`promote` (also `apply`) and `undo`: apply the sandbox's changes to the project, and take them back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable
from shlex import split

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import ProjectSandbox, current, gate_for, object_runtime, policy_of, recover
from agent_sandbox.cli.options import PromoteOptions, ShowOptions
from agent_sandbox.cli.render import pager
from agent_sandbox.cli.render.changes import check_patterns, gather, show
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.messages import Console, counted, remark, reset_terminal, say, shown
from agent_sandbox.cli.render.progress import progress_of
from agent_sandbox.cli.render.protection import path_remarks, remarked
from agent_sandbox.cli.results import (
    NOT_APPROVED,
    OMITTED,
    Omitted,
    PathFacts,
    PathName,
    PathReason,
    PathRemarks,
    PromotionFacts,
    VerbResult,
    declined,
)
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted, carry_out, proposed, refuse_unexpected, take_back
from agent_sandbox.engine.review import diff_for_approver, rows_for_approver
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import ancestors, covering
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.diff.formats import LETTERS
from agent_sandbox.workspace.digests import PRINTED
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.undo import last
from agent_sandbox.workspace.protected import BULK, CLASSES, DEPENDENCY
from agent_sandbox.workspace.review_mark import ReviewMark
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from typing import Literal

    from agent_sandbox.workspace.promotion.journal import Journal
    from agent_sandbox.workspace.promotion.plan import Plan

_LISTED = 10  # paths under one heading; --json has all


@dataclass(frozen=True)
class PromoteResult(VerbResult):
    """A proposed promotion, and whether it was carried out.

    `moved` are the paths that drifted, and `settled` those that need no write. `since` says what used the sandbox since its last review.
    """

    kind = "promote"

    root: PathName
    carried_over: bool
    why_not: str | None
    done: PromotionFacts | Omitted
    changes: tuple[Change, ...]
    moved: tuple[PathReason, ...]
    merged: tuple[PathFacts, ...]
    settled: tuple[PathFacts, ...]
    conflicts: tuple[PathReason, ...]
    refused: tuple[PathReason, ...]
    protected: dict[str, tuple[PathFacts, ...]]
    remarks: tuple[PathRemarks, ...]
    git: tuple[str, ...]
    caches: tuple[PathFacts, ...]  # left in the sandbox
    digest: str | None  # of the changes, for --expect; None if they cannot be promoted
    since: str | None  # what changed the sandbox since a person was last shown its changes
    outcome: Literal["promoted", "nothing-to-do", "dry-run", "not-approved"]

    @property
    def code(self) -> int:
        """3 if the promotion was not approved, else 0."""
        return NOT_APPROVED if self.outcome == "not-approved" else 0

    def text(self, console: Console) -> None:
        if self.why_not is not None:
            console.note(self.why_not)
        elif self.changes:
            back = " · take it back: agent-sandbox undo" if not isinstance(self.done, Omitted) and self.done.promotion else ""
            console.note(f"promoted {counted(len(self.changes), 'change')} to {self.root}{back}")
        else:
            settled = counted(len(self.settled), "change")
            console.note(f"nothing to promote: {settled} already in the project, now dropped from the sandbox")


@dataclass(frozen=True)
class UndoResult(VerbResult):
    """A promotion that was undone. If the sandbox was used since the promotion, the snapshot `now_in` holds the undone changes."""

    kind = "undo"

    done: PromotionFacts
    root: PathName
    now_in: int | None

    def text(self, console: Console) -> None:
        where = "; the changes are in the sandbox again" if self.done.snapshot is not None else ""
        if self.now_in is not None:
            where = f"; the sandbox was used since, so the changes are in snapshot {self.now_in}: agent-sandbox rollback {self.now_in}"
        console.note(f"took back promotion {self.done.undoes} of {self.root}{where}")


def promote(options: PromoteOptions, console: Console) -> PromoteResult:
    """Show the changes that would be promoted, ask the user, and promote them."""
    check_patterns(options.only)
    sandbox = current(options.project)
    wanted = wanted_by(options, sandbox.project.path)
    gate = _gate(options, sandbox)
    try:
        stored = Stored(sandbox.state)
        recover(stored, gate)
        with progress_of(console) as progress:
            return _promote(options, sandbox, stored, gate, replace(wanted, progress=progress), console)
    finally:
        gate.end()


def _gate(options: PromoteOptions, sandbox: ProjectSandbox) -> Gate:
    policy = policy_of(options.policy, sandbox.project)
    return gate_for(policy, sandbox.project, sandbox.state.id, capabilities=options.capabilities, prompt=True)


def _promote(
    options: PromoteOptions, sandbox: ProjectSandbox, stored: Stored, gate: Gate, wanted: Wanted, console: Console
) -> PromoteResult:
    with object_runtime() as runtime, proposed(stored, gate.policy, wanted, runtime) as proposal:
        plan = proposal.plan()
        wanted.progress.end()
        mark, shown_before = ReviewMark.of(stored.state), ReviewMark.recall(stored.state)
        since = mark.since(shown_before) if shown_before is not None else ""
        if console.shows:
            show_proposal(proposal, plan, sandbox.project.path, console)
            if since and options.expect is None:
                remark(f"{since} since its changes were last shown (see all of them: agent-sandbox diff)")
            if os.isatty(1):  # otherwise a program may be the only reader
                mark.remember(stored.state)
        refuse_unexpected(proposal, gate)
        if not proposal.changes and not proposal.settled:
            return promotion_result(proposal, plan, since, "nothing-to-do", nothing_to_promote(proposal))
        if options.dry_run:
            return promotion_result(proposal, plan, since, "dry-run", "not promoted: this was a rehearsal (--dry-run)")
        agreed = agreement(proposal, console, yes=options.yes, project=sandbox.project.path)
        if agreed is None:
            return promotion_result(proposal, plan, since, "not-approved", f"not promoted: {why_not_agreed(console)}")
        done = carry_out(agreed, stored, gate, details=lambda: diff_for_approver(agreed))
        wanted.progress.end()
        if console.shows and os.isatty(1):  # the layers are other ones now, and hold nothing that was not shown before
            ReviewMark.of(stored.state).remember(stored.state)
    if done.note:
        remark(done.note)
    return replace(promotion_result(agreed, agreed.plan(), since, "promoted", None), done=promotion_facts(done))


def undo(options: PromoteOptions, console: Console) -> VerbResult:
    """Undo the last promotion. At a terminal, ask first; elsewhere --yes is needed, because real files are replaced."""
    sandbox = current(options.project)
    gate = _gate(options, sandbox)
    try:
        stored = Stored(sandbox.state)
        recover(stored, gate)
        journal = last(sandbox.state.promotions)
        question = f"Take back promotion {journal.number}{_begun(journal)}?" if journal is not None else ""
        if journal is not None and (no := declined("undo", question, console, yes=options.yes)):
            return no
        with progress_of(console) as progress:
            done = take_back(stored, gate, progress)
        if done.note:
            remark(done.note)
        now_in = None if done.snapshot else _snapshot_with_changes(stored, done)
        root = done.promotion.root if done.promotion.root == "/" else sandbox.project.path
        return UndoResult(promotion_facts(done), PathName(root), now_in)
    finally:
        gate.end()


def _begun(journal: Journal) -> str:
    """Return when a promotion was begun, for a question; "" if its record does not tell."""
    started = journal.facts().get("started")
    return f" of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(started))}" if isinstance(started, float) and started > 0 else ""


def nothing_to_promote(proposal: PromotionProposal) -> str:
    """Return in words that a proposal has no changes."""
    waiting = len(proposal.pending.within(proposal.root))
    return f"there is nothing to promote: none of {counted(waiting, 'change')} was chosen" if waiting else "there is nothing to promote"


def _snapshot_with_changes(stored: Stored, done: CarriedOver) -> int | None:
    label = f"before promotion {done.promotion.undoes}"
    return max((each.id for each in stored.snapshots().snapshots if each.automatic and each.label == label), default=None)


def wanted_by(options: PromoteOptions, project: str) -> Wanted:
    """Return the promotion that these options ask for."""
    inside, outside = options.only, options.skip
    home = here().host.home
    covered, skipped = (covering(texts, project=project, home=home) for texts in (inside, outside))

    def chosen(change: Change) -> bool:
        return (not inside or covered(change.path)) and not skipped(change.path)

    return Wanted(
        *(chosen, options.policy.system, options.drift, options.resolve, options.approved, options.caches), expect=options.expect, home=home
    )


def show_proposal(proposal: PromotionProposal, plan: Plan, project: str, console: Console) -> None:
    """Print the changes that would be promoted, and the reasons why some cannot be."""
    summary = ShowOptions(form="stat", everything=True)
    if proposal.changes:
        reset_terminal()
        material = gather(
            summary,
            proposal.root,
            proposal.changes,
            proposal.contents,
            digests=proposal.hashes.by_path(),
            progress=proposal.wanted.progress,
        )
        show(summary, material, sys.stdout.buffer.write, console, proposal.history.words)
        sys.stdout.flush()
        if proposal.digest and not plan.refused:
            say(f"digest of these changes: {proposal.digest[:PRINTED]} (--expect)")
    if outside := sum(change.path not in proposal.history.raw for change in proposal.pending.outside(proposal.root)):
        console.note(f"{counted(outside, 'change')} outside the project {'stays' if outside == 1 else 'stay'} in the sandbox (--system)")
    if caches := len(proposal.caches):
        console.note(f"{counted(caches, 'change')} in caches {'stays' if caches == 1 else 'stay'} in the sandbox (--caches)")
    refused = [f"{each.path}: {each.why}" for each in plan.refused]
    _list(f"{len(refused):,} can never be promoted (--skip leaves out):", refused, project)
    if proposal.wanted.drift == "refuse":
        moved = [f"{path}: {each.why()}" for path, each in proposal.moved.items()]
        _list(f"{len(moved):,} changed in reality since the sandbox first touched them (--merge, --force):", moved, project)
    elif proposal.merged:
        _list(f"{len(proposal.merged):,} merged with the real files:", proposal.merged, project)
    settled = [path for path in proposal.settled if path not in proposal.history.raw]
    _list(f"{len(settled):,} need no change: the real file is already the same, or is kept:", settled, project)
    _list(f"{len(proposal.conflicts):,} in conflict:", [conflict.sentence() for conflict in proposal.conflicts], project)
    for name, paths in proposal.protected().items():
        agreed = " [approved]" if name in proposal.wanted.approved else f" (--approve {name})"
        lines = [remarked(path, proposal.remarks.get(path, ())) if name == DEPENDENCY else path for path in paths]
        _list(f"{len(paths):,} of the protected kind {name!r}: {CLASSES[name]}{agreed}:", lines, project)
    _list("not promoted with it:", [f"{left.path}: {left.what}" for left in plan.left_out], project)


def _list(heading: str, lines: Iterable[str], project: str) -> None:
    every = list(lines)
    if not every:
        return
    say(shown(heading))
    for line in every[:_LISTED]:
        say(f"  {shown(line.removeprefix(project.rstrip('/') + '/'))}")
    if len(every) > _LISTED:
        say(f"  and {counted(len(every) - _LISTED, 'more', 'more')} (--json has all)")


def agreement(proposal: PromotionProposal, console: Console, *, yes: bool, project: str | None) -> PromotionProposal | None:
    """Return the proposal, with the changes and protected kinds that the user approved. Return None if the user said no or cannot be asked.

    `yes` approves everything except protected kinds. A promotion that must fail is returned without a question: `carry_out` then raises the
    error. Without a `project`, the user can only approve the whole proposal; with one, the user may leave out changes.
    """
    if proposal.conflicts or proposal.plan().refused or (proposal.moved and proposal.wanted.drift == "refuse"):
        return proposal
    if not console.asks:
        missing = frozenset(proposal.protected()) - proposal.wanted.approved
        return proposal if missing or yes else None  # the gate refuses a proposal with a missing kind, and names it
    while (agreed := _with_approved_kinds(proposal, console, whole=project is None)) is not None:
        if yes:
            return agreed
        answer = _ask(agreed, console, selects=project is not None and agreed.wanted.expect is None)
        if answer == "yes":
            return agreed
        chosen = select(agreed, project, console) if answer == "select" and project is not None else None
        if chosen is None or project is None:
            return None
        proposal = chosen
        show_proposal(proposal, proposal.plan(), project, console)
    return None


def why_not_agreed(console: Console) -> str:
    """Return why `agreement` returned None: the user said no, or cannot be asked."""
    return "not approved" if console.asks else "needs --yes"


def _ask(proposal: PromotionProposal, console: Console, *, selects: bool) -> Literal["yes", "no", "select"]:
    """Ask the user whether to promote. "diff" shows the diff and asks again; unknown answers are no. `selects` offers to select files."""
    choices = "[y]es [n]o [d]iff [s]elect files" if selects else "[y]es [n]o [d]iff"
    question = f"Promote {counted(len(proposal.changes), 'change')} to {shown(proposal.root)}? {choices} "
    while (answer := console.answer(question)) in ("d", "diff"):
        _page(proposal, console)
    return "yes" if answer in ("y", "yes") else "select" if selects and answer in ("s", "select") else "no"


def _page(proposal: PromotionProposal, console: Console) -> None:
    """Show the whole diff of a proposal in the pager."""
    reset_terminal()
    painter = Painter(console.style.colours)
    with pager.output() as write:
        for row in rows_for_approver(proposal):
            write(f"{painter.line(row)}\n".encode())


def _with_approved_kinds(proposal: PromotionProposal, console: Console, *, whole: bool) -> PromotionProposal | None:
    """Ask the user about each protected kind, and leave out the changes of a refused kind. Return None if no change is left.

    With `whole`, nothing may be left out: return None if a kind is refused.
    """
    refused: set[str] = set()
    while missing := [name for name in proposal.protected() if name not in proposal.wanted.approved]:
        for name in missing:
            if name not in refused and console.says_yes(f"Promote changes of the protected kind {name!r}?"):
                proposal = proposal.approving(frozenset({name}))
            else:
                refused.add(name)
        narrower = leave_out(proposal, refused) if refused else proposal
        if narrower is not proposal and (whole or not (narrower.changes or narrower.settled)):
            return None
        if left_out := len(proposal.changes) - len(narrower.changes):
            kinds = ", ".join(map(repr, sorted(refused)))
            remark(f"left out: {counted(left_out, 'change')} of the protected {'kind' if len(refused) == 1 else 'kinds'} {kinds}")
        proposal = narrower
    return proposal


def leave_out(proposal: PromotionProposal, kinds: Collection[str]) -> PromotionProposal:
    """Return the proposal without the changes of these protected kinds.

    Everything in a new directory of such a kind is left out, too, and so is a new directory that would then be empty. The kind "too many
    deletions" concerns the whole proposal: if it is given, all deletions are left out.
    """
    changes = proposal.changes
    new = {change.path for change in changes if change.kind in (Kind.ADDED, Kind.RETYPED) and _is_directory(change)}
    holding = {above for change in changes for above in ancestors(change.path)[1:]}
    out = {path for name, paths in proposal.protected().items() if name in kinds and name != BULK for path in paths}
    if BULK in kinds:
        out |= {change.path for change in changes if change.after is None or change.inside}
    out |= {change.path for change in changes if any(above in out and above in new for above in ancestors(change.path)[1:])}
    leaves = [change.path for change in changes if change.path not in new or change.path not in holding]
    needed = {above for path in leaves if path not in out for above in ancestors(path)[1:]}
    empty = {above for path in out for above in ancestors(path)[1:] if above in new} - needed
    return proposal.narrowed(lambda path: path not in out and path not in empty)


def _is_directory(change: Change) -> bool:
    return change.after is not None and change.after.type is EntryType.DIRECTORY


def select(proposal: PromotionProposal, project: str, console: Console) -> PromotionProposal | None:
    """Ask the user which files to promote: by patterns, or one by one. Return None if no file is chosen."""
    while True:
        typed = console.answer("Files to promote, as patterns (Enter: ask about each): ", exactly=True)
        try:
            patterns = tuple(split(typed))
            covered = covering(patterns, project=project, home=here().host.home)
        except (PolicyError, ValueError) as error:
            remark(error.message if isinstance(error, PolicyError) else str(error))
            continue
        break
    narrower = proposal.narrowed(covered if patterns else _chosen_one_by_one(proposal, project, console).__contains__)
    if not narrower.changes and not narrower.settled:
        remark("no changes were chosen")
        return None
    return narrower


def _chosen_one_by_one(proposal: PromotionProposal, project: str, console: Console) -> set[str]:
    """Ask the user about each change. Return the paths that got a yes, and the paths that need no write.

    A new directory that holds other changes is not asked about: it is promoted with them.
    """
    chosen: set[str] = set(proposal.settled)
    holding = {above for change in proposal.changes for above in ancestors(change.path)}
    for change in proposal.changes:
        if change.path in holding and change.before is None and _is_directory(change):
            continue
        name = shown(change.path.removeprefix(project.rstrip("/") + "/"))
        answer = console.answer(f"{LETTERS[change.kind]} {name}? [y]es [n]o [q]uit, no to all others ")
        if answer in ("q", "quit"):
            break
        if answer in ("y", "yes"):
            chosen.add(change.path)
    return chosen


def promotion_result(
    proposal: PromotionProposal,
    plan: Plan,
    since: str,
    outcome: Literal["promoted", "nothing-to-do", "dry-run", "not-approved"],
    why_not: str | None,
) -> PromoteResult:
    """Return a proposal and what became of it, as the result of a verb."""
    return PromoteResult(
        PathName(proposal.root),
        why_not is None,
        why_not,
        OMITTED,
        proposal.changes.changes,
        tuple(PathReason(PathName(path), moved.why()) for path, moved in proposal.moved.items()),
        _paths(proposal.merged),
        _paths(proposal.settled),
        tuple(PathReason(PathName(each.path), each.kind.value) for each in proposal.conflicts),
        tuple(PathReason(PathName(each.path), each.why) for each in plan.refused),
        {name: _paths(paths) for name, paths in proposal.protected().items()},
        path_remarks(proposal.remarks),
        tuple(proposal.history.words),
        _paths(proposal.caches),
        None if plan.refused else proposal.digest or None,
        since or None,
        outcome,
    )


def _paths(paths: Iterable[str]) -> tuple[PathFacts, ...]:
    return tuple(PathFacts(PathName(path)) for path in paths)


def promotion_facts(done: CarriedOver) -> PromotionFacts:
    """Return the facts of a completed promotion, as they appear in a result."""
    promotion, snapshot = done.promotion, done.snapshot.id if done.snapshot else None
    return PromotionFacts(promotion.number, promotion.undoes or None, promotion.counts, promotion.bytes, promotion.digest, snapshot)
