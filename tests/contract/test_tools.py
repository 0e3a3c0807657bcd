"""Functions of the caller's, called from inside: the same claims for each runtime of Python code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from agent_sandbox import Sandbox, SandboxResult, SandboxStatus, ToolError
from agent_sandbox.ledger.event import Event, Intent, OutcomeEvent, RefusalEvent
from agent_sandbox.runtime.base import ExitReason
from tests.patience import given_time

pytestmark = pytest.mark.once

Make = Callable[..., Sandbox]
Events = Callable[[], list[Event]]


def lookup(key: str, limit: int = 10, *more: Any, flag: bool | None = None, **rest: Any) -> list[Any]:
    """Look it up."""
    return [key, limit, more, flag, rest]


@pytest.mark.both
def test_a_tool_is_a_function_like_any_other(sandboxes: Make) -> None:
    ran = sandboxes(tools=[lookup]).execute("""
import inspect
from host_tools import lookup as imported
print(lookup("a"), lookup("a", 1, 2, 3, flag=True, other=(4, 5)), lookup(limit=7, key="b"))
print(imported is lookup, lookup.__name__, lookup.__doc__, inspect.isfunction(lookup))
print(inspect.signature(lookup))
for wrong in (lambda: lookup(), lambda: lookup(1, key=2)):
    try:
        wrong()
    except TypeError as error:
        print(error)
""")
    assert ran.stdout.splitlines() == [
        "['a', 10, [], None, {}] ['a', 1, [2, 3], True, {'other': [4, 5]}] ['b', 7, [], None, {}]",
        "True lookup Look it up. True",
        "(key: 'str', limit: 'int' = 10, *more: 'Any', flag: 'bool | None' = None, **rest: 'Any') -> 'list[Any]'",
        "lookup() missing 1 required positional argument: 'key'",
        "lookup() got multiple values for argument 'key'",
    ], ran


ODD: dict[str, Callable[..., Any]] = {
    "by_place": lambda a, b=2, /, c=3: [a, b, c],
    "by_name": lambda *, a, b=float("inf"): [a, b],
    "unsaid": lambda a, b=object, c=3: [a, b is object, c],
    "pair": divmod,
    "unknown": max,
}


def test_every_kind_of_signature_is_the_same_inside(sandboxes: Make) -> None:
    ran = sandboxes().execute(
        """
print(by_place(1), by_place(1, 5), by_place(1, 5, c=6), by_name(a=1), unsaid(1), unsaid(1, c=4), pair(7, 3), unknown(3, 9))
import inspect
print(inspect.signature(by_place), inspect.signature(by_name), inspect.signature(unsaid))
""",
        tools=ODD,
    )
    assert ran.stdout.splitlines() == [
        "[1, 2, 3] [1, 5, 3] [1, 5, 6] [1, inf] [1, True, 3] [1, True, 4] [2, 1] 9",
        "(a, b=2, /, c=3) (*, a, b=inf) (a, b=..., c=3)",
    ], ran


DATA: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, -(2**1999), 2**2001, -(10**6000), 0.1, -0.0, 1e308, math.inf, -math.inf,
    "", "é𝄞\0\x7f", '"\\', "\ud800", "\ud83d\ude00", bytes(range(256)), b"", [], {}, [[], [[]], {}], {"": {"a": [1, {"b": None}]}},
    {"$int": "1"}, {"$dict": [["$bytes", b"x"]], "plain": 1}, [1, "a", None, [2.5, {"k": [False]}]],
)  # fmt: skip


def test_data_crosses_unchanged_both_ways(sandboxes: Make) -> None:
    taken: list[Any] = []

    def take(value: Any) -> Any:
        taken.append(value)
        return value

    ran = sandboxes(tools=[take]).execute(
        "import math\nfor value in DATA:\n    got = take(value)\n    assert got == value and type(got) is type(value), (got, value)\n"
        "assert math.copysign(1, take(-0.0)) == -1 and math.isnan(take(math.nan))\nprint(take((1, (2, 3))))".replace("DATA", _source(DATA))
    )
    assert ran.stdout == "[1, [2, 3]]\n", ran.stderr[-2000:]
    assert tuple(taken[: len(DATA)]) == DATA
    assert [type(value) for value in taken[: len(DATA)]] == [type(value) for value in DATA]
    assert math.copysign(1, taken[-3]) == -1 and math.isnan(taken[-2]) and taken[-1] == [1, [2, 3]]


def _source(value: Any) -> str:
    """As Python source that no setting keeps from being read."""
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)
    if isinstance(value, float) and math.isinf(value):
        return f"{'-' if value < 0 else ''}math.inf"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_source, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    return ascii(value)


NO_DATA = {
    "an object": ("object()", "TypeError"),
    "a set": ("{1}", "TypeError"),
    "inside": ("[1, {'a': len}]", "TypeError"),
    "a key": ("{1: 2}", "TypeError"),
    "depth": ("deep", "ValueError"),
    "itself": ("loop", "ValueError"),
    "size": ("'x' * (17 << 20)", "ValueError"),
    "number": ("[0] * 5_000_000", "ValueError"),
}


@pytest.mark.parametrize(("value", "error"), NO_DATA.values(), ids=NO_DATA.keys())
def test_what_is_no_data_does_not_cross(sandboxes: Make, value: str, error: str) -> None:
    calls: list[object] = []
    ran = sandboxes(tools={"take": calls.append}, max_memory_mb=512).execute(f"""
