"""Saved plans: simulations that may still be carried out, each with the layers of its run, in `<state>/plans/<name>/`.

    held            locked while the plan is being made, read or carried out
    size            its size on disk
    plan-<digest>   its text, written last and atomically: a directory without it is no plan, and is swept
    begun           the plan has begun to be carried out, and cannot be used again
    layers/, …      as for a sandbox: see `store`

Plans are few, small and short-lived: beyond a limit the oldest are removed. The caller chooses the text; its digest is its file name. The
layers are not synced: carrying out a plan compares them with its text.
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
from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.durable import explained, sync_directory, write_atomically
from agent_sandbox.workspace.store import Holder, PreparedSandbox, SandboxState, Store, hold

KEPT_SECONDS = 3600.0
MOST_PLANS = 16
MOST_BYTES = 4 << 30  # all plans together
_LARGEST_TEXT = 64 << 20
_TEXT, _SIZE, _BEGUN, _HELD = "plan-", "size", "begun", "held"
_SHORTEST_PREFIX = 4


class PlanState(SandboxState):
    """The stored state of a plan: a sandbox in its own directory, never in an image.

    An image would reserve disk space at once, which is only worth it for sandboxes that stay.
    """

    @property
    def path(self) -> str:
        """The directory of the plan."""
        return os.path.join(self.store.path, "plans", self.id)

    @property
    def promotions(self) -> str:
        """The directory for journals of promotions. It stays empty: a plan is promoted with the journals of the project's sandbox."""
        return os.path.join(self.path, "promotions")

    def lock(self, *, wait: bool = False, command: str = "") -> AbstractContextManager[None]:
        """Hold the lock on this plan for the duration of a block. The lock file is removed together with the plan."""
        return hold(os.path.join(self.path, "lock"), Holder(os.getpid(), command, self.store.clock()), wait=wait, what="this plan")

    def prepare(self, limit_bytes: int | None = None) -> PreparedSandbox:
        """Create missing files, as for a sandbox. The note about a missing image is left out, because a plan never has an image."""
        return replace(super().prepare(limit_bytes), notes=())

    def _make_layers(self, present: object, limit_bytes: int | None) -> tuple[str, ...]:
        os.makedirs(self.layers, mode=0o700, exist_ok=True)
        return ()


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


class Plans:
    """The saved plans in a state directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = os.path.join(store.path, "plans")

    @contextmanager
    def making(self, project: str) -> Iterator[PlanState]:
        """Yield a new place for the layers of a simulation. It is removed at the end of the block, unless `keep` was called."""
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
        """Save a plan inside the block of `making`, completely or not at all. Raises `WorkspaceError` if the plan is too large."""
        size = _size_of(state.layers)
        if len(text) > _LARGEST_TEXT or size > MOST_BYTES:
            raise WorkspaceError("it changes too much for its plan to be kept", hint="carry it out in portions: run it, then promote")
        with explained("keep the plan"):
            write_atomically(os.path.join(state.path, _SIZE), str(size))
            write_atomically(os.path.join(state.path, _TEXT + sha256(text.encode("ascii")).hexdigest()), text)

    @contextmanager
    def opened(self, prefix: str) -> Iterator[SavedPlan]:
        """Open the plan whose digest starts with `prefix`, locked for the duration of the block.

        Raises `PolicyError` if there is no such plan, if the plan was already carried out, or if its text does not match its digest.
        """
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside()
                name, digest = self._find(prefix)
                state = PlanState(self._store, "", name)
                ends.enter_context(self._hold(state, "carry-out"))
            self._remove(swept)
            yield SavedPlan(state, _read(state.path, digest), digest)

    def drop(self, kept: SavedPlan) -> None:
        """Remove a plan that has been carried out."""
        if name := self._move_aside(kept.state.id):
            self._remove([name])

    def all(self) -> tuple[tuple[str, str], ...]:
        """Return digest and text of each usable plan, newest first. Expired plans are removed before."""
        self.sweep()
        plans: list[tuple[str, str]] = []
        for _, name, digest in sorted(self._all(), reverse=True):
            with suppress(PolicyError, WorkspaceError):  # changed or removed meanwhile
                plans.append((digest, _read(os.path.join(self._path, name), digest)))
        return tuple(plans)

    def sweep(self) -> None:
        """Remove expired and incomplete plans."""
        if os.path.isdir(self._path):
            with self._alone():
                swept = self._put_aside()
            self._remove(swept)

    def _find(self, prefix: str) -> tuple[str, str]:
        asked = prefix.lower()
        if len(asked) < _SHORTEST_PREFIX or asked.strip("0123456789abcdef"):
            raise PolicyError(f"{prefix!r} is not the beginning of a digest", hint=f"give {_SHORTEST_PREFIX} or more of its letters")
        matches = [(name, digest) for _, name, digest in self._all() if digest.startswith(asked)]
        if len(matches) > 1:
            raise PolicyError(f"more than one plan begins with {prefix!r}", hint="give more of its letters")
        if not matches:
            raise PolicyError(
                f"there is no plan {prefix!r}: it was carried out, is more than {KEPT_SECONDS / 3600:.0f} hour old, or never existed",
                hint="simulate the command again",
            )
        return matches[0]

    def _all(self) -> Iterator[tuple[float, str, str]]:
        for name in self._names():
            path = os.path.join(self._path, name)
            if (digest := _text_in(path)) is not None and not os.path.lexists(os.path.join(path, _BEGUN)):
                with suppress(FileNotFoundError):
                    yield os.stat(os.path.join(path, _TEXT + digest)).st_mtime, name, digest

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path) if not name.startswith("."))
        except FileNotFoundError:  # no simulation yet
            return []

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the plans briefly against other processes that make, sweep or open plans."""
        with explained(f"use {self._path!r}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
        return hold(os.path.join(self._path, ".lock"), Holder(os.getpid(), "plans", self._store.clock()), wait=True, what="the plans")

    def _hold(self, state: PlanState, command: str) -> AbstractContextManager[None]:
        holder = Holder(os.getpid(), command, self._store.clock())
        return hold(os.path.join(state.path, _HELD), holder, wait=False, what="this plan")

    def _put_aside(self, room_for: int = 0) -> list[str]:
        """Move incomplete, expired and excess plans to the trash, except for locked ones. Return their names in the trash.

        `room_for` is the number of new plans to make room for.
        """
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
        except (Busy, WorkspaceError):  # locked by another process, or being removed already
            return None

    def _move_aside(self, name: str) -> str | None:
        aside = f"plan-{name}"
        try:
            os.rename(os.path.join(self._path, name), os.path.join(self._store.path, "trash", aside))
        except OSError:  # the next sweep tries again
            return None
        return aside

    def _remove(self, names: list[str]) -> None:
        trash = os.open(os.path.join(self._store.path, "trash"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in names:
                with suppress(WorkspaceError, OSError):  # the next opening of the store sweeps the rest
                    remove_tree(trash, name)
        finally:
            os.close(trash)


def _text_in(path: str) -> str | None:
    """Return the digest of the plan text in a directory, which is part of its file name; None if the directory holds no plan."""
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
