"""The review of a sandbox: its changes, the part that a promotion would take, and the digest of that part.

The content is hashed while the sandbox is locked, and the lock ends before anything is shown: a person may read for an hour. A run in that
time could change the rest that is still to be shown. So the digest is valid only if nothing used the sandbox from the hashing to the end of
the review.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.engine.git_objects import RuntimeOf
from agent_sandbox.engine.promote import PromotionProposal, Wanted, history_of, selected, with_history
from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.policy.model import Policy
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.contents import Mixed
from agent_sandbox.workspace.diff.compare import (
    EVERYTHING,
    DiffLimits,
    Effort,
    FormerContents,
    Formerly,
    MachineFiles,
    compare,
    pair_renames,
)
from agent_sandbox.workspace.diff.formats import HEADING, Row, ours, unified
from agent_sandbox.workspace.digests import MOST_HASHED, ContentDigests, digest_of
from agent_sandbox.workspace.review_mark import ReviewMark
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class Review:
    """The changes of a sandbox, for a person to read. Valid in the block of `reviewed`.

    `selection` are the changes that a promotion would take, and `hashed` is their digest; `why_not` is the reason if there is none.
    """

    stored: Stored
    everything: ChangeSet
    selection: ChangeSet  # that a promotion would take
    contents: Contents
    former: Formerly
    digests: Mapping[str, str]  # of the content of `selection`, by path
    hashed: str = ""  # the digest of `selection`
    mark: ReviewMark | None = None
    why_not: str = ""  # the reason why there is no digest
    words: tuple[str, ...] = ()  # sentences about commits and branches
    classes: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)  # the protected classes of commits and branches

    def digest(self) -> tuple[str, str]:
        """Return the digest of the selection and "", or "" and the reason why there is none. Call it after everything was shown."""
        if self.hashed and ReviewMark.of(self.stored.state) != self.mark:
            return "", "something used the sandbox while its changes were shown"
        return self.hashed, self.why_not

    def remember(self) -> None:
        """Store that a person was shown this state of the sandbox."""
        if self.mark is not None:
            self.mark.remember(self.stored.state)


@contextmanager
def reviewed(stored: Stored, policy: Policy, wanted: Wanted, runtime: RuntimeOf, *, hashed: bool = True) -> Iterator[Review]:
    """Yield the changes of a sandbox. Without `hashed`, no digest is computed. Raises `WorkspaceError`.

    `runtime` returns the runtime in which the git objects of the sandbox are read.
    """
    with ExitStack() as lock, ExitStack() as block:
        why_not = mark = None
        try:
            lock.enter_context(stored.state.lock(command="diff"))
            mark = ReviewMark.of(stored.state)
        except Busy as busy:
            why_not = busy.message
        stack = block.enter_context(stored.opened())
        everything = stored.changes_in(stack, policy, wanted.progress)
        selection, _ = selected(everything, stored.state.project, wanted)
        history, _ = history_of(stored, policy, everything, selection, wanted, stack, runtime, block)
        own = ChangeSet(tuple(change for change in selection if change.path not in history.raw))
        contents, digest = Mixed(stack), ""
        digests: Mapping[str, str] = {}
        if mark is not None and hashed and (len(own) or history.facts):
            hashes = ContentDigests(own, contents, most=MOST_HASHED, progress=wanted.progress)
            try:
                digests = hashes.by_path()
                digest = digest_of(own, digests, history.facts) if hashes.complete else ""
                why_not = None if digest else "there is more content than a diff reads; promote --dry-run prints it"
            except WorkspaceError as error:
                why_not = error.message
        lock.close()
        former = Formerly(bases=stored.bases(stack), read_base=stored.read_base)
        selection, _ = with_history(selection, contents, history)
        everything, contents = with_history(everything, contents, history)
        yield Review(
            stored, everything, selection, contents, former, digests, digest, mark, why_not or "", history.sentences(), history.classes
        )


def unified_rows(
    changes: ChangeSet,
    contents: Contents,
    former: FormerContents,
    *,
    relative_to: str,
    limits: DiffLimits = EVERYTHING,
    digests: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a unified diff of changes. For a removed directory, the diff of each entry in it is included."""
    machine, effort = former if isinstance(former, MachineFiles) else MachineFiles(), Effort()
    for whole in pair_renames(changes):
        for change in machine.one_by_one(whole, limits.inside):
            preview = compare(change, contents, former, limits=limits, effort=effort, digests=digests)
            yield from unified(preview, relative_to=relative_to, limits=limits)


def rows_for_approver(proposal: PromotionProposal) -> Iterator[Row]:
    """Yield the diff of a whole promotion, for the person who is asked about it, with the digest of the changes as its last row."""
    digests = proposal.hashes.by_path()
    yield from unified_rows(proposal.changes, proposal.contents, MachineFiles(), relative_to=proposal.root, digests=digests)
    yield from (ours(HEADING, f"# {words}") for words in proposal.history.words)
    yield ours(HEADING, f"# Digest of these changes: {proposal.digest}")


def diff_for_approver(proposal: PromotionProposal) -> str:
    """Return the diff of a whole promotion as text, with the digest of the changes in its last line."""
    return "\n".join(row.plain for row in rows_for_approver(proposal))
