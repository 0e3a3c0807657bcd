"""Retry a launch: on a new plan if a mount appeared, or in another runtime if the launch failed or a feature was missing.

Error output is held back until it is clear whether the run is retried.
"""

from __future__ import annotations

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.runtimes import Choice, RoutingQuestion, Runtimes, modules_in
from agent_sandbox.errors import LaunchFailed, Overtaken, RuntimeUnavailable, SandboxError
from agent_sandbox.policy.model import Limits, Policy
from agent_sandbox.runtime.base import COMMAND, DEVNULL, Completed, Demands, ExitReason, Launch, Usage
from agent_sandbox.runtime.router.model import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    from agent_sandbox.engine import work as submitted
    from agent_sandbox.engine.attachments import Attachment
    from agent_sandbox.engine.plan_launch import LaunchPlanner
    from agent_sandbox.runtime.base import Guest

    T = TypeVar("T")

_A_MOMENT = 0.001  # seconds: a limit of zero is not possible
MOST_PLANS = 5  # plans for one launch, if a mount appears each time between the plan and the view


def on_a_plan_that_holds(attempt: Callable[[], T]) -> T:
    """Call `attempt`, which plans a view and launches on it, and return its result. Retry if a mount appeared in between."""
    for _ in range(MOST_PLANS - 1):
        with suppress(Overtaken):
            return attempt()
    return attempt()


class Launches:
    """The launches of one run: an iterator over the runtimes to try, and a context manager around each try.

    A launch that fails is retried on a new plan, if a mount appeared meanwhile, or in the next runtime. A run that ended because its
    runtime lacks something is retried elsewhere, if the first run had no visible effect.
    """

    def __init__(
        self,
        work: submitted.Work,
        runtimes: Runtimes,
        planner: LaunchPlanner,
        policy: Policy,
        attached: Attachment,
        *,
        stored: bool = False,
        turns: bool = False,
    ) -> None:
        """`attached` is released after each failure. In a `stored` sandbox no run is repeated, because its writes would stay."""
        self._work = work
        self._runtimes = runtimes
        self._planner = planner
        self._policy = policy
        self._attached = attached
        self._stored = stored
        self._question = lambda: question_of(work, policy, stored=stored, turns=turns)
        self._choice: Choice | None = None
        self._failures: dict[str, str] = {}
        self._plans = 1
        self._held: HeldOutput | None = None
        self._guest: Guest | None = None  # the guest whose run counts so far
        self._running = False
        self._over = False
        self.limits = policy.limits
        self.notes: tuple[str, ...] = ()  # about a second launch that failed

    def __iter__(self) -> Iterator[Choice]:
        self._choice = self._runtimes.choose(self._policy, self._question)
        while not self._over:
            yield self._choice
            if not self._over:
                self._attached.release()

    def held(self, launch: Launch) -> Launch:
        """Return the launch with its error output held back, if the run may be retried. A run is retried at most once."""
        assert self._choice is not None
        if self._guest is not None or launch.on_output is None or not self._choice.may_lack:
            return launch
        self._held = HeldOutput(launch.on_output)
        return replace(launch, on_output=self._held)

    def started(self, guest: Guest) -> Guest:
        """Note that a launch has succeeded, so that later exceptions end the run. If this is a retry, close the guest of the first run."""
        if self._guest is not None:
            self._guest.close()
            self._held = None  # its output is replaced by that of the second run
        self._guest, self._running = guest, True
        return guest

    def go_on_after(self, completed: Completed) -> bool:
        """Return whether the run, which has ended, will be retried in another runtime."""
        assert self._choice is not None
        assert self._guest is not None
        lack = lack_of(self._work, self._choice, self._guest, completed, self._held, stored=self._stored)
        again = None if lack is None else self._runtimes.after_lack(self._choice, lack, self._policy, self._question)
        if again is None:
            self._settle()
            return False
        self._choice, self._plans, self.limits = again, 1, rest(self._policy.limits, completed.exit.usage)
        return True

    def _settle(self) -> None:
        self._over = True
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> None:
        self._running = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or self._running:
            return False
        self._attached.release()
        if isinstance(error, Overtaken):
            self._planner.forget()
            self._plans += 1
            if self._plans <= MOST_PLANS:
                return True
        assert self._choice is not None
        name = self._choice.runtime.traits.name
        if self._guest is not None and isinstance(error, SandboxError):  # the second launch failed, so the outcome of the first run counts
            self.notes = (f"it could not start again on {name}: {error.message}",)
            self._settle()
            return True
        if not isinstance(error, RuntimeUnavailable | LaunchFailed):
            return False
        self._failures[name] = error.message
        self._choice, self._plans = self._runtimes.after_failure(self._failures, error, self._policy, self._question), 1
        return True


