"""langchain-tests' suite for sandboxes of deepagents, against ours and against plain processes. Runs in an environment with deepagents."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import SandboxIntegrationTests

from agent_sandbox.adapters.deepagents import AgentSandboxBackend

PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"  # the suite runs `python`


class TestSandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[AgentSandboxBackend]:
        backend = AgentSandboxBackend(env_vars={"PATH": PATH})
        yield backend
        backend.close()


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **options: Any) -> ScriptedModel:
        return self


def test_the_example_of_the_guide_works_on_a_project(
    tmp_path: Path, run_example: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text("one\n")
    calls = [
        {"name": "execute", "args": {"command": "echo two >> notes.txt"}},
        {"name": "read_file", "args": {"file_path": f"{project}/notes.txt"}},
    ]
    messages = [AIMessage(content="", tool_calls=[{**call, "id": str(number), "type": "tool_call"}]) for number, call in enumerate(calls)]
    model = ScriptedModel(messages=iter([*messages, AIMessage(content="done")]))
    answer = run_example("deepagents", model=model, project=project)["answer"]
    assert "two" in answer["messages"][-2].content and answer["messages"][-1].content == "done"
    assert (project / "notes.txt").read_text() == "one\n" and "+two" in capsys.readouterr().out


class PlainBackend(BaseSandbox):
    """No sandbox: plain processes and files of this machine. It shows which failures are of the base class of deepagents itself."""

    id = "plain"

    def execute(self, command: str, *, timeout: int | None = None) -> Any:
        done = subprocess.run(["bash", "-c", command], capture_output=True, env={**os.environ, "PATH": PATH}, check=False)
        return ExecuteResponse(output=(done.stdout + done.stderr).decode(errors="replace"), exit_code=done.returncode)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[Any]:
        for path, content in files:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
        return [FileUploadResponse(path=path) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[Any]:
        return [FileDownloadResponse(path=path, content=Path(path).read_bytes()) for path in paths]


class TestPlain(SandboxIntegrationTests):
    """Only those tests for which a failure of ours is explained by the framework."""

    root = tempfile.mkdtemp(dir="/var/tmp")

    @property
    def sandbox_root_dir(self) -> str:
        return self.root

    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[PlainBackend]:
        yield PlainBackend()
        subprocess.run(["rm", "-rf", self.root], check=True)


for _name in [
    name for name in dir(TestPlain) if name.startswith("test_") and "glob" not in name and name != "test_write_existing_file_fails"
]:
    setattr(TestPlain, _name, None)
