"""The places of experiments: the frozen project and the layers of each attempt, in `<state>/experiments/<id>/`.

    held          locked while the experiment runs, is looked at or promoted
    frozen/       the copy of the project that every attempt starts from: see `frozen_tree`
    NAME/         an attempt; as for a sandbox: see `store`
    NAME.check/   the copy of an attempt in which its check runs
    result-<digest>   the result, written last and atomically; without it, the directory is swept

A place that nobody holds and that has no result is what a killed process left, and the next experiment or `status` removes it. Kept
experiments are few and short-lived, as plans are.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.errors import Busy, PolicyError, WorkspaceError
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.originals.runs import append, spell_run
from agent_sandbox.workspace.store import Holder, PreparedSandbox, SandboxState, Store, hold

KEPT_SECONDS = 3600.0
MOST_KEPT = 4
_RESULT, _HELD, _FROZEN = "result-", "held", "frozen"
_LARGEST_RESULT = 16 << 20


@dataclass(frozen=True)
class AttemptState(SandboxState):
    """The stored state of an attempt: a sandbox in the place of its experiment, never in an image.

    `frozen_ns` is when the project was frozen, or 0 if the attempt sees the live files. Everything that the attempt covers is judged by
    that time: a real file that has changed since is not what the attempt saw.
    """

    top: str = ""
    frozen_ns: int = 0

    @property
    def path(self) -> str:
        """The directory of the attempt."""
        return os.path.join(self.top, self.id)

    @property
    def promotions(self) -> str:
        """The directory for journals. It stays empty: an attempt is promoted with the journals of the project's sandbox."""
        return os.path.join(self.path, "promotions")

    @property
    def over_a_copy(self) -> bool:
        """Whether the layers lie over a frozen copy of the project."""
        return bool(self.frozen_ns)

    def lock(self, *, wait: bool = False, command: str = "") -> AbstractContextManager[None]:
        """Hold the lock on this attempt for the duration of a block. Its file is removed with the experiment."""
        return hold(f"{self.path}.lock", Holder(os.getpid(), command, self.store.clock()), wait=wait, what="this attempt")

    def prepare(self, limit_bytes: int | None = None) -> PreparedSandbox:
        """Create missing files, as for a sandbox, and note that what a run sees is as old as the frozen project."""
        prepared = super().prepare(limit_bytes)
        if self.frozen_ns:
            with explained(f"prepare the attempt {self.id!r}"):
                os.makedirs(self.bases, mode=0o700, exist_ok=True)
                append(self.bases, prepared.present.active, spell_run(self.frozen_ns))  # see `originals.runs.begin`
        return replace(prepared, notes=())

    def _make_layers(self, present: object, limit_bytes: int | None) -> tuple[str, ...]:
        os.makedirs(self.layers, mode=0o700, exist_ok=True)
        return ()


@dataclass(frozen=True)
class ExperimentPlace:
    """The directory of one experiment, held by this process."""

    store: Store
    project: str
    id: str

    @property
    def path(self) -> str:
        """The directory itself."""
        return os.path.join(self.store.path, "experiments", self.id)

    @property
    def frozen(self) -> str:
        """The directory of the frozen project."""
        return os.path.join(self.path, _FROZEN)

    def attempt(self, name: str, frozen_ns: int = 0) -> AttemptState:
        """Return the state of an attempt. Names are checked by the caller: see `engine.experiment.model`."""
        return AttemptState(self.store, self.project, name, self.path, frozen_ns)

    def remove(self, name: str) -> None:
        """Remove one entry of the place, such as an attempt that is dropped. What cannot be removed now goes with the place."""
        aside = f"experiment-{self.id}-{name}"
        with suppress(OSError):
            os.rename(os.path.join(self.path, name), os.path.join(self.store.path, "trash", aside))
            with suppress(WorkspaceError):
                self.store.remove_from_trash(aside)

    def keep(self, text: str) -> None:
        """Save the result, inside the block of `making`, so that the experiment outlives it."""
        with explained("keep the experiment"):
            write_atomically(os.path.join(self.path, _RESULT + sha256(text.encode()).hexdigest()), text)


