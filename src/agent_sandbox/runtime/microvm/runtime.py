"""The `microvm` runtime: a native program or Python code in a virtual machine that is restored from a template for each run.

The process runtime does everything else: view, confinement, limits, pool, clean-up. Three things differ: the zygote holds a template, the
view lies one directory down, and the guest is our driver with QEMU, which starts no program of the user. The program's own limits, powers
and filter are set inside the machine, by its agent.
"""

from __future__ import annotations

import marshal
import os
from functools import cache

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.kernel.guest_setup import HOSTNAME
from agent_sandbox.kernel.wire import TRUST
from agent_sandbox.policy.model import MIB, Guarantee
from agent_sandbox.runtime.base import COMMAND, Demands, Hosted, JavaScriptCode, Launch, Support, Traits
from agent_sandbox.runtime.microvm import kernel_package, machine
from agent_sandbox.runtime.microvm.template import Recipe, Shelf, Template, Unusable
from agent_sandbox.runtime.microvm.view import (
    VIEW,
    exact_directories,
    moved_down,
    private_directories,
    shared_memory_bytes,
    shown_in_private,
)
from agent_sandbox.runtime.process.guest_request import DEVICES, SCRATCH
from agent_sandbox.runtime.process.runtime import GUARANTEES, ProcessRuntime
from agent_sandbox.runtime.process.zygote import UNUSABLE, Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.runtime.process.guest_handle import ProcessGuest

PROGRAM = "agent_sandbox.runtime.microvm.zygote_program"
# Not given: a list of programs (the machine's kernel knows no such rule of ours).
TRAITS = Traits(
    name="microvm",
    cost=90,
    languages=frozenset({"python", "javascript", "ruby", "bash", COMMAND}),
    guarantees=GUARANTEES - {Guarantee.PROGRAMS_CONFINED} | {Guarantee.SEPARATE_KERNEL},
)
_SIZES_MIB = (1024, 4096)  # memory of a machine: few sizes, so that few templates serve all limits
_SYSTEM_MIB = 160  # of it, for the machine's kernel, the agent and cached files
_QEMU_BYTES = 1024 * MIB  # for QEMU itself, beside the machine's memory: translated code, buffers, its libraries
_QEMU_TASKS, _QEMU_FILES = 160, 65536  # QEMU has a thread for each of up to 64 file operations, and a descriptor for each open file


@cache
def shared_runtime(cache_directory: str, shared_directory: str, kernel: str, warm: int) -> MicroVmRuntime:
    """Return the runtime that all sandboxes of this process share. Root makes templates for all users, everybody else for themselves."""
    own, other = (os.path.join(place, "microvm") for place in (cache_directory, shared_directory))
    if os.geteuid() == 0:
        return MicroVmRuntime(other, others=(own,), public=True, kernel=kernel, warm=warm)
    return MicroVmRuntime(own, others=(other,), kernel=kernel, warm=warm)


