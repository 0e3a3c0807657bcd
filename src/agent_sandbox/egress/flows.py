"""Flows: what is recorded of a connection, and how much may pass.

A flow is one connection of the sandbox. Its record names the host, the port, the protocol, the requests without their queries, the bytes
each way, the rule that let it pass, and why something was refused. A record never holds a query, a field or a body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from agent_sandbox.policy.hosts import covers
from agent_sandbox.policy.traffic_budgets import TrafficBudget

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
    intent: str = ""  # that the request declared for itself

    def __str__(self) -> str:
        """Return one line: `POST /path 200, sent 3, received 2, intent 'publish'`."""
        counted = "".join(f", {word} {count}" for word, count in (("sent", self.sent), ("received", self.received)) if count)
        declared = f", intent {self.intent!r}" if self.intent else ""
        return f"{self.method} {self.path or '(withheld)'} {self.status or 'broken off'}{counted}{declared}"

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


@dataclass
class _Spent:
    """The traffic that has passed under a budget. The requests of a minute are a bucket, which fills again with time."""

    sent: int = 0
    received: int = 0
    requests: int = 0
    bucket: float = 0.0
    filled_at: float = 0.0

    @property
    def bytes(self) -> int:
        return self.sent + self.received


class OverBudget(Exception):
    """A budget is used up. The message says which."""


class Budgets:
    """The budgets of one run and what is spent of them. `clock` returns seconds."""

    def __init__(self, budgets: tuple[TrafficBudget, ...], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[TrafficBudget, _Spent] = {}
        self.put_in_force(budgets)

    def put_in_force(self, budgets: tuple[TrafficBudget, ...]) -> None:
        """Let these budgets hold from now on. What was spent of one of them is spent."""
        for budget in budgets:
            self._spent.setdefault(budget, _Spent(bucket=budget.requests_a_minute or 0, filled_at=self._clock()))
        self._budgets = [(budget, self._spent[budget]) for budget in budgets]

    def request(self, name: str) -> None:
        """Count a request to a canonical host. Raises `OverBudget`, and counts nothing then."""
        found = [(budget, spent) for budget, spent in self._budgets if covers((budget.hosts,), name)]
        for budget, spent in found:
            if budget.requests is not None and spent.requests >= budget.requests:
                raise _over(budget, spent, "requests", f"all {budget.requests:,} requests were made")
            if budget.requests_a_minute is not None:
                now = self._clock()
                spent.bucket = min(budget.requests_a_minute, spent.bucket + (now - spent.filled_at) * budget.requests_a_minute / 60)
                spent.filled_at = now
                if spent.bucket < 1:
                    wait = ceil((1 - spent.bucket) * 60 / budget.requests_a_minute)
                    raise _over(budget, spent, "", f"{budget.requests_a_minute:,} requests a minute; the next can be made in {wait} s")
        for _, spent in found:
            spent.requests += 1
            spent.bucket -= 1
        self._check(found)

    def count(self, name: str, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes to or from a canonical host. Raises `OverBudget` once there are too many."""
        found = [(budget, spent) for budget, spent in self._budgets if covers((budget.hosts,), name)]
        for _, spent in found:
            spent.sent += sent
            spent.received += received
        self._check(found)

    def _check(self, found: list[tuple[TrafficBudget, _Spent]]) -> None:
        for budget, spent in found:
            for part in ("bytes", "sent", "received"):
                most: int | None = getattr(budget, part)
                if most is not None and getattr(spent, part) > most:
                    what = "bytes" if part == "bytes" else f"bytes {part}"
                    raise _over(budget, spent, part, f"there were more than {most:,} {what}")


def _over(budget: TrafficBudget, spent: _Spent, part: str, why: str) -> OverBudget:
    """Return the error that a budget is used up, with what is left of its other parts."""
    words = {"bytes": "bytes", "sent": "bytes to send", "received": "bytes to receive", "requests": "requests"}
    left = [
        f"{max(0, most - getattr(spent, name)):,} {word}"
        for name, word in words.items()
        if name != part and (most := getattr(budget, name)) is not None
    ]
    return OverBudget(f"the budget {budget} is used up: {why}" + (f"; left are {', '.join(left)}" if left else ""))
