"""Which runtime does a piece of work: those of this machine, each made when it is first needed, and what the caller wishes for.

The router is pure (`runtime.router`). Here it gets its facts, and its answer is carried out. Whatever a runtime is to give, each launch
puts in force or fails before anything has run. So the launch itself is the live try, and no other is made before it: where it fails, the
work goes to the next runtime that gives the same, and what was learnt counts for a while.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.router.model import Host, Permits, Route, Work

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.retry import Held
    from agent_sandbox.runtime.process.runtime import ProcessRuntime
    from agent_sandbox.runtime.wasm.one_wall import OneWall
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime

    Runtime = ProcessRuntime | WasmRuntime | OneWall

WISHES = ("process", "wasm", "auto")
ONE_WALL = "wasm-one-wall"  # chosen by name only, or by the system that has no other
_CHOSEN, _ALL_THERE_IS = "the caller chose it", "no other works on this system"
NOT_LINUX = "the confinement of a process is Linux's, and this is another system"
_NONE: Mapping[str, str] = {}
_MOST_MODULES = 4096  # names in a directory that are looked at before each run
_LOOK_AGAIN_SECONDS = 2.0  # after which one that is not there may have come: it is being compiled, or was installed
_TRY_AGAIN_SECONDS = 60.0  # after which one that failed to launch may do so again


@dataclass(frozen=True)
class Question:
    """What the router has to know: the work as it sees it, and what the launch will ask for besides."""

    work: Work
    terminal: bool = False
    watched: bool = False
    observed: bool = False
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A runtime, and why that one."""

    runtime: Runtime
    route: Route
    may_lack: bool = False  # whether it was guessed, and may turn out to have been the wrong one


@dataclass(frozen=True)
class _Absence:
    """Why a runtime is not to be used, or nothing, and until when that is believed."""

    why: str
    until: float


