"""`python -m agent_sandbox`: the same program as `agent-sandbox`."""

from __future__ import annotations

from agent_sandbox._fast.finder import load_quickly

if __name__ == "__main__":
    load_quickly()
    from agent_sandbox.cli.main import program  # after the line above, which makes its loading quicker

    program()
