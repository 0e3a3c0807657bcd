"""What a run was seen to try, as values: for learning, simulation and a verbose log. Never for deciding: see `observer`."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass

# Parts of the notes of a run of which not everything was seen.
TOO_MANY, FAILED = NOT_ALL = ("it tried more different things than are kept", "of its calls could not be looked at")
READ, WRITE, EXECUTE, CONNECT, RESOLVE, LISTEN = KINDS = ("read", "write", "execute", "connect", "resolve", "listen")


@dataclass(frozen=True)
class Observed:
    """Something a program tried, as seen from outside it: what it named, and whether the sandbox's rules let it be there.

    `kind` is one of KINDS. `target` is an absolute, normalised path of the view; HOST:PORT for connect and listen, IPv6 in brackets; the
    name for resolve. `program` is the path of the executable that did it, or its name where that cannot be told.
    """

    kind: str
    target: str
    program: str
    allowed: bool
    times: int = 1


@dataclass(frozen=True)
class Seen:
    """What a runtime can say of it, which knows no rules. `there` is whether a program that was to be executed is in the view at all: one
    that is looked for along a search path is asked for at every place on it."""

    kind: str
    target: str
    program: str
    there: bool = True
