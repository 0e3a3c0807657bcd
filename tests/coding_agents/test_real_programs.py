"""Claude Code, Codex and Gemini CLI themselves, connected by `connect`, with a model that says what the test tells it.

They are large, and not ours to install: name each in a variable, and run `make torture`, or this file with `-m torture`.

    AGENT_SANDBOX_TEST_CLAUDE=…/claude  AGENT_SANDBOX_TEST_CODEX=…/codex  AGENT_SANDBOX_TEST_GEMINI=…/gemini.js
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.coding_agents.scripted_model import Call, Model, scripted
from tests.e2e.program import PROGRAM, Shell, words

pytestmark = pytest.mark.torture

COMMAND = 'touch canary && echo "it\'s done" && pwd'
CALLS: dict[str, Call] = {
    "claude": ("Bash", {"command": COMMAND, "description": "d"}),
    "codex": ("exec_command", {"cmd": COMMAND}),
    "gemini": ("run_shell_command", {"command": COMMAND, "description": "d"}),
}
READS: dict[str, Call] = {
    "claude": ("Read", {"file_path": "greeting.txt"}),
    "codex": ("view_image", {"path": "greeting.txt"}),
    "gemini": ("read_file", {"file_path": "greeting.txt"}),
}
ALL_ALLOWED = {
    "claude": ["--dangerously-skip-permissions"],
    "codex": ["--dangerously-bypass-approvals-and-sandbox"],
    "gemini": ["--yolo"],
}
SETTINGS = {"claude": ".claude/settings.json", "codex": ".codex/hooks.json", "gemini": ".gemini/settings.json"}


@dataclass(frozen=True)
class Agent:
    """A real program in a home of its own, standing in a project."""

    name: str
    program: str
    home: Path
    project: Path

    @property
    def shell(self) -> Shell:
        return Shell(self.project, {"HOME": str(self.home), "AGENT_SANDBOX_STATE": str(self.home / "state")})

    def start(self, model: Model, *options: str) -> subprocess.CompletedProcess[bytes]:
        """Start the program with one prompt, and wait for it."""
        address = f"http://127.0.0.1:{model.port}"
        env = {"PATH": os.environ["PATH"], "TERM": "dumb", "SHELL": "/bin/bash", "IS_SANDBOX": "1", **self.shell.env}
        match self.name:
            case "claude":
                line = [self.program, "-p", "go", *options]
                env |= {"ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": "k", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
            case "codex":
                provider = f"model_providers.p={{name='p',base_url='{address}/v1',env_key='P_KEY',wire_api='responses'}}"
                line = [
                    self.program,
                    "exec",
                    "--skip-git-repo-check",
                    "-c",
                    "model=m",
                    "-c",
                    "model_provider=p",
                    "-c",
                    provider,
                    *options,
                    "go",
                ]
                env |= {"P_KEY": "k"}
            case _:
                line = ["node", self.program, "-p", "go", "-m", "gemini-2.5-pro", *options]
                env |= {"GOOGLE_GEMINI_BASE_URL": address, "GEMINI_API_KEY": "k", "GEMINI_CLI_TRUST_WORKSPACE": "true"}
        return subprocess.run(line, cwd=self.project, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=240)

    @property
    def harmed(self) -> bool:
        return (self.project / "canary").exists()


@pytest.fixture(params=CALLS)
def agent(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> Agent:
    variable = f"AGENT_SANDBOX_TEST_{request.param.upper()}"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no program")
    home = tmp_path / "home"
    (home / ".gemini").mkdir(parents=True)
    (home / ".gemini/settings.json").write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}\n')
    return Agent(request.param, os.environ[variable], home, project)


def trusted(agent: Agent) -> list[str]:
    """Options by which Codex runs a hook that no person has trusted in its dialog."""
    return ["--dangerously-bypass-hook-trust"] if agent.name == "codex" else []


def connect(agent: Agent) -> None:
    done = agent.shell("connect", agent.name, "--yes")
    assert done.returncode == 0, words(done)


def test_a_connected_program_works_in_the_sandbox(agent: Agent) -> None:
    connect(agent)
    with scripted([CALLS[agent.name], READS[agent.name]]) as model:
        done = agent.start(model, *trusted(agent))
    assert model.was_told("it's done") and not agent.harmed, (done, model.requests[-1])
    assert not model.was_told((agent.project / "greeting.txt").read_text().strip()), "nor did it read a file past the sandbox"
    assert b"canary" in agent.shell("diff", "--name-only").stdout


def test_the_same_program_alone_changes_the_machine(agent: Agent) -> None:
    """The control: without `connect`, and with everything allowed, the canary is there."""
    with scripted([CALLS[agent.name]]) as model:
        done = agent.start(model, *ALL_ALLOWED[agent.name])
    assert agent.harmed, done


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 1", "echo garbage", "sleep 100"])
def test_a_hook_that_is_dead_late_or_mad_lets_nothing_through(agent: Agent, end: str) -> None:
    """Without the shell around the hook, too: only the program's own permissions are left."""
    connect(agent)
    _replace(agent.home / SETTINGS[agent.name], _command_of(agent), end)
    with scripted([CALLS[agent.name]]) as model:
        done = agent.start(model, *trusted(agent))
    assert len(model.requests) > 1 and not agent.harmed, done


def test_a_hook_of_codex_that_nobody_has_trusted_lets_nothing_through(agent: Agent) -> None:
    if agent.name != "codex":
        pytest.skip("only Codex asks a person to trust hooks")
    connect(agent)
    with scripted([CALLS["codex"]]) as model:
        done = agent.start(model)
    assert len(model.requests) > 1 and not agent.harmed, done


def test_a_project_that_switches_hooks_off_does_not_get_out(agent: Agent) -> None:
    if agent.name != "claude":
        pytest.skip("a setting of Claude Code")
    connect(agent)
    (agent.project / ".claude").mkdir()
    (agent.project / ".claude/settings.json").write_text('{"disableAllHooks": true, "permissions": {"allow": ["Bash"]}}')
    with scripted([CALLS["claude"]]) as model:
        done = agent.start(model)
    assert not agent.harmed, done


def test_a_prefix_sends_every_command_of_claude_into_the_sandbox(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    if agent.name != "claude":
        pytest.skip("a variable of Claude Code")
    prefix = f"CLAUDE_CODE_SHELL_PREFIX={Path(PROGRAM[0]).with_name('agent-sandbox-shell')}"
    wrapper = agent.home / "claude"
    wrapper.write_text(f'#!/bin/sh\n{prefix} exec {agent.program} "$@"\n')
    wrapper.chmod(0o755)
    started = Agent("claude", str(wrapper), agent.home, agent.project)
    with scripted([CALLS["claude"]]) as model:
        done = started.start(model, *ALL_ALLOWED["claude"])
    assert model.was_told("it's done") and not agent.harmed, done


def _command_of(agent: Agent) -> str:
    from agent_sandbox.coding_agents.own_commands import hook_command  # as the installed program writes it

    return hook_command(agent.name)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    short = text.replace(old, new).replace('"timeout": 60000', '"timeout": 2000').replace('"timeout": 60', '"timeout": 2')
    path.write_text(short)
