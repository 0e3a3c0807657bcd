"""The registry of runtimes, and the choice among them: by the caller's wish or by the router, and again when a launch fails.

The router is pure (`runtime.router`). Here it gets its facts, and its answer is carried out. A launch enforces every guarantee or fails
before anything has run. So the launch itself is the live try: where it fails, the work goes to the next runtime that gives the same, and
the failure is remembered for a while.
"""

from __future__ import annotations

import os
import sys
import time

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.model import Guarantee, Policy
from agent_sandbox.runtime.base import Demands
from agent_sandbox.runtime.router.model import Candidate, Permits, Route, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from agent_sandbox.runtime.base import Runtime

    T = TypeVar("T")

AUTO = "auto"  # instead of the name of a runtime: the router chooses
_CHOSEN, _ALL_THERE_IS = "the caller chose it", "no other works on this system"
_FOR_IMAGES = "an image is named, and this runtime shows its files"
_NONE: Mapping[str, str] = {}
_MOST_MODULES = 4096  # names in a directory that are read before each run
_LOOK_AGAIN_SECONDS = 2.0  # after which we check again whether a missing runtime is compiled or installed now
_TRY_AGAIN_SECONDS = 60.0  # after which a runtime that failed to launch may be tried again


class Registry:
    """The known runtimes, by name, and the factories that make them.

    A factory is called once, when its runtime is first needed. Safe to share between threads. There is no lock, because a fork could
    inherit a held lock.
    """

    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], Runtime]] = {}
        self._automatic: dict[str, None] = {}  # a set that keeps its order
        self._heavy: set[str] = set()
        self._made: dict[str, Runtime] = {}
        self._companions: dict[type[Any], Any] = {}

    def companion(self, kind: type[T]) -> T:
        """Return the one object of this kind that accompanies the runtimes, and is closed with them; the first call makes it."""
        made: T = self._companions.get(kind) or self._companions.setdefault(kind, kind())  # if two threads make it, one is used
        return made

    def accompany(self, made: object) -> None:
        """Let this object accompany the runtimes, as the one of its kind."""
        self._companions[type(made)] = made

    def register(self, name: str, make: Callable[[], Runtime], *, automatic: bool = True, light: bool = True) -> None:
        """Add a runtime, or replace the runtime of this name. Without `automatic`, it is used only if a caller names it.

        One that is not `light` costs more than all that are. It is not even asked whether it is there while a light one will do.
        """
        self.unregister(name)
        self._factories[name] = make
        if automatic:
            self._automatic[name] = None
        if not light:
            self._heavy.add(name)

    def unregister(self, name: str) -> None:
        """Remove a runtime, without closing it."""
        for table in (self._factories, self._made, self._automatic):
            table.pop(name, None)
        self._heavy.discard(name)

    def get(self, name: str) -> Runtime:
        """Return the runtime of this name; the first call makes it. Raises KeyError for an unknown name."""
        return self._made.get(name) or self._made.setdefault(name, self._factories[name]())  # if two threads make it, one is used

    @property
    def automatic(self) -> tuple[str, ...]:
        """The names of the runtimes that the router chooses from."""
        return tuple(self._automatic)

    @property
    def light(self) -> tuple[str, ...]:
        """Those of them that cost little."""
        return tuple(name for name in self._automatic if name not in self._heavy)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a user may ask for: the runtimes, and `auto`."""
        return (*self._automatic, AUTO)

    def __contains__(self, name: str) -> bool:
        return name == AUTO or name in self._factories

    def close(self, *, leaving: bool = False) -> None:
        """Close the runtimes that have been made. The next launch starts them again."""
        for each in [*self._made.values(), *self._companions.values()]:
            each.close(leaving=leaving)


@dataclass(frozen=True)
class RoutingQuestion:
    """The facts that the router needs to choose a runtime: about the work, and the demands on its launch."""

    work: Workload
    demands: Demands = Demands()


@dataclass(frozen=True)
class Choice:
    """The chosen runtime, and the reason for the choice."""

    runtime: Runtime
    route: Route
    may_lack: bool = False  # whether the runtime was guessed, and may turn out to lack something


@dataclass(frozen=True)
class _Absence:
    """A cached answer, valid until `until`: the reason why a runtime cannot be used, or an empty string if it can."""

    why: str
    until: float


class Runtimes:
    """Chooses a runtime for each piece of work. `wish` is the name of a runtime, or "auto". Safe to share between threads."""

    def __init__(
        self,
        wish: str,
        registry: Registry,
        *,
        background: bool = False,
        announce: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `background`, a background process prepares a runtime that is not ready. It may outlive this process.

        `announce` is called with one line about such a process. Without it, the line is a warning in the log.
        """
        self.wish = wish
        self._registry = registry
        self._background = background
        self._announce = announce or _log
        self._clock = clock
        self._absences: dict[str, _Absence] = {}  # by name; each is replaced whole, so threads may share it

    def on(self, wish: str) -> Runtimes:
        """Return the same runtimes, with another wish."""
        return Runtimes(wish, self._registry, background=self._background, announce=self._announce, clock=self._clock)

    @property
    def identity(self) -> dict[str, str]:
        """The versions that determine the result of a deterministic run. Raises `RuntimeUnavailable` if no runtime offers such runs."""
        for name in self._registry.automatic:
            runtime = self._registry.get(name)
            if Guarantee.DETERMINISTIC in runtime.traits.guarantees:
                return runtime.identity
        raise RuntimeUnavailable("there is no runtime for deterministic runs", missing=("deterministic",), hint='use runtime="wasm"')

    def companion(self, kind: type[T]) -> T:
        """Return the one object of this kind that accompanies the runtimes, and is closed with them."""
        return self._registry.companion(kind)

    def choose(self, policy: Policy, ask: Callable[[], RoutingQuestion], *, acting: bool = True) -> Choice:
        """Return the runtime for a piece of work. `ask` returns the facts about the work, and is called only if there is a choice.

        Without `acting`, no runtime is prepared. Raises `RuntimeUnavailable` if no runtime can run the work with the guarantees that the
        policy requires.
        """
        if self.wish != AUTO:
            runtime = self._registry.get(self.wish)
            why = _FOR_IMAGES if policy.image and runtime.traits.images else _CHOSEN if sys.platform == "linux" else _ALL_THERE_IS
            return Choice(runtime, Route(self.wish, why))
        return self._chosen(policy, ask(), acting)

    def after_failure(self, failed: Mapping[str, str], error: SandboxError, policy: Policy, ask: Callable[[], RoutingQuestion]) -> Choice:
        """Return the next runtime to try after failed launches. Raises `error`, the last failure, if no runtime is left.

        `failed` has the reason of each failure by runtime.
        """
        if self.wish != AUTO:
            raise error
        last = self._registry.get([*failed][-1])
        if not last.traits.whole:  # a runtime with everything the machine has is tried each time: there may be no other runtime
            self._absences[last.traits.name] = _Absence(failed[last.traits.name], self._clock() + _TRY_AGAIN_SECONDS)
        if isinstance(error, RuntimeUnavailable) and self._background:
            last.prepare(self._announce)  # the runtime was ready, and something has damaged it since
        try:
            return self._chosen(policy, ask(), acting=True, failed=failed)
        except RuntimeUnavailable:
            raise error from None

    def after_lack(self, choice: Choice, lack: str, policy: Policy, ask: Callable[[], RoutingQuestion]) -> Choice | None:
        """Return the runtime for the second start of a run whose first runtime lacked a feature (`lack`); None if there is none."""
        if self.wish != AUTO:
            return None
        question = ask()
        again = replace(question, work=replace(question.work, repeatable=True))
        first = self._routed(policy, again, acting=False)
        if first.runtime != choice.runtime.traits.name or first.fall_forward is None:
            return None
        others = tuple((name, why) for name, why in first.passed_over if name != first.fall_forward)
        why = f"{first.runtime} was tried first and lacked something; it started again here, on a fresh clone"
        route = Route(first.fall_forward, why, ((first.runtime, lack), *others), notes=first.notes, fell_forward=lack)
        return Choice(self._registry.get(first.fall_forward), route)

    def _chosen(self, policy: Policy, question: RoutingQuestion, acting: bool, failed: Mapping[str, str] = _NONE) -> Choice:
        route = self._routed(policy, question, acting, failed, every=not acting)
        if route.runtime is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in route.passed_over)
            missing = tuple(name for name, _ in route.passed_over)
            raise RuntimeUnavailable(f"{route.why} ({reasons})", missing=missing, hint="see: agent-sandbox doctor")
        runtime = self._registry.get(route.runtime)
        return Choice(runtime, route, may_lack=not runtime.traits.whole)

    def _routed(
        self, policy: Policy, question: RoutingQuestion, acting: bool, failed: Mapping[str, str] = _NONE, *, every: bool = False
    ) -> Route:
        """Route among the light runtimes, and only if none of them will do among all. With `every`, say of all what speaks against them."""
        from agent_sandbox.runtime.router.route import route

        def among(names: tuple[str, ...]) -> Route:
            # Without an image, a runtime for images is no candidate that anybody could expect.
            named = [name for name in names if question.demands.image or not self._registry.get(name).traits.images]
            candidates = [self._candidate(name, question, acting, failed.get(name, "")) for name in named]
            return route(question.work, policy.requires, Permits.of(policy), candidates)

        light = None if every else among(self._registry.light)
        return light if light is not None and light.runtime is not None else among(self._registry.automatic)

    def _candidate(self, name: str, question: RoutingQuestion, acting: bool, failed: str) -> Candidate:
        runtime = self._registry.get(name)
        return Candidate(runtime.traits, failed or self._absence(runtime, acting) or runtime.objection(question.demands))

    def _absence(self, runtime: Runtime, acting: bool) -> str:
        """Return the reason why a runtime cannot be used now; empty if it can be. With `acting`, a missing runtime may be prepared."""
        name = runtime.traits.name
        known = self._absences.get(name)
        if known is not None and self._clock() < known.until:
            return known.why
        try:
            why = runtime.absence()
            if why and acting and self._background:
                why = runtime.prepare(self._announce)
        except RuntimeUnavailable as error:
            why = f"{error.message} ({error.hint})"
        # Readiness is not checked for every run. If the runtime has gone since the last check, its launch fails: see `after_failure`.
        self._absences[name] = _Absence(why, self._clock() + (_LOOK_AGAIN_SECONDS if why else _TRY_AGAIN_SECONDS))
        return why


def _log(message: str) -> None:
    """Log a warning. A program without settings for its log gets the line on standard error."""
    import logging  # only for what happens once

    logging.getLogger("agent_sandbox").warning("agent-sandbox: %s", message)


def modules_in(directory: str) -> frozenset[str] | None:
    """Return the names that Python could import from a directory; None if the directory cannot be listed or is too large."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_MODULES + 1), strict=False)]
    except OSError:
        return None
    return frozenset(name.partition(".")[0] for name in names) if len(names) <= _MOST_MODULES else None


def only(runtime: Runtime) -> Runtimes:
    """Return a `Runtimes` that always chooses this runtime."""
    registry = Registry()
    registry.register(runtime.traits.name, lambda: runtime)
    return Runtimes(runtime.traits.name, registry)
