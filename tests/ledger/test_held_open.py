"""Files that are kept open change nothing but the time it takes."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.chain import closed, entries
from agent_sandbox.ledger.verify import evidence, examine
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import exit_code, filled, in_child, intent, ledger_at, notes_in, write_many
from tests.patience import stretched


def whole(ledger: Ledger) -> bool:
    report = examine(ledger.path, evidence(ledger.keys))
    return report.intact and report.complete is True


def test_what_is_recorded_is_the_same_and_nothing_stays_open(tmp_path: Path) -> None:
    ledger, before = filled(tmp_path / "ledger", 1), os.listdir("/proc/self/fd")
    with ledger.held():
        assert len(os.listdir("/proc/self/fd")) == len(before) + 2
        assert [ledger.record(intent()).sequence for _ in range(5)] == [2, 3, 4, 5, 6]
        assert ledger.record(intent(), lasting=True).sequence == 7
    assert ledger.record(intent()).sequence == 8
    assert os.listdir("/proc/self/fd") == before and whole(ledger)


def test_a_ledger_that_has_no_entry_yet_is_begun_all_the_same(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    with ledger.held():
        ledger.record(intent())
    assert whole(ledger)


def test_others_write_in_between(tmp_path: Path) -> None:
    ledger, other = filled(tmp_path / "ledger", 1), ledger_at(tmp_path / "ledger")
    with ledger.held():
        assert [each.record(intent()).sequence for each in (ledger, other, other, ledger)] == [2, 3, 4, 5]
    assert whole(ledger)


@pytest.mark.parametrize("who", ["this one", "another"])
def test_it_goes_on_in_the_next_file_when_one_is_closed(tmp_path: Path, who: str) -> None:
    ledger, other = (Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=2_000) for _ in range(2))
    ledger.record(intent())
    with ledger.held():
        for _ in range(20):
            ledger.record(intent())
            if who == "another":
                other.record(intent())
    assert len(closed(ledger.path)) > 2 and whole(ledger)


def test_a_ledger_that_is_moved_away_is_begun_anew(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    with ledger.held():
        os.rename(ledger.path, tmp_path / "old")
        assert ledger.record(intent()).sequence == 5
        assert ledger.record(intent()).sequence == 6
    assert [entry.event.kind for entry in entries(ledger.path)] == ["gap", "intent", "intent"]
    assert len((tmp_path / "old").read_bytes().splitlines()) == 3, "nothing was written there"


def test_a_ledger_that_is_cut_meanwhile_is_not_continued(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    with ledger.held():
        os.truncate(ledger.path, 100)
        with pytest.raises(LedgerBroken, match="lost its end"):
            ledger.record(intent())


@pytest.mark.parametrize("part", [b"outsider", b'"seq":4'])
def test_what_another_has_written_is_not_continued_once_it_was_changed(tmp_path: Path, part: bytes) -> None:
    ledger, other = filled(tmp_path / "ledger", 3), ledger_at(tmp_path / "ledger")
    with ledger.held():
        other.record(intent("outsider"))
        content = Path(ledger.path).read_bytes()
        assert content.count(part) == 1
        with open(ledger.path, "r+b") as file:  # in place: the held file is the same one
            file.write(content.replace(part, part[:-1] + b"7"))
        with pytest.raises(LedgerBroken, match="was changed"):
            ledger.record(intent())
        with open(ledger.path, "r+b") as file:
            file.write(content)
        assert ledger.record(intent()).sequence == 5
    assert whole(ledger)


def test_a_forked_child_shares_neither_lock_nor_files(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1)
    with ledger.held():
        open_here = set(os.listdir("/proc/self/fd"))

        def look_and_write() -> None:
            assert len(open_here - set(os.listdir("/proc/self/fd"))) >= 2
            write_many(ledger, 1, 50)

        children = [in_child(look_and_write) for _ in range(3)]
        for _ in range(50):
            ledger.record(intent())
        assert [exit_code(pid) for pid in children] == [0, 0, 0]
    assert whole(ledger) and sum(1 for _ in entries(ledger.path)) == 201


def test_a_holder_that_is_killed_while_its_child_lives_leaves_no_lock(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1)
    reader, writer = os.pipe()

    def hold_and_fork() -> None:
        with ledger.held():
            if os.fork() == 0:
                signal.pause()
            os.write(writer, b"%d" % os.getpgid(0))
            while True:
                ledger.record(intent())

    def in_a_group() -> None:
        os.setpgid(0, 0)
        hold_and_fork()

    holder = in_child(in_a_group)
    group = int(os.read(reader, 20))
    os.kill(holder, signal.SIGKILL)
    exit_code(holder)
    try:
        ledger_at(tmp_path / "ledger").record(intent("would wait for ever"))
    finally:
        os.killpg(group, signal.SIGKILL)
        os.close(reader)
        os.close(writer)
    assert whole(ledger)


@pytest.mark.parametrize("held", [True, False])
def test_who_finds_the_lock_taken_for_long_sleeps_until_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    ledger, asleep, flock = filled(tmp_path / "ledger", 1), threading.Event(), fcntl.flock

    def tell(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:  # may wait
            asleep.set()
        flock(descriptor, operation)

    with open(ledger.path, "rb") as taken, ledger.held() if held else nullcontext():
        flock(taken, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", tell)
        thread = threading.Thread(target=partial(write_many, ledger, 1, 1))
        thread.start()
        assert asleep.wait(stretched(60)) and len(notes_in(ledger.path)) == 1
        flock(taken, fcntl.LOCK_UN)
        thread.join()
    assert whole(ledger) and len(notes_in(ledger.path)) == 2


def test_threads_take_turns(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1)
    with ledger.held():
        threads = [threading.Thread(target=partial(write_many, ledger, name, 50)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert whole(ledger) and sum(1 for _ in entries(ledger.path)) == 401
