"""The changes of an attempt: their size, their diff, and their promotion, which is that of every other sandbox.

An attempt is promoted as `promote` does it: the same drift check, the same protected kinds, the same questions, journalled with the
project's own promotions, so that `undo` takes it back. The project's sandbox is locked meanwhile: of two experiments that promote at once,
one is refused, and the second one then finds that reality has moved on where both changed a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.experiment.model import DiffSize
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted, carry_out, proposed
from agent_sandbox.engine.review import reviewed
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.diff.compare import DEFAULT, DiffLimits, Effort, MachineFiles, Preview, compare, pair_renames
from agent_sandbox.workspace.diff.formats import unified
from agent_sandbox.workspace.layers.rekey import rekey
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.git_objects import RuntimeOf
    from agent_sandbox.engine.review import Review
    from agent_sandbox.policy.model import Policy
    from agent_sandbox.workspace.experiment_store import AttemptState
    from agent_sandbox.workspace.frozen_tree import FrozenTree
    from agent_sandbox.workspace.store import SandboxState

UNHASHED = "unhashed"  # instead of the digest of more content than is hashed


def seed(attempt: AttemptState, sandbox: SandboxState, limit_bytes: int | None, frozen: FrozenTree | None) -> FrozenTree | None:
    """Let an attempt begin with the unpromoted changes of the project's sandbox. Call it with the lock of the sandbox held.

    Return the frozen project without the live trees that these changes have removed or replaced. Raises `WorkspaceError` if they have
    replaced the project itself.
    """
    Stored(sandbox).copy_to(attempt, limit_bytes)
    if frozen is None:
        return None
    generation = os.open(os.path.join(attempt.layers, str(attempt.history().active)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not rekey(generation, frozen.project):
            hint = "promote it or drop it first: agent-sandbox reset"
            raise WorkspaceError(f"the sandbox has replaced the directory {frozen.project!r} itself", hint=hint)
        return replace(frozen, live=tuple(tree for tree in frozen.live if rekey(generation, tree)))
    finally:
        os.close(generation)


def measure(attempt: AttemptState, policy: Policy, runtime: RuntimeOf) -> tuple[DiffSize, int]:
    """Return the size of an attempt's changes in the project, and the number of its changes elsewhere."""
    if not attempt.exists:
        return DiffSize(), 0
    files = added = removed = size = 0
    with reviewed(Stored(attempt), policy, Wanted(), runtime, hashed=False) as review:
        for preview in _previews(review, DEFAULT):
            after = preview.change.after
            if "/.git/" in preview.change.path:  # a commit makes an attempt no larger
                continue
            files += 1
            added += preview.added
            removed += preview.removed
            size += after.size if after is not None else 0
        inside = len(review.everything.within(attempt.project))
        return DiffSize(files, added, removed, size), len(review.everything) - inside


def diff_lines(attempt: AttemptState, policy: Policy, runtime: RuntimeOf, *, limits: DiffLimits = DEFAULT) -> dict[str, tuple[str, ...]]:
    """Return the lines of an attempt's unified diff by path, relative to the project. Invisible characters are escaped."""
    lines: dict[str, tuple[str, ...]] = {}
    if not attempt.exists:
        return lines
    with reviewed(Stored(attempt), policy, Wanted(), runtime, hashed=False) as review:
        for preview in _previews(review, limits):
            rows = unified(preview, relative_to=attempt.project, limits=limits)
            name = os.path.relpath(preview.change.path, attempt.project)
            lines[name] = tuple(line for row in rows for line in row.plain.split("\n"))
    return lines


def _previews(review: Review, limits: DiffLimits) -> Iterator[Preview]:
    machine, effort = MachineFiles(), Effort()
    for whole in pair_renames(review.selection):
        for change in machine.one_by_one(whole, limits.inside):
            yield compare(change, review.contents, review.former, limits=limits, effort=effort)


@contextmanager
def proposed_attempt(
    attempt: AttemptState, sandbox: Stored, policy: Policy, wanted: Wanted, runtime: RuntimeOf
) -> Iterator[PromotionProposal]:
    """Yield the promotion of an attempt, for `carry_attempt`. The attempt and the project's sandbox are locked in the block.

    Raises as `promote.proposed` does: `Busy` if something else uses the project's sandbox.
    """
    with ExitStack() as held:
        held.enter_context(sandbox.state.lock(command="try"))
        yield held.enter_context(proposed(Stored(attempt), policy, wanted, runtime))


def carry_attempt(proposal: PromotionProposal, sandbox: Stored, gate: Gate, *, details: Callable[[], str]) -> CarriedOver:
    """Promote an attempt, in the block of `proposed_attempt`. Raises as `promote.carry_out` does.

    The attempt's own layers stay as they are, and so do those of the project's sandbox: as with a plan, they are not what was promoted.
    """
    named = replace(proposal, wanted=replace(proposal.wanted, plan=proposal.digest or UNHASHED))
    return carry_out(named, sandbox, gate, details=details)