def question_of(work: submitted.Work, policy: Policy, *, stored: bool, turns: bool = False) -> RoutingQuestion:
    """Return the facts about a piece of work that the router needs to choose a runtime."""
    from agent_sandbox.runtime.guest_rpc.inside import MODULE

    language: str = getattr(work.what, "language", COMMAND)
    repeatable = not stored and not turns and work.on_output is None and not takes_input(work)
    local: frozenset[str] | None = frozenset()
    file = getattr(work.what, "file", None)
    place = work.cwd if file is None else file.directory
    if place is not None and language != COMMAND and policy.files.read and policy.files.reaches(place):
        local = None if stored else modules_in(place)  # the layers of a stored sandbox are not searched
    placed = file is not None and "__file__" in getattr(work.what, "source", "")
    given = frozenset({MODULE} if work.tools else ())
    asked = Workload(language, getattr(work.what, "source", ""), repeatable, local, given, turns, placed)
    return RoutingQuestion(
        asked,
        Demands(
            work.terminal is not None,
            policy.system,
            work.watch_reads,
            work.observe,
            work.preload,
            bool(work.publish),
            work.timeline is not None,
            policy.image,
        ),
    )


def lack_of(
    work: submitted.Work, choice: Choice, guest: Guest, completed: Completed, held: HeldOutput | None, *, stored: bool
) -> str | None:
    """Return the feature whose absence ended the run, if the run can be repeated unnoticed; otherwise None."""
    end = completed.exit
    shown = held.passed if held is not None else work.on_output is not None or not work.collect
    if not choice.may_lack or end.reason is not ExitReason.EXITED or stored or takes_input(work) or shown:
        return None
    if guest.refused or guest.irrevocable:
        return None
    from agent_sandbox.runtime.router.route import lack_in

    return lack_in(end.code, completed.stderr if held is None else held.stderr)


def takes_input(work: submitted.Work) -> bool:
    """Return whether the work reads its input from a descriptor, which a retry could not read again."""
    return isinstance(work.stdin, int) and work.stdin != DEVNULL


def rest(limits: Limits, spent: Usage) -> Limits:
    """Return the limits for a second run. Its time limits are what the first run left; the other limits stay the same."""
    left = {
        name: max(limit - used, _A_MOMENT)
        for name, used in (("wall_seconds", spent.wall_seconds), ("cpu_seconds", spent.cpu_seconds))
        if (limit := getattr(limits, name)) is not None
    }
    return replace(limits, **left)


_BEGINNINGS = (b"Traceback (most recent call last):", b"ReferenceError: ")  # of the error messages that `lack_in` recognises
_MOST = 64 << 10  # bytes held back: a traceback is shorter


class HeldOutput:
    """Wraps `on_output` for a run that may be retried: an error message at its beginning is held back."""

    def __init__(self, pass_on: Callable[[str, bytes], None]) -> None:
        self._pass_on = pass_on
        self._held = b""
        self.passed = False  # whether any output was passed on

    def __call__(self, stream: str, data: bytes) -> None:
        """Hold back output that may be the error message of a missing feature; pass everything else on."""
        if self.passed:
            self._pass_on(stream, data)
        elif stream == "stderr" and self._may_be_an_end(self._held + data):
            self._held += data
        else:
            self.release()
            self.passed = True
            self._pass_on(stream, data)

    @property
    def stderr(self) -> bytes:
        """The standard error held back so far."""
        return self._held

    def release(self) -> None:
        """Pass on the output that was held back. Called when the run is not retried."""
        held, self._held = self._held, b""
        if held:
            self.passed = True
            self._pass_on("stderr", held)

    def _may_be_an_end(self, text: bytes) -> bool:
        return len(text) <= _MOST and any(text.startswith(each) or each.startswith(text) for each in _BEGINNINGS)
