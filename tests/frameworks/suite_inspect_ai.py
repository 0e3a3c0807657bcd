"""inspect-ai's own checks of sandbox environments, and a real evaluation. Runs in an environment with inspect-ai."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from agent_sandbox.adapters.inspect_ai import AgentSandboxEnvironment, SampleOptions

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shared() -> Iterator[AgentSandboxEnvironment]:
    environment = SampleOptions().environment()
    yield AgentSandboxEnvironment(environment)
    environment.close()


@pytest.fixture
def sandbox_env(shared: AgentSandboxEnvironment) -> AgentSandboxEnvironment:
    return shared


def test_the_example_of_the_guide_finds_the_sandbox_by_its_entry_point(
    tmp_path: Path, run_example: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    outputs = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "cat given.txt; echo more >> given.txt; wc -l given.txt"}),
        ModelOutput.from_content("mockllm/model", "it says canary"),
    ]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else inspect fetches a tokenizer to count
    logs: list[Any] = []
    model = get_model("mockllm/model", custom_outputs=outputs)
    thread = threading.Thread(target=lambda: logs.extend(run_example("inspect-ai", model=model)["logs"]))
    thread.start()  # inspect has an event loop of its own, so it needs a thread without one
    thread.join()
    (log,) = logs
    assert log.status == "success", log.error
    said = [message.text for message in log.samples[0].messages if message.role == "tool"]
    assert "canary" in said[0] and "1 given.txt" in said[0]
    assert log.results.scores[0].metrics["accuracy"].value == 1
