"""LangChain's real shell session and middleware, with our execution policy. Runs in an environment with langchain."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware.shell_tool import ShellSession
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from agent_sandbox import Workspace
from agent_sandbox.adapters.langchain import SandboxExecutionPolicy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "notes.txt").write_text("one\n")
    return tmp_path / "project"


@pytest.fixture
def session(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShellSession]:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "canary")
    session = ShellSession(project, SandboxExecutionPolicy(), ("/bin/bash",), {"GIVEN": "yes"})
    session.start()
    yield session
    session.stop(10)


def test_the_shell_keeps_its_state_and_the_project_stays_as_it_is(session: ShellSession, project: Path) -> None:
    assert session.execute("cd /tmp; x=5; echo $GIVEN", timeout=60).output == "yes\n"
    assert session.execute("echo $x; pwd; false", timeout=60).output == "5\n/tmp\n"
    assert session.execute("env | grep -c canary", timeout=60).output == "0\n", "the caller's environment does not pass"
    assert session.execute("env | grep -c yes", timeout=60).output == "1\n", "the control: what is given does"
    assert session.execute(f"echo two >> {project}/notes.txt; cat {project}/notes.txt", timeout=60).output == "one\ntwo\n"
    assert (project / "notes.txt").read_text() == "one\n"
    session.stop(10)
    workspace = Workspace.over(project)
    assert "+two" in workspace.diff() and workspace.promote() is not None
    assert (project / "notes.txt").read_text() == "one\ntwo\n"


def test_variables_for_the_shell_do_not_act_on_the_program_that_starts_it(project: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (project / "sitecustomize.py").write_text(f"open({str(canary)!r}, 'w')")
    odd = 'a "quoted" $HOME \\ and\nanother line\t# no comment '
    variables = {"PYTHONPATH": str(project), "LD_LIBRARY_PATH": str(project), "ODD": odd, "EMPTY": ""}
    session = ShellSession(project, SandboxExecutionPolicy(), ("/bin/bash",), variables)
    session.start()
    try:
        assert session.execute('printf "%s" "$ODD"; echo "|$PYTHONPATH|$LD_LIBRARY_PATH|$EMPTY"', timeout=60).output == (
            f"{odd}|{project}|{project}|\n"
        )
        assert not canary.exists(), "our own program, outside of the sandbox, does not load it"
    finally:
        session.stop(10)
    subprocess.run([sys.executable, "-c", ""], env={"PYTHONPATH": str(project)}, check=True)
    assert canary.exists(), "the control: a program with this variable loads it"


def test_a_command_that_hangs_is_ended_and_the_shell_starts_again(session: ShellSession, project: Path) -> None:
    session.execute("echo kept > kept.txt", timeout=60)
    assert session.execute("sleep 1000", timeout=1).timed_out
    assert session.execute("cat kept.txt", timeout=60).output == "kept\n"


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **options: Any) -> ScriptedModel:
        return self


def test_the_example_of_the_guide_uses_the_shell_of_the_middleware(
    project: Path, run_example: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"name": "shell", "args": {"command": "echo from the agent >> notes.txt; cat notes.txt"}, "id": "1", "type": "tool_call"}
    model = ScriptedModel(messages=iter([AIMessage(content="", tool_calls=[call]), AIMessage(content="done")]))
    answer = run_example("LangChain", model=model, project=project)["answer"]
    assert "one\nfrom the agent" in answer["messages"][-2].content
    assert (project / "notes.txt").read_text() == "one\n" and os.listdir(project) == ["notes.txt"]
    assert "+from the agent" in capsys.readouterr().out
