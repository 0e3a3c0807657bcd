"""Recover from a promotion or an undo that was cut off: finish the tree, then the ledger, then the layers.

While a promotion or an undo is under way, a note beside the journals holds its action, the state of the layers before it, and the paths to
drop from the layers afterwards. The next user of the sandbox looks for the note, or an open journal; this check takes microseconds. If
something has run in the layers since the note was written, no path is dropped from them.
"""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.contexts import nullcontext, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.engine.gate import Gate
from agent_sandbox.errors import SandboxError
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.originals.runs import file_of
from agent_sandbox.workspace.store import Holder, SandboxState
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from agent_sandbox.workspace.layers.history import Snapshot
    from agent_sandbox.workspace.promotion.journal import Journal
    from agent_sandbox.workspace.promotion.promote import Recovery

_NAME = "under-way"


@dataclass(frozen=True)
class Leaving:
    """The paths to drop from the layers after a promotion. `places` are promoted directories that stay, because they hold other changes."""

    paths: Collection[str] = ()
    places: Collection[str] = ()


@dataclass(frozen=True)
class UnderWay:
    """The note on disk of a promotion or undo that may be unfinished. `after` is the number of the last journal before it."""

    action: str  # the digest of the action
    after: int
    undo: bool
    leaving: Leaving | None  # None when the layers are not affected
    layers: object

    @classmethod
    def begin(cls, stored: Stored, action: str, leaving: Leaving | None, *, undo: bool = False) -> UnderWay:
        """Write the note, before a promotion or undo begins. The caller holds the lock."""
        from json import dumps

        from agent_sandbox.workspace.promotion.journal import journals

        after = max((journal.number for journal in journals(stored.state.promotions)), default=0)
        note = cls(action, after, undo, leaving, _layers(stored))
        with explained(f"note what is under way in {stored.state.promotions!r}"):
            os.makedirs(stored.state.promotions, mode=0o700, exist_ok=True)
            write_atomically(_place(stored.state), dumps({**vars(note), "leaving": leaving and vars(leaving)}) + "\n")
        return note

    @classmethod
    def recall(cls, stored: Stored) -> UnderWay | None:
        """Return the note of an unfinished promotion or undo; None if there is none. An unreadable note is removed."""
        from json import loads

        try:
            with open(_place(stored.state), "rb") as file:
                note = loads(file.read())
            return cls(**{**note, "leaving": note["leaving"] and Leaving(**note["leaving"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            cls.finish(stored)
            return None

    @staticmethod
    def finish(stored: Stored) -> None:
        """Remove the note of a promotion or undo that needs no more work."""
        with suppress(FileNotFoundError):
            os.unlink(_place(stored.state))

    def done(self, stored: Stored) -> Journal | None:
        """Return the journal of this promotion or undo; None if it changed nothing in the real tree."""
        from agent_sandbox.workspace.promotion.journal import journals

        later = (journal for journal in journals(stored.state.promotions) if journal.number > self.after and journal.committed)
        return next((journal for journal in later if bool(journal.facts().get("undoes")) is self.undo), None)

    def untouched(self, stored: Stored) -> bool:
        """Return whether the layers are the same as when the note was written, and no run has used them since then."""
        return self.layers == _layers(stored)


def interrupted(state: SandboxState) -> bool:
    """Return whether a promotion or an undo is under way, or was cut off. Every run calls this, so it must be fast."""
    try:
        names = os.listdir(state.promotions)
    except FileNotFoundError:
        return False
    return _NAME in names or any(name.isdecimal() and not os.path.isdir(f"{state.promotions}/{name}/olds") for name in names)


def recovered(stored: Stored, gate: Gate, *, held: bool = False) -> tuple[str, ...]:
    """Finish an interrupted promotion or undo, and return notes about it.

    `held` says that the caller holds the lock. Without `held`, this takes the lock, and raises `Busy` if another process holds it.
    """
    if not interrupted(stored.state):
        return ()
    from agent_sandbox.workspace.promotion.promote import recover

    with nullcontext() if held else stored.state.lock(command="recovery"):
        note = UnderWay.recall(stored)
        recovery = recover(stored.state.promotions, Holder(os.getpid(), "recovery", time.time()))
        said = tuple(_words(recovery))
        return said if note is None or recovery.problems else (*said, *_concluded(note, stored, gate))


def _concluded(note: UnderWay, stored: Stored, gate: Gate) -> Iterator[str]:
    journal = note.done(stored)
    if journal is None:
        gate.conclude(note.action, "raised", {"error": "interrupted", "message": "it was cut off, and taken back afterwards"})
    else:
        facts = {name: value for name, value in journal.facts().items() if isinstance(value, str | int)}
        gate.conclude(note.action, "done", {"promotion": journal.number, "recovered": True, **facts})
        if note.leaving is not None and note.untouched(stored):
            try:
                let_go(stored, gate, note.leaving, journal.number, int(journal.facts().get("undoes", 0)))
            except (SandboxError, OSError) as error:
                yield not_let_go(error)
                return
    UnderWay.finish(stored)


def let_go(stored: Stored, gate: Gate, leaving: Leaving, number: int, undoes: int) -> Snapshot | None:
    """Update the layers after a promotion or an undo: drop the promoted paths, or restore the layers from before the promotion.

    `undoes` is the number of the undone promotion, 0 for a promotion. Return the snapshot of the layers before a promotion, or the restored
    snapshot; None if nothing changed.
    """
    masks = [mask.path for mask in gate.policy.files.masks]
    if undoes:
        return stored.restore(f"before promotion {undoes}", masks)
    label = f"before promotion {number}" if number else "before dropping changes that were already real"
    return stored.drop(leaving.paths, label, masks, places=leaving.places)


def not_let_go(error: Exception) -> str:
    """Return a note for the user about a failed update of the layers."""
    return f"it is done, but the sandbox still holds these changes: {error}; dropping them is tried again the next time"


def _words(recovery: Recovery) -> Iterator[str]:
    for number in recovery.rolled_back:
        yield f"promotion {number} had been interrupted; it was taken back, and the tree is as it was before"
    for number in recovery.finished:
        yield f"promotion {number} had been interrupted after it was done; it was finished"
    for path in recovery.kept:
        yield f"files that another program saved meanwhile are kept in {path}"
    yield from recovery.problems


def _layers(stored: Stored) -> object:
    """Return a value that changes when the layers change, and with every run in them, because a run records its start."""
    if not stored.state.exists:
        return None
    layers = stored.state.history().layers
    try:
        size = os.stat(file_of(stored.state.bases, layers[0])).st_size
    except FileNotFoundError:
        size = 0
    return [stored.state.created(), list(layers), size]


def _place(state: SandboxState) -> str:
    return os.path.join(state.promotions, _NAME)
