"""`python -m agent_sandbox`: the same program as `agent-sandbox`."""

from __future__ import annotations

import sys

from agent_sandbox._fast.finder import load_quickly

if __name__ == "__main__":
    load_quickly()
    # After the line above, which makes their loading quicker.
    if sys.argv[1:2] == ["hook"]:  # it starts for every tool call of a coding agent, and needs little of the rest
        from agent_sandbox.cli.commands.hook import program
    else:
        from agent_sandbox.cli.errand import program

    program()
