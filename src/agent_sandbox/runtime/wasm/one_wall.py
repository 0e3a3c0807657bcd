"""The `wasm-one-wall` runtime: the same interpreter inside WebAssembly, for hosts without Linux's confinement.

Only the engine separates the program from the machine. If the engine has a hole, nothing else stops the program. The program gets an empty
directory of its own, read access to its library, and its streams. It gets no file of the machine, because file rules cannot be enforced
here. A thread beside the program watches its limits. Nothing here or in `one_wall_program` needs Linux.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.wire import SCRIPT, SCRIPTS
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import DEVNULL, Completed, Confined, Demands, Exit, ExitReason, Launch, PythonCode, Support, Traits, Usage
from agent_sandbox.runtime.process.zygote import argv_for, packages
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import MODULE, Cache, CachedFile
from agent_sandbox.runtime.wasm.python_modules import ABSENT, MODULES
from agent_sandbox.runtime.wasm.recipe import Package
from agent_sandbox.runtime.wasm.runtime import cache_for, missing_means

if TYPE_CHECKING:
    from typing import IO

NOTE = "one wall only: between this program and the machine there was the WebAssembly engine, and no confinement of the kernel's behind it"
NAME = "wasm-one-wall"
PROGRAM = "agent_sandbox.runtime.wasm.one_wall_program"
# The engine alone gives each of these guarantees: a program inside has only the calls of WASI, and only the files that we opened for it.
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
_REASONS = {"wall": ExitReason.TIMED_OUT, "cpu": ExitReason.CPU_LIMIT, "disk": ExitReason.DISK_LIMIT, "abort": ExitReason.SIGNALLED}
_PATIENCE_BYTES = 64 << 20  # a run that prints more than this and 16 times its limit is ended
_CHUNK = 65536
_STARTING_SECONDS = 60.0  # the engine must have loaded after this time
_TICK = 0.05  # seconds between calls of `on_tick`
_ABORT = 6  # SIGABRT: in every runtime a trap ends the program like this signal


class OneWallGuest:
    """A run: a process that contains the engine and the program, and a directory for the run."""

    layers: int | None = None
    irrevocable = False
    terminal: int | None = None

    def __init__(self, launch: Launch, program: PythonCode, module: CachedFile, found: Package) -> None:
        self.launch = launch
        self.refused = ""
        self.notes: tuple[str, ...] = (NOTE,)
        self._directory = tempfile.mkdtemp(prefix="agent-sandbox-")
        self._killed = self._closed = False
        try:
            self._process = self._start(launch, program, module, found)
        except BaseException:
            remove(self._directory)
            raise
        self._began = time.monotonic()

    def _start(self, launch: Launch, program: PythonCode, module: CachedFile, found: Package) -> subprocess.Popen[bytes]:
        root, library = os.path.join(self._directory, "root"), os.path.join(self._directory, "library")
        os.mkdir(library)
        _link_or_copy(found.library, os.path.join(library, found.library_name))
        for name in ("tmp", SCRIPTS.lstrip("/")):
            os.makedirs(os.path.join(root, name))
        with open(os.path.join(root, SCRIPT.lstrip("/")), "w", encoding="utf-8", errors="surrogateescape") as script:
            script.write(program.source)
        limits = launch.limits
        message = {
            "module": module.path,
            "digest": module.digest,
            "library": library,
            "root": root,
            "report": os.path.join(self._directory, "report"),
            "source": program.source,
            "arguments": list(program.argv),
            "env": dict(launch.env),
            "cwd": launch.cwd,
            "wall_seconds": limits.wall_seconds,
            "memory_bytes": limits.memory_bytes,
            "open_files": limits.open_files,
            "cpu_seconds": limits.cpu_seconds,
            "disk_bytes": limits.disk_bytes,
        }
        path = os.path.join(self._directory, "told")
        with open(path, "w", encoding="ascii") as file:
            json.dump(message, file)
        given = launch.stdin
        stdin = subprocess.PIPE if isinstance(given, bytes) else subprocess.DEVNULL if given == DEVNULL else given
        return subprocess.Popen(
            argv_for(PROGRAM, packages(), path),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._directory,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
        )

    def wait(self) -> Completed:
        """Read the output until the run has ended, and return it with the way the run ended."""
        arrived: queue.Queue[tuple[str, bytes]] = queue.Queue(16)  # bounded: a program that prints faster than we read has to wait
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for name, stream in streams.items():
            threading.Thread(target=_carry, args=(name, stream, arrived), daemon=True).start()
        if isinstance(self.launch.stdin, bytes):
            threading.Thread(target=_feed, args=(self._process.stdin, self.launch.stdin), daemon=True).start()
        kept: dict[str, list[bytes]] = {name: [] for name in streams}
        taken, ended_by = dict.fromkeys(streams, 0), None
        open_streams = set(streams)
        wall = self.launch.limits.wall_seconds
        deadline = None if wall is None else self._began + wall + _STARTING_SECONDS  # a run that has begun watches its own time
        while open_streams:
            left = math.inf if deadline is None or ended_by is not None else max(0.0, deadline - time.monotonic())
            for tick in self.launch.on_tick:
                tick()
                left = min(left, _TICK)
            try:
                name, data = arrived.get(timeout=None if left == math.inf else left)
            except queue.Empty:
                if ended_by is None and deadline is not None and time.monotonic() >= deadline:
                    ended_by = ExitReason.TIMED_OUT
                    self._process.kill()
                continue
            if not data:
                open_streams.discard(name)
            elif self._take(name, data, taken, kept):
                ended_by = ended_by or ExitReason.OUTPUT_LIMIT
                self._process.kill()
        code = self._process.wait()
        return Completed(self._exit(code, ended_by, taken), b"".join(kept["stdout"]), b"".join(kept["stderr"]))

    def _take(self, name: str, data: bytes, taken: dict[str, int], kept: dict[str, list[bytes]]) -> bool:
        """Keep and pass on output up to the limit. Return whether so much more was dropped that the run must end."""
        limit = self.launch.limits.output_bytes
        room = len(data) if limit is None else max(0, limit - taken[name])
        taken[name] += len(data)
        if data := data[:room]:
            if self.launch.collect:
                kept[name].append(data)
            if self.launch.on_output is not None:
                self.launch.on_output("stdout" if name == "stdout" else "stderr", data)
        return limit is not None and taken[name] > max(16 * limit, _PATIENCE_BYTES)

    def _exit(self, code: int, ended_by: ExitReason | None, taken: dict[str, int]) -> Exit:
        reported = self._reported()
        word = reported.get("reason", "")
        reason = ExitReason.KILLED if self._killed else ended_by or _REASONS.get(str(word))
        number = _ABORT if reason is ExitReason.SIGNALLED else -code if code < 0 else None
        if reason is None:
            reason = ExitReason.SIGNALLED if number is not None else ExitReason.EXITED
        limit = self.launch.limits.output_bytes
        hit = [
            name
            for name, each in (("wall", ExitReason.TIMED_OUT), ("cpu", ExitReason.CPU_LIMIT), ("disk", ExitReason.DISK_LIMIT))
            if reason is each
        ]
        if limit is not None and any(count > limit for count in taken.values()):
            hit.append("output")
        cpu = reported.get("cpu", 0.0)
        usage = Usage(time.monotonic() - self._began, float(cpu) if isinstance(cpu, int | float) else 0.0)
        return Exit(code if number is None else 128 + number, reason, number, tuple(hit), usage)

    def _reported(self) -> dict[str, object]:
        """Return the report that the process left in a file, out of the program's reach; empty if there is none."""
        try:
            with open(os.path.join(self._directory, "report"), encoding="ascii") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def kill(self) -> None:
        """End the run at once, from any thread."""
        self._killed = True
        self._process.kill()

    def interrupt(self, number: int) -> None:
        """Forward a signal to the run."""
        with suppress(OSError, ValueError):
            self._process.send_signal(number)

    def wake_on(self, fd: int) -> None:
        """Do nothing: a signal handler interrupts this runtime's `wait`."""

    def close(self) -> None:
        """Kill the run if it has not ended, and free its resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        remove(self._directory)

    def __enter__(self) -> OneWallGuest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without hard links
        shutil.copyfile(source, target)


def _carry(name: str, stream: IO[bytes], arrived: queue.Queue[tuple[str, bytes]]) -> None:
    while data := os.read(stream.fileno(), _CHUNK):
        arrived.put((name, data))
    arrived.put((name, b""))


def _feed(stream: IO[bytes], data: bytes) -> None:
    with suppress(OSError):  # the program need not read its input
        stream.write(data)
    with suppress(OSError):
        stream.close()


def remove(top: str) -> None:
    """Remove a tree that a program has made, however deep. Subdirectories are first moved to the top, so that no path grows long."""
    number = 0
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        with os.scandir(directory) as entries:
            listed = list(entries)
        for entry in listed:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            number += 1
            waiting.append(os.path.join(top, f".{number}"))
            os.rename(entry.path, waiting[-1])
        if directory != top:
            os.rmdir(directory)
    os.rmdir(top)


class OneWall:
    """The one-wall runtime: each run of Python code has its own engine and process. Safe to use from many threads."""

    def __init__(self, cache: str, records: str, *, others: tuple[tuple[str, str], ...] = ()) -> None:
        self._directories = cache, records
        self._others = others

    @cached_property
    def _package(self) -> Package:
        return recipe.find_package()

    @cached_property
    def _cache(self) -> Cache:
        return cache_for(self._package, *self._directories, others=self._others)

    @property
    def traits(self) -> Traits:
        """The properties of this runtime. It does not change the user: started by root, the engine runs as root."""
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        guarantees = _GUARANTEES if root else _GUARANTEES | {Guarantee.NOT_HOST_ROOT}
        python = frozenset({"python"})
        return Traits(NAME, 5, python, guarantees, python, views=False, features=frozenset(), modules=MODULES, absent=ABSENT)

    @property
    def ready(self) -> bool:
        """Whether the interpreter is compiled. Raises `RuntimeUnavailable` if the extra is not installed."""
        return self._cache.entry(MODULE) is not None

    def absence(self) -> str:
        """Return the reason why this runtime cannot be used now; empty if it can. Raises `RuntimeUnavailable` without the extra `wasm`."""
        return "" if self.ready else "it has not been compiled; run: agent-sandbox setup"

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Return the reason why this runtime is not ready. Prepares nothing: only `setup` compiles it."""
        return self.absence()

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; "" if it does."""
        return missing_means(demands) or ("it has no preloaded modules" if demands.preload else "")

    @property
    def identity(self) -> dict[str, str]:
        """Raise `RuntimeUnavailable`: this runtime has no deterministic runs."""
        raise RuntimeUnavailable("one wall has no deterministic runs", missing=("deterministic",), hint='use runtime="wasm"')

    def probe(self) -> Support:
        """Return the guarantees that a launch would enforce here; none if the interpreter is not compiled or not installed."""
        try:
            if self.ready:
                return Support(NAME, self.traits.guarantees, {each.value: NOTE for each in Guarantee if each not in self.traits.guarantees})
            return Support(NAME, frozenset(), {Guarantee.FILES_CONFINED.value: "it has not been compiled; run: agent-sandbox setup"})
        except RuntimeUnavailable as error:
            return Support(NAME, frozenset(), {Guarantee.FILES_CONFINED.value: f"{error.message}; {error.hint}"})

    def launch(self, launch: Launch) -> OneWallGuest:
        """Start a run. Every required guarantee is in force when its program starts, or nothing runs.

        Raises `RuntimeUnavailable` for a launch that this runtime cannot take.
        """
        if missing := launch.requires - self.traits.guarantees:
            names = tuple(sorted(guarantee.value for guarantee in missing))
            raise RuntimeUnavailable(
                f"one wall cannot give: {', '.join(names)}", missing=names, hint="run it on Linux, as an ordinary user"
            )
        if not isinstance(launch.program, PythonCode):
            raise RuntimeUnavailable(
                "this runtime runs Python code, no other program", missing=("native-programs",), hint="run it on Linux"
            )
        why = self.objection(Demands.of(launch))
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
        for tell in launch.on_ready:
            tell(Confined(None, None))
        package = self._package
        return OneWallGuest(launch, launch.program, entry, package)

    def close(self, *, leaving: bool = False) -> None:
        """Do nothing: this runtime keeps no waiting guests."""
