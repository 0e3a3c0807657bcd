"""The runtimes that all sandboxes of this process share.

A zygote, a process with the interpreter warm, is what costs time and memory, and it serves any number of sandboxes, as do the guests
that wait ready. All of it starts with the first run and ends by itself when this process does; a forked child gets its own.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache

from agent_sandbox import places
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.engine.runtimes import NOT_LINUX, ONE_WALL, Runtimes
from agent_sandbox.errors import RuntimeUnavailable

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.one_wall import OneWall
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime

WARM = 24  # guests that may wait ready: at 8 MB each at most, about as much as one browser tab

if sys.platform == "linux":
    from agent_sandbox.runtime.process.runtime import ProcessRuntime

    _RUNTIME = ProcessRuntime(warm=WARM)


def runtime() -> ProcessRuntime:
    """The one of this process. Closing it ends what waits; the next run starts anew. Raises `RuntimeUnavailable` outside Linux."""
    if sys.platform != "linux":
        raise RuntimeUnavailable(f"the runtime 'process' does not work here: {NOT_LINUX}", missing=("linux",), hint='use runtime="auto"')
    return _RUNTIME


def wasm(*, warm: int = WARM) -> WasmRuntime:
    """The same for code inside WebAssembly. `warm` is how many of its guests may wait ready."""
    return _wasm(places.cache_dir(), places.state_dir(), warm)


def one_wall() -> OneWall:
    """The same where the engine is the only wall."""
    return _one_wall(places.cache_dir(), places.state_dir())


def runtimes(wish: str) -> Runtimes:
    """All of them, for whom this is the wish: the name of one, or "auto". What one run learns of them, the next one knows.

    Raises `RuntimeUnavailable` where the wish is for what only Linux has.
    """
    if sys.platform != "linux":
        if wish == "process":
            raise RuntimeUnavailable(
                f"the runtime 'process' does not work here: {NOT_LINUX}", missing=("linux",), hint='use runtime="auto"'
            )
        wish = ONE_WALL
    return _runtimes(wish, places.cache_dir(), places.state_dir())


@lru_cache(maxsize=8)
def _runtimes(wish: str, cache: str, state: str) -> Runtimes:
    return Runtimes(
        wish, runtime, lambda: _wasm(cache, state, WARM), lambda: _one_wall(cache, state), background=places.may_work_in_the_background()
    )


@lru_cache(maxsize=2)
def _wasm(cache: str, state: str, warm: int) -> WasmRuntime:
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime  # an extra: nobody else pays for it

    return WasmRuntime(*_places(cache, state), warm=warm)


@lru_cache(maxsize=1)
def _one_wall(cache: str, state: str) -> OneWall:
    from agent_sandbox.runtime.wasm.one_wall import OneWall

    return OneWall(*_places(cache, state))


def _places(cache: str, state: str) -> tuple[str, str]:
    """Where what is compiled is kept, and its digests."""
    return os.path.join(cache, "wasm"), os.path.join(state, "wasm")
