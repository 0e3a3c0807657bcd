"""Flows: what is recorded of a connection, and how much may pass.

A flow is one connection of the sandbox. Its record names the host, the port, the protocol, the requests without their queries, the bytes
each way, the rule that let it pass, and why something was refused. A record never holds a query, a field or a body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_sandbox.policy.hosts import covers

MOST_REQUESTS = 20  # in one record; then the flow goes on in the next
_LONGEST_PATH = 200


@dataclass(slots=True)
class RequestRecord:
    """One request of a flow: without its query, and without anything that it carried."""

    method: str
    path: str = ""
    status: int = 0
    sent: int = 0
    received: int = 0

    def __str__(self) -> str:
        """Return one line: `POST /path 200, sent 3, received 2`."""
        counted = "".join(f", {word} {count}" for word, count in (("sent", self.sent), ("received", self.received)) if count)
        return f"{self.method} {self.path or '(withheld)'} {self.status or 'broken off'}{counted}"

    def name_path(self, target: bytes) -> None:
        """Note the path of the request, which is no part of the record before it has been searched."""
        path = target.partition(b"?")[0]
        if not path.startswith(b"/") and b"://" in path:
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        self.path = path.decode("ascii", "replace")[:_LONGEST_PATH]


@dataclass(slots=True)
class Flow:
    """One connection of the sandbox, as it is recorded. `report` takes the record."""

    report: Callable[[dict[str, Any]], None]
    name: str
    port: int
    how: str = ""  # "http", "https", "h2", "websocket", "tls" (uninspected), "opaque", "dns"
    rule: str = ""
    sent: int = 0
    received: int = 0
    refused: str = ""
    requests: list[RequestRecord] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)  # the names of those that were put in

    def begin(self, request: RequestRecord) -> RequestRecord:
        """Add a request. A full record is reported first."""
        if len(self.requests) >= MOST_REQUESTS:
            self.flush()
        self.requests.append(request)
        return request

    def refuse(self, why: str) -> None:
        """Note why something did not pass. Of several reasons in one record, the first is kept."""
        self.refused = self.refused or why

    def flush(self) -> None:
        """Report what there is, and go on with an empty record."""
        if self.requests or self.sent or self.received or self.refused or self.findings:
            self.report(self._record())
        self.sent = self.received = 0
        self.refused = ""
        self.requests, self.findings, self.secrets = [], [], []

    def _record(self) -> dict[str, Any]:
        record = {"name": self.name, "port": self.port, "how": self.how, "rule": self.rule, "sent": self.sent, "received": self.received}
        record |= {"refused": self.refused, "requests": list(map(str, self.requests))}
        return record | {key: value for key in ("findings", "secrets") if (value := getattr(self, key))}


@dataclass(frozen=True)
class TrafficBudget:
    """How much may pass in one run between the sandbox and the hosts that a pattern covers, all together. None is any amount."""

    hosts: str = "*"
    sent: int | None = None  # bytes of bodies and of opaque streams
    received: int | None = None
    requests: int | None = None
    requests_a_minute: int | None = None

    def __str__(self) -> str:
        return "the whole run" if self.hosts == "*" else self.hosts


@dataclass
class _Spent:
    """The traffic that has passed under a budget. The requests of a minute are a bucket, which fills again with time."""

    sent: int = 0
    received: int = 0
    requests: int = 0
    bucket: float = 0.0
    filled_at: float = 0.0


class OverBudget(Exception):
    """A budget is used up. The message says which."""


class Budgets:
    """The budgets of one run and what is spent of them. `clock` returns seconds."""

    def __init__(self, budgets: tuple[TrafficBudget, ...], clock: Callable[[], float]) -> None:
        self._budgets = [(budget, _Spent(bucket=budget.requests_a_minute or 0, filled_at=clock())) for budget in budgets]
        self._clock = clock

    def request(self, name: str) -> None:
        """Count a request to a canonical host. Raises `OverBudget`, and counts nothing then."""
        found = [(budget, spent) for budget, spent in self._budgets if covers((budget.hosts,), name)]
        for budget, spent in found:
            if budget.requests is not None and spent.requests >= budget.requests:
                raise OverBudget(f"the budget of {budget.requests} requests for {budget} is used up")
            if budget.requests_a_minute is not None:
                now = self._clock()
                spent.bucket = min(budget.requests_a_minute, spent.bucket + (now - spent.filled_at) * budget.requests_a_minute / 60)
                spent.filled_at = now
                if spent.bucket < 1:
                    raise OverBudget(f"the budget of {budget.requests_a_minute} requests a minute for {budget} is used up")
        for _, spent in found:
            spent.requests += 1
            spent.bucket -= 1
        self.check(name)

    def count(self, name: str, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes to or from a canonical host. Raises `OverBudget` once there are too many."""
        for budget, spent in self._budgets:
            if covers((budget.hosts,), name):
                spent.sent += sent
                spent.received += received
        self.check(name)

    def check(self, name: str) -> None:
        """Raise `OverBudget` if the bytes of a budget are used up."""
        for budget, spent in self._budgets:
            if covers((budget.hosts,), name):
                if budget.sent is not None and spent.sent > budget.sent:
                    raise OverBudget(f"the budget of {budget.sent} bytes sent for {budget} is used up")
                if budget.received is not None and spent.received > budget.received:
                    raise OverBudget(f"the budget of {budget.received} bytes received for {budget} is used up")
