"""The questions of a run about its network: for a host that the policy asks for, or data that was found in a request.

The egress process holds a request and asks here. A capability of the sandbox answers at once, and anew for each request, so that a revoked
one refuses the next. Otherwise a person is asked, through the gate: one question for each host, however many requests wait for it. A yes is
for the request that was shown, or for the host until the run ends; a no is for the run. The process reads bytes of the guest, so its
questions are judged again, and everything that it can cause is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.errors import Denied, SandboxError
from agent_sandbox.policy.action import Connect

if TYPE_CHECKING:
    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.policy.network import NetworkRules

MOST_QUESTIONS = 20  # to a person in one run; then the answer is no
MOST_OPEN = 4  # questions that a person has at once
MOST_WAITING = 256  # requests that wait for an answer
MOST_LOOKUPS = 16  # that answers for single requests leave over
_LONGEST = 1e9  # seconds that an approval is said to hold
_END_SECONDS = 2.0  # that a question may take to be withdrawn, once the run has ended
_LONGEST_PROGRAM = 500  # characters
_ENOUGH = f"no more than {MOST_QUESTIONS} questions are asked in one run"
_Key = tuple[str, int, str]


@dataclass(frozen=True)
class RequestAnswer:
    """The answer to a request that waits. One for the run holds for `seconds`; `watched` says that it may be taken back meanwhile."""

    allowed: bool
    why: str = ""
    seconds: float = 0.0
    watched: bool = False


Reply = Callable[[int, RequestAnswer], None]


@dataclass
class _Open:
    """A question to a person about an action, and the requests that wait for its answer."""

    action: Connect
    waiting: list[int]


class Questions:
    """The questions of one run. `reply` sends an answer to the request of a number. Safe to use from several threads."""

    def __init__(self, gate: Gate, reply: Reply, *, run: str, clock: Callable[[], float] = time.time) -> None:
        """`run` tells this run from others of the same sandbox. `clock` is that of the gate."""
        self.program = ""  # that the run was started with, for whoever is asked
        self._gate, self._reply, self._run, self._clock = gate, reply, run, clock
        self._lock = threading.Lock()
        self._granted: dict[_Key, float] = {}  # until when
        self._refused: dict[_Key, str] = {}
        self._open: dict[_Key, _Open] = {}
        self._actions: dict[int, Connect] = {}  # of the requests that wait
        self._count = 0
        self._over = False
        self._lookups: dict[str, int] = {}
        self._used: set[tuple[str, str]] = set()  # capabilities and hosts whose first use was recorded
        self._threads: list[threading.Thread] = []

    def hear(self, rules: NetworkRules, number: int, action: Connect, *, again: bool = False) -> None:
        """Answer a question of the egress process, or let it wait. With `again`, nobody is asked: a connection goes on if it still may."""
        if (answer := self._known(rules, action, again)) is not None:
            self._tell(number, action, answer)
            return
        with self._lock:
            key = _key(action)
            if (answer := self._remembered(key)) is not None:  # it was given in this moment
                pass
            elif self._over or len(self._actions) >= MOST_WAITING:
                answer = RequestAnswer(False, "too many requests wait for an answer" if not self._over else "the run has ended")
            elif key in self._open:
                self._open[key].waiting.append(number)
                self._actions[number] = action
            elif len(self._open) >= MOST_OPEN:
                answer = RequestAnswer(False, f"{len(self._open)} questions of this run wait for an answer already")
            elif self._count >= MOST_QUESTIONS:
                answer = RequestAnswer(False, _ENOUGH)
            else:
                self._actions[number] = action
                self._begin(key, _Open(action, [number]))
        if answer is not None:
            self._tell(number, action, answer)

    def withdraw(self, number: int) -> None:
        """Forget a request whose client has gone."""
        with self._lock:
            action = self._actions.pop(number, None)
            if action is None or (question := self._open.get(_key(action))) is None:
                return
            question.waiting.remove(number)

    def may_resolve(self, name: str) -> bool:
        """Return whether a host that the policy asks for may be looked up: it was allowed for the run, or for one request more."""
        with self._lock:
            if any(host == name and not data and self._clock() < until for (host, _, data), until in self._granted.items()):
                return True
            left = self._lookups.get(name, 0)
            if left:
                self._lookups[name] = left - 1
            return left > 0

    def close(self) -> None:
        """Withdraw every question: the run has ended. An answer that comes later is for nobody."""
        with self._lock:
            self._over = True
            threads = list(self._threads)
        until = time.monotonic() + _END_SECONDS
        for each in threads:
            each.join(max(0.0, until - time.monotonic()))

    def _known(self, rules: NetworkRules, action: Connect, again: bool) -> RequestAnswer | None:
        """Return the answer that needs no person; None if there is none."""
        why = rules.objection(action.host, action.port)
        if (not action.data or why) and not rules.asks_for(action.host, action.port):
            return RequestAnswer(not why, why)
        key = _key(action)
        with self._lock:
            expired = key in self._granted
            if (answer := self._remembered(key)) is not None:
                return answer
            if expired and again:
                return RequestAnswer(False, "the approval for this run has expired")
        try:
            found = None if action.data else self._gate.pre_approval(action, again=again)
        except (OSError, SandboxError) as error:
            return RequestAnswer(False, f"its capability cannot be checked: {type(error).__name__}")
        if isinstance(found, Refused):
            return RequestAnswer(False, f"{found.why}, so {action.target} is not reached any more")
        if isinstance(found, Granted):
            return self._recorded(found, action)
        if again:
            return RequestAnswer(False, "nobody has agreed to it any longer")
        if not action.data and not rules.asks_for(action.host, action.port, person=True):
            what = f"{action.method} at {action.target}" if action.method else action.target
            return RequestAnswer(False, f"no capability of this run covers {what}")
        return None

    def _remembered(self, key: _Key) -> RequestAnswer | None:
        """Return the answer that a person gave for this run; None if there is none, or none any more."""
        left = self._granted.get(key, 0.0) - self._clock()
        if left > 0:
            return RequestAnswer(True, seconds=min(left, _LONGEST), watched=True)
        self._granted.pop(key, None)
        return RequestAnswer(False, self._refused[key]) if key in self._refused else None

    def _recorded(self, found: Granted, action: Connect) -> RequestAnswer:
        """Record the first use of a capability for a host. Each flow is recorded as well."""
        if (use := (found.by, action.target)) not in self._used:
            try:
                self._gate.note("network.capability", {"target": action.target, "allowed": True, "why": found.by})
            except SandboxError as error:
                return RequestAnswer(False, f"it cannot be recorded: {error.message}")
            self._used.add(use)
        return RequestAnswer(True, watched=True)

    def _begin(self, key: _Key, question: _Open) -> None:
        self._count += 1
        self._open[key] = question
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(threading.Thread(target=self._ask, args=(key, question), name="agent-sandbox-question", daemon=True))
        self._threads[-1].start()

    def _ask(self, key: _Key, question: _Open) -> None:
        """Ask a person, and answer the requests that wait. The question stays if the client has gone: it often tries again."""
        action, why, until = question.action, "", 0.0
        wanted = lambda: not self._over  # noqa: E731
        try:
            until = self._gate.perform(
                action, lambda verdict: verdict.until, describe=_decided, details=self._details(action), wanted=wanted
            )
        except Denied as error:
            why = error.message.removeprefix("denied: ")
        except Exception as error:  # what cannot be asked or recorded is not allowed
            why = f"nobody could be asked: {type(error).__name__}"
        self._settle(key, question, why, until)

    def _settle(self, key: _Key, question: _Open, why: str, until: float) -> None:
        """Answer the requests that wait. A yes for one request is for the one that was shown; of the others, the next is asked about."""
        with self._lock:
            del self._open[key]
            now = [(number, self._actions.pop(number)) for number in question.waiting if number in self._actions]
            later: list[tuple[int, Connect]] = []
            answer = RequestAnswer(True)
            if self._over:
                answer = RequestAnswer(False, "the run has ended")
            elif why:
                self._refused[key] = why
                answer = RequestAnswer(False, why)
            elif until:
                self._granted[key] = until
                answer = RequestAnswer(True, "", min(max(until - self._clock(), 0.0), _LONGEST), True)
            else:
                shown = [each for each in now if each[1] == question.action][:1]
                now, later = shown, [each for each in now if each not in shown]
            if later and self._count < MOST_QUESTIONS:
                self._actions |= dict(later)
                self._begin(key, _Open(later[0][1], [number for number, _ in later]))
                later = []
        for number, action in now:
            self._tell(number, action, answer)
        for number, action in later:
            self._tell(number, action, RequestAnswer(False, _ENOUGH))

    def _tell(self, number: int, action: Connect, answer: RequestAnswer) -> None:
        if answer.allowed and not answer.seconds and not action.data:
            with self._lock:
                self._lookups[action.host] = min(self._lookups.get(action.host, 0) + 1, MOST_LOOKUPS)
        self._reply(number, answer)

    def _details(self, action: Connect) -> Callable[[], str]:
        if action.data:
            what = f"for the run: requests to {action.target} may hold what this rule finds ({action.data.partition(' ')[0]})"
        else:
            what = f"for the run: every request to {action.target} that the policy does not forbid"
        program = "" if action.data else self.program[:_LONGEST_PROGRAM]  # a command line may hold the value that was found
        asks = f"asked by run {self._run}" + (f": {program}" if program else "")
        return lambda: f"{asks}\nonce: this {'request' if action.method else 'connection'}\n{what}"


def _key(action: Connect) -> _Key:
    return action.host, action.port, action.data.partition(" ")[0]


def _decided(until: float) -> dict[str, str]:
    return {"decision": "run" if until else "once"}
