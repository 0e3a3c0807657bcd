"""What is recorded is written when `record` returns; what cannot be written is said."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger.chain import verify
from agent_sandbox.ledger.event import Gap
from agent_sandbox.ledger.verify import evidence, examine
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import exit_code, filled, in_child, intent, ledger_at, notes_in, read, write_many


def test_an_entry_is_in_the_file_when_record_returns(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    for number in range(3):
        entry = ledger.record(intent(str(number)))
        assert list(read(ledger.path))[-1] == entry
        assert (entry.sequence, entry.time) == (number + 1, 1.5)


def test_missing_directories_are_made_for_this_user_only(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "state" / "deep" / "ledger")
    ledger.record(intent())
    path = Path(ledger.path)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    filled(tmp_path / "ledger", 3)
    assert os.listdir("/proc/self/fd") == before


def test_a_ledger_that_was_moved_away_is_begun_anew_and_says_what_is_missing(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    os.rename(ledger.path, tmp_path / "old")
    assert ledger.record(intent()).sequence == 5
    gap, after = read(ledger.path)
    assert isinstance(gap.event, Gap) and (gap.sequence, gap.event.last, after.sequence) == (4, 3, 5)
    assert verify(tmp_path / "old").count == 3


def test_a_ledger_that_lost_its_end_is_not_written_to(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    lines = Path(ledger.path).read_bytes().splitlines(keepends=True)
    Path(ledger.path).write_bytes(b"".join(lines[:2]))
    with pytest.raises(LedgerBroken, match="lost its end"):
        ledger.record(intent())


@pytest.mark.parametrize("obstacle", ["directory", "symlink", "fifo", "parent is a file", "long name"])
def test_what_is_no_file_is_unavailable(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "ledger"
    match obstacle:
        case "directory":
            path.mkdir()
        case "symlink":
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "parent is a file":
            path.write_text("")
            path = path / "ledger"
        case "long name":
            path = tmp_path / ("x" * 300)
    with pytest.raises(LedgerUnavailable, match="cannot be written") as refusal:
        ledger_at(path).record(intent())
    assert refusal.value.hint
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    def try_it() -> None:
        if os.geteuid() == 0:  # root may write anywhere; nobody may not
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(LedgerUnavailable, match="Permission denied"):
            ledger_at(tmp_path / "ledger").record(intent())

    assert exit_code(in_child(try_it)) == 0
    tmp_path.chmod(0o700)
    assert ledger_at(tmp_path / "ledger").record(intent()).sequence == 1


def test_a_file_that_may_not_grow_is_unavailable_and_goes_on_when_it_may(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 10)
    size = os.stat(ledger.path).st_size

    def fill_up() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for _ in range(2):
            with pytest.raises(LedgerUnavailable, match="File too large"):
                ledger.record(intent())

    assert exit_code(in_child(fill_up)) == 0
    assert (verify(ledger.path).count, verify(ledger.path).unsealed) == (10, 100)
    ledger.record(intent())
    assert (verify(ledger.path).count, verify(ledger.path).torn) == (12, 1)


@pytest.mark.needs_root
def test_a_full_disk_is_unavailable_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        ledger = ledger_at(tmp_path / "ledger")
        with pytest.raises(LedgerUnavailable, match="No space left"):
            for _ in range(1000):
                ledger.record(intent("x" * 100))
        count = verify(ledger.path).count
        assert count > 50
        with pytest.raises(LedgerUnavailable, match="No space left"):
            ledger.record(intent())
        subprocess.run(["mount", "-o", "remount,size=256k", tmp_path], check=True)
        ledger.record(intent())
        verified = verify(ledger.path)
        assert verified.count == count + 1 + verified.torn
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.needs_root
def test_a_read_only_disk_is_unavailable(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,ro", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(LedgerUnavailable, match="Read-only"):
            ledger_at(tmp_path / "ledger").record(intent())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_many_processes_append_at_once_and_no_entry_is_lost(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1)  # the very object is used on both sides of the fork
    writers = [in_child(partial(write_many, ledger, name, 500)) for name in range(8)]
    assert [exit_code(pid) for pid in writers] == [0] * 8
    assert verify(ledger.path).count == 4001
    notes = notes_in(ledger.path)[1:]
    for name in range(8):
        assert [note for note in notes if note.startswith(f"{name}/")] == [f"{name}/{number}" for number in range(500)]


def test_many_threads_append_at_once_and_no_entry_is_lost(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    threads = [threading.Thread(target=lambda: [ledger.record(intent()) for _ in range(100)]) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(ledger.path).count == 1600


@pytest.mark.parametrize("round", range(5))
def test_writers_that_are_killed_leave_a_ledger_that_verifies_and_can_be_continued(tmp_path: Path, round: int) -> None:
    """Each writer says what it has recorded, after `record` returned. All of that must be there."""
    ledger = ledger_at(tmp_path / "ledger")
    reader, writer = os.pipe()
    children = [in_child(partial(write_many, ledger, name, 1_000_000, writer)) for name in range(6)]
    os.close(writer)
    said = b""
    while said.count(b"\n") < 200 * (round + 1):  # the writers are in full swing, and die wherever they happen to be
        said += os.read(reader, 65536)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert {exit_code(pid) for pid in children} == {-signal.SIGKILL}
    while chunk := os.read(reader, 65536):
        said += chunk
    os.close(reader)
    verify(ledger.path)
    ledger.record(intent("after"))
    notes = notes_in(ledger.path)
    assert set(said.decode().splitlines()) <= set(notes)
    assert notes[-1] == "after"


def test_a_file_that_has_the_number_of_a_removed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """Files are closed and removed between two entries of one writer, and inodes are used again."""
    idle, busy = (Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=1_000, kept_bytes=1) for _ in range(2))
    inodes = set[int]()
    for number in range(500):
        idle.record(intent("idle"))
        inodes.add(os.stat(idle.path).st_ino)
        for _ in range(2 + number % 7):
            busy.record(intent("busy"))
        if number >= 19 and len(inodes) <= number:
            break
    else:
        pytest.skip("this filesystem uses no number again")
    report = examine(idle.path, evidence(idle.keys))
    assert report.intact and report.complete
