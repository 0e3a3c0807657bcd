"""The decision on a request: whether it may leave, and in which form, from values alone.

Every refusal carries a sentence for the program inside, which names the rule and what would allow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from agent_sandbox.egress.http1 import Fields, RequestHead
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed, canonical_host, covers
from agent_sandbox.policy.intents import FIELD, for_request, known_intent, names_of
from agent_sandbox.policy.network import NetworkRules, split_port

_INTENT = FIELD.lower().encode()  # for this egress alone: it never goes on
_HOP_BY_HOP = frozenset(
    b"connection proxy-connection keep-alive proxy-authenticate proxy-authorization te trailer upgrade transfer-encoding content-length "
    b"expect http2-settings alt-svc alt-used host".split()
) | {_INTENT}
_LOOKALIKES = (b"transfer_encoding", b"content_length")  # gateways such as CGI take an underscore for a hyphen
_OVERRIDES = frozenset((b"x-http-method-override", b"x-http-method", b"x-method-override"))  # fields that many servers take for the method
_LONGEST_METHOD = 32
_REWRITES = frozenset((b"x-original-url", b"x-rewrite-url"))  # and for the path
_NEEDED = frozenset((b"host", b"authorization", b"cookie", b"content-type", b"content-encoding"))  # no client may have these dropped


@dataclass(frozen=True)
class Origin:
    """Whom a connection is for: a canonical host, its port, and whether it is spoken to over TLS that is read here."""

    name: str
    port: int
    tls: bool

    @cached_property
    def field(self) -> bytes:
        """The value of the Host field for requests to it."""
        name = bracketed(self.name)
        return (name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}").encode()

    def __str__(self) -> str:
        return self.field.decode()


class FlowRefused(Exception):
    """Something does not leave. The message is for the program and for the record; `status` is what a client is answered.

    `withheld` says that data was found, so that what it was found in is not recorded. `findings` say what was found.
    """

    def __init__(self, status: int, why: str, *, withheld: bool = False, findings: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.status, self.withheld, self.findings = status, withheld, findings


@dataclass(frozen=True)
class Judged:
    """A request that may leave: its method, its target in the form for an origin, and the fields that go on, without those of framing."""

    method: bytes
    target: bytes
    fields: Fields
    websocket: bool = False


def declared_by(head: RequestHead) -> str:
    """Return the intent that a request declares for itself, as it is written; empty if it declares none. Raises `FlowRefused`."""
    values = head.values(_INTENT)
    if not values:
        return ""
    if len(values) > 1:
        raise FlowRefused(400, f"the request has {len(values)} fields {FIELD}; it can have one")
    text = values[0].decode("latin-1")
    if not text.strip():
        raise FlowRefused(403, f"the field {FIELD} of the request is empty")
    return text


def rules_for(rules: NetworkRules, declared: str) -> NetworkRules:
    """Return the rules by which a request is judged that declares this intent for itself, or none. Raises `FlowRefused`."""
    if not declared:
        return rules
    try:
        name = known_intent(rules, declared).name
    except PolicyError:  # its message would bring a field of the request into the record
        known = f"it names {names_of(rules)}" if rules.intents else "it names none"
        raise FlowRefused(403, f"the request declares an intent that the policy does not name; {known}") from None
    try:
        return for_request(rules, name)
    except PolicyError as error:
        raise FlowRefused(403, error.message) from None


def judge_request(rules: NetworkRules, origin: Origin, head: RequestHead) -> Judged:
    """Return the request as it goes on to the host of its connection. Raises `FlowRefused`.

    The host of the request must be that of the connection. A target must be a path, or an address with the same host. A host that the rules
    ask for passes here: `consent` asks.
    """
    hosts = head.values(b"host")
    if len(hosts) != 1:
        raise FlowRefused(400, "the request has no host, or two")
    if alike := next((key for key, _ in head.fields if key in _LOOKALIKES), b""):
        raise FlowRefused(400, f"the field {alike.decode()} is {alike.decode().replace('_', '-')} for some servers")
    target = head.target
    if not target.startswith(b"/") and target != b"*" and head.method != b"CONNECT":
        absolute = read_absolute(target)
        whom = read_authority(absolute[1], 443 if absolute[0] else 80) if absolute else None
        if absolute is None or whom != (origin.name, origin.port):
            raise FlowRefused(421, f"the target of the request is for {_shown(whom)}, and its connection for {origin}")
        target = absolute[2]
    asked = (origin.name, origin.port) if hosts[0] == origin.field else read_authority(hosts[0], origin.port)
    if asked is None:
        raise FlowRefused(400, "the field Host of the request names no host")
    if asked != (origin.name, origin.port):
        raise FlowRefused(421, f"the request is for {_shown(asked)}, and its connection for {origin}")
    if why := rules.refusal(origin.name, origin.port):
        raise FlowRefused(403, why)
    if head.method in (b"CONNECT", b"TRACE", b"TRACK"):
        raise FlowRefused(405, f"{head.method.decode()} does not leave a sandbox")
    path = target.partition(b"?")[0].decode("ascii")
    if b"#" in target:
        raise FlowRefused(400, "the target of the request holds a fragment")
    if (why := ambiguity(path) or rewriting(head.fields)) and _has_paths(rules, origin.name):
        raise FlowRefused(400, why)
    for method in (head.method.decode("ascii"), *overriding(head.fields)):
        if why := rules.request_objection(origin.name, method, path, origin.port):
            raise FlowRefused(403, why)
    named = {token.strip().lower() for value in head.values(b"connection") for token in value.split(b",")} - _NEEDED
    fields = tuple(each for each in head.fields if each[0] not in _HOP_BY_HOP and each[0] not in named)
    websocket = head.minor == 1 and b"upgrade" in named and [value.lower() for value in head.values(b"upgrade")] == [b"websocket"]
    return Judged(head.method, target, ((b"host", origin.field), *fields), websocket)


def overriding(fields: Fields) -> list[str]:
    """Return the methods that fields of a request name, and that some servers take in the place of its own; `?` for what is none."""
    values = [value.strip().upper() for key, value in fields if _plain(key) in _OVERRIDES]
    return [value.decode("ascii") if value.isalpha() and len(value) <= _LONGEST_METHOD else "?" for value in values]


def rewriting(fields: Fields) -> str:
    """Return why some servers take another path than that of the request; empty if none does."""
    return next((f"the field {key.decode()} is the path for some servers" for key, _ in fields if _plain(key) in _REWRITES), "")


def _plain(key: bytes) -> bytes:
    """Return the name of a field as gateways such as CGI understand it, which take an underscore for a hyphen."""
    return key.replace(b"_", b"-")


def read_absolute(target: bytes) -> tuple[bool, bytes, bytes] | None:
    """Return whether a target with a scheme is `https`, its authority, and its path with the query; None for anything else."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return None
    end = min((place for place in (rest.find(b"/"), rest.find(b"?")) if place >= 0), default=len(rest))
    path = rest[end:]
    return scheme.lower() == b"https", rest[:end], path if path.startswith(b"/") else b"/" + path


