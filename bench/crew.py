"""The workers of one measure, asked one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

LEAVING_SECONDS = 20.0
BEFORE = "@before"  # behind the key of a subject: the same at an earlier commit
EARLIER = Path(__file__).resolve().parent.parent / ".bench" / "before"  # that commit: its checkout, and a virtual environment of its own


class Crew:
    """A worker process for each subject. A worker that cannot, or breaks, is missing from then on, with its reason."""

    def __init__(self, measure: str, keys: Sequence[str]) -> None:
        self._measure = measure
        self._keys = tuple(keys)
        self._stack = ExitStack()
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._missing: dict[str, str] = {}

    def __enter__(self) -> Crew:
        with ExitStack() as stack:
            for key in self._keys:
                worker = _start(self._measure, key)
                stack.callback(_dismiss, worker)
                self._workers[key] = worker
                self._receive(key)  # one after the other: two that warm up at once would only be slower
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, key: str, request: dict[str, Any]) -> list[float]:
        """Have one subject measured now, if it takes part."""
        if key in self._missing:
            return []
        stdin = self._workers[key].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            self._missing[key] = "its process has ended"
            return []
        return self._receive(key)

    def missing(self, key: str) -> str:
        """Why a subject did not take part, or an empty string."""
        return self._missing.get(key, "")

    def _receive(self, key: str) -> list[float]:
        stdout = self._workers[key].stdout
        assert stdout is not None
        line = stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"missing": "its process has ended"}
        if "missing" in answer:
            self._missing[key] = " ".join(str(answer["missing"]).split())
        values: list[float] = answer.get("values", [])
        return values


def _start(measure: str, key: str) -> subprocess.Popen[str]:
    """Start the worker of a subject. That of an earlier commit is the earlier worker, on a store of its own."""
    command = [sys.executable, "-m", "bench.worker", measure, key]
    place, environment = None, dict(os.environ)
    if key.endswith(BEFORE):
        command = [str(EARLIER / "venv/bin/python"), "-m", "bench.worker", measure, key.removesuffix(BEFORE)]
        place = EARLIER / "checkout"
        for name in ("AGENT_SANDBOX_STATE", "XDG_STATE_HOME", "XDG_DATA_HOME"):
            if name in environment:
                environment[name] += "-before"
    return subprocess.Popen(command, cwd=place, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _dismiss(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdout:
        with suppress(BrokenPipeError):  # it has left already
            worker.stdin.close()  # the end of its input is the order to leave
        try:
            worker.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
