"""Entries are found by what people look for, and new ones are waited for, through every file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.ledger.chain import closed, entries
from agent_sandbox.ledger.event import Entry, Event, Intent, Noted, OutcomeEvent, RefusalEvent, tell
from agent_sandbox.ledger.query import Filter, follow, select
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import intent, ledger_at

EVENTS: tuple[Event, ...] = (
    Intent({"kind": "RunCommand", "argv": ["git", "push", "two words"]}, "d", "p", "command", sandbox="a"),
    OutcomeEvent(1, "done", {"exit_code": 0}, sandbox="a"),
    RefusalEvent({"kind": "RunCommand", "argv": ["curl", "evil.example"]}, "d", "p", "processes", "no processes", sandbox="b"),
    Intent({"kind": "RunCode", "language": "python", "source_sha256": "f" * 64}, "d", "p", "code", sandbox="b"),
    OutcomeEvent(4, "raised", {"error": "LaunchFailed"}, sandbox="b"),
    Noted("file.read", {"target": "/etc/shadow", "allowed": False, "why": "hidden"}, sandbox="b"),
    Noted("file.read", {"target": "/etc/hosts"}, sandbox="b"),
    Intent({"kind": "Promote", "root": "/project", "count": 3}, "d", "p", "promotion"),
)


@pytest.fixture
def told(tmp_path: Path) -> list[Entry]:
    clock = iter(range(100))
    ledger = Ledger(tmp_path / "ledger", clock=lambda: float(next(clock)))
    return [ledger.record(event) for event in EVENTS]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (Filter(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Filter(since=2, until=5), [3, 4, 5]),
        (Filter(after=6), [7, 8]),
        (Filter(kind="refusal"), [3]),
        (Filter(category="file"), [6, 7]),
        (Filter(category="process", allowed=False), [3]),
        (Filter(level="warning"), [3, 5, 6]),
        (Filter(level="info"), [1, 2, 3, 4, 5, 6, 8]),
        (Filter(sandbox="a"), [1, 2]),
        (Filter(allowed=False), [3, 6]),
        (Filter(words="PUSH"), [1]),
        (Filter(words="/etc/"), [6, 7]),
        (Filter(words="nowhere"), []),
    ],
    ids=repr,
)
def test_a_filter_takes_what_it_names(told: list[Entry], wanted: Filter, numbers: list[int]) -> None:
    assert [entry.sequence for entry, _ in select(told, wanted)] == numbers


def test_an_entry_says_what_was_done_to_what(told: list[Entry]) -> None:
    said = [(each.category, each.action, each.target) for each in map(tell, told)]
    assert said[0] == ("process", "run_command", "git push 'two words'"), "a space in a word is seen"
    assert said[3] == ("code", "run_code", f"python {'f' * 12}")
    assert said[4] == ("outcome", "raised", "entry 4")
    assert said[7] == ("promotion", "promote", "/project")


@pytest.mark.parametrize(("operation", "action"), [("read", "read_file"), ("remove", "remove_file"), ("\x1b[2J", "use_file")])
def test_an_operation_on_a_file_is_told_by_its_name_and_path(tmp_path: Path, operation: str, action: str) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5)
    told = tell(ledger.record(Intent({"kind": "UseFile", "operation": operation, "path": "/srv/notes.txt"}, "d", "p", "file")))
    assert (told.category, told.action, told.target) == ("file", action, "/srv/notes.txt")


def test_every_kind_of_entry_says_something(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=1_000)
    for _ in range(5):
        ledger.record(intent())
    ledger.checkpoint()
    Path(ledger.path).unlink()
    with Path(ledger.path).open("wb"):
        pass
    again = ledger_at(Path(ledger.path))
    again.record(intent("word " * 100_000))
    kinds = {entry.event.kind: tell(entry) for entry in entries(ledger.path)}
    assert {"intent", "rotated", "gap"} <= set(kinds) and all(each.action and each.target for each in kinds.values())


class Enough(Exception):
    """There will be nothing new."""


def test_following_tells_what_is_there_and_then_what_comes_through_every_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=2_000)
    written: list[int] = []

    def pause() -> None:
        """Something is written while the reader waits; at last nothing."""
        if len(written) >= 40:
            raise Enough
        for _ in range(1 + len(written) % 12):  # now and then more than one file's worth
            written.append(ledger.record(intent()).sequence)

    seen: list[int] = []
    with pytest.raises(Enough):
        for entry in follow(ledger.path, pause=pause):
            seen.append(entry.sequence)
    assert len(closed(ledger.path)) > 3
    assert seen == [entry.sequence for entry in entries(ledger.path)] and set(written) <= set(seen)


def test_following_waits_for_a_line_that_is_being_written(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    ledger.record(intent("whole"))
    path, parts = Path(ledger.path), list[bytes]()
    half = path.read_bytes()

    def pause() -> None:
        if not parts:
            parts.append(half)
            with path.open("ab") as file:
                file.write(b'{"seq":2,"ti')
        elif len(parts) == 1:
            parts.append(half)
            ledger_at(path).record(intent("after a tear"))
        else:
            raise Enough

    kinds: list[str] = []
    with pytest.raises(Enough):
        for entry in follow(ledger.path, pause=pause):
            kinds.append(entry.event.kind)
    assert kinds == ["intent", "torn", "intent"]
