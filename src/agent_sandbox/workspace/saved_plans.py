"""Plans of simulations that may yet be carried out, each with the layers of its run: `<state>/plans/<name>/`.

    held            locked while somebody makes the plan, reads it or carries it out
    size            what it takes on the disk
    plan-<digest>   its text, written last and in one step: a directory without one is no plan, and whatever was begun there is swept
    begun           somebody has begun to carry it out, so it is good for nothing any more
    layers/, …      what a sandbox has: see `store`

They are few, small and short-lived: what is over a bound goes, the oldest first. The text is the caller's; its name says what it is. The
layers are not synced: whoever carries a plan out compares them with its text.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.errors import Busy, PolicyError, WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.durable import explained, sync_directory, write_atomically
from agent_sandbox.workspace.lock import Holder, hold
from agent_sandbox.workspace.removal import remove_tree
from agent_sandbox.workspace.store import Prepared, SandboxState, Store

KEPT_SECONDS = 3600.0
MOST_PLANS = 16
MOST_BYTES = 4 << 30  # of all plans together
_LARGEST_TEXT = 64 << 20
_TEXT, _SIZE, _BEGUN, _HELD = "plan-", "size", "begun", "held"
_SHORTEST_PREFIX = 4


class PlanState(SandboxState):
    """The layers of a plan: a sandbox like others, in a directory of its own, and always in a directory.

    An image would be reserved on the disk at once, which is for those that stay.
    """

    @property
    def path(self) -> str:
        """Its directory."""
        return os.path.join(self.store.path, "plans", self.id)

    @property
    def promotions(self) -> str:
        """None is ever made from here: what a plan changes is promoted by the project's sandbox."""
        return os.path.join(self.path, "promotions")

    def lock(self, *, wait: bool = False, command: str = "") -> AbstractContextManager[None]:
        """As for others; the lock goes with the plan."""
        return hold(os.path.join(self.path, "lock"), Holder(os.getpid(), command, self.store.clock()), wait=wait, what="this plan")

    def prepare(self, limit_bytes: int | None = None) -> Prepared:
        """As for others. That it is no image is as it should be."""
        return replace(super().prepare(limit_bytes), notes=())

    def _make_layers(self, present: object, limit_bytes: int | None) -> tuple[str, ...]:
        os.makedirs(self.layers, mode=0o700, exist_ok=True)
        return ()


@dataclass(frozen=True)
class Kept:
    """A plan that is held: its text, whose digest was asked for, and its layers."""

    state: PlanState
    text: str
    digest: str

    def begin(self) -> None:
        """From here on it cannot be carried out again, even if the power fails."""
        with explained("note that the plan is being carried out"):
            write_atomically(os.path.join(self.state.path, _BEGUN), "")

    def recall(self) -> None:
        """Nothing came of it, so it may be tried again."""
        with explained("note that the plan was not carried out"):
            os.unlink(os.path.join(self.state.path, _BEGUN))
            sync_directory(self.state.path)


