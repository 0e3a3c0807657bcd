"""Secrets that a run uses and never sees: how a person writes them, and what the egress is given.

Pure: the values come in by argument (`agent_sandbox.secret_values` reads them).
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_pattern
from agent_sandbox.policy.network import NetworkRules

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORTEST = 8  # characters of a value that can be told from chance in what comes back
AUTHORIZATION = "authorization"
AWS_KEY, AWS_SECRET, AWS_TOKEN = "aws-key", "aws", "aws-token"  # the parts of a key with which requests to AWS are signed
AWS_NAMES = {AWS_KEY: "AWS_ACCESS_KEY_ID", AWS_SECRET: "AWS_SECRET_ACCESS_KEY", AWS_TOKEN: "AWS_SESSION_TOKEN"}
SOURCES = ("env", "file", "command", "keyring")
_HINT = "write NAME@api.example.com, NAME=file:PATH@api.example.com, or NAME@api.example.com+header:X-Api-Key"


@dataclass(frozen=True)
class Secret:
    """A secret for some hosts. A run has a placeholder in the variable `name`; the egress puts the value in, on the way to these hosts.

    `place` is where in a request: "authorization" (the field, also inside of basic authentication), "header:X-Api-Key", "query:key", or
    "body:key" for a field of a form or of an object in JSON. At every other place, and towards every other host, the placeholder is
    refused. "aws" signs requests instead: the name is then AWS_SECRET_ACCESS_KEY, and the value goes nowhere.

    `source` is where the value comes from: "env" is the caller's variable of the same name, "env:OTHER" another one, "file:PATH" the text
    of a file outside the project, "command:LINE" what a program prints, "keyring:SERVICE/USER" the keyring of the system. Or give the
    `value` itself, which no representation shows.

    >>> Secret("GITHUB_TOKEN", ["api.github.com"])
    Secret(name='GITHUB_TOKEN', hosts=('api.github.com',), place='authorization', source='env')
    """

    name: str
    hosts: Sequence[str]
    place: str = AUTHORIZATION
    source: str = "env"
    value: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (str(self.name).isascii() and str(self.name).isidentifier()):
            raise PolicyError("the name of a secret is that of an environment variable", hint=_HINT)
        if isinstance(self.hosts, str) or not self.hosts:
            raise PolicyError(f"the secret {self.name} names no host", hint=_HINT)
        hosts = tuple(canonical_pattern(each) for each in self.hosts)
        if "*" in hosts:
            raise PolicyError(f"the secret {self.name} is bound to every host", hint="name the hosts that may have it")
        object.__setattr__(self, "hosts", hosts)
        check_place(self.name, self.place)
        if self.place in AWS_NAMES and (self.place != AWS_SECRET or self.name != AWS_NAMES[AWS_SECRET]):
            raise PolicyError(f"the secret {self.name} is no key of AWS", hint="write AWS_SECRET_ACCESS_KEY@s3.eu-west-1.amazonaws.com+aws")
        kind, colon, rest = self.source.partition(":")
        if kind not in SOURCES or (bool(rest) is not bool(colon)) or (kind != "env" and not rest):
            raise PolicyError(f"the secret {self.name} comes from nowhere: {kind!r}", hint=f"a source is {', '.join(SOURCES)}; {_HINT}")
        if kind == "keyring" and not all(rest.rpartition("/")):
            raise PolicyError(f"the secret {self.name} names no entry of the keyring", hint=f"write {self.name}=keyring:SERVICE/USER@HOST")
        if self.value is not None and not isinstance(self.value, str):
            raise PolicyError(f"the value of the secret {self.name} is no text", hint="decode it first")

    @classmethod
    def read(cls, written: str) -> Secret:
        """Return the secret that a text writes: NAME[=SOURCE]@HOST[,HOST…][+PLACE]. Raises `PolicyError`, which does not quote the text.

        >>> Secret.read("KEY=file:/etc/key@api.example.com+header:X-Api-Key").place
        'header:X-Api-Key'
        """
        front, at, back = written.rpartition("@")
        name, equals, source = front.partition("=")
        hosts, plus, place = back.partition("+")
        if not at or not name.isidentifier():  # it may be a value that somebody wrote down, so it is not shown
            raise PolicyError("--secret takes the name of a variable and hosts", hint=_HINT)
        if (equals and not source) or (plus and not place):
            raise PolicyError(f"the secret {name} is not written out", hint=_HINT)
        return cls(name, tuple(each for each in hosts.split(",") if each), place or AUTHORIZATION, source or "env")


@dataclass(frozen=True)
class BoundSecret:
    """A secret, what the sandbox sees instead, and where the value may go: see `Secret`.

    A place that is a field of the head then takes no other credential. `paths` are beginnings of paths, and `methods` those of requests
    that the value may go into; empty are all.
    """

    name: str
    placeholder: str
    value: str = field(repr=False)
    hosts: tuple[str, ...] = ()
    place: str = AUTHORIZATION
    paths: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_place(self.name, self.place)
        if not self.hosts:
            raise PolicyError(f"the secret {self.name} is bound to no host", hint=_HINT)
        if len(self.value) < SHORTEST or not (self.value.isascii() and self.value.isprintable()):
            raise PolicyError(
                f"the secret {self.name} cannot be put into requests",
                hint=f"a value has at least {SHORTEST} characters, all printable ASCII",
            )

    def goes_with(self, method: str, path: str) -> bool:
        """Return whether the value may go into a request with this method and this path, in which nothing is ambiguous."""
        return (not self.methods or method in self.methods) and (not self.paths or path.startswith(self.paths))

    @property
    def scope(self) -> str:
        """The requests that the value may go into, in words."""
        return " ".join(filter(None, (", ".join(self.methods) or "requests", f"below {' and '.join(self.paths)}" if self.paths else "")))

    @property
    def header(self) -> bytes:
        """The name of the field that the value goes into; empty if it goes elsewhere."""
        kind, _, name = self.place.partition(":")
        return b"authorization" if self.place == AUTHORIZATION else name.lower().encode() if kind == "header" else b""

    def named(self, kind: str) -> str:
        """Return the name of the query's or the body's field that the value goes into; empty if it goes elsewhere."""
        own, _, name = self.place.partition(":")
        return name if own == kind else ""


def new_placeholder(name: str, random: bytes) -> str:
    """Return a placeholder that occurs nowhere else: the name of the secret, and at least 12 random bytes."""
    return f"agent-sandbox-secret-{name.lower().replace('_', '-').strip('-')}-{random.hex()}"


def check_place(secret: str, place: str) -> None:
    """Raise `PolicyError` if a secret cannot be put at this place."""
    kind, _, name = place.partition(":")
    if place != AUTHORIZATION and place not in AWS_NAMES and (kind not in ("header", "query", "body") or not name or not name.isascii()):
        raise PolicyError(
            f"the secret {secret} is bound to no place: {place!r}",
            hint="a place is authorization, header:NAME, query:NAME, body:NAME or aws",
        )


def check_bound(secrets: Sequence[Secret], rules: NetworkRules) -> None:
    """Raise `PolicyError` if a secret is bound to a host that the rules do not let a run reach, or that passes unread."""
    rules = rules.widest()  # an intent may open the host later
    for number, secret in enumerate(secrets):
        if any(other.name == secret.name for other in secrets[:number]):
            raise PolicyError(f"the secret {secret.name} is there twice", hint=f"bind it once: {secret.name}@HOST,HOST")
        for host in secret.hosts:
            if why := rules.refusal(host):
                raise PolicyError(
                    f"the secret {secret.name} is bound to {host}, which it does not open: {why}", hint=f"add --network {host}"
                )
            if rules.passes_uninspected(host):
                why = f"the secret {secret.name} is bound to {host}, whose TLS is passed on unread, so nothing can be put in"
                raise PolicyError(why, hint="take the mark +uninspected away")
