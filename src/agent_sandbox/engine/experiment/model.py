"""Attempts, their results, and the order in which they are compared. Pure: the same results always have the same order and winner.

Work of an attempt is data, with its environment, so that it can be stored or sent to another machine as it is. A function of the caller is
not: such an attempt runs in the process that has the function, and is marked as not portable.

Attempts that passed come before all others. Among these, the order is: the higher score of the caller's own, fewer tests failed, more tests
passed, fewer changed lines, fewer changed files, and last the order in which they were given. How long an attempt took never decides,
because it differs each time. If the first to pass wins, that one comes first, and the others follow in this order.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.engine.experiment.reports import TestCounts
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import canonical_language

if TYPE_CHECKING:
    from typing import Any, Literal

    State = Literal["passed", "failed", "timed-out", "cancelled", "refused", "broken"]

MOST_ATTEMPTS = 64
KEPT_OUTPUT = 64 << 10  # bytes of each output that a result holds, from its end
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_FORMAT = 1


@dataclass(frozen=True)
class AttemptWork:
    """A command or code with its environment, directory and input: plain data. `cwd` is relative to the project."""

    what: Code | Command
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    cwd: str = "."
    stdin: bytes = b""

    def to_data(self) -> dict[str, Any]:
        """Return the work as data that JSON can hold. `from_data` reads it again, on any machine."""
        what: dict[str, Any]
        if isinstance(self.what, Code):
            what = {"language": self.what.language, "source": self.what.source, "arguments": [*self.what.arguments]}
        else:
            what = {"argv": [*self.what.argv]}
        stdin = base64.b64encode(self.stdin).decode("ascii")
        return {"format": _FORMAT, **what, "env": dict(self.env), "cwd": self.cwd, "stdin_base64": stdin}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> AttemptWork:
        """Return the work that `to_data` made the data from. Raises `PolicyError` for anything else."""
        try:
            if data["format"] != _FORMAT:
                raise ValueError("it is of another version")
            env = {_text(name): _text(value) for name, value in data["env"].items()}
            stdin = base64.b64decode(_text(data["stdin_base64"]), validate=True)
            what: Code | Command
            if "argv" in data:
                what = Command(_words(data["argv"]))
            else:
                what = Code(canonical_language(_text(data["language"])), _text(data["source"]), _words(data["arguments"]))
            return cls(what, env, _text(data["cwd"]), stdin)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PolicyError(f"this is no work of an attempt: {error}", hint="use what to_data() returned") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    return tuple(map(_text, value))


@dataclass(frozen=True)
class PlannedAttempt:
    """One attempt: a name, and either work that is data or a function of the caller."""

    name: str
    work: AttemptWork | Callable[[Any], object]

    @property
    def portable(self) -> bool:
        """Whether the attempt is data, and could run elsewhere unchanged."""
        return isinstance(self.work, AttemptWork)


def check_names(names: Iterable[str]) -> None:
    """Raise `PolicyError` unless there are attempts, not too many, with plain names, each of its own."""
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name) or name.endswith((".check", ".lock")) or name in ("frozen", "held"):
            hint = "use letters, digits, '.', '_' and '-', at most 40, beginning with a letter or a digit"
            raise PolicyError(f"{name!r:.60} cannot be the name of an attempt", hint=hint)
        if name in seen or name.lower() in {each.lower() for each in seen}:
            raise PolicyError(f"two attempts are called {name!r}", hint="give each a name of its own")
        seen.add(name)
    if not seen:
        raise PolicyError("there are no attempts", hint='give at least one: a="COMMAND"')
    if len(seen) > MOST_ATTEMPTS:
        raise PolicyError(f"{len(seen)} attempts are more than the {MOST_ATTEMPTS} of one experiment", hint="run several experiments")


@dataclass(frozen=True)
class DiffSize:
    """The size of an attempt's changes in the project, without caches and git's own files. Lines of binary files do not count."""

    files: int = 0
    added: int = 0  # lines
    removed: int = 0
    size: int = 0  # bytes of the new files

    @property
    def lines(self) -> int:
        """The number of added and removed lines."""
        return self.added + self.removed


@dataclass(frozen=True)
class StepEnd:
    """How a run of an attempt, or its check, ended. `output` and `errors` are the end of what it printed."""

    exit_code: int
    reason: str
    output: bytes = b""
    errors: bytes = b""
    why: str = ""  # why it could not be started, or which limit ended it


@dataclass(frozen=True)
class AttemptOutcome:
    """The result of one attempt. `why` says in words why it did not pass; empty if it passed.

    `tests` are claims of the attempt's own programs. `place` is its place in the comparison, from 1.
    """

    name: str
    state: State
    why: str = ""
    run: StepEnd | None = None  # None for a function, and for an attempt that never ran
    check: StepEnd | None = None
    tests: TestCounts | None = None
    score: float | None = None  # of the caller's own
    diff: DiffSize = DiffSize()
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cost: float = 0.0  # that a function of the caller has declared
    portable: bool = True
    notes: tuple[str, ...] = ()
    place: int = 0
    outside: int = 0  # changes outside the project, which a promotion leaves out
    live: bool = False  # a fork of a session's state, whose changes are not counted

    @property
    def passed(self) -> bool:
        """Whether the attempt ended well and its check passed."""
        return self.state == "passed"


@dataclass(frozen=True)
class Comparison:
    """The results of an experiment in the order of the comparison, and the name of the winner; None if no attempt passed."""

    results: tuple[AttemptOutcome, ...]
    winner: str | None
    seconds: float = 0.0
    ended: str = ""  # why the experiment ended before all attempts had: empty if all came to their end
    notes: tuple[str, ...] = ()  # on what may have made attempts differ

    def __str__(self) -> str:
        """Return the comparison as a table, the best attempt first."""
        from agent_sandbox.engine.experiment.comparison import table  # it reads these values

        return "\n".join(table(self))

    def __getitem__(self, name: str) -> AttemptOutcome:
        """Return the result of the attempt with this name. Raises KeyError."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)


def checked_score(value: object) -> float:
    """Return a score of the caller's own as a number. Raises ValueError for what has no order."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"a score is a finite number, not {value!r:.60}")


def compared(results: Iterable[AttemptOutcome], *, first: str | None = None, seconds: float = 0.0, ended: str = "") -> Comparison:
    """Return the comparison of results, which come in the order in which the attempts were given.

    `first` is the attempt that passed first, where the first to pass wins.
    """
    numbered = sorted(enumerate(results), key=lambda each: _key(each[1], each[0], first))
    ranked = tuple(replace(result, place=place) for place, (_, result) in enumerate(numbered, 1))
    winner = ranked[0].name if ranked and ranked[0].passed else None
    return Comparison(ranked, winner, seconds, ended)


_STATES = ("passed", "failed", "timed-out", "broken", "refused", "cancelled")


def _key(result: AttemptOutcome, number: int, first: str | None) -> tuple[object, ...]:
    tests = result.tests or TestCounts(0, 0, 0, "")
    score = -result.score if result.score is not None else math.inf
    state = _STATES.index(result.state)
    return (state, result.name != first, score, tests.failed, -tests.passed, result.diff.lines, result.diff.files, number)
