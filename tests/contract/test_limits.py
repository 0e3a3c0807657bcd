"""Limits: each one holds, is reported by name, and costs nobody but the run that met it."""

from __future__ import annotations

import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.engine.work import Outcome
from agent_sandbox.kernel import cgroups
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.workspace.store import Store
from tests.kernel.group_probe import probe
from tests.patience import given_time, stretched
from tests.security.harness import GENEROUS, Box

MIB = 1 << 20
DEADLINE, LATENESS = 0.5, 1.0
HARD_MEMORY = "memory" in probe(cgroups.here()).enforces

STUBBORN = {
    "spins": "while :; do :; done",
    "ignores SIGTERM": "trap '' TERM INT HUP QUIT; while :; do :; done",
    "stops itself": "kill -STOP $$",
    "daemon forked twice": "(setsid bash -c 'trap \"\" TERM; while :; do sleep 1; done' &) ; exec sleep 60",
    "sleeps": "sleep 60",
    "stopped children": "for i in 1 2 3 4 5; do (kill -STOP $BASHPID) & done; sleep 60",
}


@pytest.mark.parametrize("script", STUBBORN.values(), ids=STUBBORN.keys())
def test_a_run_is_over_a_second_after_its_deadline(box: Box, script: str) -> None:
    outcome = box.with_(limits=replace(GENEROUS, wall_seconds=DEADLINE)).shell(script)
    assert outcome.exit.reason is ExitReason.TIMED_OUT
    assert outcome.exit.limits_hit == ("wall",)
    assert DEADLINE <= outcome.exit.usage.wall_seconds < DEADLINE + stretched(LATENESS)


def test_processor_time_is_limited_for_all_processes_together(box: Box) -> None:
    limited = box.with_(limits=replace(GENEROUS, cpu_seconds=1.0))
    outcome = limited.shell("for i in 1 2 3 4; do (while :; do :; done) & done; wait")
    assert outcome.exit.reason is ExitReason.CPU_LIMIT
    assert "cpu" in outcome.exit.limits_hit
    assert outcome.exit.usage.cpu_seconds < 1.0 + stretched(1.5)
    assert limited.shell("sleep 1.2").exit.reason is ExitReason.EXITED, "time that is waited is not used"


@pytest.mark.needs_root
def test_processor_time_of_what_nobody_waits_for_is_counted_by_the_cgroup(box: Box) -> None:
    """Without one it is not: such a process leaves its time to nobody, and is too short-lived to be seen (THREATS.md)."""
    outcome = box.with_(limits=replace(GENEROUS, cpu_seconds=0.5)).python("""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        began = time.process_time()
        while time.process_time() - began < 0.01: pass
        os._exit(0)
    time.sleep(0.005)
""")
    assert outcome.exit.reason is ExitReason.CPU_LIMIT
    assert outcome.exit.usage.cpu_seconds < 0.5 + stretched(1.0)


MEMORY = {
    "heap": "x = bytearray(300 << 20)",
    "many processes": "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
    "        x = bytearray(40 << 20); time.sleep(0.5); os._exit(0)\n"
    "if any([os.wait()[1] for _ in range(8)]): raise MemoryError",
    "mapped memfd": "import os, mmap\nf = os.memfd_create('x'); os.ftruncate(f, 300 << 20)\nm = mmap.mmap(f, 300 << 20)\n"
    "for at in range(0, 300 << 20, 4096): m[at] = 1",
    "shared anonymous": "import mmap\nm = mmap.mmap(-1, 300 << 20)\nfor at in range(0, 300 << 20, 4096): m[at] = 1",
}
UNMAPPED = {
    "tmpfs": "open('/tmp/x', 'wb').write(bytes(300 << 20))",
    "memfd": "import os\nf = os.memfd_create('x')\nfor _ in range(300): os.write(f, bytes(1 << 20))",
    "System V": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nfor _ in range(10):\n"
    "    a = libc.shmat(libc.shmget(0, 32 << 20, 0o1600), None, 0); ctypes.memset(a, 1, 32 << 20); libc.shmdt(ctypes.c_void_p(a))",
    "socket buffers": "import socket\nkept = []\nfor _ in range(2000):\n    a, b = socket.socketpair()\n"
    "    kept += [a, b]; a.setblocking(False)\n"
    "    try:\n        while True: a.send(bytes(65536))\n    except OSError: pass",
}


def _out_of_memory(outcome: Outcome) -> bool:
    return outcome.exit.reason is ExitReason.OUT_OF_MEMORY and "memory" in outcome.exit.limits_hit


@pytest.mark.parametrize("bomb", MEMORY.values(), ids=MEMORY.keys())
def test_memory_is_limited(box: Box, bomb: str) -> None:
    limited = box.with_(limits=replace(GENEROUS, memory_bytes=128 * MIB, wall_seconds=120.0))
    outcome = limited.python(bomb)
    # Where a cgroup ends one process of several, the others go on; without one each may meet its own limit before the watcher sees it.
    assert _out_of_memory(outcome) or b"MemoryError" in outcome.stderr, outcome.exit
    assert not HARD_MEMORY or "memory" in outcome.exit.limits_hit
    assert box.python(bomb).exit.code == 0, "the same program fits elsewhere"


