"""Numbers of system calls on this machine, for attempts that have to make them by hand."""

from __future__ import annotations

import os

from agent_sandbox.kernel.syscall_rules import numbers


def system_calls(*names: str) -> dict[str, int]:
    """The number of each."""
    table = numbers(os.uname().machine)
    return {name: table[name] for name in names}
