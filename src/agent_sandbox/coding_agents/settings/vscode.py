"""Visual Studio Code: its list of MCP servers, which its agent mode uses. Its own tools stay outside of the sandbox."""

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
    if place.scope == "project":
        return [Target(os.path.join(place.project, ".vscode/mcp.json"), "json with comments", _servers)]
    settings = place.variable("XDG_CONFIG_HOME") or os.path.join(place.home, ".config")
    return [Target(os.path.join(settings, "Code/User/mcp.json"), "json with comments", _servers)]


def _notes(scope: Scope) -> tuple[str, ...]:
    """Return what a person has to know about this program."""
    return ("Visual Studio Code gets the MCP server only: its own terminal and file tools stay outside of the sandbox. Deselect them",)


def _servers(document: Any) -> list[Operation]:
    program, *words = server_words()
    return [SetMember(("servers", SERVER), {"type": "stdio", "command": program, "args": words})]


VSCODE = Connector(_targets, _notes)
