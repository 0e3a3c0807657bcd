"""Whether a run may start again in another runtime, with which limits, and the output held back until that is settled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.runtimes import Choice, Question, modules_in
from agent_sandbox.errors import Overtaken
from agent_sandbox.policy.limits import Limits
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import COMMAND, DEVNULL, Completed, Demands, Reason, Usage
from agent_sandbox.runtime.router.model import Workload

if TYPE_CHECKING:
    from typing import TypeVar

    from agent_sandbox.engine import work as submitted
    from agent_sandbox.runtime.base import Guest

    T = TypeVar("T")

_A_MOMENT = 0.001  # seconds: no limit can be nothing
MOST_PLANS = 5  # of one launch, on a machine on which something is mounted each time between the plan and the view


def on_a_plan_that_holds(attempt: Callable[[], T]) -> T:
    """What `attempt` returns, which plans a view and launches on it. Once more when something was mounted in between: nothing has run."""
    for _ in range(MOST_PLANS - 1):
        with suppress(Overtaken):
            return attempt()
    return attempt()


def question_of(work: submitted.Work, policy: Policy, *, stored: bool) -> Question:
    """What the router has to know of a piece of work. What a `stored` sandbox keeps of a first try could not be taken back."""
    from agent_sandbox.runtime.guest_rpc.inside import MODULE

    language: str = getattr(work.what, "language", COMMAND)
    goes_on = work.talk is not None and work.talk.offer["turns"]
    repeatable = not stored and not goes_on and work.on_output is None and not takes_input(work)
    local: frozenset[str] | None = frozenset()
    if work.cwd is not None and language != COMMAND and policy.files.read and policy.files.reaches(work.cwd):
        local = None if stored else modules_in(work.cwd)  # its layers are not looked through
    given = frozenset({MODULE} if work.tools else ())
    asked = Workload(language, getattr(work.what, "source", ""), repeatable, local, given, goes_on)
    return Question(asked, Demands(work.terminal is not None, policy.system, work.watch_reads, work.observe, work.preload))


def lack_of(work: submitted.Work, choice: Choice, guest: Guest, completed: Completed, held: Held | None, *, stored: bool) -> str | None:
    """What its runtime lacked, if that is how it ended and it could start again as if nothing had been."""
    end = completed.exit
    shown = held.passed if held is not None else work.on_output is not None or not work.collect
    if not choice.may_lack or end.reason is not Reason.EXITED or stored or takes_input(work) or shown:
        return None
    if guest.refused or guest.irrevocable:
        return None
    from agent_sandbox.runtime.router.route import lack_in

    return lack_in(end.code, completed.stderr if held is None else held.stderr)


def takes_input(work: submitted.Work) -> bool:
    """Whether it reads from a descriptor, where what was read is gone."""
    return isinstance(work.stdin, int) and work.stdin != DEVNULL


def rest(limits: Limits, spent: Usage) -> Limits:
    """What a second run may use so that both together stay within the limits. The rest of them hold for each."""
    left = {
        name: max(limit - used, _A_MOMENT)
        for name, used in (("wall_seconds", spent.wall_seconds), ("cpu_seconds", spent.cpu_seconds))
        if (limit := getattr(limits, name)) is not None
    }
    return replace(limits, **left)


_BEGINNINGS = (b"Traceback (most recent call last):", b"ReferenceError: ")  # of what `lack_in` looks for
_MOST = 64 << 10  # held back: a traceback is shorter


class Held:
    """Stands in for `on_output` until it is clear what the output is."""

    def __init__(self, pass_on: Callable[[str, bytes], None]) -> None:
        self._pass_on = pass_on
        self._held = b""
        self.passed = False  # whether anything has been

    def __call__(self, stream: str, data: bytes) -> None:
        """Take output as it arrives."""
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
        """Pass on what was held back: the run stays as it is."""
        held, self._held = self._held, b""
        if held:
            self.passed = True
            self._pass_on("stderr", held)

    def _may_be_an_end(self, text: bytes) -> bool:
        return len(text) <= _MOST and any(text.startswith(each) or each.startswith(text) for each in _BEGINNINGS)
