"""Write the schema of policies, which the settings make, to where it is published. A test compares the two."""

from __future__ import annotations

import json
from pathlib import Path

from agent_sandbox.policy.files.settings import json_schema

PLACE = Path(__file__).resolve().parents[1] / "docs" / "policy.schema.json"

if __name__ == "__main__":
    PLACE.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
