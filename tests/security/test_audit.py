"""The record: nothing that is recorded acts on who reads it, nothing done to it stays unseen, and what cannot be recorded is not done."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.chain import closed, entries
from agent_sandbox.ledger.event import Intent
from agent_sandbox.ledger.verify import Evidence, evidence, examine
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.model import locked
from tests.e2e.program import Shell
from tests.ledger.samples import exit_code, filled, in_child, intent, ledger_at, read
from tests.security.conftest import Tell
from tests.security.harness import case

pytestmark = pytest.mark.once

HOSTILE = ("a\nb", "a\r\x1b[2Kb", 'x"},"$hash":"0', "\u202egnp.exe", "\u2028", "é" * 300_000, "\udcff\udc80", "'; DROP --", "\x7f")


@case(107)
def test_whatever_a_field_holds_is_one_record_that_reads_back(number: int, tmp_path: Path, tell: Tell) -> None:
    random, ledger = Random(107), ledger_at(tmp_path / "ledger")
    noise = ["".join(chr(random.randrange(0x110000)) for _ in range(random.randrange(40))) for _ in range(300)]
    texts = [*HOSTILE, *noise]
    for text in texts:
        ledger.record(Intent({"kind": "RunCommand", "argv": [text], "raw": text.encode("utf-8", "surrogatepass")}, text, text, text))
    lines = Path(ledger.path).read_bytes().splitlines()
    assert len(lines) == len(texts) and all(0x20 <= byte < 0x7F for line in lines for byte in line)
    back = [entry.event.digest for entry in read(ledger.path) if isinstance(entry.event, Intent)]
    assert [text for text, same in zip(texts, back, strict=True) if len(text) < 4096 and same != text] == []
    tell("one line of printable ASCII each, and equal when read", control="a field longer than is kept has its length and digest instead")


@case(108)
def test_what_log_shows_is_printable(number: int, project: Path, tmp_path: Path, tell: Tell) -> None:
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "TERM": "xterm"})
    ledger = Ledger(tmp_path / "state/ledger.jsonl", clock=lambda: 1.5)
    for text in HOSTILE:
        ledger.record(Intent({"kind": "RunCommand", "argv": ["echo", text]}, "", "", ""))
    shown = shell("log").stdout.decode()
    assert len(shown.splitlines()) == len(HOSTILE) and shown.replace("\n", "").isprintable()
    assert any(not text.isprintable() for text in HOSTILE)
    tell("escaped, one line for each entry", control="what was recorded holds escape sequences, line ends and direction marks")


@case(110)
@pytest.mark.parametrize("how", ["edited", "reordered", "duplicated", "spliced"])
def test_a_record_that_was_worked_on_fails_at_the_first_bad_number(number: int, tmp_path: Path, tell: Tell, how: str) -> None:
    ledger, other = filled(tmp_path / "ledger", 8), filled(tmp_path / "other", 1)
    for note in range(7):
        other.record(intent(f"another session {note}"))
    lines, theirs = (Path(each.path).read_bytes().splitlines(keepends=True) for each in (ledger, other))
    changed = {
        "edited": [*lines[:4], lines[4].replace(b'"4"', b'"5"'), *lines[5:]],
        "reordered": [*lines[:4], lines[5], lines[4], *lines[6:]],
        "duplicated": [*lines[:4], lines[3], *lines[4:]],
        "spliced": [*lines[:4], theirs[4], *lines[5:]],
    }[how]
    Path(ledger.path).write_bytes(b"".join(changed))
    fault = examine(ledger.path, evidence(ledger.keys)).fault
    assert "entry 5" in fault
    Path(ledger.path).write_bytes(b"".join(lines))
    assert examine(ledger.path, evidence(ledger.keys)).complete
    tell(fault, control="as it was, it is intact and complete")


@case(111)
def test_a_past_written_anew_with_right_hashes_fails(number: int, tmp_path: Path, tell: Tell) -> None:
    ledger, forged = filled(tmp_path / "here/ledger", 5), filled(tmp_path / "there/ledger", 9)
    shutil.copy(forged.path, ledger.path)
    assert examine(ledger.path, Evidence()).intact
    report = examine(ledger.path, evidence(ledger.keys))
    assert "not written with this key" in report.fault
    shutil.copy(Path(forged.keys, "key"), Path(ledger.keys, "key"))  # and the key of the forger in the place of ours
    assert "anchor was not written with this key" in examine(ledger.path, evidence(ledger.keys)).fault
    with pytest.raises(LedgerBroken):
        ledger_at(Path(ledger.path)).record(intent())
    tell("its seals are of another key; with that key put there as well, the anchor is", control="by its hashes alone it is intact")


@pytest.mark.both
@case(113)
@pytest.mark.parametrize("failing", ["write", "anchor", "fsync"])
def test_what_cannot_be_recorded_is_not_done(
    number: int, tmp_path: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    ledger = filled(tmp_path / "ledger", 2)
    gate = Gate(locked(processes=True), ledger, clock=lambda: 1.5)
    done: list[str] = []

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, {"write": "write", "anchor": "pwrite", "fsync": "fsync"}[failing], fails)
        with pytest.raises(LedgerUnavailable):
            if failing == "fsync":
                ledger.record(intent(), lasting=True)
            gate.perform(RunCommand.of(["true"]), lambda _: done.append("unrecorded"))
    assert done == []
    gate.perform(RunCommand.of(["true"]), lambda _: done.append("recorded"))
    report = examine(ledger.path, evidence(ledger.keys))
    assert done == ["recorded"] and report.intact and report.complete
    tell("refused, nothing was done, and the chain goes on", control="when the disk works again, it is done and recorded")


_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # of linux/fs.h


@contextmanager
def _immutable(path: Path) -> Iterator[None]:
    """A file that not even root can write, for the length of the block."""
    file = os.open(path, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(file, _GET_FLAGS, bytes(8)), "little")
        fcntl.ioctl(file, _SET_FLAGS, (flags | _IMMUTABLE).to_bytes(8, "little"))
    except OSError as error:
        os.close(file)
        pytest.skip(f"no immutable files here: {error}")
    try:
        yield
    finally:
        fcntl.ioctl(file, _SET_FLAGS, flags.to_bytes(8, "little"))
        os.close(file)


@case(113)
@pytest.mark.needs_root
@pytest.mark.parametrize("which", ["ledger", "anchor"])
def test_where_the_record_cannot_be_changed_nothing_is_done(number: int, tmp_path: Path, tell: Tell, which: str) -> None:
    ledger, done = filled(tmp_path / "ledger", 2), list[str]()
    place = Path(ledger.path) if which == "ledger" else Path(ledger.keys, private_files.ANCHOR)
    gate = Gate(locked(processes=True), ledger, clock=lambda: 1.5)
    for held in (False, True):
        with _immutable(place), pytest.raises(LedgerUnavailable), ledger.held() if held else nullcontext():
            gate.perform(RunCommand.of(["true"]), lambda _: done.append("unrecorded"))
    assert done == []
    gate.perform(RunCommand.of(["true"]), lambda _: done.append("recorded"))
    assert done == ["recorded"] and examine(ledger.path, evidence(ledger.keys)).complete
    tell("refused, and nothing was done", control="when it can be written again, it is done and recorded")


@case(114)
def test_a_flood_waits_its_turn_and_nothing_is_lost(number: int, tmp_path: Path, tell: Tell) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=200_000, kept_bytes=400_000)

    def flood() -> None:
        for _ in range(20):
            ledger.record_all([intent("flood")] * 50)

    ledger.record(intent())
    assert [exit_code(pid) for pid in [in_child(flood) for _ in range(4)]] == [0] * 4
    report = examine(ledger.path, evidence(ledger.keys))
    rotated = sum(entry.event.kind == "rotated" for entry in entries(ledger.path))
    assert report.intact and report.complete and report.last >= 4001 + rotated
    disk = sum(each.size for each in closed(ledger.path)) + os.path.getsize(ledger.path)
    assert disk < 900_000
    tell(
        f"{report.last:,} entries, each waited for; {disk:,} bytes on the disk",
        control="files were closed and removed on the way, on record",
    )


@case(116)
def test_the_clock_may_jump_writers_may_be_many_and_files_may_change(number: int, tmp_path: Path, tell: Tell) -> None:
    times = iter([1e9, 5.0, 2e9, 0.0] * 100)
    one = Ledger(tmp_path / "ledger.jsonl", clock=lambda: next(times), segment_bytes=3_000)
    other = Ledger(tmp_path / "ledger.jsonl", clock=lambda: next(times), segment_bytes=3_000)
    for _ in range(20):
        one.record(intent())
        other.record(intent())
    found = list(entries(one.path))
    assert [entry.sequence for entry in found] == list(range(1, len(found) + 1))
    assert len(closed(one.path)) > 2 and any(late.time < early.time for early, late in pairwise(found))
    os.unlink(closed(one.path)[1].path)
    report = examine(one.path, evidence(one.keys))
    assert not report.intact and "missing" in report.fault
    tell("numbers go up by one through all files", control="with a file in the middle removed, the first missing number is named")


@case(116)
def test_sixteen_writers_on_machines_with_other_clocks_close_files_and_lose_nothing(number: int, tmp_path: Path, tell: Tell) -> None:
    """As on a home that several machines share: each has its own idea of the time, and some go backwards."""
    path, keys = tmp_path / "ledger.jsonl", str(tmp_path / "keys")

    def write(writer: int) -> None:
        times = (1e9 * (writer - 8) + step * (-1) ** writer for step in range(1000))
        ledger = Ledger(path, clock=lambda: next(times), keys=keys, segment_bytes=6_000)
        for note in range(12):
            ledger.record(intent(f"{writer}/{note}"))

    assert [exit_code(pid) for pid in [in_child(lambda writer=writer: write(writer)) for writer in range(16)]] == [0] * 16  # type: ignore[misc]
    found = list(entries(str(path)))
    notes = [str(entry.event.action["argv"][1]) for entry in found if isinstance(entry.event, Intent)]  # type: ignore[index]
    assert sorted(notes) == sorted(f"{writer}/{note}" for writer in range(16) for note in range(12))
    assert all(
        [note for note in notes if note.startswith(f"{writer}/")] == [f"{writer}/{note}" for note in range(12)] for writer in range(16)
    )
    report = examine(str(path), evidence(keys))
    assert report.intact and report.complete and len(closed(str(path))) > 5
    tell(f"{len(found)} entries in order through {len(closed(str(path))) + 1} files", control="their times go up and down")


def test_killing_a_writer_between_entry_and_anchor_is_no_false_alarm(tmp_path: Path) -> None:
    """The one moment in which the two differ rightly."""
    ledger = filled(tmp_path / "ledger", 2)
    before = Path(ledger.keys, private_files.ANCHOR).read_bytes()
    ledger.record(intent())
    Path(ledger.keys, private_files.ANCHOR).write_bytes(before)
    report = examine(ledger.path, evidence(ledger.keys))
    assert report.complete and report.last == 3
    assert ledger_at(Path(ledger.path)).record(intent()).sequence == 4
    assert json.loads(Path(ledger.path).read_bytes().splitlines()[-1])["seq"] == 4
