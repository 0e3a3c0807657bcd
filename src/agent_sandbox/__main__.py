"""`python -m agent_sandbox`: the same program as `agent-sandbox`."""

from __future__ import annotations

from agent_sandbox.cli.errand import program

if __name__ == "__main__":
    program()
