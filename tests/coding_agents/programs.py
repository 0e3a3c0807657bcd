"""Coding agents as the hook sees them: their events, and a process that it takes for one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.program import PROGRAM

SHELL_TOOLS = {"claude": "Bash", "codex": "Bash", "gemini": "run_shell_command"}
EVENTS = {"claude": "PreToolUse", "codex": "PreToolUse", "gemini": "BeforeTool"}
# What a coding agent sets for its hooks is set by each test itself.
_THEIRS = ("CLAUDE_PROJECT_DIR", "GEMINI_PROJECT_DIR")


@dataclass(frozen=True)
class Caller:
    """A coding agent that stands in a project. `shell` is the program that starts the hook."""

    name: str
    project: Path
    shell: Path

    def __call__(self, data: bytes, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Start the hook with this text on its standard input, as the program does: by a shell, which stays its parent."""
        line = [str(self.shell), "-c", '"$@"; exit $?', "sh", *PROGRAM, "hook", self.name]
        environment = {name: value for name, value in os.environ.items() if name not in _THEIRS} | env
        return subprocess.run(line, cwd=self.project, env=environment, input=data, capture_output=True, check=False)

    def event(self, tool: str, given: Mapping[str, Any]) -> bytes:
        """Return the event of a tool call."""
        facts = {"session_id": "s", "cwd": str(self.project), "hook_event_name": EVENTS[self.name], "tool_name": tool, "tool_input": given}
        return json.dumps(facts).encode()

    def rewritten(self, command: str) -> str:
        """Return what the hook makes of a shell command."""
        done = self(self.event(SHELL_TOOLS[self.name], {"command": command}))
        assert (done.returncode, done.stderr) == (0, b""), done
        specific = json.loads(done.stdout)["hookSpecificOutput"]
        new = specific["tool_input"] if self.name == "gemini" else specific["updatedInput"]
        return str(new["command"])


def caller(name: str, project: Path, place: Path) -> Caller:
    """Return a coding agent. Codex is found by its program's name, and asked for its version: a copy of bash answers with a high one."""
    shell = Path("/bin/sh")
    if name == "codex":
        shell = place / "codex"
        shutil.copy("/bin/bash", shell)
    return Caller(name, project, shell)
