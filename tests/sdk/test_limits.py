"""Limits end or confine a run, and its result says which."""

from __future__ import annotations

import errno

import pytest

from agent_sandbox import Sandbox, SandboxError, SandboxStatus
from agent_sandbox.runtime.base import ExitReason
from tests.patience import given_time


def test_wall_time_ends_a_run_that_sleeps() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    result = given_time(lambda limit: Sandbox(timeout_seconds=limit).execute(code), lambda made: made.stdout, seconds=0.3)
    assert (result.status, result.limits_hit, result.stdout) == (SandboxStatus.TIMEOUT, ("wall",), "up\n")
    assert result.error is not None and "wall-time" in result.error


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
    # Without a cgroup the limit is an allocation that fails, and only the program knows of it.
    assert result.limits_hit == ("memory",) or result.error == "MemoryError", (result.exit, result.error)


def test_memory_within_the_limit_can_be_used() -> None:
    assert Sandbox(max_memory_mb=256).execute("x = bytearray(128 << 20); print(len(x))").success


def test_memory_of_children_counts_too() -> None:
    code = """
import os, time
for _ in range(6):
    ready, told = os.pipe()
    if os.fork() == 0:
        held = bytearray(64 << 20)
        for at in range(0, len(held), 4096): held[at] = 1
        os.write(told, b"x")
        time.sleep(60)
    os.close(told)
    os.read(ready, 1)
os.wait()
"""
    result = Sandbox(max_memory_mb=160, allow_subprocess=True).execute(code)
    assert "memory" in result.limits_hit, (result.exit, result.error)


FORK_ON = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.errno)
"""


def test_the_number_of_processes_is_bounded() -> None:
    made, number = map(int, Sandbox(max_processes=10, allow_subprocess=True).execute(FORK_ON).stdout.split())
    assert made < 10
    assert number == errno.EAGAIN


def test_that_there_were_no_more_processes_is_told() -> None:
    assert Sandbox(max_processes=10, allow_subprocess=True).execute(FORK_ON).limits_hit == ("processes",)


def test_the_number_of_threads_is_bounded() -> None:
    code = "import threading\ngo = threading.Event()\nfor _ in range(500): threading.Thread(target=go.wait, daemon=True).start()"
    result = Sandbox(max_processes=20).execute(code)
    assert result.error == "RuntimeError: can't start new thread"


def test_the_number_of_open_files_is_bounded() -> None:
    result = Sandbox(max_open_files=20, validate_code=False).execute("kept = [open('/dev/null') for _ in range(100)]")
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
    assert result.exit is not None and result.exit.reason is ExitReason.OUTPUT_LIMIT
    assert result.truncated


def test_what_is_written_to_disk_is_bounded() -> None:
    code = "with open('/tmp/big', 'wb') as file:\n  for _ in range(64): file.write(bytes(1 << 20))"
    result = Sandbox(max_disk_mb=8, validate_code=False).execute(code)
    assert result.error == "OSError: [Errno 28] No space left on device"
    assert result.limits_hit == ("disk",), result.exit
    assert Sandbox(max_disk_mb=128, validate_code=False).execute(code).success


def test_what_a_run_used_is_reported() -> None:
    result = Sandbox().execute("x = bytearray(32 << 20)\nfor n in range(200_000): pass")
    assert result.exit is not None
    usage = result.exit.usage
    assert usage.wall_seconds > 0 and usage.cpu_seconds > 0 and usage.peak_memory_bytes > 32 << 20


def test_a_lifetime_ends_what_still_runs_and_the_sandbox_with_it() -> None:
    sandbox = Sandbox(lifetime_seconds=0.4)
    result = sandbox.execute("import time; time.sleep(60)")
    assert (result.status, result.limits_hit) == (SandboxStatus.TIMEOUT, ("lifetime",))
    with pytest.raises(SandboxError, match=r"outlived its lifetime of 0\.4 s"):
        sandbox.execute("print(1)")


def test_a_shorter_timeout_ends_a_run_before_the_lifetime_does() -> None:
    result = Sandbox(lifetime_seconds=60, timeout_seconds=0.2).execute("import time; time.sleep(60)")
    assert result.limits_hit == ("wall",)
