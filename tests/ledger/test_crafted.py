"""Lines that somebody has made up, with hashes that fit: an error that says so, wherever they are read. And what is long blinds nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox._fast.encoding import sha256
from agent_sandbox.cli.commands.log import _Lines
from agent_sandbox.errors import SandboxError
from agent_sandbox.ledger.chain import START, entries
from agent_sandbox.ledger.event import Entry, Event, Intent, Noted, OutcomeEvent, RefusalEvent, Told
from agent_sandbox.ledger.export import FORMS, exporter
from agent_sandbox.ledger.query import Filter, Index, select
from agent_sandbox.ledger.verify import Evidence, examine
from tests.ledger.samples import ledger_at

_INTENT = '{"action":{"kind":"RunCommand","argv":["x"]},"digest":"d","policy":"p","rule":"r"}'


def line(*, seq: str = "1", time: str = "1.5", prev: str = f'"{START}"', kind: str = '"intent"', event: str = _INTENT) -> bytes:
    text = f'{{"seq":{seq},"time":{time},"prev":{prev},"kind":{kind},"event":{event}}}'.encode()
    return b'%b,"$hash":"%b","$seal":"%b"}\n' % (text[:-1], sha256(text).hexdigest().encode(), b"0" * 32)


def _noted(facts: str, what: str = '"a.b"') -> dict[str, str]:
    return {"kind": '"noted"', "event": f'{{"what":{what},"facts":{facts}}}'}


def _with(before: str, after: str) -> dict[str, str]:
    return {"event": _INTENT.replace(before, after)}


CRAFTED = (
    *({"seq": each} for each in ('"1"', "1.0", "-1", "true", "null", "9" * 30, "9" * 5000)),
    *({"time": each} for each in ('"x"', "NaN", "1e400", "null", "[]", "true", "9" * 30, "9" * 400, "-" + "9" * 400)),
    *({"prev": "1"}, {"kind": "[]"}, {"kind": '"unheard of"'}, *({"event": each} for each in ("null", "[1]", '"x"'))),
    *(_with('{"kind":"RunCommand","argv":["x"]}', each) for each in ('"x"', "[1]", "null", "[" * 90_000 + "]" * 90_000)),
    *(_with('["x"]', each) for each in ("[" * 900 + "]" * 900, '{"$bytes":"zz"}', '{"$text":5}', '{"$cut":{"start":5}}', '{"$x":1}')),
    *(_with('"r"', each) for each in ("[1]", "null", '"r","sandbox":{"a":1}', '"r","self":1', '"r","unheard":1')),
    *(_noted("5"), _noted("[1]"), _noted("{}", "5")),
    *({"kind": '"outcome"', "event": each} for each in ('{"intent":"x","ended":"done"}', '{"intent":1,"ended":[]}')),
    {"kind": '"gap"', "event": '{"last":"x","hash":1,"why":[]}'},
    {"kind": '"torn"', "event": '{"offset":"x","length":[],"sha256":1}'},
    {"kind": '"rotated"', "event": '{"closed":"x","size":[],"oldest":"y"}'},
    {"kind": '"checkpoint"', "event": f'{{"sequence":0,"hash":"{START}","public_key":5,"signature":[]}}'},
)


def shown_line(entry: Entry, told: Told) -> str:
    """The line that `log` prints, without its end."""
    return _Lines(None, everywhere=True).line(entry, told).removesuffix("\n")


@pytest.mark.parametrize("fields", CRAFTED, ids=lambda fields: "".join(fields.values())[:40].encode("ascii", "replace").decode())
def test_a_line_that_holds_something_else_is_an_error_and_nothing_more(tmp_path: Path, fields: dict[str, str]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(line())
    assert examine(str(path), Evidence()).intact, "the control: a line made like this is an entry"
    path.write_bytes(line(**fields))
    assert not examine(str(path), Evidence()).intact
    with pytest.raises(SandboxError, match="entry 1"):
        list(entries(str(path)))
    with pytest.raises(SandboxError):
        Index(str(path), str(tmp_path / "index")).find(Filter(), newest=10)


LONG = "x" * 5000


@pytest.mark.parametrize(
    "event",
    [
        RefusalEvent({"kind": "RunCommand", "argv": [LONG]}, LONG, LONG, LONG, LONG, LONG),
        RefusalEvent({"kind": "RunCommand", "argv": ["x"] * 60_000}, "d", "p", "r", "w", "s"),
        Intent({"kind": LONG}, LONG, LONG, LONG, LONG),
        OutcomeEvent(1, "raised", {"message": LONG}, LONG),
        OutcomeEvent(1, "done", {f"fact_{number}": LONG for number in range(20)}),
        Noted("file.read", {"target": LONG, "why": LONG}, LONG),
        Noted("file.read", {f"fact_{number}": LONG for number in range(20)}),
        Noted(LONG),
    ],
    ids=lambda event: f"{event.kind}-{len(str(event))}",
)
def test_a_text_that_is_too_long_to_be_kept_is_shown_by_its_beginning(tmp_path: Path, event: Event) -> None:
    """An agent whose refusal has five thousand letters does not take the log away from everybody."""
    ledger = ledger_at(tmp_path / "ledger.jsonl")
    ledger.record(event)
    ledger.record(Intent({"kind": "RunCommand", "argv": ["ls"]}, "", "", ""))
    found = list(select(entries(ledger.path), Filter()))
    assert len(found) == 2 and all(shown_line(entry, told).isprintable() for entry, told in found)
    for form in FORMS:
        _, as_line = exporter(form, host="host", version="1")
        assert all(as_line(entry, told).count("\n") == 1 for entry, told in found)
    assert [entry.sequence for entry in Index(ledger.path, str(tmp_path / "index")).find(Filter(), newest=10)] == [1, 2]


@pytest.mark.parametrize("time", [1e12, -1e12, 1e300, -1e308, 0.0, -1.0, 2**40])
def test_a_clock_that_was_wrong_takes_no_entry_away(tmp_path: Path, time: float) -> None:
    from agent_sandbox.ledger.writer import Ledger

    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: time)
    ledger.record(Intent({"kind": "RunCommand", "argv": ["ls"]}, "", "", ""))
    ((entry, told),) = select(entries(ledger.path), Filter())
    assert entry.time == time and "ls" in shown_line(entry, told)
    assert all(exporter(form, host="host", version="1")[1](entry, told) for form in FORMS)
