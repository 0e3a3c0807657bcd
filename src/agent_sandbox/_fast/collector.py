"""Keep Python's garbage collector out of work that makes many values and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector for a block: it would scan tens of thousands of new values again and again, and find no cycle.

    Keep the block short: other threads of the process go without the collector, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
