"""Cursor: its list of MCP servers. Its hooks are not answered here, so its own tools stay outside of the sandbox."""

from __future__ import annotations

import os
from typing import Any

from agent_sandbox.coding_agents.decide import SERVER
from agent_sandbox.coding_agents.own_commands import server_words
from agent_sandbox.coding_agents.settings.connection import Target
from agent_sandbox.coding_agents.settings.operations import Operation, SetMember
from agent_sandbox.coding_agents.settings.places import Connector, Scope, SettingsPlace


def _targets(place: SettingsPlace) -> list[Target]:
    """Return the settings files that connecting changes."""
    top = place.project if place.scope == "project" else place.home
    return [Target(os.path.join(top, ".cursor/mcp.json"), "json", _servers)]


def _notes(scope: Scope) -> tuple[str, ...]:
    """Return what a person has to know about this program."""
    return (
        "Cursor gets the MCP server only: its own terminal and file tools stay outside of the sandbox. Switch them off in its settings",
    )


def _servers(document: Any) -> list[Operation]:
    program, *words = server_words()
    return [SetMember(("mcpServers", SERVER), {"command": program, "args": words})]


CURSOR = Connector(_targets, _notes)
