"""The `wasm` runtime: Python or JavaScript in an interpreter inside WebAssembly, which runs in a guest of the `process` runtime.

Everything that makes a guest a guest is the process runtime's: view, confinement, limits, pool, clearing away. What differs is what its
zygote has loaded, that its view lies one directory down, and that it starts no program and no other process whatever the policy allows.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import cached_property

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import Completed, Hosted, JavaScriptCode, Launch, Reason, Support
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.process.runtime import GUARANTEES, ProcessRuntime
from agent_sandbox.runtime.process.zygote import Zygote, argv_for, packages
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import COUNTING, JAVASCRIPT, MODULE, Cache, Entry
from agent_sandbox.runtime.wasm.recipe import COMPILED_FOR, IMAGES, Package, javascript_stored_as, stored_as
from agent_sandbox.runtime.wasm.view import VIEW, moved_down

PROGRAM = "agent_sandbox.runtime.wasm.zygote_program"
BUILDER = "agent_sandbox.runtime.wasm.compiler"
# What only a program inside WebAssembly can be given: every instruction is ours to count, and every system call ours to answer.
ONLY_HERE = frozenset({Guarantee.FUEL_LIMITED, Guarantee.DETERMINISTIC})
_PRELOADED = frozenset(name for names in IMAGES.values() for name in names)


class WasmRuntime:
    """Guests forked from one zygote that has the compiled interpreters loaded. Safe to use from many threads, and on both sides of a fork.

    `cache` and `records` are directories of this user's: what is compiled, and the digests by which it is known again.
    """

    name = "wasm"
    brings = frozenset({"python", "javascript"})  # languages that need nothing of the machine
    guarantees = GUARANTEES | ONLY_HERE
    views = True  # its guests see what a mount plan shows

    def __init__(self, cache: str, records: str, *, warm: int = 0) -> None:
        self._directories = cache, records
        self._guests = ProcessRuntime(warm=warm, start=self._start)
        self._guests.name, self._guests.brings = self.name, self.brings  # in what it refuses
        self._found: dict[str, dict[str, str]] = {}

    @cached_property
    def _package(self) -> Package:
        return recipe.find_package()

    @cached_property
    def _cache(self) -> Cache:
        return cache_for(self._package, *self._directories)

    def _files(self, module: str) -> dict[str, str]:
        """What a zygote of this kind has to have, as it calls them: modules and images, by their names in the cache."""
        javascript = javascript_stored_as(self._package.javascript_digest, counting=module == COUNTING)
        return {module: module, JAVASCRIPT: javascript, **{image: stored_as(image) for image in IMAGES}}

    def _compiled(self, module: str) -> dict[str, str]:
        """Looked for once: whoever takes it away afterwards takes it from a zygote that has it."""
        if module not in self._found:
            self._found[module] = {name: self._entry(self._files(module)[name]).path for name in (module, JAVASCRIPT)}
        return self._found[module]

    @property
    def ready(self) -> bool:
        """Whether all that ordinary runs need has been compiled. Raises `RuntimeUnavailable` when the extra is not installed."""
        return self._has(MODULE)

    @property
    def ready_to_count(self) -> bool:
        """Whether what deterministic runs and runs with a limit on fuel need has been compiled as well."""
        return self._has(MODULE) and self._has(COUNTING)

    def _has(self, module: str) -> bool:
        return all(self._cache.entry(name) for name in self._files(module).values())

    def building(self, *, counting: bool = False) -> list[str]:
        """The command that compiles what is missing or not as it was made: a minute, or a second where there is nothing to do.

        `counting` makes the second module, too, for another minute.
        """
        return argv_for(BUILDER, *self._told(COUNTING if counting else MODULE))

    def compile_in_background(self) -> str:
        """Have that done while nobody waits for it; says how it stands. Raises `RuntimeUnavailable` when the extra is not installed."""
        from agent_sandbox.runtime.wasm import background_compiler

        return background_compiler.begin(self._cache, self._told(MODULE), now=time.time())

    @property
    def standing(self) -> str:
        """How it stands with compiling, in words. Raises as `ready` does."""
        from agent_sandbox.runtime.wasm import background_compiler

        return background_compiler.standing(self._cache, now=time.time())

    @property
    def compiler(self) -> int | None:
        """The process that compiles just now; None when there is none."""
        from agent_sandbox.runtime.wasm.compiler import holder

        return holder(self._cache)

    @property
    def identity(self) -> dict[str, str]:
        """All that a deterministic run rests on beside its input. Raises `RuntimeUnavailable` when it has not been compiled."""
        images = {f"image {name}": self._entry(stored_as(name)).digest for name in IMAGES}
        return {
            "engine": self._package.engine,
            "interpreter": self._package.digest,
            "javascript": self._package.javascript_digest,
            "configuration": COMPILED_FOR,
            "machine": os.uname().machine,
            **images,
        }

    def _told(self, module: str) -> list[str]:
        """What who compiles has to know."""
        fields = (getattr(self._package, name) for name in Package.__annotations__)  # in the order in which it takes them
        return [packages(), *self._directories, self._cache.key, module, *fields]

    def probe(self) -> Support:
        """What a launch would enforce here: the walls of the process runtime, as a live guest shows, if an interpreter comes up in them;
        and what only code inside WebAssembly can be given, as live runs show."""
        from agent_sandbox.runtime.process.probe import probe, trial

        pass

        walls = ProcessRuntime()
        try:
            support = probe(walls)
            with self.launch(trial("pass")) as guest:
                ended = guest.wait().exit
            if ended.code != 0:
                return _nothing(f"its interpreter ended with {ended.code}")
            return proved(self, replace(support, runtime=self.name))
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
        if why := self.objection(
            terminal=launch.terminal is not None,
            system=launch.system,
            watched=launch.on_ready is not None,
            observed=launch.observe,
            preload=launch.preload,
        ):
            raise RuntimeUnavailable(f"the wasm runtime cannot do this: {why}", missing=("process-runtime",), hint='use runtime="process"')
        if launch.talk is not None and isinstance(launch.program, JavaScriptCode):
            raise RuntimeUnavailable("only Python code can be given tools and turns", missing=("tools",), hint="write it in Python")
        if Guarantee.DETERMINISTIC in launch.requires and launch.deterministic is None:
            launch = replace(launch, deterministic=0)
        module = COUNTING if launch.deterministic is not None or launch.limits.fuel is not None else MODULE
        package = self._package
        root = moved_down(launch.root, compiled=self._compiled(module), library=package.library, name=package.library_name)
        return self._guests.launch(
            replace(
                launch,
                root=root,
                beneath=VIEW,
                farewell=True,
                processes=False,
                executables=(),
                preload=(module,),  # there is a zygote for each
                requires=launch.requires - ONLY_HERE,  # ours, not those of the process around it
            )
        )

    def objection(self, *, terminal: bool, system: bool, watched: bool, observed: bool, preload: tuple[str, ...]) -> str:
        """Why it does not take such a launch, whatever the program; or nothing."""
        for wanted, name in ((terminal, "terminal"), (system, "system profile"), (watched, "watch over reads"), (observed, "observer")):
            if wanted:
                return f"it has no {name}"
        strange = [name for name in preload if name not in _PRELOADED]
        return f"it has no image with {', '.join(strange)} imported" if strange else ""

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting guests and the zygote. Running guests go on, and the zygote with them."""
        self._guests.close(leaving=leaving)

    def _entry(self, name: str) -> Entry:
        entry = self._cache.entry(name)
        if entry is None:
            why = f"the wasm runtime cannot be used yet: {self.standing.partition(' (')[0]}"
            if name.startswith(COUNTING) and self.ready:
                why = "the wasm runtime has not been compiled for deterministic runs and limits on fuel yet"
            raise RuntimeUnavailable(why, missing=("compiled-module",), hint="run: agent-sandbox setup")
        return entry

    def _start(self, preload: tuple[str, ...] | None) -> Zygote:
        (module,) = preload or (MODULE,)
        entries = {name: self._entry(stored) for name, stored in self._files(module).items()}
        self._cache.used(entries.values(), time.time())
        return Zygote([word for name, entry in entries.items() for word in (name, entry.path, entry.digest)], program=PROGRAM)


