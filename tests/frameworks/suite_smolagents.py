"""A real smolagents agent whose model is scripted. Runs in an environment with smolagents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smolagents import CodeAgent, tool
from smolagents.local_python_executor import InterpreterError
from smolagents.models import ChatMessage, MessageRole, Model

from agent_sandbox.adapters.smolagents import SandboxExecutor


class ScriptedModel(Model):
    def __init__(self, *steps: str) -> None:
        super().__init__(model_id="scripted")
        self.steps = [f"<code>\n{step}\n</code>" for step in steps]

    def generate(self, messages: Any, **options: Any) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content=self.steps.pop(0))


@tool
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word.upper()


def test_an_agent_keeps_its_state_calls_tools_and_answers(tmp_path: Path) -> None:
    canary = tmp_path / "canary.txt"
    canary.write_text("secret")
    model = ScriptedModel(
        "import math\nn = math.factorial(3)\nprint(lookup('abc'))",
        "print('before'); missing_name",
        f"import os\nprint(os.path.exists({str(canary)!r}))\nopen('/tmp/x', 'w').write('kept')",
        "try:\n    final_answer(n * 7 + seven)\nexcept Exception:\n    pass\nprint('never reached')",
    )
    with SandboxExecutor() as executor:
        agent = CodeAgent(tools=[lookup], model=model, executor=executor, verbosity_level=0)
        assert agent.run("Compute.", additional_args={"seven": 7}) == 49
        steps = agent.memory.steps[1:]
        assert "ABC" in steps[0].observations and "missing_name" in str(steps[1].error) and "before" in steps[1].observations
        assert "False" in steps[2].observations, "the files of this machine are not there"
        assert "never reached" not in steps[3].observations
    assert canary.exists()


def test_the_example_of_the_guide_answers(run_example: Callable[..., dict[str, Any]]) -> None:
    assert run_example("smolagents", model=ScriptedModel("final_answer(6 * 7)"))["answer"] == 42


def test_a_step_that_never_ends_is_ended_and_the_next_one_starts_anew() -> None:
    with SandboxExecutor(timeout_seconds=2) as executor:
        executor.send_tools({"lookup": lookup})
        executor.send_variables({"given": [1, 2]})
        assert executor("x = 1\ngiven").output == [1, 2]
        with pytest.raises(InterpreterError, match=r"timed out.*variables are gone"):
            executor("while True: pass")
        assert executor("print('x' in globals()); lookup(str(given))").output == "[1, 2]"
        assert executor.state["_print_outputs"] == "False\n"
        with pytest.raises(TypeError, match="cannot cross"):
            executor.send_variables({"odd": object()})


def test_the_network_and_processes_are_closed_by_default() -> None:
    with SandboxExecutor() as executor:
        with pytest.raises(InterpreterError):
            executor("import subprocess\nsubprocess.run(['true'], check=True)")
        with pytest.raises(InterpreterError):
            executor("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)")
        assert executor("1 + 1").output == 2
