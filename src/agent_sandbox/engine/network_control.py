"""The network of one sandbox while it is in use: the declared intent, and what was opened besides. Tells the egress of every run.

Changes are recorded before they hold. What expires ends in the egress process itself, which has the time; here its end is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.policy.intents import Declared, known_intent
from agent_sandbox.policy.network import GrantedWay, NetworkRules, Way

if TYPE_CHECKING:
    from agent_sandbox.engine.egress import EgressProcess
    from agent_sandbox.ledger.event import Facts


class NetworkControl:
    """The declared intent and the opened ways of one sandbox, for its runs that go on and those to come. Safe to use from many threads."""

    def __init__(self, note: Callable[[str, Facts], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`note` records a fact. `clock` is one that cannot be set, and that the egress processes share."""
        self._note, self._clock = note, clock
        self._lock = threading.Lock()
        self._declared: Declared | None = None
        self._seconds = 0.0  # that the declared intent holds
        self._granted: tuple[GrantedWay, ...] = ()
        self._processes: dict[EgressProcess, NetworkRules] = {}  # and the rules of the policy that each runs under

    def in_force(self, rules: NetworkRules) -> NetworkRules:
        """Return the rules that are in force now where a policy has these."""
        return replace(rules, declared=self._declared, granted=(*rules.granted, *self._granted)).at(self._clock())

    def declared_in(self, rules: NetworkRules) -> NetworkRules:
        """Return these rules with the intent that was declared, for as long as a run goes on that repeats this one."""
        return rules if self._declared is None else replace(rules, declared=Declared(self._declared.name))

    def declare(self, rules: NetworkRules, written: str | None, *, later: bool = False) -> None:
        """Declare one of the intents that these rules name, or none. Raises `PolicyError` for an unknown one, and what `note` raises.

        With `later`, its time begins with the next run, not now.
        """
        declared = None
        self.record_expiry()
        with self._lock:
            if written is None:
                self._note("network.intent", {"target": "", "allowed": True, "why": "the intent was taken back"})
            else:
                intent = known_intent(rules, written)
                self._note("network.intent", {"target": intent.name, "allowed": True, "seconds": intent.seconds})
                declared = Declared(intent.name, None if later else self._clock() + intent.seconds)
                self._seconds = intent.seconds
            self._declared = declared
            self._tell()

    def open(self, way: Way, *, seconds: float | None = None) -> None:
        """Open a way besides what the policy's rules permit, for these seconds, or as long as this sandbox is used."""
        with self._lock:
            self._granted = (*self._granted, GrantedWay(way, None if seconds is None else self._clock() + seconds))
            self._tell()

    def attach(self, process: EgressProcess, rules: NetworkRules) -> None:
        """Tell this egress process the rules in force from now on. `rules` are those of its policy."""
        with self._lock:
            self._processes[process] = rules
            self._tell()

    def begin(self) -> None:
        """Let the time of an intent begin that was declared for the next run: its program starts now."""
        with self._lock:
            if self._declared is not None and self._declared.until is None:
                self._declared = replace(self._declared, until=self._clock() + self._seconds)
                self._tell()

    def detach(self, process: EgressProcess) -> None:
        """Tell this process nothing any more."""
        with self._lock:
            self._processes.pop(process, None)

    def record_expiry(self) -> None:
        """Record that the declared intent has expired, once it has."""
        with self._lock:
            declared = self._declared
            if declared is None or declared.lapsed or declared.until is None or self._clock() < declared.until:
                return
            self._declared = replace(declared, lapsed=True)
            self._note("network.intent", {"target": declared.name, "allowed": False, "why": "it has expired"})

    def _tell(self) -> None:
        for process, rules in self._processes.items():
            with suppress(OSError):  # it has gone, and the network of its run with it
                process.obey(self.in_force(rules))
