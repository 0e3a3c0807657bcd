"""A real openai-agents run whose model is scripted, and the session's own operations. Runs in an environment with openai-agents."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import ModelResponse, Usage, set_tracing_disabled
from agents.models.interface import Model
from agents.sandbox import Manifest
from agents.sandbox.errors import ExecTimeoutError, InvalidManifestPathError, WorkspaceReadNotFoundError
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from agent_sandbox.adapters.openai_agents import AgentSandboxClient

set_tracing_disabled(True)


class ScriptedModel(Model):
    def __init__(self, *steps: dict[str, Any] | str) -> None:
        self.steps = list(steps)

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        step = self.steps.pop(0)
        if isinstance(step, str):
            text = ResponseOutputText(type="output_text", text=step, annotations=[])
            output: Any = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        else:
            words = json.dumps(step)
            output = ResponseFunctionToolCall(type="function_call", call_id=f"c{len(self.steps)}", name="exec_command", arguments=words)
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def test_the_example_of_the_guide_works_on_a_project_and_only_promotion_makes_it_real(
    tmp_path: Path, run_example: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text("one\n")
    model = ScriptedModel({"cmd": "echo two >> notes.txt; (sleep 1000 &) ; pwd"}, {"cmd": "cat notes.txt; exit 3"}, "done")
    names = run_example("openai-agents", model=model, project=project)
    said = [str(item.output) for item in names["answer"].new_items if hasattr(item, "output")]
    assert names["answer"].final_output == "done" and str(project) in said[0] and "code 3" in said[1] and "one\ntwo" in said[1]
    assert (project / "notes.txt").read_text() == "one\n" and "+two" in capsys.readouterr().out
    assert names["client"].workspace.promote() is not None and (project / "notes.txt").read_text() == "one\ntwo\n"


def test_files_commands_and_archives_of_a_session() -> None:
    async def main() -> None:
        client = AgentSandboxClient()
        session = await client.create(manifest=Manifest(), options=None)
        async with session:
            await session.write(Path("a/b.txt"), io.BytesIO(b"hello"))
            assert (await session.read(Path("a/b.txt"))).read() == b"hello"
            assert (await session.exec("cat a/b.txt")).stdout == b"hello" and await session.running()
            with pytest.raises(WorkspaceReadNotFoundError):
                await session.read(Path("missing"))
            await session.exec("ln -s /etc link")
            for outside in ("/etc/passwd", "link/passwd"):
                with pytest.raises(InvalidManifestPathError):
                    await session.read(Path(outside))
            await session.exec("rm link")
            with pytest.raises(ExecTimeoutError):
                await session.exec("sleep 1000", timeout=0.5)
            archive = await session.persist_workspace()
            state = client.deserialize_session_state(client.serialize_session_state(session._inner.state))
            other = await client.create(options=None)
            async with other:
                await other.hydrate_workspace(archive)
                assert (await other.read(Path("a/b.txt"))).read() == b"hello"
            await client.delete(other)
            again = await client.resume(state)
            assert (await again.read(Path("a/b.txt"))).read() == b"hello", "the same sandbox, which is still alive"
        await client.delete(session)
        assert not await session.running()
        client.close()

    asyncio.run(main())
