"""The runtime that all sandboxes of this process share.

Its zygote, a process with the interpreter warm, is what costs time and memory, and it serves any number of sandboxes, as do the guests
that wait ready. All of it starts with the first run and ends by itself when this process does; a forked child gets its own.
"""

from __future__ import annotations

from agent_sandbox.runtime.process import ProcessRuntime

WARM = 24  # guests that may wait ready: at 8 MB each at most, about as much as one browser tab

_RUNTIME = ProcessRuntime(warm=WARM)


def runtime() -> ProcessRuntime:
    """The one of this process. Closing it ends what waits; the next run starts anew."""
    return _RUNTIME