class Plans:
    """The plans in a state directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = os.path.join(store.path, "plans")

    @contextmanager
    def making(self, project: str) -> Iterator[PlanState]:
        """A place for the layers of a simulation of a project. What is not kept by the end of the block is gone. Sweeps first."""
        state = PlanState(self._store, project, secrets.token_hex(8))
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside(room_for=1)
                with explained(f"make a place for a plan in {self._path!r}"):
                    os.mkdir(state.path, 0o700)
                ends.enter_context(self._hold(state, "simulation"))
            try:
                self._remove(swept)
                yield state
            finally:
                if _text_in(state.path) is None:
                    self._remove([name] if (name := self._move_aside(state.id)) else [])

    def keep(self, state: PlanState, text: str) -> None:
        """Keep a plan that is being made. Afterwards all of it is there, or nothing. Raises `WorkspaceError` when it is too large."""
        size = _size_of(state.layers)
        if len(text) > _LARGEST_TEXT or size > MOST_BYTES:
            raise WorkspaceError("it changes too much for its plan to be kept", hint="carry it out in portions: run it, then promote")
        with explained("keep the plan"):
            write_atomically(os.path.join(state.path, _SIZE), str(size))
            write_atomically(os.path.join(state.path, _TEXT + sha256(text.encode("ascii")).hexdigest()), text)

    @contextmanager
    def opened(self, prefix: str) -> Iterator[Kept]:
        """The plan whose digest begins so, held for the length of the block. Raises `PolicyError` when there is no such plan.

        Refused too: one that somebody began to carry out, and one whose text is not what its digest says.
        """
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside()
                name, digest = self._find(prefix)
                state = PlanState(self._store, "", name)
                ends.enter_context(self._hold(state, "carry-out"))
            self._remove(swept)
            yield Kept(state, _read(state.path, digest), digest)

    def drop(self, kept: Kept) -> None:
        """It has been carried out."""
        if name := self._move_aside(kept.state.id):
            self._remove([name])

    def all(self) -> tuple[tuple[str, str], ...]:
        """Digest and text of each plan that is still good, the newest first. Sweeps first."""
        self.sweep()
        found: list[tuple[str, str]] = []
        for _, name, digest in sorted(self._all(), reverse=True):
            with suppress(PolicyError, WorkspaceError):  # changed, or gone meanwhile
                found.append((digest, _read(os.path.join(self._path, name), digest)))
        return tuple(found)

    def sweep(self) -> None:
        """Remove what is no plan, or none any more. Nothing is made where there are none."""
        if os.path.isdir(self._path):
            with self._alone():
                swept = self._put_aside()
            self._remove(swept)

    def _find(self, prefix: str) -> tuple[str, str]:
        asked = prefix.lower()
        if len(asked) < _SHORTEST_PREFIX or asked.strip("0123456789abcdef"):
            raise PolicyError(f"{prefix!r} is not the beginning of a digest", hint=f"give {_SHORTEST_PREFIX} or more of its letters")
        found = [(name, digest) for _, name, digest in self._all() if digest.startswith(asked)]
        if len(found) > 1:
            raise PolicyError(f"more than one plan begins with {prefix!r}", hint="give more of its letters")
        if not found:
            raise PolicyError(
                f"there is no plan {prefix!r}: it was carried out, or is more than {KEPT_SECONDS / 3600:.0f} hour old, or never was",
                hint="simulate the command again",
            )
        return found[0]

    def _all(self) -> Iterator[tuple[float, str, str]]:
        for name in self._names():
            path = os.path.join(self._path, name)
            if (digest := _text_in(path)) is not None and not os.path.lexists(os.path.join(path, _BEGUN)):
                with suppress(FileNotFoundError):
                    yield os.stat(os.path.join(path, _TEXT + digest)).st_mtime, name, digest

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path) if not name.startswith("."))
        except FileNotFoundError:  # nothing was ever simulated
            return []

    def _alone(self) -> AbstractContextManager[None]:
        """Between others who make, sweep or open plans; nobody stays here long."""
        with explained(f"use {self._path!r}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
        return hold(os.path.join(self._path, ".lock"), Holder(os.getpid(), "plans", self._store.clock()), wait=True, what="the plans")

    def _hold(self, state: PlanState, command: str) -> AbstractContextManager[None]:
        holder = Holder(os.getpid(), command, self._store.clock())
        return hold(os.path.join(state.path, _HELD), holder, wait=False, what="this plan")

    def _put_aside(self, room_for: int = 0) -> list[str]:
        """Move away what is no plan, is too old, or is one too many. Whatever somebody holds stays. Returns what is in the trash."""
        now = self._store.clock()
        plans = sorted(self._all(), reverse=True)
        known = {name: when for when, name, _ in plans}
        room = MOST_BYTES
        going = [name for name in self._names() if name not in known]
        for kept, (when, name, _) in enumerate(plans, 1):
            room -= _noted_size(os.path.join(self._path, name))
            if not 0 <= now - when <= KEPT_SECONDS or kept + room_for > MOST_PLANS or room < 0:
                going.append(name)
        return [aside for name in going if (aside := self._unheld_aside(name))]

    def _unheld_aside(self, name: str) -> str | None:
        try:
            with self._hold(PlanState(self._store, "", name), "sweeping"):
                return self._move_aside(name)
        except (Busy, WorkspaceError):  # somebody has it, or it is going already
            return None

    def _move_aside(self, name: str) -> str | None:
        aside = f"plan-{name}"
        try:
            os.rename(os.path.join(self._path, name), os.path.join(self._store.path, "trash", aside))
        except OSError:  # then the next who sweeps tries again
            return None
        return aside

    def _remove(self, names: list[str]) -> None:
        trash = os.open(os.path.join(self._store.path, "trash"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in names:
                with suppress(WorkspaceError, OSError):  # what is left there is swept when the store is opened next
                    remove_tree(trash, name)
        finally:
            os.close(trash)


def _text_in(path: str) -> str | None:
    """The digest of the plan in a directory; None when it holds none."""
    try:
        return next((name.removeprefix(_TEXT) for name in os.listdir(path) if name.startswith(_TEXT) and not name.endswith(".new")), None)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read(path: str, digest: str) -> str:
    with explained("read the plan"):
        fd = os.open(os.path.join(path, _TEXT + digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        content = file.read(_LARGEST_TEXT + 1)
    if sha256(content).hexdigest() != digest:
        raise PolicyError("the plan has been changed since it was shown", hint="simulate the command again")
    return content.decode("ascii")


def _noted_size(path: str) -> int:
    try:
        with open(os.path.join(path, _SIZE), "rb") as file:
            noted = file.read(32)
    except FileNotFoundError:
        return MOST_BYTES
    return int(noted) if noted.isdigit() else MOST_BYTES


def _size_of(path: str) -> int:
    """What a tree takes on the disk, as far as it may be looked through."""
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return sum(entry.status.st_blocks * 512 for entry in beneath.walk(top))
    except (WorkspaceError, OSError):  # more entries than are ever listed, or one that cannot be looked at
        return MOST_BYTES + 1
    finally:
        os.close(top)
