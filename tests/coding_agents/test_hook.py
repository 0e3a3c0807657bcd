"""The hook refuses whatever it cannot answer: broken events, broken lists, and its own end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.coding_agents.hook import PROGRAMS, REFUSED
from agent_sandbox.coding_agents.own_commands import hook_command, is_ours, server_words
from tests.coding_agents.programs import EVENTS, SHELL_TOOLS, Caller, caller
from tests.e2e.program import PROGRAM


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> Caller:
    return caller(request.param, project, tmp_path)


def refused(done: subprocess.CompletedProcess[bytes]) -> bool:
    """Whether every program takes this for a refusal: exit code 2, a reason, and nothing that reads like an answer."""
    return done.returncode == REFUSED and bool(done.stderr.strip()) and not done.stdout


def test_what_is_no_event_is_refused(program: Caller) -> None:
    whole = program.event(SHELL_TOOLS[program.name], {"command": "ls"})
    event = json.loads(whole)
    assert not refused(program(whole)), "the control: this one is answered"
    broken: dict[str, bytes] = {
        "nothing": b"",
        "blanks": b" \n",
        "half of it": whole[: len(whole) // 2],
        "more after it": whole + b"{}",
        "not UTF-8": whole.replace(b"ls", b"\xff"),
        "a list": b"[]",
        "a number": b"1" * 5000,
        "deep": b"[" * 100_000,
        "a name twice": whole.replace(b'"tool_input"', b'"tool_name": "Read", "tool_input"'),
        "a command twice": whole.replace(b'"command"', b'"command": "true", "command"'),
        "NaN": whole.replace(b'"ls"', b"NaN"),
        "another event": json.dumps({**event, "hook_event_name": "PostToolUse"}).encode(),
        "an event of next year": json.dumps({**event, "hook_event_name": "PreThought"}).encode(),
        "no event": json.dumps({**event, "hook_event_name": None}).encode(),
        "no tool": json.dumps({**event, "tool_name": ""}).encode(),
        "an input that is no object": json.dumps({**event, "tool_input": "ls"}).encode(),
        "no command": json.dumps({**event, "tool_input": {}}).encode(),
        "a command that is no text": json.dumps({**event, "tool_input": {"command": ["ls"]}}).encode(),
        "a zero byte": json.dumps({**event, "tool_input": {"command": "ls\0rm"}}).encode(),
        "no directory": json.dumps({**event, "cwd": None}).encode(),
        "a relative directory": json.dumps({**event, "cwd": "."}).encode(),
        "a directory that is not there": json.dumps({**event, "cwd": "/nowhere/at/all"}).encode(),
        "the root directory": json.dumps({**event, "cwd": "/"}).encode(),
    }
    assert [name for name, data in broken.items() if not refused(program(data))] == []


def test_an_event_that_is_too_large_is_refused(project: Path, tmp_path: Path) -> None:
    assert refused(caller("claude", project, tmp_path)(b" " * (65 << 20)))


@pytest.mark.parametrize("words", [[], ["cursor"], ["claude", "codex"], ["--json", "claude"]])
def test_an_unknown_program_is_refused(words: list[str]) -> None:
    assert refused(subprocess.run([*PROGRAM, "hook", *words], input=b"{}", capture_output=True, check=False))


def test_an_answer_that_cannot_be_written_is_a_refusal(program: Caller) -> None:
    line = [str(program.shell), "-c", '"$@" > /dev/full; exit $?', "sh", *PROGRAM, "hook", program.name]
    data = program.event(SHELL_TOOLS[program.name], {"command": "ls"})
    assert refused(subprocess.run(line, input=data, capture_output=True, check=False, cwd=program.project))


def test_a_hook_that_waits_for_its_event_ends_by_itself() -> None:
    code = "from agent_sandbox.coding_agents import hook; hook.SECONDS = 1; hook.respond(['claude'], {})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.wait() == -signal.SIGALRM  # its event never comes


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("end", ["exit 1", "kill -KILL $$", "kill -ALRM $$", "exec /nowhere/at/all"])
def test_the_command_in_the_settings_refuses_if_the_hook_ends_badly(name: str, end: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\n{end}\n")
    broken.chmod(0o755)
    ours = hook_command(name)
    start = ours.split(" hook ")[0]
    for program in (str(broken), str(tmp_path / "missing")):
        done = subprocess.run(["sh", "-c", ours.replace(start, program, 1)], input=b"{}", capture_output=True, check=False)
        assert refused(done), done
    alone = subprocess.run([str(broken), "hook", name], input=b"{}", capture_output=True, check=False)
    assert not refused(alone), "the control: without the shell around it, no program takes this for a refusal"


def test_the_variable_of_the_program_chooses_the_project(project: Path, tmp_path: Path) -> None:
    program = caller("claude", project, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    data = program.event("Bash", {"command": "ls"}).replace(str(project).encode(), str(elsewhere).encode())
    assert f"--project {project} " in program(data, CLAUDE_PROJECT_DIR=str(project)).stdout.decode()
    assert f"--project {elsewhere} " in program(data).stdout.decode()


@pytest.mark.skipif(not os.path.exists("/bin/dash"), reason="needs dash: a shell that does not say its version")
def test_a_codex_that_does_not_say_its_version_gets_the_line_to_run_instead(project: Path, tmp_path: Path) -> None:
    silent = tmp_path / "codex"
    shutil.copy("/bin/dash", silent)  # it has no version
    (tmp_path / "new").mkdir()
    line = caller("codex", project, tmp_path / "new").rewritten("echo it's")
    for each in (Caller("codex", project, silent), Caller("codex", project, Path("/bin/sh"))):
        done = each(each.event("Bash", {"command": "echo it's"}))
        decision = json.loads(done.stdout)["hookSpecificOutput"]
        assert decision["permissionDecision"] == "deny" and decision["permissionDecisionReason"].endswith(f": {line}")
        again = each(each.event("Bash", {"command": line}))
        assert (again.returncode, again.stdout) == (0, b""), "that line passes"
        for wrong in (f"{line}; ls", line.replace("shell-prefix", "run"), f" {line}", line.replace("--project", "--cwd")):
            assert b'"deny"' in each(each.event("Bash", {"command": wrong})).stdout, wrong


def test_a_command_that_was_rewritten_is_not_rewritten_again(program: Caller) -> None:
    once = program.rewritten("echo it's")
    assert program.rewritten(once) == once
    twice = program.rewritten(f"{once} && ls")
    assert twice != once and "&& ls" in twice


def test_the_shell_prefix_knows_its_own_commands_letter_for_letter() -> None:
    ours = [*map(hook_command, PROGRAMS), " ".join(server_words())]
    assert all(map(is_ours, ours))
    others = [line.replace(" hook ", " run ").replace(" mcp", " run") for line in ours]
    others += [each for line in ours for each in (f"{line} ", f"{line}; ls", f"ls; {line}", "")]
    assert not any(map(is_ours, others))


def test_the_hook_loads_almost_nothing(project: Path) -> None:
    event = {"hook_event_name": EVENTS["claude"], "tool_name": "Bash", "tool_input": {"command": "ls"}, "cwd": str(project)}
    code = "import sys; before = set(sys.modules); from agent_sandbox.cli.commands.hook import program, respond; respond(['claude'], {})"
    code += "; sys.stderr.write(' '.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", code], input=json.dumps(event).encode(), capture_output=True, check=True)
    assert b"updatedInput" in done.stdout
    loaded = set(done.stderr.decode().split())
    assert "agent_sandbox.coding_agents.decide" in loaded
    heavy = {"json", "re", "enum", "dataclasses", "subprocess", "tomllib", "pathlib", "typing", "ctypes", "shlex", "hashlib"}
    assert sorted(loaded & heavy) == []
    assert {name for name in loaded if name.startswith("agent_sandbox.cli.")} == {
        "agent_sandbox.cli.commands",
        "agent_sandbox.cli.commands.hook",
    }
    assert len([name for name in loaded if name.startswith("agent_sandbox")]) < 30
