"""The chain finds what was changed, and tells a torn write from a changed entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.chain import Verified, verify
from agent_sandbox.ledger.event import OutcomeEvent, Torn
from tests.ledger.samples import as_if_it_died, filled, intent, ledger_at, read


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_an_untouched_ledger_verifies_and_an_empty_one_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 10)
    assert verify(path) == Verified(10, json.loads(lines_of(path)[-1])["$hash"], torn=0, unsealed=0)
    assert [entry.sequence for entry in read(path)] == list(range(1, 11))
    path.write_bytes(b"")
    assert verify(path).count == 0


@pytest.mark.parametrize(
    ("change", "first_bad"),
    [
        (lambda lines: [*lines[:4], lines[4].replace(b'"4"', b'"5"'), *lines[5:]], 5),
        (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], 5),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], 6),
        (lambda lines: lines[:4] + lines[5:], 5),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:4], lines[4][:50] + b"\n", *lines[5:]], 5),
        (lambda lines: [*lines[:4], lines[4][:50], *lines[5:]], 5),
        (lambda lines: [*lines[:4], b"\n", *lines[4:]], 5),
        (lambda lines: [*lines[:4], b"junk\n", *lines[4:]], 5),
    ],
    ids=["edited", "reordered", "duplicated", "removed", "head removed", "cut short", "cut and merged", "blank line", "junk between"],
)
def test_a_change_is_found_and_the_first_bad_entry_is_named(tmp_path: Path, change, first_bad: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ledger"
    filled(path, 10)
    path.write_bytes(b"".join(change(lines_of(path))))
    with pytest.raises(LedgerBroken, match=rf"entry {first_bad} "):
        verify(path)


def test_entries_of_another_ledger_do_not_fit(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    filled(one, 5)
    ledger_at(other).record(intent("another beginning"))
    filled(other, 5)
    one.write_bytes(b"".join(lines_of(one)[:3] + lines_of(other)[3:]))
    with pytest.raises(LedgerBroken, match="entry 4 "):
        verify(one)


@pytest.mark.parametrize("kept", [1, 40, -80, -2])
def test_a_torn_write_is_sealed_by_the_next_entry_and_nothing_of_it_is_lost(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "ledger"
    filled(path, 3)
    whole = lines_of(path)
    as_if_it_died(path, b"".join(whole[:2]) + whole[2][:kept])
    debris = whole[2][:kept]
    assert (verify(path).count, verify(path).unsealed) == (2, len(debris))
    ledger_at(path).record(intent("after"))
    assert (verify(path).count, verify(path).torn, verify(path).unsealed) == (4, 1, 0)
    assert debris + b"\n" in lines_of(path)
    sealed, after = list(read(path))[2:]
    assert isinstance(sealed.event, Torn) and sealed.event.length == len(debris)
    assert after.event == intent("after")


def test_an_entry_that_lacks_only_its_line_end_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 3)
    as_if_it_died(path, path.read_bytes()[:-1])
    assert verify(path).count == 3
    ledger_at(path).record(intent("after"))
    assert (verify(path).count, verify(path).torn) == (4, 0)


def test_a_seal_that_was_itself_torn_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 2)
    before = path.read_bytes() + b'{"seq":3,"ti'
    path.write_bytes(before)
    ledger_at(path).record(intent("x"))
    sealed = path.read_bytes()
    for length in range(len(before), sealed.index(b"}\n", len(before)), 7):
        as_if_it_died(path, sealed[:length])
        ledger_at(path).record(intent("y"))
        assert (verify(path).count, verify(path).torn) == (4, 1), length


def test_no_fact_can_make_a_torn_write_look_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = filled(path, 1)
    ledger.record(OutcomeEvent(1, "done", {"argument": f',"$hash":"{"0" * 64}"}}', "hash": "0" * 64}))
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    for place in range(start, len(content) - 1):
        if content[place : place + 1] == b"}":
            as_if_it_died(path, content[: place + 1])
            ledger_at(path).record(intent("after"))
            assert verify(path).count == 3


def test_a_torn_first_entry_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b'{"seq":1,')
    ledger_at(path).record(intent())
    assert (verify(path).count, verify(path).torn) == (2, 1)


@pytest.mark.parametrize("junk", [b"\0" * 100_000, b"x" * 100_000, b"\n", b"{}\n{}\n"])
def test_whatever_a_power_cut_leaves_behind_is_sealed(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "ledger"
    filled(path, 2)
    path.write_bytes(path.read_bytes() + junk)
    ledger_at(path).record(intent())
    assert (verify(path).count, verify(path).torn) == (4, 1)
    assert junk in path.read_bytes()


def test_changing_what_was_sealed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 2)
    path.write_bytes(path.read_bytes() + b"torn")
    ledger_at(path).record(intent())
    path.write_bytes(path.read_bytes().replace(b"torn\n", b"tOrn\n"))
    with pytest.raises(LedgerBroken, match="entry 3 "):
        verify(path)


def test_removing_what_was_sealed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 2)
    path.write_bytes(path.read_bytes() + b"torn")
    ledger_at(path).record(intent())
    path.write_bytes(path.read_bytes().replace(b"torn\n", b""))
    with pytest.raises(LedgerBroken, match="entry 3 seals"):
        verify(path)


def test_a_changed_last_entry_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    filled(path, 3)
    path.write_bytes(path.read_bytes().replace(b'"2"]', b'"9"]'))
    with pytest.raises(LedgerBroken, match="was changed"):
        ledger_at(path).record(intent())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_flipping_any_byte_is_found_or_leaves_every_entry_as_it_was(tmp_path: Path, place: int, flip: int) -> None:
    """By the hashes alone. A change in the last line can look like a torn write, and one in a seal shows to who has the key."""
    path = tmp_path / "ledger"
    if not path.exists():
        filled(path, 6)
    whole = path.read_bytes()
    before = [entry.event for entry in read(path)]
    changed = tmp_path / "changed"
    changed.unlink(missing_ok=True)
    content = bytearray(whole)
    content[place % len(content)] ^= flip
    changed.write_bytes(content)
    try:
        verified = verify(changed)
    except LedgerBroken:
        return
    assert verified.count == 6 or (verified.count == 5 and verified.unsealed > 0)
    assert [entry.event for entry in read(changed)] == before[: verified.count]


def test_an_entry_of_another_version_is_not_said_to_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(tmp_path / "ledger", 2)
    monkeypatch.setattr(OutcomeEvent, "kind", "of tomorrow")
    ledger.record(OutcomeEvent(1, "done"))
    with pytest.raises(LedgerBroken, match="entry 3 was written by another version"):
        verify(ledger.path)
