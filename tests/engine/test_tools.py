"""Which functions can be tools, and how often they are called."""

from __future__ import annotations

import marshal
from typing import Any

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.tools import KEPT_ERRORS, ToolCalls
from agent_sandbox.errors import LedgerUnavailable, PolicyError
from agent_sandbox.ledger.event import Entry, Event
from agent_sandbox.policy.model import locked
from agent_sandbox.runtime.base import Nonsense
from agent_sandbox.runtime.guest_rpc import codec


class Memory:
    """A ledger that keeps what it is told, or is full."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.events: list[Event] = []
        self._room = room

    def record(self, event: Event, *, lasting: bool = False) -> Entry:
        if len(self.events) >= self._room:
            raise LedgerUnavailable("the disk is full")
        self.events.append(event)
        return Entry(len(self.events), 0.0, "", "", event)

    def unended(self, action_digest: str) -> int | None:
        raise AssertionError("nothing was cut off")


def hearing(ledger: Memory, most_calls: int = 1000, **tools: Any) -> ToolCalls:
    return ToolCalls(Gate(locked(tools=tools), ledger, clock=lambda: 0.0), tools, most_calls=most_calls)


def said(name: str, *args: Any) -> bytes:
    return codec.spell({"call": name, "args": list(args), "kwargs": {}})


def lookup() -> int:
    """Look it up."""
    return 1


NO_NAMES: tuple[Any, ...] = (
    {"not a name": print}, {"for": len}, {"print": len}, {"__import__": len}, {"__x": len}, {"": len}, {1: len}, {"ToolError": len},
    {"lookup": 3}, [3], [lambda: 1], "lookup", b"x", 7, [lookup, lookup],
)  # fmt: skip


@pytest.mark.parametrize("tools", NO_NAMES, ids=repr)
def test_what_cannot_be_a_tool_is_refused_when_it_is_handed_over(tools: Any) -> None:
    with pytest.raises(PolicyError):
        Sandbox(tools=tools)


def test_calls_beyond_their_number_are_refused_until_the_next_turn() -> None:
    calls: list[int] = []
    ears = hearing(Memory(), most_calls=2, take=calls.append)
    answers = [marshal.loads(ears.hear(said("take", n))) for n in range(4)]
    assert [answer.get("raise") for answer in answers] == [None, None, "ToolError", "ToolError"] and calls == [0, 1]
    assert "no more than 2 calls" in answers[-1]["text"]
    ears.renew()
    assert "value" in marshal.loads(ears.hear(said("take", 9))) and calls == [0, 1, 9]


def test_what_cannot_be_recorded_is_not_called() -> None:
    calls: list[int] = []
    with pytest.raises(LedgerUnavailable):
        hearing(Memory(room=0), take=calls.append).hear(said("take", 1))
    assert calls == []
    with pytest.raises(LedgerUnavailable, match="performed, but"):
        hearing(Memory(room=1), take=calls.append).hear(said("take", 2))
    assert calls == [2]


def test_errors_are_kept_up_to_a_number() -> None:
    ears = hearing(Memory(), fail=lambda: 1 / 0)
    for _ in range(KEPT_ERRORS + 5):
        ears.hear(said("fail"))
    assert len(ears.errors) == KEPT_ERRORS


def test_large_words_that_become_larger_when_spelt_again_are_heard() -> None:
    """Nobody spells them again: short numbers may be long when written out."""
    taken: list[int] = []
    words = b'{"call":"take","args":[[' + b",".join([b"1e9"] * 1_500_000) + b']],"kwargs":{}}'
    hearing(Memory(), take=lambda numbers: taken.append(len(numbers))).hear(words)
    assert taken == [1_500_000]


def test_turns_are_nobodys_to_answer_here() -> None:
    with pytest.raises(Nonsense):
        hearing(Memory(), take=print).talk().hear(b'{"turn":{}}')
