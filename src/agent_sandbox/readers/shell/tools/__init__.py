"""The tools that agents use, and the effects of each for given arguments. `effects_of` is the entry point; the tools are in `tables`."""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.readers.shell.effects import Effect, Spec
from agent_sandbox.readers.shell.expansion import Field


def effects_of(tool: str, arguments: Sequence[Field]) -> tuple[Effect, ...] | None:
    """Return the effects of a tool with these arguments; None for an unknown tool."""
    from agent_sandbox.readers.shell.tools.tables import TOOLS  # large, and not needed to tell which programs start

    known = TOOLS.get(tool)
    if known is None:
        return None
    return tuple(dict.fromkeys(known.effects(arguments) if isinstance(known, Spec) else known(arguments)))
