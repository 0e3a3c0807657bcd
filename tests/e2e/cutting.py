"""The program, killed at a place of our choice."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.e2e.program import Shell

KILLER = """
import importlib, os, signal, sys
module, _, name = sys.argv.pop(1).partition(":")
owner = importlib.import_module(module)
*inner, last = name.split(".")
for each in inner:
    owner = getattr(owner, each)
setattr(owner, last, lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL))
from agent_sandbox.cli.main import program
program()
"""


def cut_off(shell: Shell, at: str, *line: str) -> None:
    """Type a line whose process is killed in place of calling this function: `module:name`."""
    done = subprocess.run([sys.executable, "-c", KILLER, at, *line], cwd=shell.cwd, env=shell.environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
