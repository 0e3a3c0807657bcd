"""The runtimes that all sandboxes of this process share.

A zygote, a process with the interpreter warm, is what costs time and memory, and it serves any number of sandboxes, as do the guests
that wait ready. All of it starts with the first run and ends by itself when this process does; a forked child gets its own.
"""

from __future__ import annotations

import os
from functools import lru_cache

from agent_sandbox import places
from agent_sandbox.engine.routing import Runtimes
from agent_sandbox.runtime.process import ProcessRuntime
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime

WARM = 24  # guests that may wait ready: at 8 MB each at most, about as much as one browser tab

_RUNTIME = ProcessRuntime(warm=WARM)


def runtime() -> ProcessRuntime:
    """The one of this process. Closing it ends what waits; the next run starts anew."""
    return _RUNTIME


def wasm(*, warm: int = WARM) -> WasmRuntime:
    """The same for code inside WebAssembly. `warm` is how many of its guests may wait ready."""
    return _wasm(places.cache_dir(), places.state_dir(), warm)


def runtimes(wish: str) -> Runtimes:
    """All of them, for whom this is the wish: the name of one, or "auto". What one run learns of them, the next one knows."""
    return _runtimes(wish, places.cache_dir(), places.state_dir())


@lru_cache(maxsize=8)
def _runtimes(wish: str, cache: str, state: str) -> Runtimes:
    return Runtimes(wish, runtime, lambda: _wasm(cache, state, WARM), background=places.may_work_in_the_background())


@lru_cache(maxsize=2)
def _wasm(cache: str, state: str, warm: int) -> WasmRuntime:
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime  # an extra: nobody else pays for it

    return WasmRuntime(os.path.join(cache, "wasm"), os.path.join(state, "wasm"), warm=warm)