class ExperimentStore:
    """The experiments in a state directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = os.path.join(store.path, "experiments")

    @contextmanager
    def making(self, project: str) -> Iterator[ExperimentPlace]:
        """Yield a new place. It is removed at the end of the block, unless it was kept."""
        place = ExperimentPlace(self._store, project, secrets.token_hex(6))
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside(room_for=1)
                with explained(f"make a place for an experiment in {self._path!r}"):
                    os.mkdir(place.path, 0o700)
                ends.enter_context(self._hold(place.id, "try"))
            try:
                self._remove(swept)
                yield place
            finally:
                if _digest_in(place.path) is None:
                    self._remove([aside] if (aside := self._move_aside(place.id)) else [])

    @contextmanager
    def opened(self, prefix: str) -> Iterator[tuple[ExperimentPlace, str]]:
        """Open the kept experiment whose id starts with `prefix`, and yield it with its result. Raises `PolicyError` and `Busy`."""
        with ExitStack() as ends:
            with self._alone():
                swept = self._put_aside()
                name = self._find(prefix)
                ends.enter_context(self._hold(name, "try"))
            self._remove(swept)
            yield ExperimentPlace(self._store, "", name), _read(os.path.join(self._path, name))

    def drop(self, place: ExperimentPlace) -> None:
        """Remove an experiment that was kept."""
        self._remove([aside] if (aside := self._move_aside(place.id)) else [])

    def kept(self) -> tuple[tuple[str, str], ...]:
        """Return id and result of each kept experiment, newest first. Expired ones are removed before."""
        self.sweep()
        results: list[tuple[str, str]] = []
        for _, name in sorted(self._all(), reverse=True):
            with suppress(PolicyError, WorkspaceError):  # changed or removed meanwhile
                results.append((name, _read(os.path.join(self._path, name))))
        return tuple(results)

    def sweep(self) -> None:
        """Remove expired experiments, and what killed processes left."""
        if os.path.isdir(self._path):
            with self._alone():
                swept = self._put_aside()
            self._remove(swept)

    def _find(self, prefix: str) -> str:
        matches = [name for _, name in self._all() if name.startswith(prefix.lower())] if prefix else []
        if len(matches) > 1:
            raise PolicyError(f"more than one experiment begins with {prefix!r}", hint="give more of its letters")
        if not matches:
            hint = 'begin one: agent-sandbox try a="COMMAND" b="COMMAND" --check "COMMAND"'
            raise PolicyError(
                f"there is no experiment {prefix!r}: it is more than {KEPT_SECONDS / 3600:.0f} hour old, was promoted, or never existed",
                hint=hint,
            )
        return matches[0]

    def _all(self) -> Iterator[tuple[float, str]]:
        for name in self._names():
            if (digest := _digest_in(os.path.join(self._path, name))) is not None:
                with suppress(FileNotFoundError):
                    yield os.stat(os.path.join(self._path, name, _RESULT + digest)).st_mtime, name

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path) if not name.startswith("."))
        except FileNotFoundError:  # no experiment yet
            return []

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the experiments briefly against other processes that make, sweep or open them."""
        with explained(f"use {self._path!r}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
        holder = Holder(os.getpid(), "experiments", self._store.clock())
        return hold(os.path.join(self._path, ".lock"), holder, wait=True, what="the experiments")

    def _hold(self, name: str, command: str) -> AbstractContextManager[None]:
        holder = Holder(os.getpid(), command, self._store.clock())
        return hold(os.path.join(self._path, name, _HELD), holder, wait=False, what="this experiment")

    def _put_aside(self, room_for: int = 0) -> list[str]:
        """Move incomplete, expired and excess experiments to the trash, except for locked ones. Return their names in the trash."""
        now = self._store.clock()
        kept = sorted(self._all(), reverse=True)
        known = {name for _, name in kept}
        going = [name for name in self._names() if name not in known]
        for number, (when, name) in enumerate(kept, 1):
            if not 0 <= now - when <= KEPT_SECONDS or number + room_for > MOST_KEPT:
                going.append(name)
        return [aside for name in going if (aside := self._unheld_aside(name))]

    def _unheld_aside(self, name: str) -> str | None:
        try:
            with self._hold(name, "sweeping"):
                return self._move_aside(name)
        except (Busy, WorkspaceError):  # locked by another process, or being removed already
            return None

    def _move_aside(self, name: str) -> str | None:
        aside = f"experiment-{name}"
        try:
            os.rename(os.path.join(self._path, name), os.path.join(self._store.path, "trash", aside))
        except OSError:  # the next sweep tries again
            return None
        return aside

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(WorkspaceError, OSError):  # the next opening of the store sweeps the rest
                self._store.remove_from_trash(name)


def _digest_in(path: str) -> str | None:
    """Return the digest of the result in a directory, which is part of its file name; None if there is none."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((name.removeprefix(_RESULT) for name in names if name.startswith(_RESULT) and not name.endswith(".new")), None)


def _read(path: str) -> str:
    digest = _digest_in(path) or ""
    with explained("read the experiment"):
        fd = os.open(os.path.join(path, _RESULT + digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        content = file.read(_LARGEST_RESULT + 1)
    if sha256(content).hexdigest() != digest:
        raise PolicyError("the experiment has been changed since it was kept", hint="run it again")
    return content.decode()
