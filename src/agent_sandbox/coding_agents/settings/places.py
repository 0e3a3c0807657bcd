"""Where settings files of coding agents lie, and what their hooks have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_sandbox.coding_agents.settings.connection import Target
from agent_sandbox.coding_agents.settings.operations import AddElement, Operation, RemoveElement, lookup

Scope = Literal["user", "project", "machine"]
SCOPES: tuple[Scope, ...] = ("user", "project", "machine")


@dataclass(frozen=True)
class SettingsPlace:
    """The home directory, the project and the scope that settings are for. `root` is the root directory, for tests."""

    scope: Scope
    home: str
    project: str
    environment: Mapping[str, str] = field(default_factory=dict)
    root: str = "/"

    def variable(self, name: str) -> str:
        """Return a directory that a variable names; empty if it names none."""
        value = self.environment.get(name, "")
        return os.path.normpath(value) if os.path.isabs(value) else ""

    def rooted(self, path: str) -> str:
        """Return an absolute path below the root directory."""
        return os.path.join(self.root, path.lstrip("/"))


@dataclass(frozen=True)
class Connector:
    """A coding agent that can be connected: the settings files that this changes, and what a person has to know then."""

    targets: Callable[[SettingsPlace], list[Target]]
    notes: Callable[[Scope], tuple[str, ...]]


def replaced_hooks(document: Any, path: tuple[str, ...], program: str, entry: Mapping[str, Any]) -> list[Operation]:
    """Return the operations that put our entry into a list of hooks, instead of entries of ours from elsewhere."""
    present = lookup(document, path)
    operations: list[Operation] = []
    for each in present if isinstance(present, list) else ():
        if each != entry and _is_ours(each, program):
            operations.append(RemoveElement(path, each))
    return [*operations, AddElement(path, dict(entry))]


def _is_ours(entry: Any, program: str) -> bool:
    """Whether all hooks of an entry are ours, of whichever installation."""
    hooks = entry.get("hooks") if isinstance(entry, dict) else None
    if not isinstance(hooks, list) or not hooks:
        return False
    return all(isinstance(hook, dict) and f"agent-sandbox hook {program} || " in str(hook.get("command", "")) for hook in hooks)
