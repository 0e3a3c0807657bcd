"""The `wasm` runtime: Python or JavaScript in an interpreter inside WebAssembly, which runs in a guest of the `process` runtime.

The process runtime does everything else: view, confinement, limits, pool, clean-up. Three things differ: the zygote has the engine loaded,
the view lies one directory down, and a guest starts no program and no other process, whatever the policy allows.

`proved` completes a probe: it tests with real runs that runs are deterministic and that fuel is limited.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import cached_property

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import Completed, Demands, ExitReason, Hosted, JavaScriptCode, Launch, Support, Traits
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.runtime import GUARANTEES, ProcessRuntime
from agent_sandbox.runtime.process.zygote import Zygote, argv_for, packages
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import COUNTING, JAVASCRIPT, MODULE, Cache, CachedFile
from agent_sandbox.runtime.wasm.python_modules import ABSENT, MODULES
from agent_sandbox.runtime.wasm.recipe import COMPILED_FOR, IMAGES, Package, javascript_stored_as, stored_as
from agent_sandbox.runtime.wasm.view import VIEW, moved_down

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.runtime.wasm.compiler import Compilation

PROGRAM = "agent_sandbox.runtime.wasm.zygote_program"
BUILDER = "agent_sandbox.runtime.wasm.compiler"
# Guarantees that only WebAssembly can give: we count every instruction and answer every system call.
ONLY_HERE = frozenset({Guarantee.FUEL_LIMITED, Guarantee.DETERMINISTIC})
_LANGUAGES = frozenset({"python", "javascript"})
TRAITS = Traits(
    name="wasm",
    cost=10,
    languages=_LANGUAGES,
    guarantees=GUARANTEES - {Guarantee.EGRESS_ONLY} | ONLY_HERE,  # no socket of a program inside reaches anything
    brings=_LANGUAGES,
    features=frozenset(),
    modules=MODULES,
    absent=ABSENT,
)
_PRELOADED = frozenset(name for names in IMAGES.values() for name in names)

# Every printed value differs from one ordinary run to the next.
_TELLTALE = """
import os, random, secrets, tempfile, time, uuid
time.sleep(3600)
print(time.time(), time.monotonic(), time.perf_counter(), random.random(), secrets.token_hex(), uuid.uuid1(), tempfile.mkdtemp())
print([os.stat(os.path.join("/tmp", name)) for name in os.listdir("/tmp")], object())
"""
_ENDLESS = "while True: pass"
_FUEL = 10_000_000  # a hundredth of a second
# The program inside starts no process and no thread. The engine has up to 512 threads for files, and starts one whenever none is idle. That
# depends on how busy the machine is: at a lower limit, runs of one program would differ in the limits that they reached.
_ENGINE_TASKS = 640


class WasmRuntime:
    """The wasm runtime: guests are forked from one zygote that has the compiled interpreters loaded.

    Safe to use from many threads, and on both sides of a fork. `cache` and `records` are the directories of compiled files and of their
    digests. `others` and `public` are those of `Cache`.
    """

    traits = TRAITS

    def __init__(self, cache: str, records: str, *, others: tuple[tuple[str, str], ...] = (), public: bool = False, warm: int = 0) -> None:
        self._directories = cache, records
        self._others, self._public = others, public
        self._guests = ProcessRuntime(warm=warm, start=self._start, traits=TRAITS, inner_root=VIEW)
        self._compiled_paths: dict[str, dict[str, str]] = {}

    @cached_property
    def _package(self) -> Package:
        return recipe.find_package()

    @cached_property
    def _cache(self) -> Cache:
        return cache_for(self._package, *self._directories, others=self._others, public=self._public)

    def _files(self, module: str) -> dict[str, str]:
        """Return the compiled modules and images that a zygote for this module needs: names in the zygote, mapped to names in the cache."""
        javascript = javascript_stored_as(self._package.javascript_digest, counting=module == COUNTING)
        return {module: module, JAVASCRIPT: javascript, **{image: stored_as(image) for image in IMAGES}}

    def _compiled(self, module: str) -> dict[str, str]:
        """Return the paths of the compiled modules. They are looked up once; a file that is removed later is still loaded in the zygote."""
        if module not in self._compiled_paths:
            self._compiled_paths[module] = {name: self._entry(self._files(module)[name]).path for name in (module, JAVASCRIPT)}
        return self._compiled_paths[module]

    @property
    def ready(self) -> bool:
        """Whether everything that ordinary runs need is compiled. Raises `RuntimeUnavailable` if the extra is not installed."""
        return self._has(MODULE)

    @property
    def ready_to_count(self) -> bool:
        """Whether the files for deterministic runs and fuel limits are compiled as well."""
        return self._has(MODULE) and self._has(COUNTING)

    def _has(self, module: str) -> bool:
        return all(self._cache.entry(name) for name in self._files(module).values())

    def building(self, *, counting: bool = False) -> list[str]:
        """Return the command that compiles missing and damaged files. It takes a minute, or a second if there is nothing to do.

        With `counting` it makes the counting module, too, which takes another minute.
        """
        return argv_for(BUILDER, *self._compiler_arguments(COUNTING if counting else MODULE))

    def compile_in_background(self, announce: Callable[[str], None]) -> str:
        """Start compiling in the background, and return a message about it. Raises `RuntimeUnavailable` if the extra is not installed.

        `announce` is called with one line if a process was started.
        """
        from agent_sandbox.runtime.wasm import background_compiler  # only until it is compiled

        return background_compiler.begin(self._cache, self._compiler_arguments(MODULE), announce, now=time.time())

    @property
    def standing(self) -> str:
        """A message about the state of compiling. Raises as `ready` does."""
        from agent_sandbox.runtime.wasm import background_compiler  # only until it is compiled

        return background_compiler.standing(self._cache, now=time.time())

    @property
    def compilation(self) -> Compilation | None:
        """The compilation that goes on now; None if there is none."""
        from agent_sandbox.runtime.wasm.compiler import compilation  # only where somebody waits for it

        return compilation(self._cache)

    @property
    def identity(self) -> dict[str, str]:
        """Return the versions and digests that, with its input, determine a deterministic run. Raises `RuntimeUnavailable`."""
        images = {f"image {name}": self._entry(stored_as(name)).digest for name in IMAGES}
        return {
            "engine": self._package.engine,
            "interpreter": self._package.digest,
            "javascript": self._package.javascript_digest,
            "configuration": COMPILED_FOR,
            "machine": os.uname().machine,
            **images,
        }

    def _compiler_arguments(self, module: str) -> list[str]:
        """Return the command line arguments of the program `compiler`."""
        from agent_sandbox.runtime.wasm.compiler import encoded  # only until it is compiled

        fields = (getattr(self._package, name) for name in Package.__annotations__)  # in the order of its constructor
        return [packages(), encoded(self._cache), module, *fields]

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces on this host, proved by real runs.

        These are the guarantees of the process runtime, if an interpreter starts inside it, and those that only WebAssembly can give.
        """
        from agent_sandbox.runtime.process.probe import probe, trial  # Linux only, and this module is loaded elsewhere too

        walls = ProcessRuntime()
        try:
            support = probe(walls)
            with self.launch(trial("pass")) as guest:
                ended = guest.wait().exit
            if ended.code != 0:
                return _nothing(f"its interpreter ended with {ended.code}")
            missing = {**support.missing, Guarantee.EGRESS_ONLY.value: "no program inside WebAssembly has a network"}
            given = support.guarantees - {Guarantee.EGRESS_ONLY}
            return proved(self, replace(support, runtime=TRAITS.name, guarantees=given, missing=missing))
        except (SandboxError, OSError) as error:
            return _nothing(str(error))
        finally:
            walls.close()

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run.

        Raises `RuntimeUnavailable` for a launch that this runtime cannot take.
        """
        if not isinstance(launch.program, Hosted):
            raise RuntimeUnavailable(
                "the wasm runtime runs Python code and JavaScript, no other program",
                missing=("native-programs",),
                hint='use runtime="process"',
            )
        if missing := tuple(sorted(each.value for each in launch.requires - TRAITS.guarantees)):
            why = f"the wasm runtime cannot give: {', '.join(missing)}"
            raise RuntimeUnavailable(why, missing=missing, hint='use runtime="process", or "auto", which chooses it')
        if why := self.objection(Demands.of(launch)):
            raise RuntimeUnavailable(f"the wasm runtime cannot do this: {why}", missing=("process-runtime",), hint='use runtime="process"')
        if launch.talk is not None and isinstance(launch.program, JavaScriptCode):
            raise RuntimeUnavailable("only Python code can be given tools and turns", missing=("tools",), hint="write it in Python")
        if Guarantee.DETERMINISTIC in launch.requires and launch.deterministic is None:
            launch = replace(launch, deterministic=0)
        module = COUNTING if launch.deterministic is not None or launch.limits.fuel is not None else MODULE
        package = self._package
        root = moved_down(launch.root, compiled=self._compiled(module), library=package.library, name=package.library_name)
        limits = launch.limits
        if limits.processes is not None:
            limits = replace(limits, processes=max(limits.processes, _ENGINE_TASKS))
        return self._guests.launch(
            replace(
                launch,
                root=root,
                limits=limits,
                processes=False,
                executables=(),
                preload=(module,),  # one zygote for each module
                requires=launch.requires - ONLY_HERE,  # the rest is given by the process runtime
            )
        )

    def absence(self) -> str:
        """Return the reason why this runtime cannot be used now; empty if it can. Raises `RuntimeUnavailable` without the extra `wasm`."""
        return "" if self.ready else self.standing

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Compile missing and damaged files in the background, and return a message about the progress. Raises as `absence` does."""
        return self.compile_in_background(announce)

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; "" if it does."""
        if why := missing_means(demands):
            return why
        strange = [name for name in demands.preload if name not in _PRELOADED]
        return f"it has no image with {', '.join(strange)} imported" if strange else ""

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting guests and the zygote. Running guests go on, and the zygote lives until they end."""
        self._guests.close(leaving=leaving)

    def _entry(self, name: str) -> CachedFile:
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


