"""The link between a supervisor and its egress process: framed JSON, and the orders that come first.

JSON in both directions, not marshal: the egress reads bytes of a guest, so the supervisor takes its messages as hostile. Every frame is
bounded.

    from the egress      ready {certificate} or failed {why}; resolve {number, name}; flow {…}; lost {count}; ended {}
    from the supervisor  orders {…} with the descriptors of the doors; resolved {number, addresses, why}; rules {…}; finish {}
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.kernel import wire
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.network import NetworkRules, Reach, RequestRule
from agent_sandbox.policy.search_rules import SearchRules

if TYPE_CHECKING:
    from typing import Any

FRAME = struct.Struct("!I")
MOST_BYTES = 64 << 10  # of a frame from the egress
MOST_ORDER_BYTES = 32 << 20  # of a frame from the supervisor: it carries the tables of the search


@dataclass(frozen=True)
class Orders:
    """The orders of an egress process: the rules by which it judges, and what it needs for that.

    `resolvers` is how many of the descriptors sent along receive queries for names; the others are listeners. `secrets` are put in on the
    way out, `own` are names and values that must not leave, and `tables` are paths and texts of the user's rules of the search.
    """

    rules: NetworkRules
    resolvers: int
    secrets: tuple[BoundSecret, ...] = ()
    own: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tables: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> dict[str, Any]:
        """Return the message that carries these orders."""
        return {
            **{"kind": "orders", "rules": encode_rules(self.rules), "resolvers": self.resolvers},
            **{"secrets": [vars(each) for each in self.secrets], "own": self.own, "tables": self.tables},
        }

    @classmethod
    def decoded(cls, message: dict[str, Any]) -> Orders:
        """Return the orders in a message."""
        secrets = tuple(BoundSecret(**_tuples(each)) for each in message["secrets"])
        own, tables = (tuple((name, text) for name, text in message[key]) for key in ("own", "tables"))
        return cls(decode_rules(message["rules"]), message["resolvers"], secrets, own, tables)


def encode_rules(rules: NetworkRules) -> dict[str, Any]:
    """Return rules as plain values."""
    reaches = [{**vars(reach), "requests": [vars(each) for each in reach.requests]} for reach in rules.reaches]
    return {**vars(rules), "reaches": reaches, "search": vars(rules.search)}


def decode_rules(plain: dict[str, Any]) -> NetworkRules:
    """Return the rules that `encode_rules` encoded."""
    reaches = (
        Reach(**{**_tuples(reach), "requests": tuple(RequestRule(**_tuples(each)) for each in reach["requests"])})
        for reach in plain["reaches"]
    )
    search = plain["search"]
    actions, floor = (tuple((name, action) for name, action in search[key]) for key in ("actions", "floor"))
    said = SearchRules(search["off"], actions, floor, tuple(search["tables"]))
    return NetworkRules(**{**_tuples(plain), "reaches": tuple(reaches), "search": said})


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as the bytes to send."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return FRAME.pack(len(body)) + body


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with descriptors. Raises OSError."""
    data = memoryview(frame(message))
    if descriptors:
        data = data[socket.send_fds(link, [data], list(descriptors)) :]
    link.sendall(data)


def receive(link: socket.socket, *, most: int = MOST_BYTES) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its descriptors. Raises EOFError if the other side has gone, ValueError if it is malformed or too long."""
    head, descriptors = wire.receive_descriptors(link, FRAME.size)
    try:
        if not head:
            raise EOFError("the other side has gone")
        head += wire.exactly(link, FRAME.size - len(head))
        (length,) = FRAME.unpack(head)
        if length > most:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(wire.exactly(link, length))
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("a message without a kind")
        return message, descriptors
    except BaseException:
        wire.close_all(descriptors)
        raise


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
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{host}:{self.port}" if self.port else self.name
