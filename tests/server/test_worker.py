"""A worker has loaded what the verbs that it performs need, and its rehearsal leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.cli import errand
from agent_sandbox.server import worker
from tests.e2e.program import Shell

# Loads ahead as the daemon does, then performs each line in a fork of its own, as a worker does, and prints what that has loaded.
PERFORM = """
import json, os, sys
from agent_sandbox.server import worker
worker.load_ahead()
from agent_sandbox.cli.main import main
for line in json.loads(sys.argv[1]):
    ours, theirs = os.pipe()
    if not os.fork():
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        before = set(sys.modules)
        code = main(line)
        os.write(theirs, json.dumps([line, code, sorted(set(sys.modules) - before)]).encode())
        os._exit(0)
    os.close(theirs)
    print(os.read(ours, 65536).decode(), flush=True)
    os.close(ours)
    os.wait()
"""


def _performed(shell: Shell, *lines: tuple[str, ...]) -> list[tuple[list[str], int, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", PERFORM, json.dumps(lines)], cwd=shell.cwd, env=shell.environment, capture_output=True, check=True
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_worker_loads_nothing_for_what_it_performs(shell: Shell) -> None:
    lines = [
        *(("run", "--", "true"), ("run", "echo 1 >kept"), ("run", "--throw-away", "touch x"), ("run", "--json", "true")),
        *(("status",), ("diff",), ("list",), ("snapshot",), ("snapshots",), ("rollback",), ("log",), ("ps",)),
    ]
    performed = _performed(shell, *lines)
    assert [code for _, code, _ in performed] == [0] * len(lines)
    assert {" ".join(line): new for line, _, new in performed if new} == {}
    ((_, _, new),) = _performed(shell, ("capabilities",))
    assert new, "the control arm: a verb that no worker performs loads its own modules"
    assert "capabilities" not in errand.VERBS


def test_a_rehearsal_says_nothing_changes_nothing_and_stays_nowhere(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(shell.cwd)
    assert shell("run", "echo 1 >kept").returncode == 0
    state = Path(shell.env["AGENT_SANDBOX_STATE"])
    before = _contents(state)
    worker.rehearse(os.fsencode(shell.cwd))
    assert os.getcwd() == "/"
    assert _contents(state) == before
    assert capfd.readouterr() == ("", "")
    assert shell("run", "--throw-away", "true").returncode == 0 and _contents(state) != before, "the control arm: a run is recorded"
    worker.rehearse(b"/no/such/directory")
    assert capfd.readouterr() == ("", "")


def _contents(place: Path) -> dict[Path, tuple[int, int]]:
    """Every file with its size and time. The keeper of an earlier run may still give blocks of an image back to the disk."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file() and path.name != "image")
    return {path: (status.st_size, status.st_mtime_ns) for path in files for status in (path.lstat(),)}
