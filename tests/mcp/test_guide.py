"""The guide's configurations are valid, and start the server."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from agent_sandbox.cli.parser import parse

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "mcp.md"


def entries(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The servers that a client's settings name, under whichever key it has."""
    [servers] = settings.values()
    return list(servers.values())


def test_the_configurations_in_the_guide_start_the_server() -> None:
    text = GUIDE.read_text()
    found = [entry for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) for entry in entries(json.loads(block))]
    found += [entry for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) for entry in entries(tomllib.loads(block))]
    lines = [entry for entry in found if "command" in entry]
    assert len(lines) == 4 and len(found) == 5
    for entry in lines:
        assert entry["command"] == "agent-sandbox" and parse(entry["args"]).verb == "mcp"
    [remote] = [entry for entry in found if "url" in entry]
    assert remote["url"].endswith("/mcp") and remote["headers"]["Authorization"].startswith("Bearer ")