class Runtimes:
    """The runtimes of this machine and a wish: the name of one, or "auto". Safe to share between threads."""

    def __init__(
        self,
        wish: str,
        process: Callable[[], ProcessRuntime],
        wasm: Callable[[], WasmRuntime] | None = None,
        one_wall: Callable[[], OneWall] | None = None,
        *,
        background: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`process`, `wasm` and `one_wall` give the runtimes, and are not called before one is needed. The last is never a choice of ours.

        With `background`, what is still to be compiled is compiled meanwhile, by a process of its own that may outlive this one.
        """
        self.wish = wish
        self._process = process
        self._wasm = wasm
        self._one_wall = one_wall
        self._background = background
        self._clock = clock
        self._absence = _Absence("", 0.0)  # of wasm; replaced whole, so threads may share it

    @property
    def identity(self) -> dict[str, str]:
        """Of the one that runs what is to be the same every time."""
        if self._wasm is None:
            raise RuntimeUnavailable("there is no runtime for deterministic runs", missing=("deterministic",), hint='use runtime="wasm"')
        return self._wasm().identity

    def choose(self, policy: Policy, ask: Callable[[], Question], *, acting: bool = True) -> Choice:
        """The runtime for a piece of work. `ask` is called where there is something to choose; without `acting` nothing is set going.

        Raises `RuntimeUnavailable` when none gives what the policy requires and takes the work.
        """
        if self.wish != "auto":
            return Choice(self._made(self.wish), Route(self.wish, _CHOSEN if sys.platform == "linux" else _ALL_THERE_IS))
        return self._chosen(policy, ask(), acting)

    def held(self, choice: Choice, on_output: Callable[[str, bytes], None] | None) -> Held | None:
        """What is to take the output of a run that may start again; None where it is the caller's from the beginning."""
        if on_output is None or not choice.may_lack:
            return None
        from agent_sandbox.engine.retry import Held

        return Held(on_output)

    def after_failure(self, failed: Mapping[str, str], error: SandboxError, policy: Policy, ask: Callable[[], Question]) -> Choice:
        """The choice after launches that failed before anything had run, the last with this error; raised where there is no other."""
        if self.wish != "auto":
            raise error
        if "wasm" in failed:
            self._absence = _Absence(failed["wasm"], self._clock() + _TRY_AGAIN_SECONDS)
            if isinstance(error, RuntimeUnavailable) and self._background and self._wasm is not None:
                self._wasm().compile_in_background()  # it has been compiled, but is not as it was
        try:
            return self._chosen(policy, ask(), acting=True, failed=failed)
        except RuntimeUnavailable:
            raise error from None

    def after_lack(self, choice: Choice, lack: str, policy: Policy, ask: Callable[[], Question]) -> Choice | None:
        """Where a run starts again that lacked something and left no trace; None where it stays as it is."""
        if self.wish != "auto":
            return None
        question = ask()
        again = replace(question, work=replace(question.work, repeatable=True))
        first = self._routed(policy, again, acting=False)
        if first.runtime != choice.runtime.name or first.fall_forward is None:
            return None
        others = tuple((name, why) for name, why in first.passed_over if name != first.fall_forward)
        why = f"{first.runtime} was tried first and lacked something; it started again here, on a fresh clone"
        route = Route(first.fall_forward, why, ((first.runtime, lack), *others), notes=first.notes, fell_forward=lack)
        return Choice(self._made(first.fall_forward), route)

    def _chosen(self, policy: Policy, question: Question, acting: bool, failed: Mapping[str, str] = _NONE) -> Choice:
        route = self._routed(policy, question, acting, failed)
        if route.runtime is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in route.passed_over)
            missing = tuple(name for name, _ in route.passed_over)
            raise RuntimeUnavailable(f"{route.why} ({reasons})", missing=missing, hint="see: agent-sandbox doctor")
        return Choice(self._made(route.runtime), route, may_lack=route.runtime != "process")

    def _routed(self, policy: Policy, question: Question, acting: bool, failed: Mapping[str, str] = _NONE) -> Route:
        from agent_sandbox.runtime.router.route import route

        hosts = [self._process_host(failed.get("process", ""))]
        if self._wasm is not None:
            hosts.append(self._wasm_host(self._wasm, policy, question, acting))
        return route(question.work, policy.requires, Permits.of(policy), hosts)

    def _process_host(self, unavailable: str) -> Host:
        from agent_sandbox.runtime.router.route import process_host

        return process_host(self._process().guarantees, unavailable=unavailable)

    def _wasm_host(self, wasm: Callable[[], WasmRuntime], policy: Policy, question: Question, acting: bool) -> Host:
        from agent_sandbox.runtime.router.route import wasm_host

        if why := self._absence_of_wasm(wasm, acting):
            return wasm_host(frozenset(), unavailable=why)
        runtime = wasm()
        objection = runtime.objection(
            terminal=question.terminal,
            system=policy.system,
            watched=question.watched,
            observed=question.observed,
            preload=question.preload,
        )
        return wasm_host(runtime.guarantees, languages=runtime.brings, unavailable=objection)

    def _absence_of_wasm(self, wasm: Callable[[], WasmRuntime], acting: bool) -> str:
        """Why it cannot be used now, or nothing."""
        if self._clock() < (known := self._absence).until:
            return known.why
        try:
            runtime = wasm()
            why = "" if runtime.ready else runtime.compile_in_background() if acting and self._background else runtime.standing
        except RuntimeUnavailable as error:
            why = f"{error.message} ({error.hint})"
        # Whether it is there is not looked up each time: should it have gone, its launch fails, and that is noted too.
        self._absence = _Absence(why, self._clock() + (_LOOK_AGAIN_SECONDS if why else _TRY_AGAIN_SECONDS))
        return why

    def _made(self, name: str) -> Runtime:
        if name == "process":
            return self._process()
        make = self._one_wall if name == ONE_WALL else self._wasm
        assert make is not None
        return make()


def modules_in(directory: str) -> frozenset[str] | None:
    """The names that Python could import from a directory; None where that is not known: it cannot be listed, or holds too much."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_MODULES + 1), strict=False)]
    except OSError:
        return None
    return frozenset(name.partition(".")[0] for name in names) if len(names) <= _MOST_MODULES else None


def only(runtime: Runtime) -> Runtimes:
    """For who has one and wants no other."""
    give: Any = lambda: runtime  # noqa: E731  the one of its name is asked for, whichever it is
    return Runtimes(runtime.name, give, give, give)
