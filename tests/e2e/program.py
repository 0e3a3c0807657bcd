"""The installed program, as its users start it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(sys.executable).with_name("agent-sandbox")
PROGRAM = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "agent_sandbox"]


@dataclass(frozen=True)
class Shell:
    """A directory to stand in and an environment to type in."""

    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def __call__(self, *line: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Type `agent-sandbox` and these words, and wait for it."""
        return subprocess.run([*PROGRAM, *line], cwd=self.cwd, env=self.environment, input=stdin, capture_output=True, check=False)

    @contextmanager
    def start(self, *line: str, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
        """Type it, and do something else meanwhile. A test that fails in the block does not wait for what will never end."""
        pipe = subprocess.PIPE
        with subprocess.Popen([*PROGRAM, *line], cwd=self.cwd, env=self.environment, stdin=stdin, stdout=pipe, stderr=pipe) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def json(self, *line: str) -> dict[str, Any]:
        """Type it with --json, and read the document."""
        document: dict[str, Any] = json.loads(self("--json", *line).stdout)
        return document


def words(done: subprocess.CompletedProcess[bytes]) -> str:
    """What it said to people."""
    return done.stderr.decode()


def processes_with(marker: str) -> list[str]:
    """The processes of this machine, those inside sandboxes too, that have a word on their command line.

    Not our own: what clears away after a run is a fork of the program, with its command line, and may outlive it for a moment.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in line.split(b"\0") and os.fsencode(PROGRAM[-1]) not in line.split(b"\0"):
            found.append(pid)
    return found


def processes_in(shell: Shell) -> list[int]:
    """The processes that were started in a shell, by its environment: also those that go on after their command has ended."""
    found = []
    ours = {f"{name}={value}".encode() for name, value in shell.env.items()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if ours <= set(Path("/proc", pid, "environ").read_bytes().split(b"\0")):
                found.append(int(pid))
    return found


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """All that is in a directory: type and mode, and content or where a link leads."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(top))] = (stat.filemode(status.st_mode), content)
    return found
