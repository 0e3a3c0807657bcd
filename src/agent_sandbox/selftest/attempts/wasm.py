"""Attempts from Python inside WebAssembly: what works on the machine, by the same calls. Modules that it may lack are imported late."""

from __future__ import annotations

import os
import sys

from agent_sandbox.selftest.attempts import Deeds, content, later, write_to


def leave(paths: list[str], directory: str, name: str, port: int, variable: str) -> Deeds:
    """Return ways out: read these files, make a file of this name, connect to a port, start a process, find a variable, load a library."""
    climb = "../" * 32
    return {
        **{f"read {os.path.basename(path)}": later(content, path) for path in paths},
        "read by climbing": lambda: content(f"{climb}{paths[0]}"),
        "list": lambda: f"{len(os.listdir(directory))} entries",
        "write": lambda: write_to(f"{directory}/{name}", "changed"),
        "link": lambda: os.symlink("/", f"{directory}/{name}.link"),
        "connect": lambda: _connect(port),
        "process": _process,
        "variable": lambda: os.environ[variable],
        "native code": lambda: __import__("ctypes").CDLL(None).getpid(),
        "host processes": lambda: content("/proc/self/status")[:40],
    }


def _connect(port: int) -> str:
    import socket

    with socket.socket() as made:
        made.connect(("127.0.0.1", port))
    return "connected"


def _process() -> str:
    import subprocess

    return f"exit code {subprocess.run([sys.executable, '-I', '-S', '-c', 'pass'], check=True).returncode}"


def go_on(steps: int) -> Deeds:
    """Return a way to go on for this many steps of a loop."""
    return {"fuel": lambda: f"{sum(1 for _ in range(steps)):,} steps"}


def show_chance() -> Deeds:
    """Return values that differ from one ordinary run to the next."""
    import random
    import time

    return {"values": lambda: (time.time(), time.monotonic(), random.random(), os.urandom(8))}
