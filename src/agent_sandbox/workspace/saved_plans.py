"""Saved plans: simulations that may still be carried out, each with the layers of its run, in `<state>/plans/<name>/`.

    size            its size on disk
    begun           the plan has begun to be carried out, and cannot be used again
    held, plan-<digest>, layers/, …   as in every kept place: see `kept_places`

The caller chooses the text. The layers are not synced: carrying out a plan compares them with its text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.durable import explained, sync_directory, write_atomically
from agent_sandbox.workspace.kept_places import KEPT_SECONDS, KeptPlaces, PlaceState
from agent_sandbox.workspace.store import Holder, hold

MOST_PLANS = 16
MOST_BYTES = 4 << 30  # all plans together
_LARGEST_TEXT = 64 << 20
_SIZE, _BEGUN = "size", "begun"
_SHORTEST_PREFIX = 4


class PlanState(PlaceState):
    """The stored state of a plan: a sandbox in its own directory."""

    @property
    def path(self) -> str:
        """The directory of the plan."""
        return os.path.join(self.store.path, "plans", self.id)

    def lock(self, *, wait: bool = False, command: str = "") -> AbstractContextManager[None]:
        """Hold the lock on this plan for the duration of a block. The lock file is removed together with the plan."""
        return hold(os.path.join(self.path, "lock"), Holder(os.getpid(), command, self.store.clock()), wait=wait, what="this plan")


@dataclass(frozen=True)
class SavedPlan:
    """An open, locked plan: its layers, its text, and the digest of the text."""

    state: PlanState
    text: str
    digest: str

    def begin(self) -> None:
        """Record that the plan is being carried out. It cannot be carried out again, even after a power failure."""
        with explained("note that the plan is being carried out"):
            write_atomically(os.path.join(self.state.path, _BEGUN), "")

    def recall(self) -> None:
        """Remove the record of `begin`, because nothing was carried out. The plan can be used later."""
        with explained("note that the plan was not carried out"):
            os.unlink(os.path.join(self.state.path, _BEGUN))
            sync_directory(self.state.path)


class Plans(KeptPlaces):
    """The saved plans in a state directory."""

    folder, noun, text = "plans", "plan", "plan-"
    most, largest_text = MOST_PLANS, _LARGEST_TEXT
    changed = "the plan has been changed since it was shown", "simulate the command again"

    @contextmanager
    def making(self, project: str) -> Iterator[PlanState]:
        """Yield a new place for the layers of a simulation. It is removed at the end of the block, unless `keep` was called."""
        state = PlanState(self.store, project, os.urandom(8).hex())
        with self.make(state.id, "simulation"):
            yield state

    def keep(self, state: PlanState, text: str) -> None:
        """Save a plan inside the block of `making`, completely or not at all. Raises `WorkspaceError` if the plan is too large."""
        size = _size_of(state.layers)
        if len(text) > _LARGEST_TEXT or size > MOST_BYTES:
            raise WorkspaceError("it changes too much for its plan to be kept", hint="carry it out in portions: run it, then promote")
        with explained("keep the plan"):
            write_atomically(os.path.join(state.path, _SIZE), str(size))
        self.save(state.id, text)

    @contextmanager
    def opened(self, prefix: str) -> Iterator[SavedPlan]:
        """Open the plan whose digest starts with `prefix`, locked for the duration of the block.

        Raises `PolicyError` if there is no such plan, if the plan was already carried out, or if its text does not match its digest.
        """
        with self.hold_found(lambda: self._find(prefix), "carry-out") as (name, digest, text):
            yield SavedPlan(PlanState(self.store, "", name), text, digest)

    def drop(self, kept: SavedPlan) -> None:
        """Remove a plan that has been carried out."""
        self.remove(kept.state.id)

    def all(self) -> tuple[tuple[str, str], ...]:
        """Return digest and text of each usable plan, newest first. Expired plans are removed before."""
        return tuple((digest, text) for _, digest, text in self.read_all())

    def is_spent(self, path: str) -> bool:
        """Whether a plan has begun to be carried out."""
        return os.path.lexists(os.path.join(path, _BEGUN))

    def beyond_room(self, names: list[str]) -> set[str]:
        """Return which plans are too many, or too large together, beginning with the oldest."""
        beyond, room = super().beyond_room(names), MOST_BYTES
        for name in names:
            room -= _noted_size(os.path.join(self.path, name)) if name else 0
            if room < 0:
                beyond.add(name)
        return beyond

    def _find(self, prefix: str) -> tuple[str, str]:
        asked = prefix.lower()
        if len(asked) < _SHORTEST_PREFIX or asked.strip("0123456789abcdef"):
            raise PolicyError(f"{prefix!r} is not the beginning of a digest", hint=f"give {_SHORTEST_PREFIX} or more of its letters")
        matches = [(name, digest) for _, name, digest in self.usable() if digest.startswith(asked)]
        if len(matches) > 1:
            raise PolicyError(f"more than one plan begins with {prefix!r}", hint="give more of its letters")
        if not matches:
            raise PolicyError(
                f"there is no plan {prefix!r}: it was carried out, is more than {KEPT_SECONDS / 3600:.0f} hour old, or never existed",
                hint="simulate the command again",
            )
        return matches[0]


def _noted_size(path: str) -> int:
    try:
        with open(os.path.join(path, _SIZE), "rb") as file:
            noted = file.read(32)
    except FileNotFoundError:
        return MOST_BYTES
    return int(noted) if noted.isdigit() else MOST_BYTES


def _size_of(path: str) -> int:
    """Return the disk usage of a tree. If the tree cannot be walked completely, return more than the maximum of a plan."""
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return sum(entry.status.st_blocks * 512 for entry in beneath.walk(top))
    except (WorkspaceError, OSError):  # too many entries, or one that cannot be examined
        return MOST_BYTES + 1
    finally:
        os.close(top)
