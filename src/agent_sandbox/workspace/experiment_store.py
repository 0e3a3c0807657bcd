"""The places of experiments: the frozen project and the layers of each attempt, in `<state>/experiments/<id>/`.

frozen/       the copy of the project that every attempt starts from: see `frozen_tree`
NAME/         an attempt; as for a sandbox: see `store`
NAME.check/   the copy of an attempt in which its check runs
held, result-<digest>   as in every kept place: see `kept_places`
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.kept_places import KEPT_SECONDS, KeptPlaces, PlaceState
from agent_sandbox.workspace.originals.runs import append, spell_run
from agent_sandbox.workspace.store import Holder, PreparedSandbox, Store, hold

MOST_KEPT = 4
_FROZEN = "frozen"


@dataclass(frozen=True)
class AttemptState(PlaceState):
    """The stored state of an attempt: a sandbox in the place of its experiment.

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
        return prepared


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
        ExperimentStore(self.store).save(self.id, text)


class ExperimentStore(KeptPlaces):
    """The experiments in a state directory."""

    folder, noun, text = "experiments", "experiment", "result-"
    most, largest_text = MOST_KEPT, 16 << 20
    changed = "the experiment has been changed since it was kept", "run it again"

    @contextmanager
    def making(self, project: str) -> Iterator[ExperimentPlace]:
        """Yield a new place. It is removed at the end of the block, unless it was kept."""
        place = ExperimentPlace(self.store, project, secrets.token_hex(6))
        with self.make(place.id, "try"):
            yield place

    @contextmanager
    def opened(self, prefix: str) -> Iterator[tuple[ExperimentPlace, str]]:
        """Open the kept experiment whose id starts with `prefix`, and yield it with its result. Raises `PolicyError` and `Busy`."""
        with self.hold_found(lambda: self._find(prefix), "try") as (name, _, result):
            yield ExperimentPlace(self.store, "", name), result

    def drop(self, place: ExperimentPlace) -> None:
        """Remove an experiment that was kept."""
        self.remove(place.id)

    def kept(self) -> tuple[tuple[str, str], ...]:
        """Return id and result of each kept experiment, newest first. Expired ones are removed before."""
        return tuple((name, result) for name, _, result in self.read_all())

    def _find(self, prefix: str) -> tuple[str, str]:
        matches = [(name, digest) for _, name, digest in self.usable() if name.startswith(prefix.lower())] if prefix else []
        if len(matches) > 1:
            raise PolicyError(f"more than one experiment begins with {prefix!r}", hint="give more of its letters")
        if not matches:
            hint = 'begin one: agent-sandbox try a="COMMAND" b="COMMAND" --check "COMMAND"'
            raise PolicyError(
                f"there is no experiment {prefix!r}: it is more than {KEPT_SECONDS / 3600:.0f} hour old, was promoted, or never existed",
                hint=hint,
            )
        return matches[0]
