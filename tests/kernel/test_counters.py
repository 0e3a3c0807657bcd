"""What init counts of the machine's shared counters, compared with what was really taken."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from contextlib import closing
from math import inf
from pathlib import Path

import pytest

from agent_sandbox.kernel import counters, probes, syscalls, usage
from agent_sandbox.kernel.counters import CounterWatch
from agent_sandbox.kernel.socket_memory import ALL, SocketMeter
from agent_sandbox.kernel.syscall_rules import numbers

KEEP = "import os, sys\nkept = [os.open('/dev/null', 0) for _ in range(500)]\nprint(flush=True)\nsys.stdin.read()"
# Its first thread ends, and another one goes on.
KEEP_BEHIND = """
import ctypes, os, sys, threading
kept = [os.open('/dev/null', 0) for _ in range(500)]
first = threading.main_thread().native_id
def tell():
    while ") Z " not in open(f"/proc/self/task/{first}/stat").read(): pass
    print(flush=True); sys.stdin.read(); os._exit(0)
threading.Thread(target=tell).start()
ctypes.CDLL(None).syscall(EXIT, 0)
""".replace("EXIT", str(numbers(syscalls.MACHINE)["exit"]))
NO_FILE = {b"00:00"}


def test_what_is_in_sockets_is_measured() -> None:
    here, there = socket.socketpair()
    with closing(SocketMeter(ALL)) as meter, here, there:
        if meter.unseen():
            pytest.skip(f"this kernel does not tell: {meter.unseen()}")
        before = meter.measure()
        here.send(bytes(100_000))
        assert meter.measure() - before > 50_000, "others may have read some of theirs meanwhile"
    assert probes.socket_buffers().worked


@pytest.mark.parametrize("program", [KEEP, KEEP_BEHIND], ids=["first thread", "another thread"])
def test_the_files_of_a_process_are_counted_and_no_more_than_needed(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        there = f"/proc/{process.pid}"
        assert usage.read_live(there, counters._descriptors, nothing=0, hidden=0) >= 500
        assert 0 < usage.read_live(there, _mapped_in, nothing=0, hidden=0) < 500
        assert counters.open_files("/proc", enough=1 << 40) >= 500
        assert process.stdin is not None
        process.stdin.close()


def _mapped_in(directory: str, *, until: float = inf) -> int | None:
    return counters._mapped_files(directory, uncounted=NO_FILE, enough=1 << 20, until=until, most=1 << 20)


def _mapped(*, until: float = inf) -> int:
    return _mapped_in("/proc/self", until=until) or 0


def test_a_process_whose_threads_follow_one_another_counts_as_hidden_and_one_that_ends_does_not(tmp_path: Path) -> None:
    """The first is a chain of threads, each of which starts the next and ends. Here none of them is ever there to be read."""
    (tmp_path / "task/9").mkdir(parents=True)

    def chain(directory: str) -> None:
        threads = tmp_path / "task"
        (threads / str(9 + len(list(threads.iterdir())))).mkdir()

    for state, threads, read, expected in (
        ("Z", 2, chain, "hidden"),
        ("Z", 2, lambda directory: None, "nothing"),  # they end, and no other begins
        ("Z", 1, chain, "nothing"),
        ("S", 2, chain, "nothing"),
    ):
        (tmp_path / "stat").write_text(f"8 (x) {state} 1 1 1 0 -1 0 9 9 9 9 1 2 3 4 20 0 {threads} 0 777 10 10")
        assert usage.read_live(str(tmp_path), read, nothing="nothing", hidden="hidden") == expected
    assert usage.read_live(str(tmp_path / "gone"), chain, nothing="nothing", hidden="hidden") == "nothing"


ENDS = "import os, threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nos._exit(0)"


def test_a_process_that_ends_with_all_its_threads_is_not_taken_for_one_that_hides() -> None:
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", ENDS]) as process:
            while process.poll() is None:
                assert usage.read_live(f"/proc/{process.pid}", usage._process_memory, nothing=(0, 0, 0), hidden=None) is not None


@pytest.mark.parametrize("name", ["file", "x 00:00 0 00:00 0 00:00 0", "x\n7f0 r--p 0 00:00 0\n"])
def test_mappings_without_a_descriptor_are_counted_whatever_the_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    before = _mapped()
    with open(tmp_path / name, "rb") as file:
        kept = [mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for _ in range(100)]
    try:
        assert before + 50 <= _mapped() <= before + 150  # the C library may load something meanwhile
    finally:
        for each in kept:
            each.close()


def test_mappings_that_take_too_long_to_read_are_estimated_on_the_high_side() -> None:
    assert _mapped(until=0.0) > 2 * _mapped()


def test_descriptors_that_cannot_be_listed_are_estimated_on_the_high_side(tmp_path: Path) -> None:
    """As before Linux 6.2, for a process that made itself unreadable."""
    (tmp_path / "status").write_text("Name:\tx\nFDSize:\t256\nThreads:\t1\n")
    assert counters._descriptors(str(tmp_path)) == 256
    assert counters._descriptors(str(tmp_path / "gone")) is None


def test_devices_of_overlays_are_read_as_maps_writes_them(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    rows = (
        "76 45 0:42 / / rw,nosuid - overlay overlay rw",
        "77 76 0:46 / /tmp rw shared:1 - tmpfs overlay rw",
        r"78 76 0:300 / /a\040-\040b rw - overlay x rw",
    )
    (tmp_path / "self/mountinfo").write_text("\n".join(rows))
    assert counters._overlays(str(tmp_path)) == {b"00:2a", b"00:12c"}
    assert counters._overlays(str(tmp_path / "none")) == set()


def _proc(top: Path, *, files: int, most: int, used: int, orphans: int) -> str:
    (top / "net").mkdir(parents=True)
    (top / "sys/fs").mkdir(parents=True)
    (top / "sys/fs/file-nr").write_text(f"{files}\t0\t{most}\n")
    (top / "net/sockstat").write_text(f"sockets: used {used}\nTCP: inuse 0 orphan {orphans} tw 0 alloc 1 mem 1\n")
    return str(top)


def test_the_machine_is_blamed_on_no_run_that_holds_little(tmp_path: Path) -> None:
    """Of this proc, no process holds anything; all files and orphans are other people's."""
    proc = _proc(tmp_path, files=900, most=1000, used=2, orphans=1 << 20)
    with closing(CounterWatch(memory=None, alone=False, proc=proc)) as watch:
        assert watch.look() == ""
        assert watch.interval >= counters.TICK


