"""Real files change only after a person's answer to exactly these changes."""

from __future__ import annotations

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.mcp.client import HANDSHAKE, MODERN, Asked, Model, Place, converse, text_of, yes

WORKFLOW = ".github/workflows/ci.yml"


def no_tick(asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    """A person who presses Enter without reading."""
    return types.ElicitResult(action="accept", content=dict.fromkeys(asked.requested_schema["properties"], False))


def half(asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    """A person who allows the promotion, and no protected kind."""
    return types.ElicitResult(action="accept", content={"approve": True})


def declines(asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    return types.ElicitResult(action="decline")


def cancels(asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    return types.ElicitResult(action="cancel")


@pytest.mark.parametrize("mode", [HANDSHAKE, MODERN])
def test_a_promotion_asks_the_clients_user_and_only_a_full_yes_counts(place: Place, mode: str) -> None:
    answers: list[Asked] = [declines, cancels, no_tick, yes, half, yes]

    async def talk(model: Model) -> None:
        await model.done("write", path="greeting.txt", content="changed\n\x1b[2K\r\u202ehidden\n")
        for _ in range(3):  # the canary: without a yes nothing is promoted
            refused = await model("promote")
            assert refused.is_error and (place.project / "greeting.txt").read_text() == "hello\n"
        assert "+changed" in model.asked[-1].message and "-hello" in model.asked[-1].message
        assert all(each.isprintable() or each == "\n" for each in model.asked[-1].message)  # nothing acts on a terminal
        await model.done("write", path="greeting.txt", content="changed\n")
        done = await model.done("promote")  # the control: with a yes it is
        assert done["schema"] == "agent-sandbox/promote/1" and done["outcome"] == "promoted"
        assert (place.project / "greeting.txt").read_text() == "changed\n"

        await model.done("write", path=WORKFLOW, content="on: push\n")
        assert "ci" in (await model.done("diff"))["protected"]
        assert (await model("promote")).is_error and not (place.project / WORKFLOW).exists()
        assert set(model.asked[-1].requested_schema["properties"]) == {"approve", "promote_ci"}
        await model.done("promote")
        assert (place.project / WORKFLOW).read_text() == "on: push\n"
        assert len(model.asked) == 6

    converse(place, talk, mode=mode, user=lambda asked: answers.pop(0)(asked))


@pytest.mark.parametrize("mode", [HANDSHAKE, MODERN])
def test_without_a_client_that_asks_a_question_waits_for_the_command_line(place: Place, mode: str) -> None:
    async def talk(model: Model) -> None:
        await model.done("write", path="greeting.txt", content="changed\n")
        pending = await model("promote")
        [question] = pending.structured_content["pending"]
        assert pending.is_error and question["approve"] in text_of(pending)
        again = await model("promote")
        assert again.structured_content["pending"] == [question]  # the same question, not a second one
        # The model cannot answer it: the inbox is not in the sandbox.
        inside = await model("run", command=f"agent-sandbox approve {question['id']} --yes; ls {place.state}")
        assert inside.structured_content["exit"] != 0 and (await model("promote")).is_error
        # Nor does an answer to these changes count for others.
        assert place.program("approve", question["id"], "--yes").returncode == 0
        await model.done("write", path="greeting.txt", content="something else\n")
        other = await model("promote")
        assert other.is_error and other.structured_content["pending"][0]["id"] != question["id"]
        assert (place.project / "greeting.txt").read_text() == "hello\n"
        # The control: back at exactly those changes, the answer counts, once.
        await model.done("write", path="greeting.txt", content="changed\n")
        await model.done("promote")
        assert (place.project / "greeting.txt").read_text() == "changed\n"

        await model.done("write", path="greeting.txt", content="no\n")
        [question] = (await model("promote")).structured_content["pending"]
        assert place.program("deny", question["id"]).returncode == 0
        refused = await model("promote")
        assert refused.is_error and "said no" in text_of(refused)

    converse(place, talk, mode=mode)
    assert not place.program("approve").stdout  # nothing waits any more


def test_the_state_of_a_question_is_bound_to_tool_and_arguments(place: Place) -> None:
    async def talk(model: Model) -> None:
        session = model.client.session
        await model.done("run", command="echo a > a.txt; echo b > b.txt")
        asked = await session.call_tool("promote", {"only": ["a.txt"]}, allow_input_required=True)
        assert isinstance(asked, types.InputRequiredResult) and asked.input_requests is not None
        approval: types.InputResponses = {
            name: types.ElicitResult(action="accept", content={"approve": True}) for name in asked.input_requests
        }

        async def answered(arguments: dict[str, object], state: str | None) -> object:
            return await session.call_tool("promote", arguments, input_responses=approval, request_state=state, allow_input_required=True)

        with pytest.raises(MCPError):
            await answered({"only": ["b.txt"]}, asked.request_state)
        with pytest.raises(MCPError):
            await answered({"only": ["a.txt"]}, (asked.request_state or "")[:-4] + "AAAA")
        assert isinstance(await answered({"only": ["a.txt"]}, None), types.InputRequiredResult)  # an answer to no question
        assert not (place.project / "a.txt").exists()
        done = await answered({"only": ["a.txt"]}, asked.request_state)
        assert isinstance(done, types.CallToolResult) and not done.is_error
        assert (place.project / "a.txt").exists() and not (place.project / "b.txt").exists()

    converse(place, talk, mode=MODERN, user=declines)


def test_a_capability_of_a_person_promotes_what_is_not_protected(place: Place) -> None:
    token = place.program("grant", "promote **", "--for", "1h").stdout.strip()

    async def talk(model: Model) -> None:
        await model.done("write", path="greeting.txt", content="changed\n")
        await model.done("promote")
        assert (place.project / "greeting.txt").read_text() == "changed\n"
        await model.done("write", path=WORKFLOW, content="on: push\n")
        refused = await model("promote")
        assert refused.is_error and refused.structured_content["pending"] and not (place.project / WORKFLOW).exists()

    converse(Place(place.project, place.state, {"AGENT_SANDBOX_CAPABILITY": token}), talk)


def test_an_attempt_is_promoted_by_its_name(place: Place) -> None:
    async def talk(model: Model) -> None:
        await model.done("try", attempts={"a": "echo 1 > answer.txt", "b": "echo 2 > answer.txt"}, check="true")
        await model.done("promote", attempt="b")
        assert (place.project / "answer.txt").read_text() == "2\n"

    converse(place, talk, user=yes)
