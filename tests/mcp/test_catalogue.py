"""The list of tools, which every conversation pays for."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from agent_sandbox.mcp import catalogue
from agent_sandbox.mcp.server import tool_of

READ_ONLY = {"simulate", "read", "list", "diff", "inspect"}
DESTRUCTIVE = {"run", "write", "edit", "rollback", "promote", "python", "rewind"}


@pytest.mark.parametrize("forks", [False, True])
def test_the_list_of_tools_costs_less_than_4000_tokens(forks: bool) -> None:
    """Counted as three bytes a token: English and JSON have more, so this is too many rather than too few."""
    listed = [tool_of(each).model_dump(by_alias=True, mode="json", exclude_none=True) for each in catalogue.tools(forks=forks)]
    tokens = len(json.dumps(listed).encode()) + len(catalogue.INSTRUCTIONS.encode())
    assert tokens / 3 < 4000


def test_annotations_tell_what_reads_from_what_destroys() -> None:
    tools = {each.name: tool_of(each).annotations for each in catalogue.TOOLS}
    assert {name for name, hints in tools.items() if hints is not None and hints.read_only_hint} == READ_ONLY
    assert {name for name, hints in tools.items() if hints is not None and hints.destructive_hint} == DESTRUCTIVE
    assert [name for name, hints in tools.items() if hints is not None and hints.open_world_hint] == ["run"]


def test_schemas_are_valid_and_refuse_unknown_arguments() -> None:
    for each in catalogue.TOOLS:
        Draft202012Validator.check_schema(each.schema)
        assert not Draft202012Validator(each.schema).is_valid({"no such argument": 1})


def test_no_tool_speaks_of_forks_where_sessions_cannot_be_forked() -> None:
    without = catalogue.tools(forks=False)
    assert "fork" not in {each.name for each in without}
    assert not any("session" in each.properties for each in without)
    assert any("session" in each.properties for each in catalogue.tools(forks=True))