def missing_means(demands: Demands) -> str:
    """Return a message about the first demand that no runtime inside WebAssembly can meet; "" if there is none."""
    for wanted, name in (
        (demands.terminal, "terminal"),
        (demands.system, "system profile"),
        (demands.inspect, "watch over reads"),
        (demands.observe, "observer"),
        (demands.inward, "server that a published port could lead to"),
        (demands.checkpoints, "state that can be kept in a timeline"),
        (demands.image, "place for the files of an image"),
    ):
        if wanted:
            return f"it has no {name}"
    return ""


def cache_for(found: Package, cache: str, records: str, *, others: tuple[tuple[str, str], ...] = (), public: bool = False) -> Cache:
    """Return the cache for this engine, its configuration, this interpreter and this kind of machine."""
    parts = (found.engine, found.digest, COMPILED_FOR, os.uname().machine)
    return Cache(cache, records, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24], others, public)


def _nothing(why: str) -> Support:
    return Support(TRAITS.name, frozenset(), {Guarantee.FILES_CONFINED.value: why})


def proved(runtime: WasmRuntime, support: Support) -> Support:
    """Test with real runs the guarantees that only WebAssembly gives, and add those that hold to `support`. Raises as a launch does."""
    from agent_sandbox.runtime.process.probe import trial  # Linux only

    if not runtime.ready_to_count:
        why = "the second module, which counts what it executes, has not been compiled: agent-sandbox setup"
        return replace(support, missing={**support.missing, **{each.value: why for each in ONLY_HERE}})
    first, second = (_ran(runtime, replace(trial(_TELLTALE), deterministic=7)) for _ in range(2))
    same = (first.stdout, first.exit.usage.fuel) == (second.stdout, second.exit.usage.fuel) and first.stdout.count(b"\n") == 2
    launch = trial(_ENDLESS)
    ended = _ran(runtime, replace(launch, limits=replace(launch.limits, fuel=_FUEL))).exit
    shown = {Guarantee.DETERMINISTIC: same, Guarantee.FUEL_LIMITED: ended.reason is ExitReason.FUEL_LIMIT}
    missing = {name: why for name, why in support.missing.items() if name not in {each.value for each in ONLY_HERE}}
    missing |= {each.value: "live runs showed that it does not hold" for each, holds in shown.items() if not holds}
    return replace(support, guarantees=support.guarantees | {each for each, holds in shown.items() if holds}, missing=missing)


def _ran(runtime: WasmRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        return guest.wait()
