"""The workers: one that hangs, breaks or cannot start does not take the others with it; and what they cost is counted."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.kernel import cgroups
from bench import crew, processor
from bench.crew import BEFORE, Crew
from bench.peers import Missing
from bench.processor import KernelWorkers, TaskClock, meter, settled

# A worker in a shell: it is ready, and then does this.
Worker = Callable[[str], None]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Put a shell script in place of the earlier commit's worker. Its lines are what it says and does."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "checkout").mkdir()
    monkeypatch.setattr(crew, "EARLIER", tmp_path)

    def write(script: str) -> None:
        python.write_text(f"#!/bin/sh\n[ $1 != -c ] || exit 1\n{script}\n")
        python.chmod(0o755)

    return write


KEY = "us" + BEFORE


def ended(pid: int) -> bool:
    """Whether there is no such process, or only its zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_worker_that_hangs_is_missing_and_nothing_of_it_lives_on(worker: Worker, tmp_path: Path) -> None:
    worker(f"sleep 1000 & echo $! > {tmp_path}/child; setsid sleep 1000 & echo '{{\"ready\": true}}'; read line; wait")
    with Crew("print", [KEY]) as started:
        assert started.missing(KEY) == ""
        started._patience = 0.1
        assert started.ask(KEY, {}) == []
        assert started.missing(KEY) == "it hung: no answer within 0 s"
        assert ended(int((tmp_path / "child").read_text()))
        assert crew._started_by(started._workers[KEY].pid) == []


def test_one_that_gets_never_ready_is_missing_and_the_next_takes_part(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker("read line")
    real, asked = select.select, []

    def impatient(readers: list[Any], writers: list[Any], rest: list[Any], seconds: float) -> object:
        asked.append(readers)
        return real(readers, writers, rest, 0 if len(asked) == 1 else seconds)

    monkeypatch.setattr(select, "select", impatient)
    with Crew("command", [KEY, "python"]) as started:
        assert started.missing(KEY).startswith("it hung")
        assert started.missing("python") == ""
        assert started.ask("python", {"burst": {"calls": 1, "seconds": 1, "gap": 0.01, "skip": 0}}) != []


@pytest.mark.parametrize(("says", "reason"), [("", "that commit does not measure this, or cannot"), ("echo oh", r"it answered 'oh\n'")])
def test_one_that_ends_or_babbles_is_missing_with_that_reason(worker: Worker, says: str, reason: str) -> None:
    worker(says)
    with Crew("print", [KEY]) as started:
        assert started.missing(KEY) == reason


def test_a_worker_without_an_interpreter_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "EARLIER", tmp_path / "nowhere")
    with Crew("command", [KEY, "python"]) as started:
        assert "nowhere" in started.missing(KEY)
        assert started.missing("python") == ""


def test_when_interrupted_nobody_is_waited_for(worker: Worker) -> None:
    worker("trap '' TERM; echo '{\"ready\": true}'; while true; do sleep 1000; done")
    with pytest.raises(KeyboardInterrupt), Crew("print", [KEY]) as started:
        pid = started._workers[KEY].pid
        raise KeyboardInterrupt
    assert not os.path.exists(f"/proc/{pid}")


# Half of it in a child that nobody waits for, as bubblewrap's.
SPENDING = """
import os, sys, time
sys.stdin.readline()
def spend(seconds):
    while time.process_time() < seconds:
        pass
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    spend(0.5)
    os.write(1, b"child\\n")  # one write each, also with PYTHONUNBUFFERED: the two would mix
    os._exit(0)
os.wait()
spend(0.5)
os.write(1, b"parent\\n")
sys.stdin.read()
"""


@pytest.fixture
def spender() -> Iterator[subprocess.Popen[str]]:
    """A process that uses a second of processor time as soon as it is told to."""
    command = [sys.executable, "-S", "-c", SPENDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def spent(process: subprocess.Popen[str], seconds: Callable[[], float]) -> float:
    """What a meter says that it used; when it began is not looked at, since an interpreter starts meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    before = settled(seconds)
    process.stdin.write("go\n")
    process.stdin.flush()
    assert {process.stdout.readline(), process.stdout.readline()} == {"parent\n", "child\n"}
    return settled(seconds) - before


@pytest.mark.parametrize("kind", [meter, TaskClock])
def test_a_meter_counts_a_child_that_nobody_waits_for(spender: subprocess.Popen[str], kind: Callable[[int], processor.Meter]) -> None:
    try:
        counting = kind(spender.pid)
    except (Missing, OSError) as error:
        pytest.skip(f"nothing counts processor time here: {error}")
    try:
        assert 0.9 < spent(spender, counting.seconds) < 1.5  # of processor time: how long that takes is the machine's affair
    finally:
        spender.kill()
        spender.wait()
        counting.close()


@pytest.mark.needs_root
@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_of_each_version_counts_and_is_gone_with_its_meter(
    spender: subprocess.Popen[str], version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = tuple(each for each in cgroups.here() if each.version == version and (version == 2 or "cpuacct" in each.controllers))
    if not mounted:
        pytest.skip(f"no control groups of version {version} count processor time here")
    monkeypatch.setattr(cgroups, "here", lambda: mounted)
    counting = processor.ControlGroup(spender.pid)
    assert os.path.isdir(counting._top)
    assert 0.9 < spent(spender, counting.seconds) < 1.5
    spender.kill()
    spender.wait()
    counting.close()
    assert not os.path.exists(counting._top)


def test_where_nothing_counts_both_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(processor, "ControlGroup", refuse)
    monkeypatch.setattr(processor, "TaskClock", refuse)
    with pytest.raises(Missing, match=r"no control group \(Permission denied\), no task clock \(Permission denied\); run it as root"):
        meter(os.getpid())


@pytest.mark.parametrize(("others", "doubt"), [(0.05, ""), (1.0, "others used 1.0 times as much meanwhile")])
def test_the_kernels_workers_count_only_while_nobody_else_gives_them_work(
    others: float, doubt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = iter([{(7, "1"): 3.0, (8, "1"): 1.0}, {(7, "1"): 3.2, (9, "5"): 0.1}])  # one has ended, one is new
    machine = iter([100.0, 100.0 + 2.0 + 0.3 + others * 2.0])
    monkeypatch.setattr(processor, "_kernel_threads", lambda: next(threads))
    monkeypatch.setattr(processor, "_machine_seconds", lambda: next(machine))
    seconds, why = KernelWorkers().seconds(2.0)
    assert (round(seconds, 6), why.startswith(doubt), bool(why)) == (0.3, True, bool(doubt))


def test_where_the_kernels_threads_cannot_be_seen_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_kernel_threads", dict)
    assert KernelWorkers().seconds(1.0) == (0.0, "the kernel's workers cannot be seen here")


def test_a_count_that_grows_forever_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert settled(lambda: clock[0]) >= processor.LONGEST_REST
    assert settled(lambda: 7.0) == 7.0
    assert time.monotonic() < processor.LONGEST_REST + 1
