"""How plain podman, docker, crun, runsc and QEMU do the same. The image is the one that our runs have, copied into each engine."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from agent_sandbox.errors import SandboxError
from agent_sandbox.runtime.gvisor.runsc import NAME, SET_UP
from agent_sandbox.runtime.microvm import frames, initramfs
from agent_sandbox.runtime.microvm.machine import Hardware, boot_words
from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime
from bench import heavier
from bench.ours import KIB, descendants, proportional_kib
from bench.peers import LONGEST_RUN, Call, Missing, command, first_that_works
from scripts.docker_engine import EngineMissing, docker_engine

TAG = "agent-sandbox-bench"
BOOT_SECONDS = 240.0  # emulated, on a busy machine
_LOW = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=512:512")  # without CAP_SYS_RESOURCE it cannot raise limits
_RUN = ("run", "--rm", "--interactive", "--network=none", "--pull=never", *_LOW)
# crun refuses machines with both versions of control groups, unless it does not see them.
_COVERED = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
_NOTHING = subprocess.DEVNULL
_PLATFORMS = ("systrap", "ptrace")
# Awake, it says so; it ends with its input.
_WAITS = "print(flush=True); import sys; sys.stdin.read()"

Way = Callable[[str, tuple[str, ...]], tuple[str, ...]]  # from a name and a program to the command line that runs it


def podman(*, runtime: str = "") -> Way:
    """`podman run` on a copy of the image, in a storage of its own."""
    storage = _short_place()
    engine = ("podman", "--root", f"{storage}/root", "--runroot", f"{storage}/run", "--cgroup-manager=cgroupfs")
    _copy_image((*engine, "image", "exists", TAG), (*engine, "import", "--quiet", "-", TAG))
    chosen = (f"--runtime={runtime}",) if runtime else ()
    return lambda name, program: (*engine, *chosen, *_RUN, f"--name={name}", TAG, *program)


@cache
def _short_place() -> str:
    """Return a directory whose path podman does not find too long. It ends with this process."""
    made = tempfile.mkdtemp(prefix="podman.", dir="/tmp")
    atexit.register(_clear, made)
    return made


def _clear(place: str) -> None:
    """Remove a storage of podman, which as root leaves a part of it mounted onto itself."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{place}/")]):
        subprocess.run(["umount", mount], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(place, ignore_errors=True)


def docker() -> Way:
    """`docker run` on a copy of the image, by the engine of this machine, or else by one that ends with this process."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], stdin=_NOTHING, capture_output=True, check=False).returncode:
        _start_docker()
    engine = (shutil.which("docker") or "docker", *((f"--host={os.environ['DOCKER_HOST']}",) if "DOCKER_HOST" in os.environ else ()))
    _copy_image((*engine, "image", "inspect", TAG), (*engine, "import", "-", TAG))
    return lambda name, program: (*engine, *_RUN, f"--name={name}", TAG, *program)


@cache
def _start_docker() -> None:
    stack = ExitStack()
    try:
        os.environ.update(stack.enter_context(docker_engine()))
    except EngineMissing as error:
        raise Missing(str(error)) from error
    atexit.register(stack.close)


def _copy_image(there: Sequence[str], take: Sequence[str]) -> None:
    """Give an engine the files of the image, unless it has them."""
    if shutil.which(there[0]) is None:
        raise Missing(f"{there[0]} is not installed")
    if subprocess.run(there, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0:
        return
    with subprocess.Popen(
        ["tar", "--owner=0", "--group=0", "-C", heavier.image().root, "-c", "."], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as tar:
        taken = subprocess.run(take, stdin=tar.stdout, capture_output=True, text=True, check=False)
    if taken.returncode != 0:
        raise Missing(f"{there[0]} cannot take the image: {taken.stderr.strip()[-200:]}")


def crun(*, covered: bool = False) -> Way:
    """`crun run` on the files of the image, read-only: no engine, and no layer to write to."""
    if shutil.which("crun") is None:
        raise Missing("crun is not installed")
    rootless = os.geteuid() != 0
    before = ("unshare", *(("--map-root-user",) if rootless else ()), "--mount", "sh", "-c", _COVERED, "sh") if covered else ()

    def way(name: str, program: tuple[str, ...]) -> tuple[str, ...]:
        bundle = tempfile.mkdtemp(prefix="bundle.", dir=heavier.place("bundles"))
        subprocess.run(["crun", "spec", *(["--rootless"] if rootless else [])], cwd=bundle, check=True)
        path = Path(bundle, "config.json")
        wanted = json.loads(path.read_text())
        wanted["process"].update(terminal=False, args=list(program))
        wanted["root"]["path"] = heavier.image().root
        wanted["mounts"] = [each for each in wanted["mounts"] if each["type"] != "cgroup"]
        path.write_text(json.dumps(wanted))
        return (*before, "crun", "--cgroup-manager=disabled", "run", "--bundle", bundle, name)

    return way


def runsc(platform: str) -> Way:
    """`runsc do` on this machine's files, which it covers with an overlay: the current one that is set up, or the machine's own."""
    program = SET_UP if os.access(SET_UP, os.X_OK) else NAME
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    return lambda name, words: (program, *rootless, f"--platform={platform}", "--network=none", "--ignore-cgroups", "do", *words)


CONTAINERS = {
    "podman": (podman, partial(podman, runtime="runc")),  # crun is its default
    "docker": (docker,),
    "crun": (crun, partial(crun, covered=True)),
}
KERNELS = tuple(partial(runsc, platform) for platform in _PLATFORMS)


def running(ways: Sequence[Callable[[], Way]], *program: str) -> Call:
    """Return a run of this program by the first of the ways that works."""
    return first_that_works([partial(_command, make, program) for make in ways])


def _command(make: Callable[[], Way], program: tuple[str, ...]) -> Call:
    return command(make()(f"{TAG}-{os.getpid()}", program))


@dataclass(frozen=True)
class Alive:
    """Guests of an engine that are alive at once, asleep. Measured, it gives the megabytes of one of them, with what the engine needs."""

    way: Way
    alive: int
    program: tuple[str, ...]

    def __call__(self) -> None:
        """Do nothing: there is nothing to warm up."""

    def figures(self) -> list[float]:
        """Return the megabytes of one."""
        with ExitStack() as stack:
            names = [f"{TAG}-{os.getpid()}-{number}" for number in range(self.alive)]
            started = [stack.enter_context(_awake(self.way(name, self.program))) for name in names]
            # An engine may start its helpers as nobody's children; they bear the name.
            known = {*(each.pid for each in started), *itertools.chain.from_iterable(_named(name) for name in names)}
            every = {below for pid in known for below in (pid, *descendants(pid))}
            return [sum(proportional_kib(pid) for pid in every) / KIB / self.alive]


def alive(ways: Sequence[Callable[[], Way]], count: int, python: str) -> Alive:
    """Return guests that run Python, by the first of the ways that works."""
    why = Missing("it cannot run")
    for make in ways:
        try:
            made = Alive(make(), count, (python, "-c", _WAITS))
            with _awake(made.way(f"{TAG}-{os.getpid()}-try", made.program)):
                return made
        except Missing as error:
            why = error
    raise why


@contextmanager
def _awake(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a guest that says when it is awake, and end it by the end of its input."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as guest:
        assert guest.stdin is not None and guest.stdout is not None and guest.stderr is not None
        if guest.stdout.readline() != "\n":
            guest.kill()
            raise Missing(f"it did not start: {guest.stderr.read().strip()[-200:]}")
        try:
            yield guest
        finally:
            guest.stdin.close()
            guest.wait(LONGEST_RUN)


def _named(name: str) -> list[int]:
    """Return the processes that have this word in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # it has ended
            continue
    return found


@dataclass(frozen=True)
class Machine:
    """A virtual machine that boots the kernel and the interpreter of our template, without the template. One run is one boot."""

    qemu: str
    memory_mib: int
    boot: tuple[str, ...]
    empty: str

    def __call__(self) -> None:
        """Boot one up to its first program."""
        with self._booted():
            pass

    def figures(self) -> list[float]:
        """Return the megabytes of one."""
        with self._booted() as pid:
            return [proportional_kib(pid) / KIB]

    @contextmanager
    def _booted(self) -> Iterator[int]:
        ram = os.memfd_create("ram")
        os.truncate(ram, self.memory_mib << 20)
        port, theirs = socket.socketpair()
        control, monitor = socket.socketpair()
        words = Hardware(self.memory_mib).words(
            ram=f"/proc/self/fd/{ram}", shared=True, port=theirs.fileno(), monitor=monitor.fileno(), view=self.empty
        )
        kept = (ram, theirs.fileno(), monitor.fileno())
        with port, theirs, control, monitor, open(ram), subprocess.Popen([self.qemu, *words, *self.boot], pass_fds=kept) as qemu:
            theirs.close()
            port.settimeout(BOOT_SECONDS)
            try:
                said = port.recv(frames.HEADER.size)
                if said[:1] != frames.BOOTED:
                    raise Missing(f"it did not boot: {port.recv(1000)!r}" if said else "QEMU has ended")
                yield qemu.pid
            except TimeoutError:
                raise Missing("it did not boot") from None
            finally:
                qemu.kill()


def machine() -> Machine:
    """Return a machine of the size of ours."""
    place = heavier.place("booted")
    (place / "empty").mkdir(exist_ok=True)
    runtime = MicroVmRuntime(str(place), kernel=os.environ.get("AGENT_SANDBOX_KERNEL", ""))
    try:
        recipe = runtime.recipe()
        (place / "initramfs").write_bytes(initramfs.build(recipe.kernel, initramfs.collect(()), ()))
    except SandboxError as error:
        raise Missing(f"{error.message}: {error.hint}") from error
    boot = boot_words(recipe.kernel.image, str(place / "initramfs"))
    return Machine(recipe.qemu, recipe.memory_mib, tuple(boot), str(place / "empty"))
