"""The tools that agents use, and what each does with its arguments. `effects_of` is the way in; the tools are in `tables`."""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.readers.shell.effects import Effect
from agent_sandbox.readers.shell.expansion import Field
from agent_sandbox.readers.shell.tools.spec import Spec


def effects_of(tool: str, arguments: Sequence[Field]) -> tuple[Effect, ...] | None:
    """What a tool does with these arguments; None for a tool that is not known."""
    from agent_sandbox.readers.shell.tools.tables import TOOLS  # much to load, and who asks which programs start needs none of it

    known = TOOLS.get(tool)
    if known is None:
        return None
    return tuple(dict.fromkeys(known.effects(arguments) if isinstance(known, Spec) else known(arguments)))