def read_authority(text: bytes, port: int) -> tuple[str, int] | None:
    """Return the canonical host and the port (this one, if it names none) of an authority; None if it is none."""
    written = text.decode("latin-1")
    host, separator, number = written.rpartition(":")
    if not separator or written.endswith("]"):
        host, number = written, str(port)
    if "%" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        return None
    if not (number.isascii() and number.isdigit() and len(number) <= 5 and 0 < int(number) < 65536):
        return None
    try:
        return (canonical_host(host), int(number)) if host.isascii() else None
    except PolicyError:
        return None


def ambiguity(path: str) -> str:
    """Return why two readers could understand a path differently; empty if they cannot."""
    if "\\" in path:
        return "the path holds a backslash, which must be encoded"
    once = unquote(path, errors="replace")
    if "%25" in path.lower() and unquote(once, errors="replace") != once:
        return "the path is encoded twice"
    if any(part.partition(";")[0] in (".", "..") for part in once.replace("\\", "/").split("/")):
        return "the path holds . or .. as a part"
    if "//" in once or "%2f" in path.lower() or "\0" in once:
        return "the path holds an empty part, or an encoded slash"
    return ""


def allowing_rule(rules: NetworkRules, name: str) -> str:
    """Return the entries of the policy that allow a canonical host, one for each layer that speaks of hosts; nothing if none do."""
    if rules.refusal(name):
        return ""
    entries = []
    for reach in next((way for way in rules.ways if all(reach.permits(name, None) or reach.asks(name, None) for reach in way)), ()):
        if reach.hosts is not None:
            entries += [next((each for each in reach.entries if covers((split_port(each)[0],), name)), "")]
    return " and ".join(dict.fromkeys(filter(None, entries))) or "every public host"


def _has_paths(rules: NetworkRules, name: str) -> bool:
    return any(rule.paths and covers((rule.host,), name) for way in rules.ways for reach in way for rule in reach.requests)


def _shown(whom: tuple[str, int] | None) -> str:
    """Return a host and port for a message. It shows nothing else of what a request says: messages are recorded."""
    return "no host" if whom is None else f"{bracketed(whom[0])}:{whom[1]}"
