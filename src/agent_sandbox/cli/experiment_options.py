"""The options of `try` as typed values, read like those in `options`."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.cli.options import CommandOptions, PromoteOptions, read_count, read_period
from agent_sandbox.cli.parser import Request, UsageError

if TYPE_CHECKING:
    from typing import Literal

    Keep = Literal["all", "winner", "none"]
    Live = Literal["stores", "all", "none"]

KEEPS: tuple[Keep, ...] = ("all", "winner", "none")
LIVES: tuple[Live, ...] = ("stores", "all", "none")
_OF_A_RUN = (
    *("--check", "--first", "--timeout", "--total-timeout", "--cpu", "--jobs", "--report", "--live", "--cwd", "--env", "--env-file"),
    *("--memory", "--network", "--allow-network"),
)


@dataclass(frozen=True)
class TryOptions:
    """Options of `try`. Either `attempts` are run, names and command lines, or `kept` names an experiment; with neither, it lists them."""

    run: CommandOptions
    promotion: PromoteOptions
    attempts: tuple[tuple[str, str], ...] = ()
    kept: str | None = None
    name: str | None = None  # of an attempt of the kept experiment
    check: str | None = None
    promote: bool = False
    first: bool = False
    seconds: float | None = None
    whole_seconds: float | None = None
    cpu_seconds: float | None = None
    at_once: int | None = None
    memory_bytes: int | None = None
    report: str = ""
    live: Live = "stores"
    keep: Keep | None = None
    side_by_side: bool = False

    @classmethod
    def read(cls, request: Request) -> TryOptions:
        attempts = tuple((name, command) for name, equals, command in (word.partition("=") for word in request.words) if equals)
        others = [word for word in request.words if "=" not in word]
        if others and (attempts or len(others) > 1):
            raise UsageError(f"{others[0]!r} is no attempt: write NAME=COMMAND", hint='agent-sandbox try a="COMMAND" b="COMMAND"')
        empty = next((name for name, command in attempts if not command.strip()), None)
        if empty is not None:
            raise UsageError(f"the attempt {empty!r} has no command", hint=f'write {empty or "a"}="COMMAND"')
        wrong = next((option for option in _OF_A_RUN if not attempts and request.has(option)), None)
        if wrong is not None:
            raise UsageError(f"{wrong} goes with attempts", hint='agent-sandbox try a="COMMAND" b="COMMAND"')
        keep = next((each for each in KEEPS if each == request.value("--keep")), None)
        if request.has("--keep") and keep is None:
            raise UsageError(
                f"--keep takes {', '.join(KEEPS)}, not {request.value('--keep')!r}", hint="leave it out to keep all for an hour"
            )
        live = next((each for each in LIVES if each == request.value("--live")), None)
        if request.has("--live") and live is None:
            raise UsageError(f"--live takes {', '.join(LIVES)}, not {request.value('--live')!r}", hint="the default: stores")
        report = request.value("--report") or ""
        if report.startswith("/") or ".." in report.split("/"):
            raise UsageError(f"--report {report!r} is not a path in the project", hint="name it relative to the project")
        run = CommandOptions.read(request)
        limits = dict(run.policy.limits)
        seconds, memory = limits.pop("wall_seconds", None), limits.pop("memory_bytes", None)
        limits.pop("output_bytes", None)  # of --json; output is not passed on, and its end is kept
        kept, _, name = others[0].partition("/") if others else ("", "", "")
        return cls(
            replace(run, policy=replace(run.policy, limits=tuple(limits.items())), wait=True),
            PromoteOptions.read(request),
            attempts,
            kept or None,
            name or None,
            request.value("--check"),
            request.has("--promote"),
            request.has("--first"),
            seconds,
            _period(request, "--total-timeout"),
            _period(request, "--cpu"),
            read_count("--jobs", jobs) if (jobs := request.value("--jobs")) is not None else None,
            None if memory is None else int(memory),
            report,
            live or "stores",
            keep,
            request.has("--side-by-side"),
        )


def _period(request: Request, option: str) -> float | None:
    text = request.value(option)
    return None if text is None else read_period(option, text)