deep = loop = []
for _ in range(120): deep = [deep]
loop.append(loop)
try:
    take({value})
except {error} as error:
    print(str(error).startswith("take(): "))
take("fine")
""")
    assert ran.stdout == "True\n", ran.stderr
    assert calls == ["fine"]


def test_a_result_that_is_no_data_is_the_tools_failure(sandboxes: Make) -> None:
    ran = sandboxes(tools={"give": lambda: {"a": object()}, "large": lambda: "x" * (17 << 20)}).execute("""
for tool in (give, large):
    try:
        tool()
    except ToolError as error:
        print(error)
""")
    assert ran.stdout == "give failed: what it returned is not data\nlarge failed: what it returned is not data\n", ran.stderr
    assert [type(error) for error in ran.tool_errors] == [TypeError, ValueError]


def test_of_an_exception_the_program_learns_what_the_author_says_and_the_caller_all(sandboxes: Make) -> None:
    def leak() -> None:
        raise ValueError("CANARY-of-the-host")

    def explain() -> None:
        raise ToolError("no such customer")

    sandbox = sandboxes(tools=[leak, explain])
    ran = sandbox.execute("""
import traceback
try:
    explain()
except ToolError as error:
    print(error)
try:
    leak()
except Exception as error:
    print(type(error).__name__, error, error.__cause__, error.__context__, vars(error))
    traceback.print_exc()
