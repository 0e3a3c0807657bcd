"""The places of detached sandboxes: directories `<state>/detached/<name>/`. What is in them outlives the sandbox for a day.

lock, socket, log     as in every place of a holder: see `server.places`
facts.json            what runs there: the command, the project, since when, for how long
end.json              how it ended; written when nothing of it runs any more. Dead and without it: lost
output, output.1      what its program printed: see `server.output_log`
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.server.admission import MachineRoom, most_detached, objection
from agent_sandbox.server.places import Place, Places
from agent_sandbox.workspace.durable import write_atomically
from agent_sandbox.workspace.store import Store

KEPT_SECONDS = 24 * 3600.0  # after its end: what it printed, and how it ended
MOST_KEPT = 64  # of those that have ended
_FACTS, _END = "facts.json", "end.json"


@dataclass(frozen=True)
class DetachedRecord:
    """A detached sandbox, running or not. `end` says how it ended; None while it runs, and if it was lost."""

    place: Place
    running: bool
    facts: Mapping[str, Any]
    end: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """The name that `run --detach` printed."""
        return self.place.id

    @property
    def lost(self) -> bool:
        """Whether the process that held it was killed: nothing of it runs, and nobody saw its end."""
        return not self.running and self.end is None


class DetachedPlaces(Places):
    """The places of all detached sandboxes of this user."""

    folder, letter, what = "detached", "d", "the detached sandboxes"

    def __init__(self, store: Store, env: Mapping[str, str] = os.environ) -> None:
        super().__init__(store)
        self._state = store.path
        self._env = env

    def _admit(self, living: int) -> None:
        if why := objection(MachineRoom.look(self._state), living, most_detached(self._env)):
            raise SandboxError(f"not started: {why}", hint="end one: agent-sandbox stop NAME; see: agent-sandbox ps")

    def _clear(self, place: Place) -> None:
        """Remove one that ended long ago."""
        if time.time() - _ended_at(place) > KEPT_SECONDS:
            place.remove()

    def _swept(self) -> tuple[Place, ...]:
        living = super()._swept()
        dead = [place for place in self._every() if place not in living]
        for place in sorted(dead, key=_ended_at)[:-MOST_KEPT]:
            place.remove()
        return living

    def _every(self) -> list[Place]:
        return [Place(os.path.join(self._path, name)) for name in sorted(os.listdir(self._path)) if not name.startswith(".")]

    def records(self) -> tuple[DetachedRecord, ...]:
        """Return all that are known, oldest first. Those that ended long ago are removed."""
        if not os.path.isdir(self._path):
            return ()
        with self._alone():
            living = self._swept()
            found = [_record(place, running=place in living) for place in self._every()]
        known = (each for each in found if each is not None)
        return tuple(sorted(known, key=lambda each: float(each.facts.get("since", 0.0))))

    def record(self, name: str) -> DetachedRecord:
        """Return the one with this name, or whose name alone begins so. Raises `PolicyError` if there is none."""
        known = self.records()
        exact = [each for each in known if each.name == name]
        matches = exact or [each for each in known if name and each.name.startswith(name)]
        if len(matches) > 1:
            raise PolicyError(f"more than one detached sandbox begins with {name!r}", hint="give more of its letters")
        if not matches:
            raise PolicyError(f"there is no detached sandbox {name!r}", hint="see: agent-sandbox ps --all")
        return matches[0]

    def forget_ended(self) -> int:
        """Remove all that have ended. Return how many they were."""
        ended = [each for each in self.records() if not each.running]
        for each in ended:
            each.place.remove()
        return len(ended)


def write_facts(place: Place, facts: Mapping[str, Any]) -> None:
    """Write what runs in a place."""
    write_atomically(os.path.join(place.path, _FACTS), json.dumps(facts))


def write_end(place: Place, end: Mapping[str, Any]) -> None:
    """Write how it ended. Nothing of it may run any more."""
    write_atomically(os.path.join(place.path, _END), json.dumps(end))


def _record(place: Place, *, running: bool) -> DetachedRecord | None:
    """Return what is known about a place; None if its sandbox has not begun, or never did."""
    facts = _read(place, _FACTS)
    if facts is None:
        if not running:
            place.remove()  # it could not begin
        return None
    return DetachedRecord(place, running, facts, None if running else _read(place, _END))


def _read(place: Place, name: str) -> dict[str, Any] | None:
    with suppress(OSError, ValueError), open(os.path.join(place.path, name), "rb") as file:
        found = json.loads(file.read())
        return found if isinstance(found, dict) else None
    return None


def _ended_at(place: Place) -> float:
    """Return when it ended, or at least when its place was last changed."""
    for name in (_END, ""):
        with suppress(OSError):
            return os.stat(os.path.join(place.path, name)).st_mtime
    return 0.0
