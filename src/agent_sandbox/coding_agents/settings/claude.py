"""Claude Code: its settings, and what connecting adds to them.

The program goes on without a hook that fails, is late, or is switched off by a project's settings (`disableAllHooks`). So three things are
added to the hook: `onFailure: "block"`, which versions since 2.1.295 obey; rules that deny the tools for files and hosts, which no project
can lift; and no rule that allows commands without asking. Settings of the machine (`--scope machine`) cannot be switched off by a project.
"""

from __future__ import annotations

import os
from typing import Any

from agent_sandbox.coding_agents.contracts.claude import CLAUDE as CONTRACT
from agent_sandbox.coding_agents.decide import SERVER, FileTool, NetworkTool
from agent_sandbox.coding_agents.own_commands import hook_command, server_words
from agent_sandbox.coding_agents.settings.connection import Target
from agent_sandbox.coding_agents.settings.operations import AddElement, Operation, RemoveElement, SetMember, lookup
from agent_sandbox.coding_agents.settings.places import Connector, Scope, SettingsPlace, replaced_hooks

MACHINE = "/etc/claude-code/managed-settings.json"
_DENIED = tuple(name for name, kind in CONTRACT.tools.items() if isinstance(kind, FileTool | NetworkTool))
_UNASKED = ("Bash", "Monitor", *_DENIED)  # tools whose rules in `allow` would work without the hook
_MODES = ("bypassPermissions", "acceptEdits", "auto", "dontAsk")


def _targets(place: SettingsPlace) -> list[Target]:
    """Return the settings files that connecting changes."""
    if place.scope == "machine":
        return [Target(place.rooted(MACHINE), "json", _settings)]
    if place.scope == "project":
        local, servers = os.path.join(place.project, ".claude/settings.local.json"), os.path.join(place.project, ".mcp.json")
    else:
        home = place.variable("CLAUDE_CONFIG_DIR")
        local = os.path.join(home or os.path.join(place.home, ".claude"), "settings.json")
        servers = os.path.join(home or place.home, ".claude.json")
    return [Target(local, "json", _settings), Target(servers, "json", _servers)]


def _notes(scope: Scope) -> tuple[str, ...]:
    """Return what a person has to know about this program."""
    return (
        "Claude Code without its hook: versions since 2.1.295 refuse the call; older ones ask you: no rule allows commands any more",
        "a project's settings can switch off hooks of users (disableAllHooks): then it asks you; --scope machine prevents it",
    )


def _settings(document: Any) -> list[Operation]:
    hook = {"type": "command", "command": hook_command("claude"), "timeout": 60, "onFailure": "block"}
    operations = replaced_hooks(document, ("hooks", CONTRACT.event), "claude", {"matcher": "*", "hooks": [hook]})
    operations += [AddElement(("permissions", "deny"), name) for name in _DENIED]
    allowed = lookup(document, ("permissions", "allow"))
    for rule in allowed if isinstance(allowed, list) else ():
        if isinstance(rule, str) and rule.partition("(")[0] in _UNASKED:
            operations.append(RemoveElement(("permissions", "allow"), rule))
    if lookup(document, ("permissions", "defaultMode")) in _MODES:
        operations.append(SetMember(("permissions", "defaultMode"), "default"))
    return [*operations, SetMember(("permissions", "disableBypassPermissionsMode"), "disable")]


def _servers(document: Any) -> list[Operation]:
    program, *words = server_words()
    return [SetMember(("mcpServers", SERVER), {"type": "stdio", "command": program, "args": words})]


CLAUDE = Connector(_targets, _notes)
