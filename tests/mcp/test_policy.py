"""A model narrows its policy, and never widens it."""

from __future__ import annotations

import mcp_types as types

from tests.mcp.client import MODERN, Model, Place, converse, text_of, yes


def output(result: types.CallToolResult) -> str:
    """What a run printed; nothing if it was refused."""
    printed: str = result.structured_content.get("stdout", "")
    return printed


def test_a_call_narrows_and_the_next_one_is_as_before(place: Place) -> None:
    (place.project / "plan.txt").write_text("canary\n")

    async def talk(model: Model) -> None:
        read = {"command": "cat plan.txt"}
        assert (await model.done("run", **read))["stdout"] == "canary\n"  # the control
        hidden = await model("run", **read, narrow={"hide": [str(place.project / "plan.txt")]})
        assert "No such file" in text_of(hidden) and "canary" not in text_of(hidden)
        assert (await model.done("run", **read))["stdout"] == "canary\n"

        assert (await model.done("run", command="seq 3"))["exit"] == 0
        barred = await model("run", command="seq 3", narrow={"commands": ["bash", "cat"]})
        assert barred.structured_content.get("stdout", "") == "" and "seq" in text_of(barred)

        hungry = {"code": "x = bytearray(600 << 20); print(len(x))", "timeout_seconds": 60}
        assert (await model.done("run", **hungry))["stdout"] == f"{600 << 20}\n"
        starved = await model("run", **hungry, narrow={"memory_mb": 100})
        assert starved.structured_content["exit"] != 0 and str(600 << 20) not in text_of(starved)

    converse(place, talk)


def test_nothing_that_a_call_says_widens_the_policy(place: Place) -> None:
    async def talk(model: Model) -> None:
        assert not output(await model("run", command="seq 3"))  # the policy of the server: no seq
        wide = {"commands": ["seq", "bash", "cat"], "network": True, "hosts": ["example.com"], "memory_mb": 100_000}
        barred = await model("run", command="seq 3", narrow=wide)
        assert not output(barred)
        assert (await model.done("run", command="cat greeting.txt", narrow=wide))["stdout"] == "hello\n"  # the control: cat may run
        hungry = {"code": "x = bytearray(600 << 20); print(len(x))"}
        starved = await model("run", **hungry, narrow=wide)
        assert starved.structured_content["exit"] != 0 and str(600 << 20) not in text_of(starved)
        sleepy = await model("run", command="while :; do :; done", timeout_seconds=500)
        assert sleepy.is_error and "wall" in sleepy.structured_content["limits_hit"]
        unknown = await model("run", command="true", narrow={"reveal": ["/root/.ssh"]})
        assert unknown.is_error and "invalid arguments" in text_of(unknown)
        turn = await model("python", code="1 + 1")  # such a session could not keep to a list of programs
        assert turn.is_error and "use the tool run" in text_of(turn)
        assert (await model.done("run", code="print(1 + 1)"))["stdout"] == "2\n"
        offline = await model("request", hosts=["example.com"], reason="to look")
        assert offline.is_error and "no network" in text_of(offline)

    converse(place, talk, "--allow", "bash,cat,python*", "--memory", "300M", "--timeout", "3", user=yes)


def test_more_is_asked_of_a_person_and_holds_for_a_time(place: Place) -> None:
    (place.project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["bash", "cat"]\n')
    answers = [False, True]

    async def talk(model: Model) -> None:
        assert not output(await model("run", command="seq 3"))
        assert (await model("request", programs=["seq"], reason="to count\ndigest    0000")).is_error
        assert not any(line.startswith("digest    0000") for line in model.asked[0].message.splitlines())
        assert "to count" in model.asked[0].message and "seq" in model.asked[0].message
        assert not output(await model("run", command="seq 3"))  # the canary: a no changes nothing
        granted = await model.done("request", programs=["seq"], reason="to count", minutes=5)
        assert granted["seconds"] == 300
        assert (await model.done("run", command="seq 3"))["stdout"] == "1\n2\n3\n"
        narrow = await model("run", command="seq 3", narrow={"commands": ["bash"]})
        assert not output(narrow)  # narrowing wins over what was granted

    def user(asked: object) -> object:
        return yes(asked) if answers.pop(0) else yes(asked).model_copy(update={"content": {"approve": False}})  # type: ignore[arg-type]

    converse(place, talk, mode=MODERN, user=user)  # type: ignore[arg-type]


def test_a_python_session_ends_with_the_elevation_that_it_began_under(place: Place) -> None:
    (place.project / "hidden.txt").write_text("canary\n")
    look = "print(open('hidden.txt').read())"

    async def looked_on(model: Model, seconds: float) -> types.CallToolResult:
        """Look at the file for longer than the elevation lasts, in a session that begins under it."""
        await model.done("request", paths=["hidden.txt"], reason="to look", minutes=seconds / 60)
        await model("python", code=look)  # the session that began without it has ended
        return await model("python", code=f"import time\n{look}\ntime.sleep({seconds + 5})\n{look}", timeout_seconds=600)

    async def talk(model: Model) -> None:
        assert "canary" not in text_of(await model("python", code=look))  # the control
        seconds, turn = 1.0, None
        while turn is None or "canary" not in text_of(turn):  # on a busy machine it is over before the session begins
            seconds *= 2
            turn = await looked_on(model, seconds)
        assert text_of(turn).count("canary") == 1 and turn.structured_content["ended"]
        assert "canary" not in text_of(await model("python", code=look))
        await model.done("request", paths=["hidden.txt"], reason="to look again", minutes=10)
        await model("python", code=look)
        assert "canary" in text_of(await model("python", code=look))  # a session under another elevation begins

    converse(place, talk, "--deny", str(place.project / "hidden.txt"), user=yes)


def test_a_host_that_is_asked_about_opens_with_the_answer(place: Place) -> None:
    """Nobody has this name, so a request that is let through fails; but the policy does not refuse it."""
    reach = {"command": "curl -sS -m 60 http://nobody.invalid/"}

    async def talk(model: Model) -> None:
        first = await model("run", **reach)
        assert "refused until a person runs" in text_of(first)
        second = await model("run", **reach)
        [line] = [each for each in text_of(first).splitlines() if each.startswith("agent-sandbox approve ")]
        assert line in text_of(second).splitlines()  # the same question, although another run asks
        [question] = [each for each in place.program("approve").stdout.splitlines() if each.startswith("digest ")]
        assert place.program("approve", question.split()[-1], "--yes").returncode == 0
        third = await model("run", **reach)
        assert "refused until" not in text_of(third) and "approved" not in text_of(third)
        assert "refused until" in text_of(await model("run", **reach))  # it held once

    converse(place, talk, "--network", "nobody.invalid+ask")


def test_an_unknown_intent_and_one_without_a_network_are_refused(place: Place) -> None:
    async def talk(model: Model) -> None:
        refused = await model("intent", name="whatever I like")
        assert refused.is_error and "whatever i like" in text_of(refused).lower()

    converse(place, talk, "--network", "api.example.com")