@pytest.mark.needs_root
@pytest.mark.parametrize("bomb", UNMAPPED.values(), ids=UNMAPPED.keys())
def test_memory_that_is_in_no_process_is_limited_by_the_cgroup(box: Box, bomb: str) -> None:
    if not HARD_MEMORY:
        pytest.skip("no cgroup with a memory controller here")
    assert _out_of_memory(box.with_(limits=replace(GENEROUS, memory_bytes=128 * MIB)).python(bomb))


def test_a_fork_bomb_is_bounded_and_other_runs_do_not_notice(box: Box) -> None:
    def attempt(limit: float) -> Outcome:
        bombed = box.with_(limits=replace(GENEROUS, processes=40, wall_seconds=limit))
        outcomes: list[Outcome] = []
        bomb = threading.Thread(target=lambda: outcomes.append(bombed.shell("bomb() { bomb | bomb & }; bomb; sleep 600")))
        bomb.start()
        try:
            for _ in range(5):
                assert box.run("true").exit.code == 0
        finally:
            bomb.join()
        return outcomes[0]

    # Without a cgroup the count of processes is looked at from time to time: a slow machine needs longer to see the limit reached.
    outcome = given_time(attempt, lambda made: b"fork" in made.stderr and "processes" in made.exit.limits_hit, seconds=2.0)
    assert outcome.exit.reason in (ExitReason.TIMED_OUT, ExitReason.EXITED)
    assert b"fork" in outcome.stderr
    assert "processes" in outcome.exit.limits_hit
    assert "processes" not in box.with_(limits=replace(GENEROUS, processes=40)).shell("true | true").exit.limits_hit


def test_threads_count_as_processes(box: Box) -> None:
    outcome = box.with_(limits=replace(GENEROUS, processes=20)).python("""
import threading
held = threading.Event()
try:
    for count in range(100):
        threading.Thread(target=held.wait).start()
except RuntimeError:
    print(count)
held.set()
""")
    assert 5 <= int(outcome.stdout) < 20


def test_open_files_are_limited(box: Box) -> None:
    outcome = box.with_(limits=replace(GENEROUS, open_files=50)).python("""
import os
try:
    for count in range(100): os.open("/dev/null", os.O_RDONLY)
except OSError as error:
    print(count, error.strerror)
""")
    assert outcome.stdout == b"47 Too many open files\n"


@pytest.mark.slow
def test_a_flood_of_output_is_cut_and_does_not_grow_the_supervisor(box: Box) -> None:
    """Case 138 of the attack list. The peak is compared, not the present: a buffer that came and went counts."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = box.with_(limits=replace(GENEROUS, output_bytes=1 * MIB)).shell("cat /dev/zero")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert outcome.exit.reason is ExitReason.OUTPUT_LIMIT
    assert "output" in outcome.exit.limits_hit
    assert len(outcome.stdout) == 1 * MIB
    assert grown < 64 << 10, f"{grown} KiB"


def test_a_throw_away_disk_is_sized(box: Box) -> None:
    outcome = box.with_(limits=replace(GENEROUS, disk_bytes=8 * MIB)).shell(
        "head -c 20000000 /dev/zero > big; ls -s big; rm big; echo x > small"
    )
    assert b"No space left" in outcome.stderr
    assert [change.path for change in outcome.changes] == [str(box.project / "small")], "it goes on, and what fits is kept"


@pytest.mark.needs_user
def test_layers_on_disk_are_watched(box: Box) -> None:
    state = Store.open(str(box.project.parent / "state")).sandbox_for(str(box.project))
    kept = box.with_(state=state, limits=replace(GENEROUS, disk_bytes=8 * MIB))
    outcome = kept.shell("while :; do head -c 1000000 /dev/zero >> big; sleep 0.02; done")
    assert outcome.exit.reason is ExitReason.DISK_LIMIT, outcome.exit
    assert "disk" in outcome.exit.limits_hit


SERVE = """
import http.server, threading, urllib.request
class Much(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        for _ in range(100): self.wfile.write(bytes(1 << 20))
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Much)
threading.Thread(target=server.serve_forever, daemon=True).start()
with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
    print(sum(len(part) for part in iter(lambda: answer.read(65536), b"")) >> 20)
"""


def test_a_server_and_its_client_pass_100_megabytes_over_loopback(box: Box) -> None:
    for limits in (GENEROUS, replace(GENEROUS, memory_bytes=128 * MIB)):
        assert box.with_(limits=limits).run("python3", "-c", SERVE).stdout == b"100\n"


@pytest.mark.skipif(HARD_MEMORY, reason="a cgroup limits the memory here")
def test_the_limit_on_the_data_of_a_program_leaves_its_init_alone(box: Box) -> None:
    """Init must go on whatever its program is left with: it counts, ends and reports."""
    guests: list[ProcessGuest] = []
    seen: list[str] = []

    def look(*_: object) -> None:
        limits = Path(f"/proc/{guests[0].init}/limits").read_text()
        seen.append(next(line.split()[3] for line in limits.splitlines() if line.startswith("Max data size")))

    limited = box.with_(limits=replace(GENEROUS, memory_bytes=256 * MIB))
    ended = limited.shell("ulimit -d; read", stdin=b"", on_start=guests.append, on_output=look)
    assert ended.stdout == b"262144\n" and seen == ["unlimited"]
