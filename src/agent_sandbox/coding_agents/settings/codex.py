"""Codex: its settings, and what connecting adds to them.

The program goes on without a hook that fails or is late, and does not run a hook before a person has trusted it. So its own sandbox becomes
read-only, and one rule lets the rewritten commands, and nothing else, out of it: without the hook, commands run in that sandbox and change
nothing.
"""

from __future__ import annotations

import json
import os
from typing import Any

from agent_sandbox.coding_agents.contracts.codex import CODEX as CONTRACT
from agent_sandbox.coding_agents.decide import SERVER
from agent_sandbox.coding_agents.own_commands import hook_command, server_words
from agent_sandbox.coding_agents.settings.connection import Target
from agent_sandbox.coding_agents.settings.operations import Operation, SetMember
from agent_sandbox.coding_agents.settings.places import Connector, Scope, SettingsPlace, replaced_hooks
from agent_sandbox.coding_agents.shell_words import VERB, our_program
from agent_sandbox.errors import PolicyError


def _targets(place: SettingsPlace) -> list[Target]:
    """Return the settings files that connecting changes."""
    own = os.path.join(place.project, ".codex") if place.scope == "project" else ""
    home = own or place.variable("CODEX_HOME") or os.path.join(place.home, ".codex")
    pattern = ", ".join(map(json.dumps, (*our_program(), VERB)))
    rule = f'# Added by agent-sandbox connect.\nprefix_rule(pattern = [{pattern}], decision = "allow")\n'
    return [
        Target(os.path.join(home, "hooks.json"), "json", _hooks),
        Target(os.path.join(home, "rules/agent-sandbox.rules"), "text", text=rule),
        Target(os.path.join(home, "config.toml"), "toml", _settings),
    ]


def _notes(scope: Scope) -> tuple[str, ...]:
    """Return what a person has to know about this program."""
    told = (
        "Codex does not run a hook before you have trusted it: start codex, type /hooks, and trust it",
        "Codex without its hook: commands run in its own read-only sandbox, and change nothing; one rule lets agent-sandbox out of it",
        "Your own rules of Codex stay: a program that they allow leaves its sandbox without agent-sandbox",
    )
    return (*told, "Codex reads the settings of a project only where you trust the project") if scope == "project" else told


def _hooks(document: Any) -> list[Operation]:
    hook = {"type": "command", "command": hook_command("codex"), "timeout": 60}
    return replaced_hooks(document, ("hooks", CONTRACT.event), "codex", {"matcher": "*", "hooks": [hook]})


def _settings(document: Any) -> list[Operation]:
    program, *words = server_words()
    _refuse_wider_profiles(document.get("profiles"))
    return [SetMember(("sandbox_mode",), "read-only"), SetMember(("mcp_servers", SERVER), {"command": program, "args": words})]


def _refuse_wider_profiles(profiles: Any) -> None:
    """Raise `PolicyError` for a profile with a sandbox of its own: it replaces the setting for all, on which everything rests."""
    for name, profile in profiles.items() if isinstance(profiles, dict) else ():
        if isinstance(profile, dict) and profile.get("sandbox_mode", "read-only") != "read-only":
            why = f"the profile {name!r} of Codex has a sandbox_mode of its own: without the hook, its commands would not be held"
            raise PolicyError(why, hint=f"remove sandbox_mode from [profiles.{name}] in config.toml, and connect again")


CODEX = Connector(_targets, _notes)
