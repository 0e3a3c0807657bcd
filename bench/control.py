"""The control plane: a hundred tasks by the coordinator against a loop, and requests to the HTTP interface of a daemon."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox import Sandbox
from agent_sandbox.tasks import Coordinator, Task
from bench import ours
from bench.peers import Call, Missing

TASKS = 100
WORK = "print(sum(number * number for number in range(20_000)))"
SAYS = f"{sum(number * number for number in range(20_000))}\n"


@dataclass(frozen=True)
class Tasks:
    """A hundred tasks, each in a fresh sandbox. Measured, it gives the milliseconds of all of them together."""

    run: Callable[[], list[str]]

    def __call__(self) -> None:
        """Run them once."""
        said = self.run()
        if said != [SAYS] * TASKS:
            raise Missing(f"{TASKS - said.count(SAYS)} of {TASKS} tasks failed")

    def figures(self, *, times: int) -> list[float]:
        """Return the milliseconds of so many times."""
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            self()
            taken.append((time.perf_counter() - began) * 1000)
        return taken


def coordinated() -> Tasks:
    """By the coordinator, as many at once as it allows."""

    def run() -> list[str]:
        with Coordinator() as coordinator:
            outcomes = coordinator.run(Task(f"t{number}", WORK) for number in range(TASKS))
            return [outcome.result.stdout if outcome.result is not None else "" for outcome in outcomes]

    return Tasks(run)


def looped() -> Tasks:
    """In a loop, each in a sandbox of its own that is closed afterwards."""

    def run() -> list[str]:
        said = []
        for _ in range(TASKS):
            with Sandbox(validate_code=False) as sandbox:
                said.append(sandbox.run(WORK).stdout)
        return said

    return Tasks(run)


def asking(path: str, body: dict[str, Any] | None = None) -> Call:
    """A request to the HTTP interface of a daemon of its own, on a connection that each thread keeps."""
    state = ours.serving(f"-of-http-{path.rpartition('/')[2]}", "--http")
    directory = os.open(Path(state, "daemon"), os.O_PATH)
    mine = threading.local()
    content = None if body is None else json.dumps({**body, "directory": str(ours.project())})

    def call() -> None:
        if not hasattr(mine, "link"):
            mine.link = _Link(directory)
        mine.link.request("GET" if content is None else "POST", path, content)
        answer = mine.link.getresponse()
        said = answer.read()
        if answer.status != 200 or (content is not None and json.loads(said)["exit"]):
            raise Missing(f"the interface answered {answer.status}: {said[:200]!r}")

    until = time.monotonic() + ours.READY_SECONDS
    while True:
        try:
            call()
            return call
        except OSError:  # the process of the interface loads more than the daemon does
            del mine.link
            if time.monotonic() > until:
                raise Missing("the HTTP interface does not answer") from None
            time.sleep(0.05)


class _Link(http.client.HTTPConnection):
    """A connection by the socket of a daemon. Its path may be longer than an address can be."""

    def __init__(self, directory: int) -> None:
        super().__init__("daemon")
        self._directory = directory

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(f"/proc/self/fd/{self._directory}/http")
