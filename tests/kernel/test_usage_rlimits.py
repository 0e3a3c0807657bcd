"""Resource limits, as the process that has them sees them."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from typing import Any

import pytest

PREAMBLE = """
import json, os, resource, sys
from agent_sandbox.kernel import usage
usage.apply_rlimits(**json.loads(sys.argv[1]))
"""


def limited(script: str, **limits: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PREAMBLE + script, json.dumps(limits)], capture_output=True, text=True, check=False)


def seen(kind: str, **limits: Any) -> tuple[int, int]:
    done = limited(f"print(*resource.getrlimit(resource.{kind}))", **limits)
    assert done.returncode == 0, done.stderr
    soft, hard = done.stdout.split()
    return int(soft), int(hard)


@pytest.mark.parametrize(
    ("kind", "limits", "expected"),
    [
        ("RLIMIT_NOFILE", {"open_files": 64}, (64, 64)),
        ("RLIMIT_NPROC", {"processes": 50}, (50, 50)),
        ("RLIMIT_FSIZE", {"file_bytes": 4096}, (4096, 4096)),
        ("RLIMIT_DATA", {"data_bytes": 1 << 30}, (1 << 30, 1 << 30)),
        ("RLIMIT_CPU", {"cpu_seconds": 1.2}, (2, 3)),
        ("RLIMIT_CORE", {}, (1, 1)),
        ("RLIMIT_RTPRIO", {}, (0, 0)),
    ],
)
def test_a_limit_that_is_given_is_set(kind: str, limits: dict[str, Any], expected: tuple[int, int]) -> None:
    assert seen(kind, **limits) == expected


@pytest.mark.parametrize("kind", ["RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_CPU", "RLIMIT_AS"])
def test_a_limit_that_is_not_given_stays_as_it_was(kind: str) -> None:
    assert seen(kind) == resource.getrlimit(getattr(resource, kind))


def test_a_limit_above_the_hard_limit_becomes_the_hard_limit_and_no_error() -> None:
    script = "usage.apply_rlimits(open_files=1 << 30); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert limited(script, open_files=64).stdout.split() == ["64", "64"]


def test_opening_more_files_than_allowed_fails_in_the_program() -> None:
    script = "files = [os.open('/', 0) for _ in range({})]"
    assert "Too many open files" in limited(script.format(100), open_files=32).stderr
    assert limited(script.format(10), open_files=32).returncode == 0


def test_a_heap_above_the_data_limit_is_a_memory_error() -> None:
    script = "block = bytearray({} << 20)"
    assert "MemoryError" in limited(script.format(256), data_bytes=128 << 20).stderr
    assert limited(script.format(16), data_bytes=128 << 20).returncode == 0


@pytest.mark.slow
def test_a_program_that_uses_up_its_cpu_time_is_told_so_by_the_signal() -> None:
    assert limited("while True: pass", cpu_seconds=0.5).returncode == -signal.SIGXCPU


def test_a_crash_starts_no_program_on_the_host_and_the_guest_cannot_change_that() -> None:
    """The kernel runs a piped core_pattern at a core limit of 0, and at 1 it does not: so the limit is 1, and stays."""
    script = """
from agent_sandbox.kernel import usage, seccomp
import resource
usage.apply_rlimits()
seccomp.install(seccomp.compile_filter(processes=True))
for change in ((0, 0), (0, 1)):
    try:
        resource.setrlimit(resource.RLIMIT_CORE, change)
        print("changed")
    except (OSError, ValueError):
        pass
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
print(resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "(1, 1) (16, 16)\n", "the control arm: other limits can be lowered"
