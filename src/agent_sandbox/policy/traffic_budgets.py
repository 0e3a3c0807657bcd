"""Budgets of the network: how much a run may exchange with some hosts, as a person writes it and as the egress counts it."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_pattern

_UNITS = {"b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_HINT = 'write "api.example.com 10MB 100/min"; after the host: 10MB, sent:1MB, received:1GB, requests:500, 100/min; "*" is the whole run'
_MOST = 1 << 53


@dataclass(frozen=True)
class TrafficBudget:
    """How much may pass in one run between the sandbox and the hosts that a pattern covers, all together. None is any amount.

    Bytes are those of bodies, of messages and of opaque streams. `bytes` counts both directions. `written` is what a person wrote.
    """

    hosts: str = "*"
    bytes: int | None = None
    sent: int | None = None
    received: int | None = None
    requests: int | None = None
    requests_a_minute: int | None = None
    written: str = ""

    def __str__(self) -> str:
        return self.written or f"of {'the whole run' if self.hosts == '*' else self.hosts}"


def read_budget(written: object) -> TrafficBudget:
    """Return the budget that a text writes: hosts, then one amount or more. Raises `PolicyError`.

    >>> read_budget("*.example.com sent:1MB 100/min").sent
    1000000
    """
    words = written.split() if isinstance(written, str) else []
    amounts: dict[str, int] = {}
    for word in words[1:]:
        name, amount = _amount(word)
        if name in amounts or not 0 <= amount <= _MOST:
            amounts = {}
            break
        amounts[name] = amount
    if not amounts:
        raise PolicyError(f"not a budget: {written!r}", hint=_HINT)
    return TrafficBudget(canonical_pattern(words[0]), **amounts, written=" ".join(words))


def _amount(word: str) -> tuple[str, int]:
    """Return the name and the number of one amount; -1 if it is none."""
    number, slash, unit = word.partition("/")
    if slash:
        return "requests_a_minute", _whole(number) if unit in ("min", "minute") and number != "0" else -1
    kind, colon, amount = word.partition(":")
    if kind == "requests" and colon:
        return kind, _whole(amount)
    if colon and kind not in ("sent", "received"):
        return kind, -1
    size = amount if colon else word
    digits = size.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    factor = _UNITS.get(size[len(digits) :].lower(), 0)
    return kind if colon else "bytes", _whole(digits) * factor if factor else -1


def _whole(digits: str) -> int:
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 15 else -1
