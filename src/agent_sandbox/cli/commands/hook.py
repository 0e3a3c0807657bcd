"""`hook`: answer a tool call of a coding agent. The program starts here for it, past the parser, because it starts for every tool call."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.coding_agents.hook import respond

if TYPE_CHECKING:
    from typing import NoReturn


def program() -> NoReturn:
    """Answer the event on standard input, and exit at once."""
    os._exit(respond(sys.argv[2:], os.environ))