leak()
""")
    assert ran.stdout.splitlines() == ["no such customer", "ToolError leak failed None None {}"], ran
    assert "CANARY" not in ran.stderr and ran.error == "ToolError: leak failed"
    assert [str(error) for error in ran.tool_errors] == ["no such customer", "CANARY-of-the-host", "CANARY-of-the-host"]
    assert ran.tool_errors[1].__traceback__ is not None and "leak" in ran.tool_errors[1].__notes__[0]


def test_each_call_is_judged_and_recorded_before_it_is_done_and_holds_no_contents(sandboxes: Make, events: Events) -> None:
    seen: list[Event] = []
    sandboxes(tools={"take": lambda _: seen.append(events()[-1])}).execute("take('CANARY-argument')")
    (before,) = seen
    assert isinstance(before, Intent) and before.action["kind"] == "CallTool" and before.action["tool"] == "take"
    after = [event for event in events() if isinstance(event, OutcomeEvent)]
    assert [event.facts.get("result_bytes") is not None for event in after] == [True, False], "the call's, then the run's"
    assert "CANARY" not in repr(events())


def test_what_the_policy_denies_is_never_called_and_said_to_be(sandboxes: Make, events: Events) -> None:
    calls: list[object] = []
    tools = {"take": calls.append, "delete": calls.append}
    code = "try:\n    delete(1)\nexcept PermissionError as error:\n    print(error)\ntake(2)"
    ran = sandboxes(tools=tools, denied_tools=["delete"]).execute(code)
    assert "does not let the tool 'delete' be called" in ran.stdout and calls == [2], ran
    assert [event.action["tool"] for event in events() if isinstance(event, RefusalEvent)] == ["delete"]
    assert sandboxes(tools=tools).execute(code).success and calls == [2, 1, 2], "without the rule it is called"


@pytest.mark.both
def test_tools_of_one_run_are_of_that_run_alone(sandboxes: Make) -> None:
    sandbox = sandboxes()
    assert sandbox.execute("print(one())", tools={"one": lambda: 1}).stdout == "1\n"
    assert "NameError: name 'one' is not defined" in (sandbox.execute("one()").error or "")
    assert "No module named 'host_tools'" in (sandbox.execute("import host_tools").error or "")


def test_a_tool_may_use_the_sandbox_itself(sandboxes: Make) -> None:
    sandbox = sandboxes()

    def compute(code: str) -> str:
        return sandbox.execute(f"print({code})").stdout

    assert sandbox.execute("print(compute('6 * 7'))", tools=[compute]).stdout == "42\n\n"


def test_a_run_ends_at_its_deadline_also_while_a_tool_takes_its_time(sandboxes: Make) -> None:
    sandbox = sandboxes()
    finished: list[bool] = []

    def attempt(limit: float) -> SandboxResult:
        def slow() -> int:
            sandbox.execute("while True: pass", timeout=2 * limit)
            finished.append(True)
            return 1

        finished.clear()
        return sandbox.execute("print('before', flush=True); slow(); print('after')", tools=[slow], timeout=limit)

    ran = given_time(attempt, lambda _: finished, seconds=0.4)
    assert (ran.status, ran.stdout, finished) == (SandboxStatus.TIMEOUT, "before\n", [True])


def test_what_a_tool_raises_that_is_no_error_ends_the_run_and_is_raised(sandboxes: Make) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    sandbox = sandboxes(tools=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        sandbox.execute("interrupted()")
    assert sandbox.execute("print(1)").stdout == "1\n"


def test_tools_are_for_python_code_and_that_is_said(sandboxes: Make) -> None:
    sandbox = sandboxes()
    ran = sandbox.execute("echo hello", "bash", tools=[lookup])
    assert ran.status is SandboxStatus.FAILED and "tools are for Python code" in (ran.error or "")


SAY = """
try:
    from _host import call as say  # inside WebAssembly
except ImportError:
    import gc
    say = next(found for found in gc.get_objects() if type(found).__name__ == "Speaker").ask
"""


@pytest.mark.both
@pytest.mark.parametrize("words", [b"garbage", b'{"run":"this"}', b'{"turn":{"code":0,"value":1}}'], ids=["garbage", "a kind", "a turn"])
def test_a_program_that_says_what_cannot_be_said_is_ended_for_it(sandboxes: Make, words: bytes) -> None:
    calls: list[object] = []
    sandbox = sandboxes(tools={"take": calls.append})
    ran = sandbox.execute(f"{SAY}\nsay({words!r})\nprint('went on')")
    assert ran.exit is not None and ran.exit.reason is ExitReason.GARBLED and "a malformed message to its host" in (ran.error or ""), ran
    assert (ran.stdout, calls) == ("", [])
    asked = b'{"call":"take","args":["by hand"],"kwargs":{}}'
    assert sandbox.execute(f"{SAY}\nsay({asked!r})\nprint('went on')").stdout == "went on\n" and calls == ["by hand"], "the control"
