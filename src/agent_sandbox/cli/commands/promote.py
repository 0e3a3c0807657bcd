"""`promote` (also `apply`) and `undo`: apply the sandbox's changes to the project, and take them back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import ProjectSandbox, current, gate_for, policy_of, recover
from agent_sandbox.cli.options import PromoteOptions, ShowOptions
from agent_sandbox.cli.render.changes import check_patterns, gather, rows, show
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.messages import Console, counted, remark, reset_terminal, say, shown
from agent_sandbox.cli.render.protection import path_remarks, remarked
from agent_sandbox.cli.results import (
    OMITTED,
    DeclinedResult,
    Omitted,
    PathFacts,
    PathName,
    PathReason,
    PathRemarks,
    PromotionFacts,
    VerbResult,
)
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted, carry_out, proposed, take_back
from agent_sandbox.policy.paths import covering
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.promotion.undo import last
from agent_sandbox.workspace.protected import CLASSES, DEPENDENCY
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from typing import Literal

    from agent_sandbox.workspace.promotion.plan import Plan

NOT_APPROVED = 3
NEEDS_YES = "needs --yes (and --approve KIND for each protected kind)"
_COLUMNS = 120  # of a diff in a question
_LISTED = 10  # paths under one heading; --json has all


@dataclass(frozen=True)
class PromoteResult(VerbResult):
    """A proposed promotion, and whether it was carried out."""

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
    outcome: Literal["promoted", "nothing-to-do", "dry-run", "not-approved"]

    @property
    def code(self) -> int:
        """0, or 3 if it was not approved."""
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
    """A promotion that was undone. If the sandbox was used since the promotion, `now_in` is the snapshot that holds the changes."""

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
    """Show what would be promoted, ask, and promote it."""
    check_patterns(options.only)
    sandbox = current(options.project)
    wanted = _wanted(options, sandbox.project.path)
    gate = _gate(options, sandbox)
    try:
        stored = Stored(sandbox.state)
        recover(stored, gate)
        return _promote(options, sandbox, stored, gate, wanted, console)
    finally:
        gate.end()


def _gate(options: PromoteOptions, sandbox: ProjectSandbox) -> Gate:
    policy = policy_of(options.policy, sandbox.project)
    return gate_for(policy, sandbox.project, sandbox.state.id, capabilities=options.capabilities, prompt=True)


def _promote(
    options: PromoteOptions, sandbox: ProjectSandbox, stored: Stored, gate: Gate, wanted: Wanted, console: Console
) -> PromoteResult:
    with proposed(stored, gate.policy, wanted) as proposal:
        plan = proposal.plan()
        if console.shows:
            _show(proposal, plan, sandbox.project.path, console)
        if not proposal.changes and not proposal.settled:
            return _result(proposal, plan, "nothing-to-do", _nothing(proposal))
        if options.dry_run:
            return _result(proposal, plan, "dry-run", "not promoted: this was a rehearsal (--dry-run)")
        agreed = agreement(proposal, plan, console, yes=options.yes)
        if agreed is None:
            return _result(proposal, plan, "not-approved", f"not promoted: {NEEDS_YES}")
        done = carry_out(agreed, stored, gate, details=lambda: whole_diff(agreed))
    if done.note:
        remark(done.note)
    return replace(_result(agreed, plan, "promoted", None), done=promotion_facts(done))


def whole_diff(proposal: PromotionProposal) -> str:
    """Return the diff of a whole promotion, for the person who is asked to approve it."""
    whole, plain = ShowOptions(everything=True), Painter(False)
    material = gather(whole, proposal.root, proposal.changes, proposal.contents)
    return "\n".join(plain.line(row) for row in rows(whole, material, columns=_COLUMNS, words=False))


def undo(options: PromoteOptions, console: Console) -> VerbResult:
    """Take the last promotion back."""
    sandbox = current(options.project)
    gate = _gate(options, sandbox)
    try:
        stored = Stored(sandbox.state)
        recover(stored, gate)
        journal = last(sandbox.state.promotions)
        if journal is not None and not options.yes and console.asks:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(journal.facts().get("started", 0.0))))
            if not console.says_yes(f"Take back promotion {journal.number} of {when}?"):
                return DeclinedResult("undo", NOT_APPROVED)
        done = take_back(stored, gate)
        if done.note:
            remark(done.note)
        now_in = None if done.snapshot else _snapshot_with_changes(stored, done)
        return UndoResult(promotion_facts(done), PathName(done.promotion.root), now_in)
    finally:
        gate.end()


def _nothing(proposal: PromotionProposal) -> str:
    waiting = len(proposal.pending.within(proposal.root))
    return f"there is nothing to promote: none of {counted(waiting, 'change')} was chosen" if waiting else "there is nothing to promote"


def _snapshot_with_changes(stored: Stored, done: CarriedOver) -> int | None:
    label = f"before promotion {done.promotion.undoes}"
    return max((each.id for each in stored.snapshots().snapshots if each.automatic and each.label == label), default=None)


def _wanted(options: PromoteOptions, project: str) -> Wanted:
    inside, outside = options.only, options.skip
    home = here().host.home
    covered, skipped = (covering(texts, project=project, home=home) for texts in (inside, outside))

    def chosen(change: Change) -> bool:
        return (not inside or covered(change.path)) and not skipped(change.path)

    return Wanted(chosen, options.policy.system, options.drift, options.resolve, options.approved, options.caches, home=home)


def _show(proposal: PromotionProposal, plan: Plan, project: str, console: Console) -> None:
    """Print what would be promoted, and what stands in the way."""
    summary = ShowOptions(form="stat", everything=True)
    if proposal.changes:
        reset_terminal()
        show(summary, gather(summary, proposal.root, proposal.changes, proposal.contents), sys.stdout.buffer.write, console)
        sys.stdout.flush()
    if outside := len(proposal.pending.outside(proposal.root)):
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
    _list(f"{len(proposal.settled):,} need no change: the real file is already the same, or is kept:", proposal.settled, project)
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


def agreement(proposal: PromotionProposal, plan: Plan, console: Console, *, yes: bool) -> PromotionProposal | None:
    """Return the proposal with the protected kinds that the user agreed to; None if the user said no, or if nobody can be asked.

    `yes` agrees to everything but protected kinds. Nobody is asked about an impossible promotion: carrying it out raises with the reason.
    """
    asking = console.asks
    if proposal.conflicts or plan.refused or (proposal.moved and proposal.wanted.drift == "refuse"):
        return proposal
    missing = [name for name in proposal.protected() if name not in proposal.wanted.approved]
    if asking:
        missing = [name for name in missing if not console.says_yes(f"Promote changes of the protected kind {name!r}?")]
        proposal = proposal.approving(frozenset(proposal.protected()) - frozenset(missing))
    if missing:
        return None if asking else proposal  # the gate refuses the proposal, and names the protected kind
    question = f"Promote {counted(len(proposal.changes), 'change')} to {shown(proposal.root)}?"
    return proposal if yes or (asking and console.says_yes(question)) else None


def _result(
    proposal: PromotionProposal, plan: Plan, outcome: Literal["promoted", "nothing-to-do", "dry-run", "not-approved"], why_not: str | None
) -> PromoteResult:
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
        outcome,
    )


def _paths(paths: Iterable[str]) -> tuple[PathFacts, ...]:
    return tuple(PathFacts(PathName(path)) for path in paths)


def promotion_facts(done: CarriedOver) -> PromotionFacts:
    """Return the facts of a promotion that was carried out."""
    promotion, snapshot = done.promotion, done.snapshot.id if done.snapshot else None
    return PromotionFacts(promotion.number, promotion.undoes or None, promotion.counts, promotion.bytes, promotion.digest, snapshot)
