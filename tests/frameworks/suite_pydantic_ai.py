"""pydantic-ai's own suite for workspace backends, and an agent whose model is scripted. Runs in an environment with pydantic-ai."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from agent_sandbox.adapters.pydantic_ai import SandboxWorkspaceBackend


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TestBackend(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self) -> Iterator[SandboxWorkspaceBackend]:
        backend = SandboxWorkspaceBackend()
        yield backend
        backend.close()

    @pytest.fixture
    def fresh_backend(self) -> Iterator[Callable[[], SandboxWorkspaceBackend]]:
        made: list[SandboxWorkspaceBackend] = []

        def make() -> SandboxWorkspaceBackend:
            made.append(SandboxWorkspaceBackend())
            return made[-1]

        yield make
        for each in made:
            each.close()

    @pytest.fixture
    def attach_backend(self) -> Callable[[Any], SandboxWorkspaceBackend]:
        return lambda ref: SandboxWorkspaceBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[SandboxWorkspaceBackend], Any]:
        async def destroy(backend: SandboxWorkspaceBackend) -> None:
            await asyncio.to_thread(backend.close)

        return destroy


def test_the_example_of_the_guide_works_on_a_project_and_only_promotion_makes_it_real(
    tmp_path: Path, run_example: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text("one\n")
    steps = ["echo two >> notes.txt", "cat notes.txt"]
    seen: list[str] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(str(messages[-1]))
        return ModelResponse([ToolCallPart("bash", {"line": steps.pop(0)}) if steps else TextPart("done")])

    names = run_example("pydantic-ai", model=FunctionModel(model), project=project)
    assert names["answer"].output == "done" and "one\\ntwo" in seen[-1]
    assert "+two" in capsys.readouterr().out and (project / "notes.txt").read_text() == "one\n"
    assert names["backend"].workspace.promote() is not None and (project / "notes.txt").read_text() == "one\ntwo\n"
