"""Commands of this program in the settings of coding agents: its hook and its MCP server."""

from __future__ import annotations

from agent_sandbox.coding_agents.hook import PROGRAMS, REFUSED
from agent_sandbox.coding_agents.shell_words import our_program, quote

SERVER_WORDS = ("mcp",)


def hook_command(program: str) -> str:
    """Return the command of the hook. If the hook is missing, killed or broken, the shell around it refuses instead."""
    line = " ".join(map(quote, (*our_program(), "hook", program)))
    return f"{line} || {{ echo 'agent-sandbox: refused, because its hook failed' >&2; exit {REFUSED}; }}"


def server_words() -> tuple[str, ...]:
    """Return the words that start the MCP server."""
    return (*our_program(), *SERVER_WORDS)


def is_ours(command: str) -> bool:
    """Whether a shell command is, letter for letter, one of these. Claude Code puts its shell prefix before them too."""
    return command in (*map(hook_command, PROGRAMS), " ".join(map(quote, server_words())), " ".join(server_words()))
