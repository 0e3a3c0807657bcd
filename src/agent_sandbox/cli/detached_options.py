"""The options of `run --detach`, `exec`, `logs`, `stop` and `ps` as typed values, read like those in `options`."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.cli.options import CommandOptions, read_count, read_limits, read_period
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError

LIFETIME_SECONDS = 8 * 3600.0
IDLE_SECONDS = 3600.0
LONGEST_SECONDS = 7 * 86400.0
_NONE = "none"
_WITH_DETACH = frozenset(
    {
        *("--detach", "--for", "--idle", "--json", "--quiet", "--color", "--project", "--throw-away", "--cwd", "--env", "--env-file"),
        *("--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--allow", "--deny-command", "--network"),
        *("--allow-network", "--secret", "--budget", "--no-dlp", "--publish", "--policy", "--wait", "--no-wait"),
    }
)


@dataclass(frozen=True)
class DetachOptions:
    """Options of `run --detach`. Without `idle_seconds`, the sandbox may be unused for its whole lifetime."""

    run: CommandOptions
    lifetime_seconds: float = LIFETIME_SECONDS
    idle_seconds: float | None = IDLE_SECONDS

    @classmethod
    def read(cls, request: Request) -> DetachOptions:
        wrong = next((option for option in request.given if option not in _WITH_DETACH), None)
        if wrong is not None:
            raise UsageError(f"{wrong} does not go with --detach", hint="see: agent-sandbox help run")
        run = CommandOptions.read(request)
        # Output is bounded by the log, whether or not the name is printed as a document; and nobody is there to wait for the sandbox.
        limits = tuple(each for each in run.policy.limits if each[0] != "output_bytes")
        run = replace(run, policy=replace(run.policy, limits=limits), wait=request.has("--wait"), collect=False)
        lifetime = _seconds(request, "--for", LIFETIME_SECONDS)
        idle = None if request.value("--idle") == _NONE else _seconds(request, "--idle", IDLE_SECONDS)
        return cls(run, lifetime, idle)


def _seconds(request: Request, option: str, default: float) -> float:
    if (text := request.value(option)) is None:
        return default
    seconds = read_period(option, text)
    if seconds > LONGEST_SECONDS:
        raise PolicyError(f"{option} {text}: a detached sandbox lives for at most 7 days", hint=f"write {option} 7d")
    return seconds


@dataclass(frozen=True)
class ExecOptions:
    """Options of `exec`. With `stdin`, standard input is read to its end, and is the program's. With `terminal`, it is our terminal."""

    name: str
    command: tuple[str, ...]
    cwd: str | None = None
    env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    seconds: float | None = None
    stdin: bool = False
    collect: bool = False
    terminal: bool = False

    @classmethod
    def read(cls, request: Request) -> ExecOptions:
        if request.has("--terminal") and (other := next((each for each in ("--stdin", "--json") if request.has(each)), None)):
            raise UsageError(f"--terminal does not go with {other}", hint="what is typed on the terminal is the input")
        name, *words = request.words
        separated = bool(words) and words[0] == "--"
        if separated:
            del words[0]
        elif words and words[0].startswith("-"):
            raise UsageError(f"{words[0]} stands after the name of the sandbox", hint=f"write: agent-sandbox exec {words[0]} … {name} -- …")
        if not words:
            raise UsageError("exec needs a command", hint=f"write: agent-sandbox exec {name} -- PROGRAM")
        command = tuple(words) if separated or len(words) != 1 else ("bash", "-c", words[0])
        wall = dict(read_limits(request)).get("wall_seconds")
        return cls(
            name,
            command,
            request.value("--cwd"),
            request.values("--env"),
            request.values("--env-file"),
            wall,
            request.has("--stdin"),
            request.has("--json"),
            request.has("--terminal"),
        )


@dataclass(frozen=True)
class LogsOptions:
    """Options of `logs`. `most` is the number of lines, the newest; None for all that are kept."""

    name: str
    follow: bool = False
    most: int | None = None

    @classmethod
    def read(cls, request: Request) -> LogsOptions:
        if request.has("--follow") and request.has("--json"):
            raise UsageError("--follow does not go with --json", hint="leave one of them out")
        text = request.value("--limit")
        return cls(request.words[0], request.has("--follow"), read_count("--limit", text) if text is not None else None)


@dataclass(frozen=True)
class StopOptions:
    """Options of `stop`. `seconds` is the time between the request to end and the end by force."""

    names: tuple[str, ...] = ()
    everything: bool = False
    seconds: float | None = None

    @classmethod
    def read(cls, request: Request) -> StopOptions:
        if bool(request.words) == request.has("--all"):
            raise UsageError("name the sandboxes to stop, or give --all", hint="see: agent-sandbox ps")
        text = request.value("--timeout")
        seconds = 0.0 if text == "0" else read_period("--timeout", text) if text is not None else None
        return cls(request.words, request.has("--all"), seconds)
