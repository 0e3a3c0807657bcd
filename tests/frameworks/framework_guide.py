"""A plugin of pytest for the suites: it runs the example that docs/guides/frameworks.md has for a framework."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "frameworks.md"


@pytest.fixture
def run_example() -> Callable[..., dict[str, Any]]:
    """Run the example below a heading with these names, and return all names that it has then."""

    def run(heading: str, **names: Any) -> dict[str, Any]:
        found = re.search(rf"^## {re.escape(heading)}\n.*?^```py\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert found is not None, f"the guide has no example for {heading}"
        assert len(found[1].split("\n")) <= 16, "an example is short"
        exec(compile(found[1], str(GUIDE), "exec"), names)
        return names

    return run
