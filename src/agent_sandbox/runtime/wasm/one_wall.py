"""The `wasm-one-wall` runtime: the same interpreter inside WebAssembly where Linux's confinement is not to be had.

Here the engine is all there is between the program and the machine; should it have a hole, nothing stands behind it. It is lent an empty
directory of its own, its library to read, and its streams: no file of the machine, which rules for files would need a view for. What it may
use is watched from beside it. Nothing here or in its program needs Linux.
"""

from __future__ import annotations

import os
from functools import cached_property

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import Launch, PythonCode, Support
from agent_sandbox.runtime.wasm import package
from agent_sandbox.runtime.wasm.cache import MODULE, Cache
from agent_sandbox.runtime.wasm.one_wall_guest import NOTE, OneWallGuest
from agent_sandbox.runtime.wasm.package import Package
from agent_sandbox.runtime.wasm.runtime import cache_for

NAME = "wasm-one-wall"
# Each is given by the engine alone: of the machine a program inside reaches only what WASI has a call for and we have lent it.
_GUARANTEES = frozenset(
    {
        Guarantee.FILES_CONFINED,
        Guarantee.NO_NETWORK,
        Guarantee.NO_NEW_PROCESSES,
        Guarantee.PROCESSES_INVISIBLE,
        Guarantee.SYSCALLS_FILTERED,
        Guarantee.MEMORY_WATCHED,
        Guarantee.CPU_LIMITED,
        Guarantee.DISK_LIMITED,
    }
)


class OneWall:
    """Runs Python code, each time in an engine and a process of its own. Safe to use from many threads."""

    name = NAME
    brings = frozenset({"python"})
    views = False  # nothing of the machine can be shown

    def __init__(self, cache: str, records: str) -> None:
        self._directories = cache, records

    @cached_property
    def _package(self) -> Package:
        return package.find()

    @cached_property
    def _cache(self) -> Cache:
        return cache_for(self._package, *self._directories)

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        """What it gives here. It changes no user: started by root, the engine is root's."""
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        return _GUARANTEES if root else _GUARANTEES | {Guarantee.NOT_HOST_ROOT}

    @property
    def ready(self) -> bool:
        """Whether the interpreter has been compiled. Raises `RuntimeUnavailable` when the extra is not installed."""
        return self._cache.entry(MODULE) is not None

    def objection(self, *, terminal: bool, system: bool, watched: bool, observed: bool, preload: tuple[str, ...]) -> str:
        """Why it does not take such a launch, whatever the program; or nothing."""
        for wanted, name in (
            (terminal, "terminal"),
            (system, "system profile"),
            (watched, "watch over reads"),
            (observed, "observer"),
            (preload, "preloaded modules"),
        ):
            if wanted:
                return f"it has no {name}"
        return ""

    def probe(self) -> Support:
        """What a launch would enforce here; nothing when it has not been compiled."""
        try:
            if self.ready:
                return Support(NAME, self.guarantees, {each.value: NOTE for each in Guarantee if each not in self.guarantees})
            return Support(NAME, frozenset(), {Guarantee.FILES_CONFINED.value: "it has not been compiled; run: agent-sandbox setup"})
        except RuntimeUnavailable as error:
            return Support(NAME, frozenset(), {Guarantee.FILES_CONFINED.value: f"{error.message}; {error.hint}"})

    def launch(self, launch: Launch) -> OneWallGuest:
        """Start a run. Every required guarantee is in force when its program starts, or nothing runs."""
        if missing := launch.requires - self.guarantees:
            names = tuple(sorted(guarantee.value for guarantee in missing))
            raise RuntimeUnavailable(
                f"one wall cannot give: {', '.join(names)}", missing=names, hint="run it on Linux, as an ordinary user"
            )
        if not isinstance(launch.program, PythonCode):
            raise RuntimeUnavailable(
                "this runtime runs Python code, no other program", missing=("native-programs",), hint="run it on Linux"
            )
        why = self.objection(
            terminal=launch.terminal is not None,
            system=launch.system,
            watched=launch.on_ready is not None,
            observed=launch.observe,
            preload=launch.preload,
        )
        if launch.talk is not None:
            why = "it has no sessions and no tools"
        if launch.root.steps or launch.writable or launch.cwd != "/tmp":
            why = "it shows nothing of the machine"
        if why:
            raise RuntimeUnavailable(f"this runtime cannot do that: {why}", missing=("second-wall",), hint="run it on Linux")
        entry = self._cache.entry(MODULE)
        if entry is None:
            hint = "run: agent-sandbox setup"
            raise RuntimeUnavailable("the interpreter has not been compiled for this machine yet", missing=("compiled-module",), hint=hint)
        found = self._package
        return OneWallGuest(launch, launch.program, entry, found)

    def close(self, *, leaving: bool = False) -> None:
        """Nothing waits here."""
