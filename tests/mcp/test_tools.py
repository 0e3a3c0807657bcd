"""A model works in the sandbox, by a real client and a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_sandbox.mcp.python_sessions import can_fork
from tests.mcp.client import MODERN, Model, Place, converse, text_of


def test_a_model_works_in_the_sandbox_and_the_real_files_stay(place: Place) -> None:
    before = {path: path.read_bytes() for path in place.project.rglob("*") if path.is_file()}

    async def talk(model: Model) -> None:
        listed = await model.client.list_tools()
        assert {"run", "promote", "try", "python"} <= {tool.name for tool in listed.tools}
        assert ("fork" in {tool.name for tool in listed.tools}) == can_fork()

        run = await model("run", command="echo out; echo err >&2; echo two >> greeting.txt; exit 3")
        assert not run.is_error and run.structured_content["schema"] == "agent-sandbox/run/1"  # a failing program is a result
        assert (run.structured_content["exit"], run.structured_content["stdout"], run.structured_content["stderr"]) == (3, "out\n", "err\n")
        assert text_of(run).startswith("exit 3") and "1 change pending" in text_of(run)
        code = await model.done("run", code="print(open('greeting.txt').read())", language="python")
        assert code["stdout"] == "hello\ntwo\n\n"
        assert (await model.done("run", command="cat", stdin="given"))["stdout"] == "given"

        assert (await model.done("read", path="greeting.txt", offset=2, limit=1))["text"] == "two"
        await model.done("write", path="deep/er/new.txt", content="one one\n")
        again = await model("edit", path="deep/er/new.txt", old="one", new="1")
        assert again.is_error and "occurs 2 times" in text_of(again)
        await model.done("edit", path="deep/er/new.txt", old="one", new="1", all=True)
        assert (await model.done("read", path="deep/er/new.txt"))["text"] == "1 1\n"
        assert "deep" in {each["name"] for each in (await model.done("list"))["entries"]}
        missing = await model("read", path="nothing.txt")
        assert missing.is_error and "No such file" in text_of(missing)

        await model.done("run", code=r"open(b'odd-\xff.txt', 'w').close()")
        assert "odd-�.txt" in {each["name"] for each in (await model.done("list"))["entries"]}
        await model.done("run", code=r"import os; os.remove(b'odd-\xff.txt')")

        assert (await model.done("snapshot", label="good"))["snapshot"]["label"] == "good"
        await model.done("run", command="rm -rf deep greeting.txt")
        diff = await model("diff")
        assert "deleted" in text_of(diff)
        assert (await model.done("rollback", to="good"))["to"]["label"] == "good"
        diff = await model("diff")
        assert "+two" in text_of(diff) and "+1 1" in text_of(diff)
        assert diff.structured_content["schema"] == "agent-sandbox/diff/1" and len(diff.structured_content["digest"]) == 64
        assert await model.resource("diff") == text_of(diff)

        plan = await model("simulate", command="rm greeting.txt")
        assert plan.structured_content["schema"] == "agent-sandbox/simulation/1" and "deleted file" in text_of(plan)
        assert (await model.done("read", path="greeting.txt"))["text"] == "hello\ntwo\n"

        entries = json.loads(await model.resource("ledger"))["entries"]
        assert {"process", "code", "file"} <= {entry["category"] for entry in entries} and len(entries) <= 100

    converse(place, talk)
    assert {path: path.read_bytes() for path in place.project.rglob("*") if path.is_file()} == before
    assert "greeting.txt" in place.program("diff", "--name-only").stdout  # the same sandbox as on the command line


def test_output_is_bounded_and_progress_is_reported(place: Place) -> None:
    async def talk(model: Model) -> None:
        run = await model("run", command="seq 200000; echo working; sleep 1.5; echo END")
        assert len(text_of(run)) < 20_000 and "characters left out" in text_of(run) and "END" in text_of(run)
        assert len(json.dumps(run.structured_content)) < 60_000
        assert any("working" in message for message in model.progress)

    converse(place, talk, mode=MODERN)


def test_approaches_are_tried_apart_and_compared(place: Place) -> None:
    async def talk(model: Model) -> None:
        attempts = {"good": "echo good > answer.txt", "bad": "echo bad > answer.txt"}
        done = await model.done("try", attempts=attempts, check="grep -q good answer.txt")
        assert done["winner"] == "good" and [each["state"] for each in done["attempts"]] == ["passed", "failed"]
        assert "+bad" in text_of(await model("diff", attempt="bad"))
        assert (await model.done("diff"))["changes"] == []
        none = await model("try", attempts={"a": "false"})
        assert none.structured_content["winner"] is None and "no attempt passed" in text_of(none)

    converse(place, talk)
    assert not (place.project / "answer.txt").exists()


def test_a_python_session_keeps_its_state_and_goes_back(place: Place) -> None:
    secret = Path(place.project, ".env")
    secret.write_text("TOKEN=hunter2\n")

    async def talk(model: Model) -> None:
        assert (await model.done("python", code="a = 1"))["steps"]
        turn = await model.done("python", code="a += 1\nopen('greeting.txt', 'a').write('more')\na * 21")
        assert turn["value"] == "42"
        failed = await model("python", code="b = a / 0")
        assert "ZeroDivisionError" in text_of(failed) and failed.structured_content["status"] == "failed"
        steps = await model("inspect")
        assert "a += 1" in text_of(steps) and "a: int = 2" in text_of(steps)
        assert "a += 1" in await model.resource("timeline")
        first = next(int(line.split()[0]) for line in text_of(steps).splitlines() if "a += 1" in line)
        assert (await model.done("inspect", step=first, expression="a"))["value"]["repr"] == "1"
        await model.done("rewind", step=first)
        assert (await model.done("inspect", expression="a"))["value"]["repr"] == "1"
        assert (await model.done("python", code="a, open('greeting.txt').read()"))["value"] == repr([1, "hello\n"])
        hidden = await model("python", code="open('.env').read()")
        assert "FileNotFoundError" in text_of(hidden) and "hunter2" not in text_of(hidden)
        beyond = await model("rewind", step=99999)
        assert beyond.is_error and "no step" in text_of(beyond)
        assert "NameError" in text_of(await model("python", code="a", restart=True))

    converse(place, talk)
    assert (place.project / "greeting.txt").read_text() == "hello\n"


@pytest.mark.skipif(not can_fork(), reason="sessions cannot be forked in this version")
def test_a_python_session_is_forked_and_goes_on_in_several_ways(place: Place) -> None:
    async def talk(model: Model) -> None:
        await model.done("python", code="a = 1")
        forks = (await model.done("fork", count=2))["sessions"]
        for number in forks:
            assert (await model.done("python", code=f"a += {number}; a", session=number))["value"] == str(1 + number)
        assert (await model.done("fork", close=forks))["sessions"] == forks
        assert (await model.done("python", code="a"))["value"] == "1"
        assert (await model("python", code="a", session=forks[0])).is_error

    converse(place, talk)
