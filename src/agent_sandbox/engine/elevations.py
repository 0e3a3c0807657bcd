"""Elevations in force: which sandbox has more than its policy, since when, and for how long. Stored on disk, sealed.

An elevation ends by itself. Each use compares it with two clocks: the wall clock, which can be set back, and the time since boot, which
cannot. The earlier end counts. No elevation survives a reboot. The next process that reads the elevations records each end, with its time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from agent_sandbox._fast.encoding import Seal, as_json, same
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.engine.gate import EntryWriter
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.event import Facts, Noted
from agent_sandbox.ledger.private_files import hex_names, make_private, read_private, sync_directory, write_once
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.elevation import Elevation

if TYPE_CHECKING:
    from typing import Any

PURPOSE = b"elevations"  # the purpose of the derived key
LONGEST_SECONDS = 24 * 3600.0
_LARGEST = 64 << 10
_DIGITS = 32  # of a name


@dataclass(frozen=True)
class Raised:
    """A stored elevation: its name, the sandbox, the relaxed rules, by whom, when it began, and the seconds left."""

    name: str
    sandbox: str
    what: Elevation
    by: str
    began: float
    seconds: float
    left: float
    word: Word


class Elevations:
    """The elevations in one directory. `since_boot` is a clock that nobody can set; `boot` identifies the current boot."""

    def __init__(
        self,
        directory: str,
        key: Seal,
        ledger: EntryWriter,
        *,
        clock: Callable[[], float],
        since_boot: Callable[[], float],
        boot: Callable[[], str],
    ) -> None:
        self._directory = directory
        self._key = key
        self._ledger = ledger
        self._clock = clock
        self._since_boot = since_boot
        self._boot = boot

    def begin(self, sandbox: str, what: Elevation, *, seconds: float, by: str, word: Word) -> str:
        """Begin an elevation that the person `by` asked for, and return its name. It is recorded before it takes effect.

        `word` identifies that person to the policy. Raises `PolicyError` if the elevation relaxes no rule or lasts too long,
        `LedgerUnavailable` if it cannot be recorded, OSError if it cannot be stored.
        """
        if not what.sorts():
            raise PolicyError("an elevation needs something to relax", hint="agent-sandbox grant --elevate --allow curl --for 10m")
        if not 0 < seconds <= LONGEST_SECONDS:
            raise PolicyError("an elevation lasts a day at most", hint="--for 10m")
        name, now = os.urandom(16).hex(), self._clock()
        elevation = {
            "name": name,
            "sandbox": sandbox,
            "programs": list(what.programs),
            "limits": [list(each) for each in what.limits],
            "paths": list(what.paths),
            "by": by,
            "user": word.user,
            "factor": word.factor,
            "began": now,
            "seconds": float(seconds),
            "since_boot": self._since_boot(),
            "boot": self._boot(),
        }
        facts: Facts = {"name": name, "target": what.describe(), "by": by, "seconds": seconds, "until": now + seconds}
        self._ledger.record(Noted("elevation.began", facts, sandbox), lasting=True)
        make_private(self._directory)
        message = as_json(elevation).encode("ascii")
        write_once(os.path.join(self._directory, name), message + b"\n" + self._key.on(message).hex().encode())
        sync_directory(self._directory)
        return name

    def standing(self) -> list[Raised]:
        """Return the elevations that are in force now, oldest first. Expired elevations are removed, and their end is recorded."""
        self.sweep()
        standing = [raised for name in hex_names(self._directory, _DIGITS) if (raised := self._read(name)) is not None and raised.left > 0]
        return sorted(standing, key=lambda each: (each.began, each.name))

    def end(self, name: str, *, by: str) -> None:
        """End an elevation early, for the person `by`. Raises `PolicyError` if there is no elevation of this name."""
        with self._alone():
            raised = self._read(name) if name in hex_names(self._directory, _DIGITS) else None
            if raised is None:
                raise PolicyError(f"there is no elevation {name[:64]!r}", hint="see: agent-sandbox capabilities")
            self._over(raised, self._clock(), f"{by} took it back")

    def sweep(self) -> None:
        """Remove expired elevations, and record when each ended."""
        if not hex_names(self._directory, _DIGITS):
            return
        with self._alone():  # so that only one process records an end
            for name in hex_names(self._directory, _DIGITS):
                raised = self._read(name)
                if raised is not None and not raised.left > 0:
                    self._over(raised, min(raised.began + raised.seconds, self._clock()), "its time was over")

    def _over(self, raised: Raised, ended: float, why: str) -> None:
        facts: Facts = {"name": raised.name, "target": raised.what.describe(), "ended": ended, "why": why}
        self._ledger.record(Noted("elevation.ended", facts, raised.sandbox), lasting=True)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, raised.name))
        sync_directory(self._directory)

    def _read(self, name: str) -> Raised | None:
        """Read an elevation; None if its seal is not valid, or if it has just been removed."""
        from json import loads  # few runs are elevated

        try:
            message, _, mark = read_private(os.path.join(self._directory, name), _LARGEST).rpartition(b"\n")
        except OSError:
            return None
        if not same(self._key.on(message).hex().encode(), mark):
            return None
        elevation: dict[str, Any] = loads(message)
        if elevation["name"] != name:
            return None
        limits = tuple((field, value) for field, value in elevation["limits"])
        what = Elevation(tuple(elevation["programs"]), limits, tuple(elevation["paths"]))
        word = Word(elevation["user"], elevation["factor"])
        return Raised(
            name, elevation["sandbox"], what, elevation["by"], elevation["began"], elevation["seconds"], self._left(elevation), word
        )

    def _left(self, elevation: dict[str, Any]) -> float:
        passed = self._since_boot() - elevation["since_boot"]
        if elevation["boot"] != self._boot() or passed < 0:
            return 0.0
        return float(min(elevation["seconds"] - passed, elevation["began"] + elevation["seconds"] - self._clock()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        make_private(self._directory)
        lock = os.open(os.path.join(self._directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
