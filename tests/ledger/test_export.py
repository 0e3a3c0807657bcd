"""Other programs can read it, and nothing in it acts on them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.ledger.chain import START
from agent_sandbox.ledger.event import Entry, Facts, Intent, Noted, RefusalEvent, tell
from agent_sandbox.ledger.export import COLUMNS, FORMS, exporter
from tests.ledger.test_query import EVENTS

ENTRIES = [Entry(number, 1.5 + number, START, "h" * 64, event, "s" * 32) for number, event in enumerate(EVENTS, 1)]


def exported(form: str, entries: list[Entry]) -> str:
    head, line = exporter(form, host="host", version="1")
    return head + "".join(line(entry, tell(entry)) for entry in entries)


def hostile(text: str) -> Entry:
    facts: Facts = {"kind": "RunCommand", "argv": [text], "raw": text.encode("utf-8", "surrogatepass")}
    return Entry(1, 0.0, START, "", RefusalEvent(facts, text, text, text, text, text))


@pytest.mark.parametrize("form", FORMS)
@given(text=st.text(st.characters(), max_size=60) | st.text("\ud83d\udcff\n\r\0\x1b\u202e\u2028\x7f\",;=+-@\t'a", max_size=12))
def test_whatever_a_name_holds_an_entry_is_one_printable_line(form: str, text: str) -> None:
    lines = exported(form, [hostile(text)]).removesuffix("\n").split("\n")
    assert len(lines) == 1 + (form == "csv") and all(line.isprintable() for line in lines)


@pytest.mark.parametrize("form", FORMS)
def test_naughty_strings_are_one_printable_line_each(form: str, evaluation_file: Callable[[str], Path]) -> None:
    strings = json.loads(evaluation_file("blns.json").read_text("utf-8"))
    lines = exported(form, [hostile(text) for text in strings]).removesuffix("\n").split("\n")
    assert len(lines) == len(strings) + (form == "csv") and all(line.isprintable() for line in lines)


def test_a_line_of_json_holds_all_of_the_entry() -> None:
    first = json.loads(exported("jsonl", ENTRIES).splitlines()[0])
    assert first["sequence"] == 1 and first["time"] == "1970-01-01T00:00:02.500Z"
    assert first["event"]["action"]["argv"] == ["git", "push", "two words"] and first["hash"] == "h" * 64


def test_a_spreadsheet_gets_columns_and_no_formulas() -> None:
    for formula in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1"):
        noted = Entry(1, 0.0, START, "", Noted("file.read", {"target": formula, "why": formula}, sandbox=formula))
        (row,) = csv.DictReader(io.StringIO(exported("csv", [noted])))
        assert tuple(row) == COLUMNS
        assert not any(cell.startswith(("=", "+", "-", "@", "\t")) for cell in row.values())


def test_an_event_of_ocsf_has_what_its_class_asks_for() -> None:
    events = [json.loads(line) for line in exported("ocsf", ENTRIES).splitlines()]
    needed = {"category_uid", "class_uid", "activity_id", "type_uid", "time", "severity_id", "metadata"}
    for event in events:
        assert needed <= event.keys() and event["type_uid"] == event["class_uid"] * 100 + event["activity_id"]
        assert {"version", "product"} <= event["metadata"].keys() and event["metadata"]["product"]["vendor_name"]
        if event["class_uid"]:
            assert {"actor", "device", {1007: "process", 1001: "file"}[event["class_uid"]]} <= event.keys()
    refused = events[2]
    assert (refused["class_uid"], refused["action_id"], refused["disposition_id"], refused["severity_id"]) == (1007, 2, 2, 3)
    assert (events[1]["activity_id"], events[1]["exit_code"]) == (2, 0)
    assert (events[5]["class_uid"], events[5]["file"]["path"], events[5]["action_id"]) == (1001, "/etc/shadow", 2)


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="xml"):
        exporter("xml", host="", version="")


def test_a_command_line_says_where_a_word_ends() -> None:
    entry = Entry(1, 0.0, START, "", Intent({"kind": "RunCommand", "argv": ["rm", "a b", "; c"]}, "", "", ""))
    assert tell(entry).target == "rm 'a b' '; c'"
