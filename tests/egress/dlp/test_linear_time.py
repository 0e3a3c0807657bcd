"""No data that leaves can make a pattern take exponential time: found in the patterns themselves, since a clock would only guess.

Rules and checks run in RE2, which is linear whatever the pattern. What Python's own engine runs elsewhere in `egress` has no repetition
without a bound inside another: then there is one way through a text for each place where it may begin or end, not one for each of their
combinations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import agent_sandbox.egress
from agent_sandbox.egress.dlp.checks import CHECKS
from agent_sandbox.egress.dlp.rules import LONGEST

PACKAGE = Path(agent_sandbox.egress.__file__).parent
RE_CALLS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
NOT_OF_DATA = {"dlp/prefilter.py"}  # it reads the needles of rules, which are the user's own
parser: Any = import_module("re._parser")


def nested(pattern: str | bytes) -> bool:
    """Whether a repetition without a bound stands inside another."""
    return _nested(parser.parse(pattern), inside=False)


def _nested(parsed: Any, *, inside: bool) -> bool:
    for operation, argument in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, body = argument
            endless = most is parser.MAXREPEAT
            if (endless and inside) or _nested(body, inside=inside or endless):
                return True
        elif any(_nested(body, inside=inside) for body in _bodies(argument)):
            return True
    return False


def _bodies(argument: Any) -> Iterator[Any]:
    """Yield the patterns inside an operation: of groups, alternatives, and looks around."""
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for each in argument:
            yield from _bodies(each)


def patterns_of(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the patterns that a module gives to `re`, each with its place. One that is put together from parts is not a constant."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=called), args=[first, *_]) if called in RE_CALLS:
                value = ast.literal_eval(first) if isinstance(first, ast.Constant) else ""
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", value


@pytest.mark.parametrize("pattern", [r"^[a-z]*(?:\.[a-z]*|\([^)]*\)?)*$", r"(a+)+$", r"(?:(?:x|y*)z?){2,}", rb"(?=(?:a*)*)b"])
def test_a_pattern_with_a_repetition_inside_another_is_told(pattern: str | bytes) -> None:
    """The control. The first is one that was in the checks: thirty brackets took it minutes."""
    assert nested(pattern)
    assert not nested(r"^(?:[a-z]{1,30}\.){1,9}[a-z]+$")


def test_no_module_of_the_door_gives_python_such_a_pattern() -> None:
    found = dict(each for path in sorted(PACKAGE.rglob("*.py")) for each in patterns_of(path))
    assert len(found) > 10, "the control: patterns are found"
    assert [place for place, pattern in found.items() if place.rpartition(":")[0] not in NOT_OF_DATA and nested(pattern)] == []


def test_the_checks_have_no_other_engine_than_re2() -> None:
    tree = ast.parse((PACKAGE / "dlp/checks.py").read_text("utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "re2" in imported and not imported & {"re", "regex"}


@pytest.mark.parametrize("check", sorted(CHECKS))
@pytest.mark.parametrize(
    "value", ["a" + "(" * LONGEST + ")!", "a[" * (LONGEST // 2) + "!", "a-" * (LONGEST // 2) + "!", "\\u00e9" * (LONGEST // 6) + "!"]
)
def test_each_check_ends_for_values_made_to_keep_it_busy(check: str, value: str) -> None:
    """No clock: a check that tried all ways through one of them would not end while the machine stands."""
    assert CHECKS[check](value) in (True, False)
