"""The `wasm` runtime: Python or JavaScript in an interpreter inside WebAssembly, which runs in a guest of the `process` runtime.

Everything that makes a guest a guest is the process runtime's: view, confinement, limits, pool, clearing away. What differs is what its
zygote has loaded, that its view lies one directory down, and that it starts no program and no other process whatever the policy allows.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property

from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import Hosted, Launch, Support
from agent_sandbox.runtime.process import ProcessRuntime
from agent_sandbox.runtime.running import ProcessGuest
from agent_sandbox.runtime.wasm import package
from agent_sandbox.runtime.wasm.cache import MODULE, Cache, Entry
from agent_sandbox.runtime.wasm.package import Package
from agent_sandbox.runtime.wasm.recipe import COMPILED_FOR, IMAGES, JAVASCRIPT, javascript_stored_as, stored_as
from agent_sandbox.runtime.wasm.view import VIEW, moved_down
from agent_sandbox.runtime.zygote import Zygote, argv_for, packages
from agent_sandbox.values import replace

PROGRAM = "agent_sandbox.runtime.wasm.zygote_program"
BUILDER = "agent_sandbox.runtime.wasm.building"
_PRELOADED = frozenset(name for names in IMAGES.values() for name in names)


class WasmRuntime:
    """Guests forked from one zygote that has the compiled interpreters loaded. Safe to use from many threads, and on both sides of a fork.

    `cache` and `records` are directories of this user's: what is compiled, and the digests by which it is known again.
    """

    name = "wasm"
    brings = frozenset({"python", "javascript"})  # languages that need nothing of the machine

    def __init__(self, cache: str, records: str, *, warm: int = 0) -> None:
        self._directories = cache, records
        self._guests = ProcessRuntime(warm=warm, start=self._start)
        self._guests.name, self._guests.brings = self.name, self.brings  # in what it refuses

    @cached_property
    def _package(self) -> Package:
        return package.find()

    @cached_property
    def _cache(self) -> Cache:
        return cache_for(self._package, *self._directories)

    @cached_property
    def _files(self) -> dict[str, str]:
        """What has to be there: how the zygote knows it, and its name in the cache."""
        images = {image: stored_as(image) for image in IMAGES}
        return {MODULE: MODULE, JAVASCRIPT: javascript_stored_as(self._package.javascript_digest), **images}

    @property
    def ready(self) -> bool:
        """Whether everything has been compiled. Raises `RuntimeUnavailable` when the extra is not installed."""
        return all(self._cache.entry(name) for name in self._files.values())

    def building(self) -> list[str]:
        """The command that compiles what is missing or not as it was made: a minute, or a second where there is nothing to do."""
        return argv_for(BUILDER, packages(), *self._directories, self._cache.key, *vars(self._package).values())

    def probe(self) -> Support:
        """What a launch would enforce here: the walls of the process runtime, as a live guest shows, if an interpreter comes up in them."""
        from agent_sandbox.runtime.probe import probe, trial

        walls = ProcessRuntime()
        try:
            support = probe(walls)
            with self.launch(trial("pass")) as guest:
                ended = guest.wait().exit
            return replace(support, runtime=self.name) if ended.code == 0 else _nothing(f"its interpreter ended with {ended.code}")
        except (SandboxError, OSError) as error:
            return _nothing(str(error))
        finally:
            walls.close()

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run."""
        if not isinstance(launch.program, Hosted):
            raise RuntimeUnavailable(
                "the wasm runtime runs Python code and JavaScript, no other program",
                missing=("native-programs",),
                hint='use runtime="process"',
            )
        for wanted, name in ((launch.terminal, "terminal"), (launch.system, "system profile"), (launch.on_ready, "watch over reads")):
            if wanted:
                raise RuntimeUnavailable(f"the wasm runtime has no {name}", missing=(name.replace(" ", "-"),), hint='use runtime="process"')
        if strange := [name for name in launch.preload if name not in _PRELOADED]:
            why = f"the wasm runtime has no image with {', '.join(strange)} imported"
            raise RuntimeUnavailable(why, missing=tuple(strange), hint='leave it out of preload, or use runtime="process"')
        compiled, package = {name: self._entry(name).path for name in (MODULE, JAVASCRIPT)}, self._package
        root = moved_down(launch.root, compiled=compiled, library=package.library, name=package.library_name)
        return self._guests.launch(replace(launch, root=root, beneath=VIEW, farewell=True, processes=False, executables=(), preload=()))

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting guests and the zygote. Running guests go on, and the zygote with them."""
        self._guests.close(leaving=leaving)

    def _entry(self, name: str) -> Entry:
        entry = self._cache.entry(self._files[name])
        if entry is None:
            why = "the wasm runtime has not been compiled for this machine yet"
            raise RuntimeUnavailable(why, missing=("compiled-module",), hint="run: agent-sandbox setup")
        return entry

    def _start(self, preload: tuple[str, ...] | None) -> Zygote:
        entries = {name: self._entry(name) for name in self._files}
        return Zygote([word for name, entry in entries.items() for word in (name, entry.path, entry.digest)], program=PROGRAM)


def cache_for(found: Package, cache: str, records: str) -> Cache:
    """Where the files for this engine, its configuration, this interpreter and kind of machine are."""
    parts = (found.engine, found.digest, COMPILED_FOR, os.uname().machine)
    return Cache(cache, records, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24])


def _nothing(why: str) -> Support:
    return Support(WasmRuntime.name, frozenset(), {Guarantee.FILES_CONFINED.value: why})
