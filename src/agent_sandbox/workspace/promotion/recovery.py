"""Finish interrupted promotions: roll them back, or complete them. Runs before anything else is promoted.

Recovery can itself be interrupted and repeated: every step first looks at what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import SandboxError, Unfinished, WorkspaceError
from agent_sandbox.kernel.syscalls import syncfs
from agent_sandbox.workspace.beneath import identity, open_directory
from agent_sandbox.workspace.lock import Holder, hold
from agent_sandbox.workspace.promotion.backup import keep_olds, rescue
from agent_sandbox.workspace.promotion.exchange import take_back
from agent_sandbox.workspace.promotion.journal import Intent, Journal, Prepared, boot_id, journals
from agent_sandbox.workspace.promotion.steps import Move, split
from agent_sandbox.workspace.promotion.target import Anchor, Surprise
from agent_sandbox.workspace.removal import remove_tree


@dataclass(frozen=True)
class Recovery:
    """The promotions that were finished, by number. `problems` describes the others, which are tried again the next time."""

    finished: tuple[int, ...] = ()
    rolled_back: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()  # directories with entries that belong to others
    problems: tuple[str, ...] = ()


def lock(promotions: str, holder: Holder, *, wait: bool) -> AbstractContextManager[None]:
    """Hold the lock on the promotions of one project for the length of a block. Raises `Busy`, naming the holder."""
    os.makedirs(promotions, mode=0o700, exist_ok=True)
    return hold(os.path.join(promotions, "lock"), holder, wait=wait, what="a promotion to this project")


def recover(promotions: str, holder: Holder, *, wait: bool = True, give_up: bool = False) -> Recovery:
    """Finish interrupted promotions. Cheap if there are none. Reports a promotion that cannot be finished, and never raises for it.

    With `give_up`, a promotion whose staging directory is gone is closed as it stands.
    """
    if all(journal.closed for journal in journals(promotions)):
        return Recovery()
    with lock(promotions, holder, wait=wait):
        return recover_locked(promotions, give_up=give_up)


def recover_locked(promotions: str, *, give_up: bool = False) -> Recovery:
    """Do the same as `recover`, for a caller that holds the lock."""
    finished: list[int] = []
    rolled_back: list[int] = []
    kept: list[str] = []
    problems: list[str] = []
    for journal in journals(promotions):
        if journal.closed:
            continue
        try:
            committed = journal.committed
            _finish(journal, give_up)
            (finished if committed else rolled_back).append(journal.number)
        except (SandboxError, OSError) as error:
            problems.append(f"promotion {journal.number} cannot be brought to its end yet: {error}")
        if os.path.isdir(journal.kept):
            kept.append(journal.kept)
    return Recovery(tuple(finished), tuple(rolled_back), tuple(kept), tuple(problems))


def _finish(journal: Journal, give_up: bool) -> None:
    intent = journal.intent()
    if intent is None:
        journal.drop()
        return
    with Anchor(intent.root) as anchor:
        restarted = intent.boot != boot_id()
        if anchor.identity != intent.identity and not (restarted and anchor.identity[1] == intent.identity[1]):
            raise Unfinished(
                f"{intent.root!r} is not the directory that was promoted to", hint="put that one back in its place; nothing was changed"
            )
        prepared = journal.prepared(device=anchor.identity[0] if restarted else None)
        if prepared is not None:
            for path, known in prepared.directories.items():
                anchor.expect(path, known)
        place = anchor.directory(intent.place)
        if journal.committed:
            keep_olds(journal, place, intent.staging)
            return
        if prepared is not None:
            staging = _staging(anchor, intent, prepared)
            try:
                roll_back(journal, intent, prepared, anchor, staging, give_up=give_up)
            finally:
                if staging is not None:
                    os.close(staging)
        remove_tree(place, intent.staging)
        journal.drop()


def roll_back(journal: Journal, intent: Intent, prepared: Prepared, anchor: Anchor, staging: int | None, *, give_up: bool = False) -> None:
    """Take back every move. Afterwards the tree is as it was, except for changes made by others meanwhile.

    Raises `Unfinished`, naming the first failure, if something cannot be restored; everything else is. With `give_up`, failures are
    ignored.
    """
    failures: list[str] = []
    keep = _rescuer(journal, staging)
    for move in reversed(prepared.moves):
        try:
            take_back(move, anchor, staging, keep)
        except (Surprise, OSError) as error:
            failures.append(str(error))
    if failures and not give_up:
        path = os.path.join(intent.root, intent.place, intent.staging)
        raise Unfinished(
            f"{len(failures)} of {len(prepared.moves)} files in {intent.root!r} could not be put back; the first: {failures[0]}",
            hint=f"what was there before is in {path!r}; it is tried again the next time",
        )
    syncfs(anchor.root)
    journal.untouched()


def _staging(anchor: Anchor, intent: Intent, prepared: Prepared) -> int | None:
    """Open the staging directory; None if it is gone. Raises `WorkspaceError` if it is not the one that was used."""
    try:
        fd = open_directory(anchor.directory(intent.place), intent.staging)
    except FileNotFoundError:
        return None
    known = prepared.directories.get(os.path.join(intent.place, intent.staging))
    if known is not None and identity(fd) != known:
        os.close(fd)
        raise WorkspaceError(
            f"the staging directory in {intent.root!r} was replaced by another one", hint="put the first one back; nothing was changed"
        )
    return fd


def _rescuer(journal: Journal, staging: int | None) -> Callable[[Move], None]:
    def keep(move: Move) -> None:
        assert staging is not None
        rescue(journal, staging, move.slot, split(move.path)[1])

    return keep
