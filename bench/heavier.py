"""How we run in a container image, on gVisor's kernel and in a virtual machine: through the engine, as the SDK does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from agent_sandbox import SandboxConfig
from agent_sandbox.assembly import WARM, WARM_KERNELS, here
from agent_sandbox.container_images import ContainerImage, image_from_machine, list_images, runtime_in
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.runtime.base import Runtime
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from bench.ours import ASLEEP, READY_SECONDS, megabytes_of_all, while_asleep
from bench.peers import ENVIRONMENT, PRINT, Call, Missing, Staged, expect

IMAGE = "python:3.11-slim"
WARM_MACHINES = 1  # as in the SDK
REHEARSED = 1.0  # seconds after which a machine that waits has rehearsed
# As many as are alive at once when memory is measured.
CONTAINERS, KERNELS, MACHINES = 20, 8, 4
_PLACE = {**ENVIRONMENT, "HOME": "/tmp"}
_TRUE = Work(Command(("true",)), _PLACE)
_PRINT = Work(Code(PRINT.language, PRINT.code), _PLACE)


def place(name: str) -> Path:
    """Return a directory beside the state of the benchmark. It ends with the benchmark."""
    made = Path(here().host.state).parent / name
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    return made


def image() -> ContainerImage:
    """Return an image with Python, made from packages of this machine if the directory of state has none yet."""
    found = next((each for each in list_images() if IMAGE in each.names), None)
    try:
        return found or image_from_machine(IMAGE)
    except SandboxError as error:
        raise Missing(f"no image can be made: {error.message}") from error


def container(*, pool: bool) -> Call:
    """`true` in the image, in a fresh throw-away sandbox."""
    guests = ProcessRuntime(warm=WARM if pool else 0)
    return _running(_session("container", runtime_in(here().host.state, guests), image=image().names[0]), _TRUE, guests)


def gvisor(*, pool: bool) -> Call:
    """`true` on a clone of the machine, on a kernel in user space."""
    runtime = _kernels(WARM_KERNELS if pool else 0)
    return _running(_session("gvisor", runtime), _TRUE, runtime)


def microvm(*, pool: bool) -> Call:
    """`print(1)` in a virtual machine from a template, locked, which is the default of the SDK."""
    runtime = _machines(WARM_MACHINES if pool else 0)
    return _running(_session("microvm", runtime, locked=True), _PRINT, runtime._guests, PRINT.prints, rest=REHEARSED if pool else 0.0)


def _kernels(warm: int) -> GvisorRuntime:
    runtime = GvisorRuntime(warm=warm)
    try:
        runtime.program()
    except RuntimeUnavailable as error:
        raise Missing(f"{error.message}: {error.hint}") from error
    return runtime


def _machines(warm: int) -> MicroVmRuntime:
    """Return a runtime whose template lies beside the state of the benchmark, and is made if it is missing."""
    runtime = MicroVmRuntime(str(place("machines")), kernel=os.environ.get("AGENT_SANDBOX_KERNEL", ""), warm=warm)
    try:
        runtime.recipe()
    except RuntimeUnavailable as error:
        raise Missing(f"{error.message}: {error.hint}") from error
    return runtime


def _session(name: str, runtime: Runtime, *, image: str = "", locked: bool = False) -> Session:
    """Return a session on this runtime: locked, or on a clone of the machine."""
    settings = SandboxConfig(runtime=name, image=image)
    if not locked:
        settings = replace(settings, allow_file_read=True, allow_file_write=True, allow_subprocess=True)
    return Session(Gate(settings.policy(), here().ledger(), clock=time.time), only(runtime))


def _running(session: Session, work: Work, guests: ProcessRuntime, prints: str = "", rest: float = 0.0) -> Call:
    """Return a run of this work. With a pool, each run but the first waits for a guest, and `rest` seconds more. That is not counted."""
    begun = False

    def call() -> None:
        nonlocal begun
        begun = True
        outcome = session.run(work)
        expect(prints, outcome.stdout.decode(), outcome.stderr.decode(errors="replace"))
        if outcome.exit.code != 0:
            raise Missing(outcome.refused or f"it ended with {outcome.exit.code}")

    def await_guest() -> None:
        deadline = time.monotonic() + READY_SECONDS
        while begun and guests._pool is not None and not guests._pool.waiting:
            if time.monotonic() > deadline:
                raise Missing(f"no guest was ready within {READY_SECONDS:.0f} s")
            time.sleep(0.01)
        time.sleep(rest if begun else 0.0)

    return Staged(await_guest, call)


@dataclass(frozen=True)
class Alive:
    """Guests that are alive at once, asleep in their first line. Measured, it gives the megabytes of one of them.

    Everything that they need is counted: init, zygote, outer programs, and the copy of a template. Pages that they share are counted once.
    """

    session: Session
    alive: int

    def __call__(self) -> None:
        """Do nothing: there is nothing to warm up."""

    def figures(self) -> list[float]:
        """Return the megabytes of one."""
        guests: list[ProcessGuest] = []

        def run(told: Callable[[str, bytes], None]) -> object:
            return self.session.run(Work(Code("python", ASLEEP), _PLACE, on_output=told, on_start=guests.append))

        def end() -> None:
            for guest in guests:
                guest.kill()

        return [while_asleep(run, self.alive, end, megabytes_of_all) / self.alive]


def containers_alive() -> Alive:
    """Containers, each with its Python asleep."""
    return Alive(_session("container", runtime_in(here().host.state, ProcessRuntime()), image=image().names[0]), CONTAINERS)


def kernels_alive() -> Alive:
    """Guests on kernels in user space, each with its Python asleep."""
    return Alive(_session("gvisor", _kernels(0)), KERNELS)


def machines_alive() -> Alive:
    """Virtual machines, each with its Python asleep."""
    return Alive(_session("microvm", _machines(0), locked=True), MACHINES)
