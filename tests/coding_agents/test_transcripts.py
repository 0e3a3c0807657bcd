"""What each program writes to its hook, and what the hook answers: one line of a transcript for each tool call.

The events have the form that the programs document, and that Claude Code 2.1.326, Codex 0.169.0 and Gemini CLI 0.61.0 were seen to write.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_sandbox.coding_agents.contracts.claude import CLAUDE
from agent_sandbox.coding_agents.contracts.codex import CODEX
from agent_sandbox.coding_agents.contracts.gemini import GEMINI
from agent_sandbox.coding_agents.shell_words import VERB
from tests.coding_agents.programs import caller
from tests.e2e.program import PROGRAM

TRANSCRIPTS = Path(__file__).parent / "transcripts"
CONTRACTS = {"claude": CLAUDE, "codex": CODEX, "gemini": GEMINI}


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_line_of_a_transcript_is_answered_as_written(name: str, project: Path, tmp_path: Path) -> None:
    program = caller(name, project, tmp_path)
    lines = (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines()
    for line in lines:
        expected = json.loads(line.replace("PROJECT", str(project)).replace("PROGRAM", PROGRAM[0]))
        done = program(json.dumps(expected["event"]).encode())
        answer = json.loads(done.stdout) if done.stdout else None
        assert (done.returncode, answer, done.stderr.decode()) == (expected["exit"], expected["answer"], expected.get("error", "")), line


def test_the_transcripts_hold_at_least_sixty_decisions_of_every_kind() -> None:
    rows = [json.loads(line) for path in TRANSCRIPTS.iterdir() for line in path.read_text().splitlines()]
    texts = [json.dumps(row["answer"]) for row in rows]
    assert len(rows) >= 60
    assert sum(f" {VERB} --project " in text for text in texts) >= 60, "commands that are rewritten"
    assert sum('"deny"' in text for text in texts) >= 25 and sum(text == "null" for text in texts) >= 10


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_command_is_always_rewritten_and_a_file_tool_never_passes(name: str) -> None:
    """No line may let a command or a file tool pass as it is: the two worlds would be one program apart."""
    for line in (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind = CONTRACTS[name].tools.get(row["event"]["tool_name"])
        text = json.dumps(row["answer"])
        match type(kind).__name__:
            case "ShellTool":
                assert row["exit"] == 2 or f" {VERB} --project PROJECT -- " in text
            case "FileTool" | "NetworkTool":
                assert '"deny"' in text
            case "NoneType":
                assert '"deny"' in text or "agent-sandbox" in row["event"]["tool_name"]
