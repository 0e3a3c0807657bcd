"""The attempts of a run, as values. Learning, simulation and a verbose log use them; no decision depends on them (see `observer`)."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass

# Parts of the notes of a run that was not observed completely.
TOO_MANY, FAILED = NOT_ALL = ("it tried more different things than are kept", "of its calls could not be looked at")
READ, WRITE, EXECUTE, CONNECT, RESOLVE, LISTEN = KINDS = ("read", "write", "execute", "connect", "resolve", "listen")


@dataclass(frozen=True)
class Observed:
    """An attempt of a program, observed from outside: its target, and whether the sandbox's rules allow it.

    `kind` is one of KINDS. `target` is an absolute, normalised path in the view. For connect and listen it is HOST:PORT, with IPv6 in
    brackets; for resolve, a host name. `program` is the path of the executable, or its process name if the path cannot be read.
    """

    kind: str
    target: str
    program: str
    allowed: bool
    times: int = 1


@dataclass(frozen=True)
class SeenAttempt:
    """An attempt of a program, as the runtime observes it. The runtime does not know whether the rules allow it.

    For an execution, `there` says whether the program exists in the view: a search along PATH also tries directories without it.
    """

    kind: str
    target: str
    program: str
    there: bool = True
