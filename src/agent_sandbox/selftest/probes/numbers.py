"""System call numbers of this machine, for attempts that must make raw system calls."""

from __future__ import annotations

import os

from agent_sandbox.kernel.syscall_rules import numbers


def system_calls(*names: str) -> dict[str, int]:
    """Return the number of each system call."""
    table = numbers(os.uname().machine)
    return {name: table[name] for name in names}
