"""The proposal of a promotion, as a value."""

from __future__ import annotations

from pathlib import Path

from agent_sandbox.engine.promote import PromotionProposal, Wanted
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.contents import Mixed
from agent_sandbox.workspace.promotion.inspect import look_at


class NoContents:
    """The contents of no changes."""

    def open_file(self, change: Change) -> int:
        raise FileNotFoundError(change.path)


def test_a_proposal_is_planned_once_and_again_when_more_is_approved(tmp_path: Path) -> None:
    nothing, root = ChangeSet(), str(tmp_path)
    proposal = PromotionProposal(root, nothing, Mixed(NoContents()), Wanted(), look_at(root, nothing), {})
    assert proposal.plan() is proposal.plan()
    assert proposal.approving(frozenset({"history"})).plan() is not proposal.plan()
