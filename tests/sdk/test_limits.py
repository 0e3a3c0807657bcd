"""Limits end or confine a run, and its result says which."""

from __future__ import annotations

import pytest

from agent_sandbox import Sandbox, SandboxStatus
from agent_sandbox.runtime.base import Reason


def test_wall_time_ends_a_run_that_sleeps() -> None:
    result = Sandbox(timeout_seconds=0.3).execute("import time; print('up'); time.sleep(60)")
    assert (result.status, result.limits_hit, result.stdout) == (SandboxStatus.TIMEOUT, ("wall",), "up\n")
    assert result.error is not None and "wall-time" in result.error
    assert result.execution_time < 20


def test_a_timeout_of_one_execution_replaces_the_configurations(sandbox: Sandbox) -> None:
    assert sandbox.execute("import time; time.sleep(60)", timeout=0.2).status is SandboxStatus.TIMEOUT
    assert sandbox.execute("print(1)").success


def test_no_timeout_is_possible() -> None:
    assert Sandbox(timeout_seconds=None).execute("print(1)").success


def test_processor_time_ends_a_run_that_computes() -> None:
    result = Sandbox(max_cpu_seconds=0.3).execute("while True: pass")
    assert (result.status, result.limits_hit) == (SandboxStatus.TIMEOUT, ("cpu",))
    assert result.error is not None and "processor-time" in result.error


def test_processor_time_is_not_wall_time() -> None:
    assert Sandbox(max_cpu_seconds=1).execute("import time; time.sleep(1.2)").success


def test_memory_ends_a_run_that_takes_too_much() -> None:
    code = "blocks = []\nwhile True: blocks.append(bytearray(8 << 20))"
    result = Sandbox(max_memory_mb=96).execute(code)
    assert result.status is SandboxStatus.FAILED
    assert result.limits_hit == ("memory",), (result.exit, result.error)


def test_memory_within_the_limit_can_be_used() -> None:
    assert Sandbox(max_memory_mb=256).execute("x = bytearray(128 << 20); print(len(x))").success


def test_memory_of_children_counts_too() -> None:
    code = """
import os
def fill():
    held = bytearray(64 << 20)
    for at in range(0, len(held), 4096): held[at] = 1
    return held
children = []
for _ in range(6):
    ready, told = os.pipe()
    if os.fork() == 0:
        held = fill()
        os.write(told, b"x")
        import time; time.sleep(60)
    os.close(told)
    if os.read(ready, 1) != b"x": raise SystemExit("a child was ended")
print("all are there")
"""
    result = Sandbox(max_memory_mb=160, allow_subprocess=True, timeout_seconds=30).execute(code)
    assert "all are there" not in result.stdout
    assert "memory" in result.limits_hit, (result.exit, result.error)


def test_the_number_of_processes_is_bounded() -> None:
    code = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    result = Sandbox(max_processes=10, allow_subprocess=True).execute(code)
    made, number = map(int, result.stdout.split())
    assert made < 10
    assert number == 11  # EAGAIN
    assert "processes" in result.limits_hit, result.exit


def test_the_number_of_threads_is_bounded(sandbox: Sandbox) -> None:
    code = "import threading\ngo = threading.Event()\nfor _ in range(500): threading.Thread(target=go.wait, daemon=True).start()"
    result = Sandbox(max_processes=20).execute(code)
    assert result.error == "RuntimeError: can't start new thread"


def test_the_number_of_open_files_is_bounded() -> None:
    result = Sandbox(max_open_files=20).execute("kept = [open('/dev/null') for _ in range(100)]")
    assert result.error == "OSError: [Errno 24] Too many open files: '/dev/null'"


def test_output_is_cut_and_told_and_the_program_may_finish() -> None:
    result = Sandbox(max_output_bytes=1000).execute("import sys; print('x' * 50_000); print('done', file=sys.stderr)")
    assert (result.status, len(result.stdout_bytes), result.stderr) == (SandboxStatus.COMPLETED, 1000, "done\n")
    assert result.truncated and result.limits_hit == ("output",)


def test_output_within_the_limit_is_not_cut() -> None:
    result = Sandbox(max_output_bytes=1000).execute("print('x' * 999)")
    assert (len(result.stdout), result.truncated) == (1000, False)


def test_a_program_that_never_stops_printing_is_ended() -> None:
    result = Sandbox(max_output_bytes=1000).execute("while True: print('x' * 65536)")
    assert result.status is SandboxStatus.FAILED
    assert result.exit is not None and result.exit.reason is Reason.OUTPUT_LIMIT
    assert result.truncated


def test_what_is_written_to_disk_is_bounded() -> None:
    code = "with open('/tmp/big', 'wb') as file:\n  for _ in range(64): file.write(bytes(1 << 20))"
    result = Sandbox(max_disk_mb=8).execute(code)
    assert result.error == "OSError: [Errno 28] No space left on device"
    assert result.limits_hit == ("disk",), result.exit
    assert Sandbox(max_disk_mb=128).execute(code).success


@pytest.mark.parametrize("name", ["timeout_seconds", "max_memory_mb", "max_output_bytes", "max_cpu_seconds", "max_processes", "max_disk_mb"])
def test_the_usage_of_a_run_is_reported_whatever_the_limits(name: str) -> None:
    result = Sandbox(**{name: 100}).execute("print(sum(range(10)))", timeout=30) if name != "timeout_seconds" else Sandbox().execute("1")
    assert result.exit is not None
    assert result.exit.usage.wall_seconds > 0
