"""What init counts of the machine's shared counters, compared with what was really taken."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agent_sandbox.kernel import counters, probes
from agent_sandbox.kernel.counters import CounterWatch
from agent_sandbox.kernel.socket_memory import ALL, SocketMeter

KEEP = "import os, sys\nkept = [os.open('/dev/null', 0) for _ in range(500)]\nprint(flush=True)\nsys.stdin.read()"


def test_what_is_in_sockets_is_measured() -> None:
    here, there = socket.socketpair()
    with closing(SocketMeter(ALL)) as meter, here, there:
        if meter.unseen():
            pytest.skip(f"this kernel does not tell: {meter.unseen()}")
        before = meter.measure()
        here.send(bytes(100_000))
        assert meter.measure() - before > 50_000, "others may have read some of theirs meanwhile"
    assert probes.socket_buffers().worked


def test_the_files_of_a_process_are_counted_and_no_more_than_needed() -> None:
    with subprocess.Popen([sys.executable, "-c", KEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert counters._descriptors(f"/proc/{process.pid}/fd") >= 500
        assert 0 < counters._mapped_files(f"/proc/{process.pid}", 1 << 20) < 500
        assert counters.open_files("/proc", enough=1 << 40) >= 500
        assert process.stdin is not None
        process.stdin.close()


def test_mappings_without_a_descriptor_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE))
    before = counters._mapped_files("/proc/self", 1 << 20)
    with open(tmp_path / "file", "rb") as file:
        kept = [mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for _ in range(100)]
    try:
        assert counters._mapped_files("/proc/self", 1 << 20) >= before + 50  # neighbours of the same file may be joined
    finally:
        for each in kept:
            each.close()


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
