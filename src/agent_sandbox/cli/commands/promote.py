"""`promote` (also `apply`) and `undo`: carry what the sandbox changed over to reality, and take it back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.change_list import recover
from agent_sandbox.cli.commands.diff import show
from agent_sandbox.cli.context import Current, current, gate_for, policy_of
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.changes import check, gather
from agent_sandbox.cli.render.messages import at_a_terminal, remark, say, says_yes, shown
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted, carry_out, proposed, take_back
from agent_sandbox.policy.paths import covering
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.promotion.undo import last
from agent_sandbox.workspace.protected import CLASSES
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from agent_sandbox.engine.promote import Drifted
    from agent_sandbox.workspace.merge.tree import Word

NOBODY_AGREED = 3
_COLUMNS = 120  # of a diff that somebody is asked about
_LISTED = 10  # paths under one heading; --json has all
_WORDS: tuple[Word, ...] = ("ours", "theirs", "markers")


def promote(request: Request) -> int:
    """The verb `promote`. It exits with 3 when nobody said yes, having changed nothing."""
    check(request)
    found = current(request)
    wanted = _wanted(request, found.project.path)
    stored, policy = Stored(found.state), policy_of(request, found.project)
    gate = gate_for(request, policy, found.project, found.state.id, prompt=True)
    try:
        recover(stored, gate)
        return _promote(request, found, stored, gate, wanted)
    finally:
        gate.end()


def _promote(request: Request, found: Current, stored: Stored, gate: Gate, wanted: Wanted) -> int:
    with proposed(stored, gate.policy, wanted) as proposal:
        if not request.has("--json"):
            _show(request, proposal, found)
        if not proposal.changes and not proposal.settled:
            return _end(request, proposal, None, _nothing(proposal))
        if request.has("--dry-run"):
            return _end(request, proposal, None, "nothing was carried over: this was a rehearsal (--dry-run)")
        agreed = agreement(request, proposal)
        if agreed is None:
            _end(request, proposal, None, "nothing was carried over: nobody said yes (--yes; for each protected kind --approve KIND)")
            return NOBODY_AGREED
        done = carry_out(agreed, stored, gate, details=lambda: whole_diff(request, agreed))
    back = " · take it back: agent-sandbox undo" if done.promotion.number else ""
    what = f"carried over {counted(len(agreed.changes), 'change')} to {agreed.root}{back}"
    if not agreed.changes:
        what = f"nothing had to be carried over; the sandbox let go of {counted(len(agreed.settled), 'change')}"
    _end(request, agreed, done, what)
    if done.note:
        remark(done.note)
    return 0


def whole_diff(request: Request, proposal: PromotionProposal) -> str:
    """All that would be carried over, for whoever is asked about it."""
    from agent_sandbox.cli.render.changes import rows
    from agent_sandbox.cli.render.colours import Painter

    whole, plain = replace(request, given={"--all": ("",)}), Painter(False)
    material = gather(whole, proposal.root, proposal.changes, proposal.contents)
    return "\n".join(plain.line(row) for row in rows(whole, material, columns=_COLUMNS, words=False))


def undo(request: Request) -> int:
    """The verb `undo`."""
    found = current(request)
    stored, policy = Stored(found.state), policy_of(request, found.project)
    gate = gate_for(request, policy, found.project, found.state.id, prompt=True)
    try:
        recover(stored, gate)
        return _undo(request, found, stored, gate)
    finally:
        gate.end()


def _undo(request: Request, found: Current, stored: Stored, gate: Gate) -> int:
    journal = last(found.state.promotions)
    if journal is not None and not request.has("--yes") and not request.has("--json") and at_a_terminal():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(journal.facts().get("started", 0.0))))
        if not says_yes(f"Take back promotion {journal.number} of {when}?"):
            remark("nothing was taken back")
            return NOBODY_AGREED
    done = take_back(stored, gate)
    again = "; the changes wait in the sandbox again" if done.snapshot else _where_they_are(stored, done)
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("undo", done_fields(done))
    elif not request.has("--quiet"):
        remark(f"took back promotion {done.promotion.undoes} of {done.promotion.root}{again}")
    if done.note:
        remark(done.note)
    return 0


def _nothing(proposal: PromotionProposal) -> str:
    waiting = len(proposal.pending.within(proposal.root))
    return f"there is nothing to promote: none of {counted(waiting, 'change')} was chosen" if waiting else "there is nothing to promote"


def _where_they_are(stored: Stored, done: CarriedOver) -> str:
    """Where what an undo took back is, when the sandbox has gone on since."""
    label = f"before promotion {done.promotion.undoes}"
    kept = [each.id for each in stored.snapshots().snapshots if each.automatic and each.label == label]
    return f"; something has run since, so the changes are in snapshot {kept[-1]}: agent-sandbox rollback {kept[-1]}" if kept else ""


def _wanted(request: Request, project: str) -> Wanted:
    if request.has("--merge") and request.has("--force"):
        raise UsageError("--merge and --force exclude one another", hint="merging keeps both sides, forcing drops what is real")
    drift: Drifted = "merge" if request.has("--merge") else "force" if request.has("--force") else "refuse"
    answer = request.value("--resolve")
    resolve = next((word for word in _WORDS if word == answer), None)
    if answer is not None and (resolve is None or drift != "merge"):
        raise UsageError("--resolve takes ours, theirs or markers, and goes with --merge", hint="ours is the sandbox, theirs is reality")
    inside, outside = request.values("--only"), request.values("--skip")
    covered, skipped = (covering(texts, project=project, home=here().host.home) for texts in (inside, outside))

    def chosen(change: Change) -> bool:
        return (not inside or covered(change.path)) and not skipped(change.path)

    return Wanted(chosen, request.has("--system"), drift, resolve, approved_kinds(request))


def approved_kinds(request: Request) -> frozenset[str]:
    """The protected kinds that the request agrees to."""
    return frozenset(name.strip() for value in request.values("--approve") for name in value.split(","))


def _show(request: Request, proposal: PromotionProposal, found: Current) -> None:
    """What would be carried over, and what stands in the way."""
    project = found.project.path
    whole = replace(request, given={name: value for name, value in request.given.items() if name not in ("--only", "--skip")})
    summary = replace(whole, given={**whole.given, "--stat": ("",), "--all": ("",)})
    if proposal.changes:
        show(summary, gather(summary, proposal.root, proposal.changes, proposal.contents), sys.stdout.buffer.write)
        sys.stdout.flush()
    outside = len(proposal.pending.outside(proposal.root))
    if outside and not request.has("--quiet"):
        remark(f"{counted(outside, 'change')} outside the project {'stays' if outside == 1 else 'stay'} in the sandbox (--system)")
    plan = proposal.plan()
    _list(
        f"{len(plan.refused):,} can never be carried over (--skip leaves out):",
        _told((r.path, r.why) for r in plan.refused),
        project,
    )
    if proposal.wanted.drift == "refuse":
        moved = ((path, each.why()) for path, each in proposal.moved.items())
        _list(
            f"{len(proposal.moved):,} moved on in reality since the sandbox first touched them (--merge, --force):", _told(moved), project
        )
    elif proposal.merged:
        _list(f"{len(proposal.merged):,} merged with what is real now:", proposal.merged, project)
    _list(f"{len(proposal.settled):,} need nothing: reality is so already, or stays as it is:", proposal.settled, project)
    _list(f"{len(proposal.conflicts):,} in conflict:", [conflict.sentence() for conflict in proposal.conflicts], project)
    for name, paths in proposal.protected().items():
        agreed = " [agreed to]" if name in proposal.wanted.approved else f" (--approve {name})"
        _list(f"{len(paths):,} of the protected kind {name!r}: {CLASSES[name]}{agreed}:", paths, project)
    _list("left as it is:", _told((left.path, left.what) for left in plan.left_out), project)


def _told(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{path}: {why}" for path, why in pairs]


def _list(heading: str, lines: Iterable[str], project: str) -> None:
    every = list(lines)
    if not every:
        return
    say(shown(heading))
    for line in every[:_LISTED]:
        say(f"  {shown(line.removeprefix(project.rstrip('/') + '/'))}")
    if len(every) > _LISTED:
        say(f"  and {counted(len(every) - _LISTED, 'more', 'more')} (--json has all)")


def agreement(request: Request, proposal: PromotionProposal) -> PromotionProposal | None:
    """The proposal with what somebody at the terminal agreed to; None when nobody did. Nobody is asked about what cannot be done."""
    asking = not request.has("--json") and at_a_terminal()
    stuck = proposal.conflicts or proposal.plan().refused or (proposal.moved and proposal.wanted.drift == "refuse")
    if stuck:
        return proposal  # carrying it out says why not
    missing = [name for name in proposal.protected() if name not in proposal.wanted.approved]
    if asking:
        missing = [name for name in missing if not says_yes(f"Carry over what is of the protected kind {name!r}?")]
        proposal = proposal.approving(frozenset(proposal.protected()) - frozenset(missing))
    if missing:
        return None if asking else proposal  # the gate refuses it, by name
    if request.has("--yes"):
        return proposal
    return proposal if asking and says_yes(f"Carry over {counted(len(proposal.changes), 'change')} to {shown(proposal.root)}?") else None


def _end(request: Request, proposal: PromotionProposal, done: CarriedOver | None, words: str) -> int:
    if request.has("--json"):
        from agent_sandbox.cli.render.json import change_document, path_fields, print_document

        print_document(
            "promote",
            {
                **path_fields("root", proposal.root),
                "carried_over": done is not None,
                "why_not": None if done else words,
                **(done_fields(done) if done else {}),
                "changes": [change_document(change) for change in proposal.changes],
                "moved": [{**path_fields("path", path), "why": moved.why()} for path, moved in proposal.moved.items()],
                "merged": [path_fields("path", path) for path in proposal.merged],
                "settled": [path_fields("path", path) for path in proposal.settled],
                "conflicts": [{**path_fields("path", each.path), "why": each.kind.value} for each in proposal.conflicts],
                "refused": [{**path_fields("path", each.path), "why": each.why} for each in proposal.plan().refused],
                "protected": {name: [path_fields("path", path) for path in paths] for name, paths in proposal.protected().items()},
            },
        )
    elif not request.has("--quiet"):
        remark(words)
    return 0


def done_fields(done: CarriedOver) -> dict[str, object]:
    """What was done, for a document."""
    promotion = done.promotion
    return {
        "promotion": promotion.number,
        "undoes": promotion.undoes or None,
        "counts": promotion.counts,
        "bytes": promotion.bytes,
        "content_sha256": promotion.digest,
        "snapshot": done.snapshot.id if done.snapshot else None,
    }
