"""Helpers for tests of real machines: a check of this host, and one template for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime


def runtime_in(directory: Path, *, warm: int = 0) -> MicroVmRuntime:
    """Return a runtime with its templates in this directory. Skips, and names the package, if QEMU or a kernel is missing."""
    made = MicroVmRuntime(str(directory), kernel=os.environ.get("AGENT_SANDBOX_KERNEL", ""), warm=warm)
    try:
        made.recipe()
    except RuntimeUnavailable as error:
        pytest.skip(f"{error.message}: {error.hint}")
    return made
