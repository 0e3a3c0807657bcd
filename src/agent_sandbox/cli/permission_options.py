"""The options of `approve`, `deny`, `grant` and `revoke`. Apart from `options`, because no other verb needs them."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.options import read_count, read_limits, read_names, read_period
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError


@dataclass(frozen=True)
class ApproveOptions:
    """Options of `approve` and `deny`. `allow` is the answer given on the command line; None if the user must be asked."""

    digest: str | None = None
    allow: bool | None = None
    for_run: bool = False
    seconds: float | None = None
    code: str | None = None
    of: str | None = None
    enroll: bool = False
    watch: bool = False

    @classmethod
    def read(cls, request: Request) -> ApproveOptions:
        digest, refuse = request.words[0] if request.words else None, request.verb == "deny" or request.has("--refuse")
        if request.has("--yes") and refuse:
            raise UsageError("--yes and --refuse do not go together", hint="give one of them")
        if request.has("--yes") and len(digest or "") != 64:
            raise UsageError("--yes needs the whole digest", hint="see it with: agent-sandbox approve")
        if refuse and digest is None:  # the beginning of a digest is enough: after a wrong refusal the question is asked again
            raise UsageError("--refuse needs a digest", hint="see it with: agent-sandbox approve")
        text = request.value("--timeout")
        if text is not None and not request.has("--for-run"):
            raise UsageError("--timeout goes with --for-run", hint="add --for-run")
        return cls(
            digest,
            False if refuse else True if request.has("--yes") else None,
            request.has("--for-run"),
            None if text is None else read_period("--timeout", text),
            request.value("--code"),
            request.value("--of"),
            request.has("--enroll"),
            request.has("--watch"),
        )


@dataclass(frozen=True)
class ElevationOptions:
    """The rules that `grant --elevate` relaxes."""

    programs: tuple[str, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    paths: tuple[str, ...] = ()

    @classmethod
    def read(cls, request: Request) -> ElevationOptions:
        limits: list[tuple[str, float]] = []
        for name, value in read_limits(request):
            if value is None:
                raise PolicyError("an elevation cannot remove a limit altogether", hint="give a value instead of none")
            limits.append((name, value))
        return cls(read_names(request, "--allow"), tuple(limits), request.values("--reveal"))


@dataclass(frozen=True)
class GrantOptions:
    """Options of `grant`: patterns for a capability token, or an elevation."""

    seconds: float
    patterns: tuple[str, ...] = ()
    elevation: ElevationOptions | None = None
    times: int | None = None
    sandbox: str | None = None
    project: str | None = None
    code: str | None = None

    @classmethod
    def read(cls, request: Request) -> GrantOptions:
        elevate, text, times = request.has("--elevate"), request.value("--for"), request.value("--times")
        for option in ("--allow", "--reveal", "--timeout", "--memory", "--disk", "--processes") if not elevate else ():
            if request.has(option):
                raise UsageError(f"{option} relaxes a rule and goes with --elevate", hint="add --elevate")
        if elevate and (request.words or times is not None):
            raise UsageError("--elevate takes no pattern and no --times", hint="grant --elevate --allow curl --for 10m")
        if not elevate and not request.words:
            raise UsageError("a pattern is missing", hint='agent-sandbox grant "run git push **" --for 10m')
        if text is None:
            raise UsageError("--for TIME is required", hint="--for 10m")
        return cls(
            read_period("--for", text),
            request.words,
            ElevationOptions.read(request) if elevate else None,
            None if times is None else read_count("--times", times),
            request.value("--sandbox"),
            request.value("--project"),
            request.value("--code"),
        )


@dataclass(frozen=True)
class RevokeOptions:
    """Options of `revoke`."""

    names: tuple[str, ...] = ()
    everything: bool = False

    @classmethod
    def read(cls, request: Request) -> RevokeOptions:
        if bool(request.words) == request.has("--all"):
            raise UsageError("revoke takes names, or --all", hint="see: agent-sandbox capabilities")
        return cls(request.words, request.has("--all"))