def test_a_count_is_repeated_when_the_machine_has_more_files_and_else_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = _proc(tmp_path, files=0, most=1280, used=1, orphans=0)
    counts: list[int] = []

    def count(proc: str, *, enough: int) -> int:
        counts.append(enough)
        return 0

    monkeypatch.setattr(counters, "open_files", count)
    monkeypatch.setattr(counters, "_PAUSE", 1 << 40)
    with closing(CounterWatch(memory=None, alone=False, proc=proc)) as watch:
        for files, total in ((320, 0), (321, 1), (321, 1), (331, 1), (332, 2), (332, 2)):
            Path(proc, "sys/fs/file-nr").write_text(f"{files}\t0\t1280\n")
            assert (watch.look(), len(counts)) == ("", total), files
        monkeypatch.setattr(counters, "_PAUSE", 0)
        watch._files_due = 0.0
        assert (watch.look(), watch.look(), len(counts)) == ("", "", 4)


def test_an_idle_run_is_looked_at_rarely(tmp_path: Path) -> None:
    watch = CounterWatch(memory=1 << 20, alone=False, proc=_proc(tmp_path, files=10, most=1000, used=1, orphans=0))
    assert (watch.look(), watch.interval) == ("", counters.QUIET_TICK)


def test_netlink_that_nobody_reads_is_memory(tmp_path: Path) -> None:
    proc = _proc(tmp_path, files=10, most=1000, used=2, orphans=0)
    head = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n"
    table = Path(proc, "net/netlink")
    for each, verdict in ((1000, ""), (counters.MOST_NETLINK_BYTES, "memory")):
        table.write_text(head + f"0 0 1 00000000 {each} 0 0 2 0 1\n0 0 2 00000000 1 0 0 2 0 2\n")
        assert CounterWatch(memory=None, alone=False, proc=proc).look() == verdict
