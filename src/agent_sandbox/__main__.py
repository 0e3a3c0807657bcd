"""`python -m agent_sandbox`: the same program as `agent-sandbox`."""

from __future__ import annotations

import sys

from agent_sandbox.surfaces.cli import main

if __name__ == "__main__":
    sys.exit(main())
