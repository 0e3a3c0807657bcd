"""Compare a ledger that is about to be continued with its anchor: is all of it here?

Three things can be behind a ledger that is shorter than its anchor says. The machine stopped before the last entries reached the disk: then
it has started again since, and no entry that was forced to the disk is missing. Its file is not there, because somebody moved it aside, as
our own messages advise, or removed it. Or somebody cut it, or put an old copy in its place. In the first two cases the ledger goes on with
an entry that says what is missing; in the third it does not go on.
"""

from __future__ import annotations

from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger import anchor
from agent_sandbox.ledger.anchor import Anchor, Anchored
from agent_sandbox.ledger.chain import HINT, START, Head, holds, torn_at
from agent_sandbox.ledger.encoding import sealed
from agent_sandbox.ledger.event import Gap
from agent_sandbox.spelling import Seal


def missing(path: str, directory: str, descriptor: int, size: int, head: Head, boot: str, seal: Seal) -> Gap | None:
    """The entry that has to come first; None when nothing is missing. Makes an anchor for a new ledger.

    Raises `LedgerBroken` when the ledger must not be continued, OSError when the anchor cannot be read or made.
    """
    try:
        found = anchor.read(directory)
    except ValueError as error:
        raise LedgerBroken(f"the anchor of the ledger {path} cannot be read: {error}", hint=_HINT) from None
    if found is None:
        if head.sequence:
            raise LedgerBroken(f"the ledger {path} has entries, and its anchor in {directory} is gone", hint=_HINT)
        anchor.begin(directory, START, sealed(bytes.fromhex(START), seal), boot)
        return None
    furthest = found.furthest
    if furthest is None:
        if head.sequence:
            raise LedgerBroken(f"the ledger {path} has entries, and its anchor in {directory} was emptied", hint=_HINT)
        return None  # whoever made it did not live to write it
    if furthest.seal != sealed(bytes.fromhex(furthest.hash), seal):
        raise LedgerBroken(f"the anchor of the ledger {path} was not written with its key", hint=_HINT)
    if head.sequence >= furthest.sequence:
        if furthest.sequence and not holds(descriptor, size, furthest.sequence, furthest.hash):
            raise LedgerBroken(f"the ledger {path} is another one than before: entry {furthest.sequence} is not the one it had", hint=HINT)
        return None
    return _gap(path, found, furthest, size, head, boot)


def _gap(path: str, found: Anchor, furthest: Anchored, size: int, head: Head, boot: str) -> Gap:
    torn = vars(torn_at(head.end, head.remains)) if head.remains else {}
    if size == 0:
        return Gap(furthest.sequence, furthest.hash, "the file was not there", torn)
    if boot not in (furthest.boot, "unknown") and (found.lasting is None or head.sequence >= found.lasting.sequence):
        return Gap(furthest.sequence, furthest.hash, "the machine has started again since", torn)
    raise LedgerBroken(f"the ledger {path} has lost its end: {furthest.sequence - head.sequence} entries are missing", hint=HINT)


_HINT = "find out what happened to that directory; then move it aside, and with it the ledger and its closed files"
