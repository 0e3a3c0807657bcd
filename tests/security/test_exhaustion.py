"""Attacks by sheer use: processes, memory, output, time, and what the kernel counts for each user."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from dataclasses import replace

import pytest

from agent_sandbox.kernel import cgroup_sweep, cgroups
from agent_sandbox.runtime.base import Reason
from agent_sandbox.runtime.running import ProcessGuest
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, outside

MIB = 1 << 20
ENFORCED = cgroup_sweep.probe(cgroups.here()).enforces


@case(135)
@pytest.mark.parametrize(
    "bomb",
    [
        "bomb() { bomb | bomb & }; bomb; sleep 30",
        "exec python3 -c 'import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()'",
    ],
    ids=["fork", "thread"],
)
def test_a_bomb_of_processes_is_bounded(number: int, bomb: str, box: Box, tell: Tell) -> None:
    limited = box.with_(limits=replace(GENEROUS, processes=32, wall_seconds=1.5))
    before = len([pid for pid in os.listdir("/proc") if pid.isdecimal()])
    guests: list[ProcessGuest] = []
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(limited.shell(bomb, on_start=guests.append).exit))
    thread.start()
    most = 0
    while thread.is_alive():
        most = max(most, len([pid for pid in os.listdir("/proc") if pid.isdecimal()]) - before)
        thread.join(0.05)
    assert most <= 32 + 40, "the guest's, the helpers', and whatever else starts on this machine meanwhile"
    assert box.run("true").exit.code == 0
    tell(f"at most {most} more processes; {ended[0]}", control="another run starts at once")


@case(136)
def test_a_bomb_of_memory_ends_its_own_run_only(number: int, box: Box, tell: Tell) -> None:
    """Without a cgroup memory is watched, not hard: what no process maps (memfds, pipes, sockets) escapes, and is not tried."""
    bombs = {
        "heap": "x = bytearray(400 << 20)",
        "shared": "import mmap; m = mmap.mmap(-1, 400 << 20)\nfor at in range(0, 400 << 20, 4096): m[at] = 1",
    }
    if "memory" in ENFORCED:
        bombs |= {
            "tmpfs": "open('/tmp/x', 'wb').write(bytes(400 << 20))",
            "shm": "[open(f'/dev/shm/{n}', 'wb').write(bytes(30 << 20)) for n in range(2)]; open('/tmp/x', 'wb').write(bytes(200 << 20))",
            "memfd": "import os; f = os.memfd_create('x')\nwhile True: os.write(f, bytes(1 << 20))",
            "sockets": "import socket\nkept = []\nwhile True:\n    pair = socket.socketpair()\n"
            "    kept.append(pair); pair[0].setblocking(False)\n"
            "    try:\n        while True: pair[0].send(bytes(65536))\n    except OSError: pass",
        }
    limited = box.with_(limits=replace(GENEROUS, memory_bytes=96 * MIB, wall_seconds=10.0))
    for name, bomb in bombs.items():
        outcome = limited.python(bomb)
        assert outcome.exit.reason is Reason.OUT_OF_MEMORY or b"MemoryError" in outcome.stderr, (name, outcome.exit, outcome.stderr[-300:])
    assert box.python(bombs["heap"]).exit.code == 0
    tell(f"{', '.join(bombs)}: ended", control="the heap fits under a larger limit")


@case(138)
def test_a_flood_of_output_is_bounded(number: int, box: Box, tell: Tell) -> None:
    """Also with a slow reader: the guest waits for us, not we for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limited = box.with_(limits=replace(GENEROUS, output_bytes=MIB))
    slow = [0]

    def reader(*_: object) -> None:
        slow[0] += 1
        if slow[0] < 5:
            time.sleep(0.05)  # the slow reader that the case names

    outcome = limited.shell("yes | tr -d '\\n'", on_output=reader)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert outcome.exit.reason is Reason.OUTPUT_LIMIT and len(outcome.stdout) == MIB and grown < 64
    tell(f"cut at 1 MiB and ended; supervisor +{grown} MiB", control="limits_hit names output")
    assert "output" in outcome.exit.limits_hit


@case(139)
@pytest.mark.parametrize(
    "script",
    ["while :; do :; done", "trap '' TERM; while :; do :; done", "kill -STOP $$", "(setsid sleep 99 &); sleep 99", "sleep 99"],
    ids=["spin", "ignore SIGTERM", "stop", "daemon", "sleep"],
)
def test_everything_is_dead_a_second_after_the_deadline(number: int, script: str, box: Box, tell: Tell) -> None:
    began = time.monotonic()
    outcome = box.with_(limits=replace(GENEROUS, wall_seconds=0.5)).shell(script)
    took = time.monotonic() - began
    assert outcome.exit.reason is Reason.TIMED_OUT and took < 0.5 + 1.0 + 0.3
    tell(f"over after {took:.2f} s", control="sleeping less than the deadline exits")
    assert box.with_(limits=replace(GENEROUS, wall_seconds=5.0)).run("sleep", "0.01").exit.reason is Reason.EXITED


@case(142, prio="P1")
def test_orphans_do_not_pile_up(number: int, box: Box, tell: Tell) -> None:
    left = box.with_(limits=replace(GENEROUS, processes=100)).probe("""
import json, os, time
for _ in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
deadline = time.monotonic() + 5
while (left := len([pid for pid in os.listdir("/proc") if pid.isdecimal()]) - 2) and time.monotonic() < deadline: time.sleep(0.01)
print(json.dumps(left))
""")
    assert left == 0
    tell("0 of 1000 left", control="a limit of 100 would have been met")


EXHAUST = """
import ctypes, json
libc = ctypes.CDLL(None)
count = 0
while count < 2000 and libc.inotify_init1(0) >= 0: count += 1
print(json.dumps(count), flush=True)
import sys; sys.stdin.read()
"""


@case(141, prio="P1")
def test_what_the_kernel_counts_for_each_user_cannot_be_used_up(number: int, box: Box, tell: Tell) -> None:
    reading, writing = os.pipe()
    ready = threading.Event()
    said: list[bytes] = []

    def heard(_: str, data: bytes) -> None:
        said.append(data)
        ready.set()

    thread = threading.Thread(target=lambda: box.python(EXHAUST, stdin=reading, on_output=heard))
    thread.start()
    try:
        assert ready.wait(20)
        libc = ctypes.CDLL(None, use_errno=True)
        mine = libc.inotify_init1(os.O_CLOEXEC)
        assert mine >= 0, "we, who started it, have some left"
        os.close(mine)
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
    control = outside(EXHAUST.replace("import sys; sys.stdin.read()", ""))
    assert int(b"".join(said)) < control
    tell(f"{int(b''.join(said))} inotify instances", control=f"{control} outside")


@case(144, prio="P2")
def test_a_command_line_too_long_is_refused_cleanly(number: int, box: Box, tell: Tell) -> None:
    outcome = box.run("true", "x" * (2 * MIB))
    assert (outcome.exit.code, outcome.refused) == (126, "Argument list too long")
    assert box.run("true", *["x"] * 100_000).exit.code == 0
    tell("E2BIG as exit 126", control="100,000 short words pass")


@case(145)
def test_a_supervisor_that_is_killed_leaves_nothing(number: int, box: Box, tell: Tell) -> None:
    """Forty random moments are tried in the contract suite; here one, with a guest that does all it can to stay."""
    from tests.contract.test_life import _kill_a_supervisor_after

    _kill_a_supervisor_after(None, box.project.parent)
    _kill_a_supervisor_after(0.01, box.project.parent)
    tell("within 2 s no process, mount or cgroup", control="the guest had daemons of its own")
