"""The runtime that all sandboxes of this process share.

Its zygote, a process with the interpreter warm, is what costs time and memory, and it serves any number of sandboxes. It starts with the
first run and ends by itself when this process does; a forked child of this process gets its own.
"""

from __future__ import annotations

from agent_sandbox.runtime.process import ProcessRuntime

_RUNTIME = ProcessRuntime()


def runtime() -> ProcessRuntime:
    """The one of this process. Closing it ends the zygote; the next run starts another."""
    return _RUNTIME
