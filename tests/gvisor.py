"""The runsc that tests run guests on. A test that needs one skips where there is none that can run today's programs, and says so."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime


def runtime(**how: object) -> GvisorRuntime:
    """A runtime on the machine's runsc."""
    made = GvisorRuntime(**how)  # type: ignore[arg-type]
    try:
        made.program()
    except RuntimeUnavailable as error:
        made.close()
        pytest.skip(f"{error.message}: {error.hint}")
    return made