class MicroVmRuntime:
    """The microvm runtime. Safe to use from many threads, and on both sides of a fork.

    `own` is the directory of templates that this user makes, `others` those that are only read. `kernel` is the directory of a kernel
    package; without it, the distribution's kernel is used, unpacked or installed. `warm` is how many machines may wait ready.
    """

    traits = TRAITS

    def __init__(
        self,
        own: str,
        *,
        others: tuple[str, ...] = (),
        public: bool = False,
        kernel: str = "",
        search_path: str = "/usr/local/bin:/usr/bin:/bin",
        warm: int = 0,
    ) -> None:
        self._shelf = Shelf(own, others, public=public)
        self._kernels = (kernel,) if kernel else (kernel_package.UNPACKED, "/")
        self._search_path = search_path
        self._guests = ProcessRuntime(warm=warm, start=self._start, traits=TRAITS, inner_root=VIEW)

    def recipe(self, memory_bytes: int | None = None, preload: tuple[str, ...] = ()) -> Recipe:
        """Return what a template for such a run is made from. Raises `RuntimeUnavailable` if QEMU or a kernel is missing."""
        if os.uname().machine != "x86_64":
            why = f"there are no virtual machines for processors of the kind {os.uname().machine}"
            raise RuntimeUnavailable(why, missing=("x86_64",), hint='use runtime="process"')
        qemu = machine.find_program(self._search_path)
        return Recipe(qemu, kernel_package.find(self._kernels), _machine_mib(memory_bytes), preload)

    def template(self, recipe: Recipe) -> Template | None:
        """Return the finished template of this recipe; None if it has not been made, or is damaged."""
        try:
            return self._shelf.find(recipe.key)
        except Unusable:
            return None

    def make(self, recipe: Recipe, progress: Callable[[str], None], *, only_own: bool = False) -> Template:
        """Make the template of this recipe if it is missing. Two processes do it once. Raises `RuntimeUnavailable`, `PolicyError`.

        With `only_own`, a template that another user made does not count.
        """
        from agent_sandbox.runtime.microvm.builder import build  # only until it is made

        return self._shelf.make(recipe.key, lambda directory: build(recipe, directory, progress), only_own=only_own)

    def absence(self) -> str:
        """Return "": a missing template is made by the first run. Raises `RuntimeUnavailable` without QEMU or a kernel."""
        machine.find_program(self._search_path)
        if not kernel_package.is_there(self._kernels):
            raise RuntimeUnavailable("there is no kernel to boot", missing=("kernel",), hint=kernel_package.HINT)
        return ""

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Return "": the first run makes what is missing, and says so. Raises as `absence` does."""
        return self.absence()

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; "" if it does."""
        for wanted, name in (
            (demands.terminal, "terminal"),
            (demands.system, "system profile"),
            (demands.inspect, "watch over reads"),
            (demands.observe, "observer"),
            (demands.image, "place for the files of an image"),
            (demands.inward, "server that a published port could lead to"),
            (demands.checkpoints, "state that can be kept in a timeline"),
        ):
            if wanted:
                return f"it has no {name}"
        return ""

    @property
    def identity(self) -> dict[str, str]:
        """Raise `RuntimeUnavailable`: a machine's clock and scheduling are not deterministic."""
        why = "the microvm runtime has no deterministic runs"
        raise RuntimeUnavailable(why, missing=("deterministic",), hint='use runtime="wasm"')

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces on this host: those of the process runtime, if a machine really runs."""
        from agent_sandbox.runtime.process.probe import probe, trial  # only for `doctor`

        walls = ProcessRuntime()
        try:
            support = probe(walls)
            recipe = self.recipe()
            if self.template(recipe) is None:
                return _nothing("no machine has been made yet: agent-sandbox setup microvm")
            with self.launch(trial("import os; print(os.uname().release)")) as guest:
                done = guest.wait()
            inside = done.stdout.decode(errors="replace").strip()
            if done.exit.code != 0 or inside != recipe.kernel.version:
                return _nothing(f"a program in the machine ended with {done.exit.code}, on kernel {inside[:60]!r}")
            missing = {name: why for name, why in support.missing.items() if name != Guarantee.SEPARATE_KERNEL.value}
            missing[Guarantee.PROGRAMS_CONFINED.value] = "a virtual machine does not give it"
            given = support.guarantees & TRAITS.guarantees | {Guarantee.SEPARATE_KERNEL, Guarantee.MEMORY_HARD}
            missing.pop(Guarantee.MEMORY_HARD.value, None)  # a machine has no more memory than it was made with
            return replace(support, runtime=TRAITS.name, guarantees=given, missing=missing)
        except (SandboxError, OSError) as error:
            return _nothing(str(error))
        finally:
            walls.close()

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run.

        Makes the template if it is missing. Raises `RuntimeUnavailable` for a launch that this runtime cannot take.
        """
        if missing := tuple(sorted(each.value for each in launch.requires - TRAITS.guarantees)):
            why = f"the microvm runtime cannot give: {', '.join(missing)}"
            raise RuntimeUnavailable(why, missing=missing, hint='use runtime="process", or "auto", which chooses it')
        if why := self.objection(Demands.of(launch)):
            raise RuntimeUnavailable(
                f"the microvm runtime cannot do this: {why}", missing=("process-runtime",), hint='use runtime="process"'
            )
        if launch.root.code is not None:
            why = "the microvm runtime cannot restrict which programs are executed"
            raise RuntimeUnavailable(why, missing=(Guarantee.PROGRAMS_CONFINED.value,), hint='use runtime="process"')
        if isinstance(launch.program, JavaScriptCode):
            why = "the microvm runtime has no interpreter of JavaScript in its guests"
            raise RuntimeUnavailable(why, missing=("javascript",), hint="launch a Script for Node.js instead")
        recipe = self.recipe(launch.limits.memory_bytes, launch.preload)
        template = self.template(recipe) or self.make(recipe, _log)
        try:
            guest = self._guests.launch(self._around(launch, recipe, template))
        except RuntimeUnavailable as error:
            if error.missing != UNUSABLE:
                raise
            self._shelf.discard(recipe.key)
            guest = self._guests.launch(self._around(launch, recipe, self.make(recipe, _log, only_own=True)))
        if note := _smaller_machine(launch.limits.memory_bytes, template.memory_mib):
            guest.notes = (*guest.notes, note)
        return guest

    def _around(self, launch: Launch, recipe: Recipe, template: Template) -> Launch:
        """Return the launch of the driver: the same streams and time, and room for QEMU beside what the program may use."""
        limits = launch.limits
        outer = replace(
            limits,
            memory_bytes=(template.memory_mib * MIB) + _QEMU_BYTES + (limits.disk_bytes or 0),
            processes=_QEMU_TASKS,
            open_files=_QEMU_FILES,
        )
        return replace(
            launch,
            root=moved_down(launch.root, template, recipe.qemu),
            limits=outer,
            processes=True,
            executables=(),
            preload=(recipe.qemu, template.directory),  # one zygote for each template
            requires=launch.requires - {Guarantee.SEPARATE_KERNEL, Guarantee.MEMORY_HARD, Guarantee.NO_NEW_PROCESSES},
            inside=_inside(launch),
        )

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting machines and the zygotes. Running machines go on."""
        self._guests.close(leaving=leaving)

    def _start(self, words: tuple[str, ...] | None) -> Zygote:
        return Zygote(words, program=PROGRAM)


def _inside(launch: Launch) -> bytes:
    """Return what the agent must know of a run, before its program comes."""
    limits, native = launch.limits, not isinstance(launch.program, Hosted)
    return marshal.dumps(
        {
            "hostname": HOSTNAME,
            "writable": launch.writable,
            "scratch": None if launch.writable else [*SCRATCH, *DEVICES],
            "executables": None if launch.processes or not native else list(launch.executables),
            "may_fork": launch.processes,
            "may_exec": launch.processes or native,
            "exact": exact_directories(launch.root, launch.cwd) if launch.writable else [],
            "private": private_directories(launch.root),
            "shown_in_private": [*shown_in_private(launch.root), *([TRUST] if launch.network else [])],
            "network": tuple(launch.network),
            "shm_bytes": shared_memory_bytes(launch.root),
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
            "open_files": limits.open_files,
        }
    )


def _machine_mib(memory_bytes: int | None) -> int:
    """Return the memory of the machine for a run with this limit. A limit above all sizes, such as that of a clone, gets the smallest."""
    wanted = 0 if memory_bytes is None else -(-memory_bytes // MIB) + _SYSTEM_MIB
    return next((size for size in _SIZES_MIB if size >= wanted), _SIZES_MIB[0])


def _smaller_machine(limit: int | None, memory_mib: int) -> str:
    """Return a note if a machine has less memory than its run may use; "" if it has enough."""
    room = memory_mib - _SYSTEM_MIB
    if limit is not None and limit <= room * MIB:
        return ""
    most = _SIZES_MIB[-1] - _SYSTEM_MIB
    return f"the virtual machine has {room} MiB for its programs; for more, set a memory limit of at most {most} MiB"


def _nothing(why: str) -> Support:
    return Support(TRAITS.name, frozenset(), {Guarantee.FILES_CONFINED.value: why})


def _log(message: str) -> None:
    import logging  # only for what happens once

    logging.getLogger("agent_sandbox").warning("agent-sandbox: making a virtual machine, once: %s", message)
