"""The workers of one measure, asked one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

LEAVING_SECONDS = 20.0


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
                worker = subprocess.Popen(
                    [sys.executable, "-m", "bench.worker", self._measure, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
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
