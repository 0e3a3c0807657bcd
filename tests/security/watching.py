"""Looking at a guest from outside while it does its worst: who is there of it, and a run that is held open for as long as one looks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_sandbox.engine.work import Outcome
from tests.security.harness import Box

TOLD = b"-- and now it waits\n"
WAIT = f"\nimport sys\nprint({TOLD.decode()!r}, end='', flush=True)\nsys.stdin.read()\n"


def tasks_of(marker: str) -> int:
    """How many processes and threads the machine has whose command line holds `marker`. It has to be ours alone: other suites run too."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    status = (entry / "status").read_text()
                    count += int(status.partition("Threads:")[2].split()[0])
            except (OSError, IndexError):  # it has just ended
                continue
    return count


@contextmanager
def held(box: Box, source: str, **work: Any) -> Iterator[bytes]:
    """What Python code in a box printed, while it keeps everything that it has taken. It ends with the block."""
    reading, writing = os.pipe()
    said: list[bytes] = []
    ended: list[Outcome] = []
    told = threading.Event()

    def heard(_: str, data: bytes) -> None:
        said.append(data)
        if TOLD in b"".join(said):
            told.set()

    def run() -> None:
        try:
            ended.append(box.python(source + WAIT, stdin=reading, on_output=heard, **work))
        finally:
            told.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert told.wait() and not ended, ended
        yield b"".join(said).replace(TOLD, b"")
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