def cache_for(found: Package, cache: str, records: str) -> Cache:
    """Where the files for this engine, its configuration, this interpreter and kind of machine are."""
    parts = (found.engine, found.digest, COMPILED_FOR, os.uname().machine)
    return Cache(cache, records, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24])


def _nothing(why: str) -> Support:
    return Support(WasmRuntime.name, frozenset(), {Guarantee.FILES_CONFINED.value: why})


if TYPE_CHECKING:
    pass

# Each of these differs from one ordinary run to the next.
_TELLTALE = """
import os, random, secrets, tempfile, time, uuid
time.sleep(3600)
print(time.time(), time.monotonic(), time.perf_counter(), random.random(), secrets.token_hex(), uuid.uuid1(), tempfile.mkdtemp())
print([os.stat(os.path.join("/tmp", name)) for name in os.listdir("/tmp")], object())
"""
_ENDLESS = "while True: pass"
_OURS = (Guarantee.DETERMINISTIC, Guarantee.FUEL_LIMITED)
_FUEL = 10_000_000  # a hundredth of a second


def proved(runtime: WasmRuntime, support: Support) -> Support:
    """What was found of the walls, and what the program inside them is given besides. Raises what a launch raises."""
    if not runtime.ready_to_count:
        why = "the second module, which counts what it executes, has not been compiled: agent-sandbox setup"
        return replace(support, missing={**support.missing, **{each.value: why for each in _OURS}})
    first, second = (_ran(runtime, replace(trial(_TELLTALE), deterministic=7)) for _ in range(2))
    same = (first.stdout, first.exit.usage.fuel) == (second.stdout, second.exit.usage.fuel) and first.stdout.count(b"\n") == 2
    launch = trial(_ENDLESS)
    ended = _ran(runtime, replace(launch, limits=replace(launch.limits, fuel=_FUEL))).exit
    shown = {Guarantee.DETERMINISTIC: same, Guarantee.FUEL_LIMITED: ended.reason is Reason.FUEL_LIMIT}
    missing = {name: why for name, why in support.missing.items() if name not in {each.value for each in _OURS}}
    missing |= {each.value: "live runs showed that it does not hold" for each, holds in shown.items() if not holds}
    return replace(support, guarantees=support.guarantees | {each for each, holds in shown.items() if holds}, missing=missing)


def _ran(runtime: WasmRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        return guest.wait()
