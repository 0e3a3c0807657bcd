"""Places that are kept for a while: directories in the state directory, each with the layers of a run and a text that says what they are.

    held            locked while the place is being made, read or used
    <text>-<digest> the text, written last and atomically: a place without it is incomplete, and is swept
    layers/, …      as for a sandbox: see `store`

Plans and experiments are such places. A place that nobody holds and that has no text is what a killed process left. Places are few and
short-lived: beyond a limit the oldest are removed. The digest of a text is part of its file name, so that a changed text is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import replace
from agent_sandbox.errors import Busy, PolicyError, WorkspaceError
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.store import Holder, PreparedSandbox, SandboxState, Store, hold

KEPT_SECONDS = 3600.0
_HELD = "held"


class PlaceState(SandboxState):
    """The stored state of a sandbox in a kept place, never in an image.

    An image would reserve disk space at once, which is only worth it for sandboxes that stay.
    """

    @property
    def promotions(self) -> str:
        """The directory for journals of promotions. It stays empty: a kept place is promoted with the journals of the project's sandbox."""
        return os.path.join(self.path, "promotions")

    def prepare(self, limit_bytes: int | None = None) -> PreparedSandbox:
        """Create missing files, as for a sandbox. The note about a missing image is left out, because a place never has an image."""
        return replace(super().prepare(limit_bytes), notes=())

    def _make_layers(self, present: object, limit_bytes: int | None) -> tuple[str, ...]:
        os.makedirs(self.layers, mode=0o700, exist_ok=True)
        return ()


class KeptPlaces:
    """The places of one kind in a state directory. A subclass names the kind, and what its users read when a place cannot be had."""

    folder: str
    noun: str
    text: str
    most: int
    largest_text: int
    changed: tuple[str, str]

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = os.path.join(store.path, self.folder)

    @contextmanager
    def make(self, name: str, command: str) -> Iterator[None]:
        """Make a place, held for the duration of the block. It is removed at the end, unless its text was saved."""
        place = os.path.join(self.path, name)
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside(room_for=1)
                with explained(f"make a place for the {self.noun} in {self.path!r}"):
                    os.mkdir(place, 0o700)
                ends.enter_context(self._hold(name, command))
            try:
                self._remove(swept)
                yield
            finally:
                if self._digest_in(place) is None:
                    self.remove(name)

    @contextmanager
    def hold_found(self, find: Callable[[], tuple[str, str]], command: str) -> Iterator[tuple[str, str, str]]:
        """Hold the place that `find` names for the duration of the block, and yield its name, the digest of its text and the text."""
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside()
                name, digest = find()
                ends.enter_context(self._hold(name, command))
            self._remove(swept)
            yield name, digest, self._read(name, digest)

    def save(self, name: str, text: str) -> None:
        """Write the text of a place, completely or not at all. From now on the place outlives its block."""
        with explained(f"keep the {self.noun}"):
            write_atomically(os.path.join(self.path, name, self.text + sha256(text.encode()).hexdigest()), text)

    def remove(self, name: str) -> None:
        """Remove a place."""
        self._remove([aside] if (aside := self._move_aside(name)) else [])

    def read_all(self) -> tuple[tuple[str, str, str], ...]:
        """Return name, digest and text of each place that can be used, newest first. Expired ones are removed before."""
        self.sweep()
        places: list[tuple[str, str, str]] = []
        for _, name, digest in sorted(self.usable(), reverse=True):
            with suppress(PolicyError, WorkspaceError):  # changed or removed meanwhile
                places.append((name, digest, self._read(name, digest)))
        return tuple(places)

    def sweep(self) -> None:
        """Remove expired places, and what killed processes left."""
        if os.path.isdir(self.path):
            with self._alone():
                swept = self._put_aside()
            self._remove(swept)

    def usable(self) -> Iterator[tuple[float, str, str]]:
        """Yield time, name and digest of each place with a text that `is_spent` does not exclude."""
        for name in self._names():
            path = os.path.join(self.path, name)
            if (digest := self._digest_in(path)) is not None and not self.is_spent(path):
                with suppress(FileNotFoundError):
                    yield os.stat(os.path.join(path, self.text + digest)).st_mtime, name, digest

    def is_spent(self, path: str) -> bool:
        """Whether a place was used and cannot be used again."""
        del path  # for subclasses
        return False

    def beyond_room(self, names: list[str]) -> set[str]:
        """Return which of the places, named newest first, are too many or too large together."""
        return set(names[self.most :])

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        except FileNotFoundError:  # none yet
            return []

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the places briefly against other processes that make, sweep or open them."""
        with explained(f"use {self.path!r}"):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        holder = Holder(os.getpid(), self.folder, self.store.clock())
        return hold(os.path.join(self.path, ".lock"), holder, wait=True, what=f"the {self.folder}")

    def _hold(self, name: str, command: str) -> AbstractContextManager[None]:
        holder = Holder(os.getpid(), command, self.store.clock())
        return hold(os.path.join(self.path, name, _HELD), holder, wait=False, what=f"this {self.noun}")

    def _put_aside(self, room_for: int = 0) -> list[str]:
        """Move incomplete, expired and excess places to the trash, except for locked ones. Return their names in the trash.

        `room_for` is the number of new places to make room for.
        """
        now = self.store.clock()
        places = sorted(self.usable(), reverse=True)
        known = {name for _, name, _ in places}
        going = [name for name in self._names() if name not in known]
        beyond = self.beyond_room([*[""] * room_for, *(name for _, name, _ in places)])
        going += [name for when, name, _ in places if name in beyond or not 0 <= now - when <= KEPT_SECONDS]
        return [aside for name in going if (aside := self._unheld_aside(name))]

    def _unheld_aside(self, name: str) -> str | None:
        try:
            with self._hold(name, "sweeping"):
                return self._move_aside(name)
        except (Busy, WorkspaceError):  # locked by another process, or being removed already
            return None

    def _move_aside(self, name: str) -> str | None:
        aside = f"{self.noun}-{name}"
        try:
            os.rename(os.path.join(self.path, name), os.path.join(self.store.path, "trash", aside))
        except OSError:  # the next sweep tries again
            return None
        return aside

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(WorkspaceError, OSError):  # the next opening of the store sweeps the rest
                self.store.remove_from_trash(name)

    def _digest_in(self, path: str) -> str | None:
        """Return the digest of the text in a directory, which is part of its file name; None if there is none."""
        try:
            names = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return next((name.removeprefix(self.text) for name in names if name.startswith(self.text) and not name.endswith(".new")), None)

    def _read(self, name: str, digest: str) -> str:
        with explained(f"read the {self.noun}"):
            fd = os.open(os.path.join(self.path, name, self.text + digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            content = file.read(self.largest_text + 1)
        if sha256(content).hexdigest() != digest:
            message, hint = self.changed
            raise PolicyError(message, hint=hint)
        return content.decode()
