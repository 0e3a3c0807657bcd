"""The options of `run --timeline`, `timeline`, `rewind`, `inspect` and `fork` as typed values, read like those in `options`.

A word of digits is a step. Ids of sessions begin with a letter, so the two cannot be mistaken for one another.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.options import CommandOptions, read_count, read_period
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from typing import Literal

    Question = Literal["variables", "value", "read", "list", "diff"]

NEWEST = "last"
ERROR = "error"  # the step that raised last
KEPT_SECONDS = 3600.0  # after the last use of a session
LONGEST_KEPT = 7 * 86400.0
MOST_FORKS = 16
_COMMON = ("--json", "--quiet", "--color", "--help", "--project")
_OF_A_SESSION = (
    *("--timeline", "--for", "--cwd", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal"),
    *("--allow", "--deny-command", "--network", "--allow-network", "--policy", "--language"),
)
_OF_A_TURN = ("--timeline", "--in", "--language")
_OF_NO_STEP = ("--throw-away", "--simulate", "--diff", "--explain", "--for")
_QUESTIONS: tuple[tuple[str, Question], ...] = (("--eval", "value"), ("--file", "read"), ("--list", "list"), ("--diff", "diff"))


def runs_a_command(request: Request) -> bool:
    """Return whether `run --timeline` has a command, which runs in the stored sandbox, and not a file of Python code for a session.

    A command has blanks or follows `--`. Raises `UsageError` for options that do not go with it.
    """
    if request.verb != "run" or not request.has("--timeline") or request.has("--in") or request.has("--language"):
        return False
    first = request.words[0]
    if first == "-" or first.endswith(".py") or not (request.separated or len(first.split()) > 1):
        return False
    if (wrong := next((option for option in _OF_NO_STEP if request.has(option)), None)) is not None:
        raise UsageError(f"{wrong} does not go with --timeline and a command", hint="its state is kept in the project's sandbox")
    return True


@dataclass(frozen=True)
class TimelineRunOptions:
    """Options of `run` and `code` with --timeline or --in. `session` is the id of a held session to go on in; None for a new one."""

    run: CommandOptions
    file: str
    arguments: tuple[str, ...] = ()
    language: str | None = None
    session: str | None = None
    kept_seconds: float = KEPT_SECONDS

    @classmethod
    def read(cls, request: Request) -> TimelineRunOptions:
        going_on = request.has("--in")
        fitting = _OF_A_TURN if going_on else _OF_A_SESSION
        wrong = next((option for option in request.given if option not in (*fitting, *_COMMON)), None)
        if wrong is not None and going_on:
            raise UsageError(f"{wrong} does not go with --in: the session has its settings already", hint="leave it out")
        if wrong is not None:
            raise UsageError(f"{wrong} does not go with --timeline", hint="see: docs/guides/timeline.md")
        file, *arguments = request.words
        if request.verb == "code" and arguments and not request.separated:
            raise UsageError(f"too many arguments: {arguments[0]!r}", hint="arguments for the code follow --")
        if going_on and arguments:
            raise UsageError("arguments are for the first run of a session", hint="set sys.argv in the code")
        if len(file.split()) > 1:
            hint = f"write: agent-sandbox run --timeline {file.split()[-1]}"
            raise UsageError(f"--timeline takes a file of Python code and its arguments, not the command {file!r}", hint=hint)
        seconds = KEPT_SECONDS
        if (text := request.value("--for")) is not None:
            seconds = read_period("--for", text)
            if seconds > LONGEST_KEPT:
                raise PolicyError(f"--for {text}: a session is kept for at most 7 days after its last use", hint="write --for 7d")
        return cls(CommandOptions.read(request), file, tuple(arguments), request.value("--language"), request.value("--in"), seconds)


@dataclass(frozen=True)
class TimelineOptions:
    """Options of `timeline`."""

    session: str | None = None
    everything: bool = False
    end: bool = False
    keep: bool = False

    @classmethod
    def read(cls, request: Request) -> TimelineOptions:
        session = _session(request.words)
        if session is not None and request.has("--all"):
            raise UsageError("name a session, or give --all", hint="see: agent-sandbox help timeline")
        if request.has("--keep-files") and (request.has("--all") or request.has("--end")):
            raise UsageError("--keep-files is for one session, which goes on", hint="end it afterwards: agent-sandbox timeline ID --end")
        _no_steps(request.words, "timeline")
        return cls(session, request.has("--all"), request.has("--end"), request.has("--keep-files"))


@dataclass(frozen=True)
class RewindOptions:
    """Options of `rewind`."""

    session: str | None
    step: int | str

    @classmethod
    def read(cls, request: Request) -> RewindOptions:
        step = _one_step(request)
        if step is None:
            raise UsageError("rewind needs a step, or --error", hint="see the steps: agent-sandbox timeline")
        return cls(_session(request.words), step)


@dataclass(frozen=True)
class InspectOptions:
    """Options of `inspect`. `words` is the expression or path; `other` is the second step of a comparison."""

    session: str | None = None
    step: int | str | None = None
    question: Question = "variables"
    words: str = ""
    other: int | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, request: Request) -> InspectOptions:
        asked = [(option, kind) for option, kind in _QUESTIONS if request.has(option)]
        if len(asked) > 1:
            raise UsageError(f"{asked[0][0]} and {asked[1][0]} do not go together", hint="ask one after the other")
        option, question = asked[0] if asked else ("", "variables")
        text = request.value("--timeout")
        if text is not None and question == "diff":
            raise UsageError("--timeout does not go with --diff", hint="leave it out")
        seconds = read_period("--timeout", text) if text is not None else None
        words = request.value(option) or "" if option else ""
        if option in ("--eval", "--file", "--list") and not words.strip():
            raise UsageError(f"{option} is empty", hint="see: agent-sandbox help inspect")
        session, steps = _session(request.words), _steps(request.words)
        if question == "diff":
            if not 1 <= len(steps) <= 2 or request.has("--error"):
                raise UsageError("--diff compares the states before two steps", hint="write: agent-sandbox inspect 3 7 --diff")
            return cls(session, steps[0], question, other=steps[1] if len(steps) > 1 else None)
        return cls(session, _one_step(request), question, words, seconds=seconds)


@dataclass(frozen=True)
class ForkOptions:
    """Options of `fork`."""

    session: str | None = None
    step: int | str | None = None
    count: int = 1

    @classmethod
    def read(cls, request: Request) -> ForkOptions:
        count = read_count("--count", request.value("--count") or "1")
        if count is None or count > MOST_FORKS:
            raise PolicyError(f"--count takes a number from 1 to {MOST_FORKS}", hint="fork again for more")
        return cls(_session(request.words), _one_step(request), count)


def _is_step(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _steps(words: tuple[str, ...]) -> list[int]:
    return [int(word) if len(word) < 10 else 10**9 for word in words if _is_step(word)]


def _session(words: tuple[str, ...]) -> str | None:
    """Return the session that is named, which stands first. Raises `UsageError` for a word that is neither a session nor a step."""
    names = [(place, word) for place, word in enumerate(words) if not _is_step(word)]
    if len(names) > 1 or (names and names[0][0] > 0):
        raise UsageError(f"{names[-1][1]!r} is no step: a step is a number", hint="see the steps: agent-sandbox timeline")
    return names[0][1] if names and names[0][1] != NEWEST else None


def _one_step(request: Request) -> int | str | None:
    steps = _steps(request.words)
    if len(steps) > 1 or (steps and request.has("--error")):
        raise UsageError("name one step, or give --error", hint=f"see: agent-sandbox help {request.verb}")
    return ERROR if request.has("--error") else steps[0] if steps else None


def _no_steps(words: tuple[str, ...], verb: str) -> None:
    if _steps(words):
        raise UsageError(f"{verb} takes the id of a session, not a step", hint="look at a step: agent-sandbox inspect STEP")
