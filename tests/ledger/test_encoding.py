"""One event is one line, whatever it holds, and reads back as it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.ledger.encoding import decode, encode, is_suspicious, last_place, place, sealed, spell
from agent_sandbox.ledger.event import LONGEST_TEXT, Cut, Event, Intent, OutcomeEvent, RefusalEvent, Torn
from tests.ledger.samples import SEAL, intent

text = st.text(st.characters(), max_size=200) | st.text('\ud83d\ude00\udcff\n\r\0\x1b\u202e\u2028\x7f"\\{}$a', max_size=20)
fact = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(-1e18, 1e18) | text | st.binary(max_size=100),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner, max_size=4),
    max_leaves=10,
)


def there_and_back(event: Event) -> Event:
    line, digest, seal = encode(7, 1.25, "0" * 64, event, SEAL)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert json.loads(line)["$hash"] == digest and seal == sealed(bytes.fromhex(digest), SEAL)
    entry = decode(line[:-1])
    assert (entry.sequence, entry.time, entry.previous, entry.hash, entry.seal) == (7, 1.25, "0" * 64, digest, seal)
    return entry.event


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), fact, max_size=4), text)
@example({"a": "\ud83d\ude00"}, "\ud83d\ude00\n")
def test_any_facts_are_one_line_and_read_back_equal(facts: dict[str, Any], words: str) -> None:
    assume(not is_suspicious(words) and not is_suspicious(repr(facts)))  # what may be a secret is not written as it is
    refusal = RefusalEvent(facts, words, words, words, words)
    assert there_and_back(refusal) == refusal
    outcome = OutcomeEvent(3, "done", facts)
    assert there_and_back(outcome) == outcome


def test_naughty_strings_are_one_line_each_and_read_back_equal(evaluation_file: Callable[[str], Path]) -> None:
    strings = json.loads(evaluation_file("blns.json").read_text("utf-8"))
    assert len(strings) > 400
    for string in strings:
        event = Intent({"argv": [string], "raw": string.encode("utf-8", "surrogatepass")}, string, string, string)
        assert there_and_back(event) == event


def test_a_long_text_is_cut_and_its_length_and_digest_are_kept() -> None:
    whole = "é" * 1_000_000
    event = there_and_back(OutcomeEvent(1, "done", {"argument": whole, "short": "kept"}))
    assert isinstance(event, OutcomeEvent)
    cut = Cut("é" * LONGEST_TEXT, 2_000_000, hashlib.sha256(whole.encode()).hexdigest())
    assert event.facts == {"argument": cut, "short": "kept"}
    longest = OutcomeEvent(1, "done", {"argument": "a" * LONGEST_TEXT})
    assert there_and_back(longest) == longest


def test_a_field_of_many_small_values_is_cut_and_the_others_are_kept() -> None:
    event = there_and_back(Intent({"argv": ["word"] * 100_000}, "digest", "policy", "rule"))
    assert isinstance(event, Intent) and isinstance(event.action, Cut)
    assert (event.digest, event.policy, event.rule) == ("digest", "policy", "rule")


def test_long_bytes_are_cut_too() -> None:
    event = there_and_back(OutcomeEvent(1, "done", {"raw": b"\xff" * 10_000}))
    assert isinstance(event, OutcomeEvent)
    cut: object = event.facts["raw"]
    assert cut == Cut("\udcff" * LONGEST_TEXT, 10_000, hashlib.sha256(b"\xff" * 10_000).hexdigest())


def test_a_torn_event_reads_back() -> None:
    assert there_and_back(Torn(1, 2, "x")) == Torn(1, 2, "x")


@pytest.mark.parametrize(
    "facts", [{"$cut": 1}, {"a b": 1}, {"": 1}, {"a": float("nan")}, {"a": 2**64}, {"a": object()}, {"a": {"$text": "00"}}]
)
def test_facts_that_could_be_mistaken_for_something_else_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fact"):
        encode(1, 0.0, "0" * 64, OutcomeEvent(1, "done", facts), SEAL)


@given(st.data())
def test_changing_any_byte_of_a_line_is_noticed(data: st.DataObject) -> None:
    """Without the key: any before the seal itself."""
    line = encode(1, 0.0, "0" * 64, intent("x"), SEAL)[0][:-1]
    place, byte = data.draw(st.integers(0, line.index(b'"$seal":"') + 8)), data.draw(st.integers(0, 255))
    changed = line[:place] + bytes([byte]) + line[place + 1 :]
    if changed != line:
        with pytest.raises(ValueError, match=r"entry|hash"):
            decode(changed)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(-1e18, 1e18)
    | st.text(st.characters(max_codepoint=127), max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain, max_size=4))
@example({"deep": {"list": [1, "a", None, [True, 1.5, {}]], "empty": []}, "number": -0.0, "text": '\x7f"\\'})
def test_facts_with_nothing_to_replace_are_spelt_as_json_spells_them(facts: dict[str, Any]) -> None:
    assume(not is_suspicious(repr(facts)))
    event = OutcomeEvent(3, "done", facts)
    expected = json.dumps(vars(event), separators=(",", ":")).replace("\x7f", "\\u007f")
    assert spell(event) == f'"kind":"outcome","event":{expected}'


@pytest.mark.parametrize("name", [1, 1.0, True, None])
def test_a_name_that_is_no_text_is_refused_also_after_the_same_as_text(name: object) -> None:
    spell(OutcomeEvent(1, "done", {"true": 1, "None": 1}))
    with pytest.raises(ValueError, match="fact"):
        spell(OutcomeEvent(1, "done", {"inner": {name: 1}}))  # type: ignore[dict-item]


def test_the_last_line_is_placed_without_looking_at_those_before() -> None:
    lines = [encode(number, 0.0, "0" * 64, intent("x"), SEAL)[0] for number in (1, 2)]
    assert last_place(b"".join(lines), SEAL) == place(lines[1][:-1])
    assert last_place(b"the end of a line\n" + lines[0], SEAL) == place(lines[0][:-1])
    assert last_place(lines[0], SEAL) is None, "it may have begun earlier"
    assert last_place(b"\n" + lines[0], Seal(b"another")) is None


@given(st.data())
def test_a_last_line_with_any_byte_changed_has_no_place(data: st.DataObject) -> None:
    line = b"\n" + encode(1, 0.0, "0" * 64, intent("x"), SEAL)[0]
    at, byte = data.draw(st.integers(1, len(line) - 1)), data.draw(st.integers(0, 255))
    changed = line[:at] + bytes([byte]) + line[at + 1 :]
    assert last_place(changed, SEAL) is None or changed == line
    assert last_place(line[:at], SEAL) is None, "nor has one that is cut"
