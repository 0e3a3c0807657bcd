"""The options of `serve` as typed values, read like those in `options`."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.options import read_count
from agent_sandbox.cli.parser import Request, UsageError


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve`. `most` is how many command lines are performed at once; `listen` is an address for HTTP with a token."""

    most: int | None = None
    http: bool = False
    listen: str | None = None
    token_file: str | None = None
    log: str = "text"
    status: bool = False
    stop: bool = False
    unit: str | None = None

    @classmethod
    def read(cls, request: Request) -> ServeOptions:
        most, listen, token = request.value("--most"), request.value("--listen"), request.value("--token-file")
        http, status, stop = request.has("--http"), request.has("--status"), request.has("--stop")
        log, unit = request.value("--log"), request.value("--unit")
        serving = http or any(each is not None for each in (most, listen, token, log))
        if status + stop + serving + (unit is not None) > 1:
            raise UsageError(
                "--status and --stop are about a daemon that runs, --unit prints one for systemd, the others are about a new one",
                hint="agent-sandbox help serve",
            )
        for name, value, known in (("--log", log, ("text", "json")), ("--unit", unit, ("user", "system"))):
            if value is not None and value not in known:
                raise UsageError(f"{name} takes {' or '.join(known)}, not {value!r}", hint="agent-sandbox help serve")
        if token is not None and listen is None:
            raise UsageError("--token-file is for --listen", hint="add --listen 127.0.0.1:8765")
        return cls(
            read_count("--most", most) if most is not None else None,
            http or listen is not None,
            listen,
            token,
            log or "text",
            status,
            stop,
            unit,
        )
