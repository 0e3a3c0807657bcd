"""The messages between a supervisor and its egress process (in frames, see `frames`), and the orders that come first.

from the egress      authority {certificate}, then ready {}; or failed {why}
                         resolve {number, name}; flow {…}; lost {count}; obeyed {revision}; ended {}
                     recorded {part, data}, pieces of one exchange after another; unrecorded {why}; replay {number, key}
                     ask {number, host, port, method, path, data, again}: may this leave; withdraw {number}: nobody waits any more
                     request {…}, for each that the rules allow, where the orders ask for it
from the supervisor  orders {…} with the descriptors of the doors; resolved {number, addresses, why}; rules {…, revision}; finish {}
                     replayed {number, exchange}; answered {number, allowed, why, seconds, watched}
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Connect
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.hosts import bracketed, canonical_host, canonical_port
from agent_sandbox.policy.intents import Declared, IntentReach
from agent_sandbox.policy.network import GrantedWay, NetworkRules, Reach, RequestRule, Way
from agent_sandbox.policy.search_rules import SearchRules
from agent_sandbox.policy.traffic_budgets import TrafficBudget

if TYPE_CHECKING:
    from typing import Any

LONGEST_ASKED = 300  # characters of each text of a question
MOST_ORDER_BYTES = 32 << 20  # of a frame from the supervisor: it carries the tables of the search


@dataclass(frozen=True)
class ExchangeOrders:
    """Orders about the exchanges of a run: to record them, with `bodies` or without, or to answer them from a record.

    `record` and `replay` are the salts of the two records, in hexadecimal; empty: there is none. With `tell`, each request is reported by
    itself. With `hold`, requests that may change something at their host are not sent, and neither is what is not read.
    """

    record: str = ""
    bodies: bool = False
    replay: str = ""
    tell: bool = False
    hold: bool = False


NO_EXCHANGES = ExchangeOrders()


@dataclass(frozen=True)
class Orders:
    """The orders of an egress process: the rules by which it judges, and what it needs for that.

    `resolvers` is how many of the descriptors sent along receive queries for names; the others are listeners. `secrets` are put in on the
    way out, `own` are names and values that must not leave, and `tables` are paths and texts of the user's rules of the search. `roots`
    are hosts, each with the certificates in PEM that its own is verified with, in the place of those of the system.
    """

    rules: NetworkRules
    resolvers: int
    secrets: tuple[BoundSecret, ...] = ()
    own: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tables: tuple[tuple[str, str], ...] = ()
    roots: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    exchanges: ExchangeOrders = NO_EXCHANGES

    def encoded(self) -> dict[str, Any]:
        """Return the message that carries these orders."""
        return {
            **{"kind": "orders", "rules": encode_rules(self.rules), "resolvers": self.resolvers},
            **{"secrets": [vars(each) for each in self.secrets], "own": self.own, "tables": self.tables, "roots": self.roots},
            "exchanges": vars(self.exchanges),
        }

    @classmethod
    def decoded(cls, message: dict[str, Any]) -> Orders:
        """Return the orders in a message."""
        secrets = tuple(BoundSecret(**_tuples(each)) for each in message["secrets"])
        own, tables, roots = (tuple((name, text) for name, text in message[key]) for key in ("own", "tables", "roots"))
        exchanges = ExchangeOrders(**message["exchanges"])
        return cls(decode_rules(message["rules"]), message["resolvers"], secrets, own, tables, roots, exchanges)


def encode_rules(rules: NetworkRules) -> dict[str, Any]:
    """Return rules as plain values."""
    return {
        **vars(rules),
        "reaches": _encode_way(rules.reaches),
        "granted": [{"way": _encode_way(each.way), "until": each.until} for each in rules.granted],
        "intents": [{**vars(each), "reaches": _encode_way(each.reaches)} for each in rules.intents],
        "declared": None if rules.declared is None else vars(rules.declared),
        "search": vars(rules.search),
        "budgets": [vars(each) for each in rules.budgets],
    }


def decode_rules(plain: dict[str, Any]) -> NetworkRules:
    """Return the rules that `encode_rules` encoded."""
    read: dict[str, Any] = {
        "reaches": _decode_way(plain["reaches"]),
        "granted": tuple(GrantedWay(_decode_way(each["way"]), each["until"]) for each in plain["granted"]),
        "intents": tuple(IntentReach(**{**each, "reaches": _decode_way(each["reaches"])}) for each in plain["intents"]),
        "declared": None if plain["declared"] is None else Declared(**plain["declared"]),
    }
    search = plain["search"]
    actions, floor = (tuple((name, action) for name, action in search[key]) for key in ("actions", "floor"))
    said = SearchRules(search["off"], actions, floor, tuple(search["tables"]))
    budgets = tuple(TrafficBudget(**each) for each in plain["budgets"])
    return NetworkRules(**{**_tuples(plain), **read, "search": said, "budgets": budgets})


def _encode_way(way: Way) -> list[dict[str, Any]]:
    return [{**vars(reach), "requests": [vars(each) for each in reach.requests]} for reach in way]


def _decode_way(plain: list[dict[str, Any]]) -> Way:
    return tuple(
        Reach(**{**_tuples(reach), "requests": tuple(RequestRule(**_tuples(each)) for each in reach["requests"])}) for reach in plain
    )


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def decode_question(message: dict[str, Any]) -> tuple[int, Connect, bool]:
    """Return the number of a question of an egress, what it is about, and whether nobody is to be asked. Raises ValueError."""
    number, port, again = message.get("number"), message.get("port"), message.get("again")
    host, method, path, data = texts = [message.get(name) for name in ("host", "method", "path", "data")]
    if not all(isinstance(each, str) and len(each) <= LONGEST_ASKED for each in texts) or not isinstance(again, bool):
        raise ValueError("a question whose fields are no texts")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (number, port)):
        raise ValueError("a question whose fields are no numbers")
    try:
        if canonical_host(host) != host or canonical_port(port) != port:
            raise ValueError("a question for no host in its canonical form")
    except PolicyError as error:
        raise ValueError(error.message) from None
    assert isinstance(number, int) and isinstance(port, int)
    return number, Connect(str(host), port, str(method), str(path), str(data)), again


@dataclass(frozen=True)
class FlowRecord:
    """The record of one connection or query of a run: with whom, how, how much, and why it was refused; `times` counts equal refusals.

    `findings` are the rules of the search that something in it fitted, each with the action and the place, and `secrets` the names of those
    that were put in. No value is in it.
    """

    name: str
    port: int
    how: str = ""  # "dns", "http", "https", "tls", or empty if nothing was said
    sent: int = 0
    received: int = 0
    requests: tuple[str, ...] = ()
    refused: str = ""
    times: int = 1
    findings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    @classmethod
    def decoded(cls, message: dict[str, Any]) -> FlowRecord:
        """Return the flow in a message of an egress. Raises ValueError if a field has the wrong type: it may come from anybody."""
        texts = [message.get(name, "") for name in ("name", "how", "refused")]
        numbers = [message.get(name, 0) for name in ("port", "sent", "received")]
        lists = [message.get(name, []) for name in ("requests", "findings", "secrets")]
        if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, list) for each in lists):
            raise ValueError("a flow whose fields are no texts")
        if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 63 for each in numbers):
            raise ValueError("a flow whose fields are no numbers")
        name, how, refused = texts
        port, sent, received = numbers
        requests, findings, secrets = (tuple(str(each) for each in listed) for listed in lists)
        return cls(name, port, how, sent, received, requests, refused, findings=findings, secrets=secrets)

    @property
    def target(self) -> str:
        """The host, with the port if there is one."""
        host = bracketed(self.name)
        return f"{host}:{self.port}" if self.port else self.name


@dataclass(frozen=True)
class RequestMade:
    """A request that the rules allowed. `left` is whether it was sent to its host; `secrets` are the names of those that were put in.

    `path` is without the query, and empty if it cannot be told: it is too long, or the search found something in it.
    """

    method: str
    name: str
    port: int
    tls: bool
    path: str
    left: bool
    secrets: tuple[str, ...] = ()
    times: int = 1

    @classmethod
    def decoded(cls, message: dict[str, Any]) -> RequestMade:
        """Return the request in a message of an egress. Raises ValueError if a field has the wrong type: it may come from anybody."""
        method, name, path, secrets = (message.get(each) for each in ("method", "name", "path", "secrets"))
        port, tls, left = (message.get(each) for each in ("port", "tls", "left"))
        if not (isinstance(method, str) and isinstance(name, str) and isinstance(path, str) and isinstance(secrets, list)):
            raise ValueError("a request whose fields are no texts")
        if not (isinstance(port, int) and 0 < port < 65536 and isinstance(tls, bool) and isinstance(left, bool)):
            raise ValueError("a request whose fields are no numbers")
        if not (method.isascii() and method.isprintable() and path.isascii() and path.isprintable() and name.isascii()):
            raise ValueError("a request with strange characters")
        return cls(method, name, port, tls, path, left, tuple(str(each) for each in secrets))

    @property
    def origin(self) -> str:
        """The scheme, the host, and the port if it is not the usual one."""
        host = bracketed(self.name)
        return f"http{'s' if self.tls else ''}://{host}" + ("" if self.port == (443 if self.tls else 80) else f":{self.port}")
