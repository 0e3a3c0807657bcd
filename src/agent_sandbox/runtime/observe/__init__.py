"""Observations of a run, as values: for learning, simulation and a verbose log. Never for decisions: see `observer`."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass

# Parts of the notes of a run that was not observed completely.
TOO_MANY, FAILED = NOT_ALL = ("it tried more different things than are kept", "of its calls could not be looked at")
READ, WRITE, EXECUTE, CONNECT, RESOLVE, LISTEN = KINDS = ("read", "write", "execute", "connect", "resolve", "listen")


@dataclass(frozen=True)
class Observed:
    """An attempt of a program, observed from outside: its target, and whether the sandbox's rules allow it.

    `kind` is one of KINDS. `target` is an absolute, normalised path of the view; HOST:PORT for connect and listen, IPv6 in brackets; the
    name for resolve. `program` is the path of the executable, or its process name if the path cannot be read.
    """

    kind: str
    target: str
    program: str
    allowed: bool
    times: int = 1


@dataclass(frozen=True)
class SeenAttempt:
    """An attempt as the runtime sees it, without knowledge of the rules.

    `there` is whether a program to execute exists in the view: a search along PATH tries to execute it in every directory.
    """

    kind: str
    target: str
    program: str
    there: bool = True
