"""What the watcher counts where there is no cgroup, on real processes and on hostile input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.kernel import usage
from agent_sandbox.kernel.usage import UNCOUNTABLE, disk_bytes, parse_stat

# Fields 3 to 22 of proc_pid_stat(5): utime 100, stime 20, cutime 3, cstime 4, 5 threads, started at 777.
REST = b" S 1 1 1 0 -1 4194560 9 9 9 9 100 20 3 4 20 0 5 0 777 10 10"


def in_a_pid_namespace(script: str) -> str:
    """What a script prints that runs as the first process of a pid namespace with a /proc of its own, as init does."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--pid", "--ipc", "--fork", "--mount", "--mount-proc", sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare: " in done.stderr:
        pytest.skip(f"no pid namespace to be had here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import os, signal, sys, time
from agent_sandbox.kernel import usage

def start(work):
    'A child that does its work, says so and then waits for the end.'
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        kept = work()
        os.write(writing, b'x')
        signal.pause()
    assert os.read(reading, 1) == b'x'
    return child

def spin(seconds=0.2):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@given(st.binary(max_size=64).filter(lambda name: b"\0" not in name))
def test_no_name_of_a_process_can_disturb_the_numbers(name: bytes) -> None:
    stat = parse_stat(b"42 (" + name + b")" + REST)
    assert (stat.pid, stat.own_ticks, stat.reaped_ticks, stat.threads, stat.started) == (42, 120, 7, 5, 777)


@given(st.binary(max_size=200))
def test_what_is_no_stat_is_a_value_error_and_nothing_else(content: bytes) -> None:
    try:
        parse_stat(content)
    except ValueError:
        return


def test_cpu_time_of_live_and_reaped_processes_counts_once() -> None:
    script = """
child = start(spin)
alive = usage.CpuMeter().seconds()
end(child)
print(alive, usage.CpuMeter().seconds())
"""
    alive, reaped = (float(word) for word in in_a_pid_namespace(script).split())
    assert 0.15 < alive < 0.35
    assert abs(reaped - alive) < 0.05


def test_time_of_a_process_whose_parent_ignores_its_end_is_remembered_by_the_meter() -> None:
    script = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
meter = usage.CpuMeter()
child = start(spin)
meter.seconds()
os.kill(child, signal.SIGKILL)
while os.path.exists(f'/proc/{child}'): pass
print(usage.CpuMeter().seconds(), meter.seconds())
"""
    forgotten, remembered = (float(word) for word in in_a_pid_namespace(script).split())
    assert forgotten < 0.1 < 0.15 < remembered < 0.35


def test_memory_is_what_the_guest_holds_and_shared_pages_count_once() -> None:
    script = """
import mmap
def hold():
    block = mmap.mmap(-1, 64 << 20)   # shared with whoever is forked from here
    for page in range(0, len(block), 4096): block[page] = 1
    start(lambda: [block[page] for page in range(0, len(block), 4096)])
    return block
before = usage.memory_bytes()
start(hold)
print(before, usage.memory_bytes())
"""
    before, after = (int(word) for word in in_a_pid_namespace(script).split())
    assert before == 0
    assert 64 << 20 <= after < 100 << 20


def test_a_process_that_makes_itself_unreadable_is_counted_all_the_same() -> None:
    script = """
from agent_sandbox.kernel import syscalls
def hide():
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    return bytearray(b'x') * (32 << 20)
child = start(hide)
syscalls.capset(0)
try:
    open(f'/proc/{child}/smaps_rollup').read()
except PermissionError:
    print(usage.memory_bytes())
"""
    assert int(in_a_pid_namespace(script)) >= 32 << 20


def test_memory_counts_when_the_first_thread_has_ended_and_another_goes_on() -> None:
    script = """
import ctypes, threading
from agent_sandbox.kernel import syscall_rules, syscalls
def stay_behind():
    reading, writing = os.pipe()
    if os.fork() == 0:
        kept = bytearray(b'x') * (32 << 20), os.memfd_create('x')
        os.write(kept[1], b'x' * (16 << 20))
        def stay():
            while ') Z ' not in open(f'/proc/{os.getpid()}/stat').read(): pass
            os.write(writing, b'x')
            signal.pause()
        threading.Thread(target=stay).start()
        ctypes.CDLL(None).syscall(syscall_rules.numbers(syscalls.MACHINE)['exit'], 0)
    assert os.read(reading, 1) == b'x'
stay_behind()
print(usage.memory_bytes())
"""
    assert int(in_a_pid_namespace(script)) >= 48 << 20


def test_processes_and_their_threads_are_counted_without_the_watcher() -> None:
    script = """
import threading
def crowd():
    for _ in range(3): threading.Thread(target=signal.pause, daemon=True).start()
print(usage.task_count())
start(crowd)
print(usage.task_count())
"""
    assert in_a_pid_namespace(script).split() == ["0", "4"]


def test_processes_that_vanish_and_files_that_are_none_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "stat").write_bytes(b"8 (x)" + REST)
    (tmp_path / "self").mkdir()
    assert [stat.pid for stat in usage.processes(str(tmp_path))] == [8]
    assert usage.memory_bytes(str(tmp_path)) == 0


def measured(directory: Path, most_entries: int = usage.MOST_ENTRIES) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        before = len(os.listdir("/proc/self/fd"))
        size = disk_bytes(descriptor, most_entries=most_entries)
        assert len(os.listdir("/proc/self/fd")) == before
        return size
    finally:
        os.close(descriptor)


def test_disk_use_is_what_is_allocated_with_hard_links_once_and_holes_not_at_all(tmp_path: Path) -> None:
    empty = measured(tmp_path)
    (tmp_path / "a").write_bytes(os.urandom(1 << 20))
    once = measured(tmp_path)
    assert 1 << 20 <= once - empty < (1 << 20) + 65536
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    assert measured(tmp_path) == once
    (tmp_path / "c").write_bytes(os.urandom(1 << 20))  # control: another file does count
    assert measured(tmp_path) >= once + (1 << 20)


def test_disk_use_never_follows_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "large").write_bytes(os.urandom(1 << 20))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    assert measured(tmp_path / "tree") < 65536
    assert measured(tmp_path / "outside") >= 1 << 20


def test_a_tree_too_deep_or_too_large_to_count_is_over_any_limit(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath("deep", *["d"] * (usage.MOST_DEPTH - 2))
    deepest.mkdir(parents=True)
    assert measured(tmp_path) < UNCOUNTABLE
    (deepest / "d").mkdir()
    assert measured(tmp_path) == UNCOUNTABLE
    (tmp_path / "flat").mkdir()
    for number in range(5):
        (tmp_path / "flat" / str(number)).touch()
    assert measured(tmp_path / "flat", most_entries=5) < UNCOUNTABLE
    assert measured(tmp_path / "flat", most_entries=4) == UNCOUNTABLE


def test_the_largest_process_counts_with_the_pages_that_it_shares() -> None:
    script = """
block = bytearray(os.urandom(1 << 20) * 64)
copies = [start(lambda: None) for _ in range(3)]
together, largest = usage.memory_and_largest()
print(largest >> 20, together >> 20)
"""
    largest, together = map(int, in_a_pid_namespace(script).split())
    assert largest >= 64, "a copy of it could write to all of them"
    assert together < 2 * 64, "the control: shared pages count once in all"
