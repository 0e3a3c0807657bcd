"""Gemini CLI: its settings, its policy, and what connecting adds to them.

The program goes on without a hook that fails or is late. Its own policy judges a command after the hook has rewritten it. So a policy of
the user allows rewritten commands, asks about all others (where nobody can be asked, it refuses), and denies the tools for files and hosts.
No project and no mode of the program lifts the rules of the user. A policy of a project has no effect in version 0.61.
"""

from __future__ import annotations

import json
import os
from typing import Any

from agent_sandbox.coding_agents.contracts.gemini import GEMINI as CONTRACT
from agent_sandbox.coding_agents.decide import SERVER, FileTool, NetworkTool
from agent_sandbox.coding_agents.own_commands import hook_command, server_words
from agent_sandbox.coding_agents.settings.connection import Target
from agent_sandbox.coding_agents.settings.operations import Operation, SetMember, lookup
from agent_sandbox.coding_agents.settings.places import Connector, Scope, SettingsPlace, replaced_hooks
from agent_sandbox.coding_agents.shell_words import VERB, our_program

_DENIED = tuple(name for name, kind in CONTRACT.tools.items() if isinstance(kind, FileTool | NetworkTool))
_POLICY = """# Added by agent-sandbox connect. Commands that its hook has not rewritten are asked about.
[[rule]]
toolName = "run_shell_command"
commandPrefix = {prefix}
decision = "allow"
priority = 999

[[rule]]
toolName = "run_shell_command"
decision = "ask_user"
priority = 998

[[rule]]
toolName = {denied}
decision = "deny"
priority = 999
"""


def _targets(place: SettingsPlace) -> list[Target]:
    """Return the settings files that connecting changes."""
    top = place.project if place.scope == "project" else place.variable("GEMINI_CLI_HOME") or place.home
    settings = Target(os.path.join(top, ".gemini/settings.json"), "json with comments", _settings)
    if place.scope == "project":
        return [settings]
    policy = _POLICY.format(prefix=json.dumps(" ".join((*our_program(), VERB))), denied=json.dumps(_DENIED))
    return [Target(os.path.join(top, ".gemini/policies/agent-sandbox.toml"), "text", text=policy), settings]


def _notes(scope: Scope) -> tuple[str, ...]:
    """Return what a person has to know about this program."""
    if scope == "project":
        return ("Gemini CLI without its hook: it follows your own rules, because a project's policy has no effect; --scope user adds one",)
    return ("Gemini CLI without its hook: it asks you about every command, because only rewritten ones are allowed without asking",)


def _settings(document: Any) -> list[Operation]:
    hook = {"name": SERVER, "type": "command", "command": hook_command("gemini"), "timeout": 60_000}
    operations = replaced_hooks(document, ("hooks", CONTRACT.event), "gemini", {"matcher": ".*", "hooks": [hook]})
    if lookup(document, ("hooksConfig", "enabled")) is False:
        operations.append(SetMember(("hooksConfig", "enabled"), True))
    program, *words = server_words()
    return [*operations, SetMember(("mcpServers", SERVER), {"command": program, "args": words})]


GEMINI = Connector(_targets, _notes)
