"""A command that runs apart: its orphans come to one process, its cgroups lie below one directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.kernel import cgroups
from scripts import apart
from scripts.suite import CHECKOUT
from tests.patience import until

COMMAND = (sys.executable, "-m", "scripts.apart")
ORPHAN = """
import os, sys
first = os.fork()
if first == 0:
    parent = os.getpid()
    if os.fork(): os._exit(0)
    while os.getppid() == parent: pass
    print(os.getppid(), flush=True)
    os._exit(0)
os.waitpid(first, 0)
sys.stdin.read()
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *command], cwd=CHECKOUT, capture_output=True, text=True, check=False)


def test_it_ends_as_its_command_does() -> None:
    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    told, parent = run("sh", "-c", f"echo ${apart.VARIABLE}; echo $PPID").stdout.splitlines()
    assert told == parent, "by this a test knows who adopts its orphans"


def test_an_orphan_comes_to_it_and_not_to_process_1() -> None:
    command, pipe = [*COMMAND, sys.executable, "-c", ORPHAN], subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid


@pytest.mark.needs_root
def test_its_cgroups_are_below_its_own_which_go_with_it() -> None:
    if not any(hierarchy.version == 1 for hierarchy in cgroups.here()):
        pytest.skip("no cgroups of version 1 here")
    said = run("cat", "/proc/self/cgroup").stdout
    entered = [line for line in said.splitlines() if apart.PREFIX in line]
    assert entered
    assert not set(entered) & set(Path("/proc/self/cgroup").read_text().splitlines()), "the control: we are not in them"
    (name,) = {line.rpartition("/")[2] for line in entered}
    assert [place for hierarchy in cgroups.here() if os.path.exists(place := f"{hierarchy.own}/{name}")] == []


@pytest.mark.needs_root
def test_cgroups_of_one_that_was_killed_are_removed_by_the_next() -> None:
    with subprocess.Popen([*COMMAND, "cat"], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        process.kill()
    name = f"{apart.PREFIX}{process.pid}"

    def swept() -> bool:  # once what it had started has ended, too
        return run("true").returncode == 0 and not any(os.path.exists(f"{hierarchy.own}/{name}") for hierarchy in cgroups.here())

    assert until(swept)
