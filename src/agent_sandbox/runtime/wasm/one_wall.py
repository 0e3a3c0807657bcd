"""The `wasm-one-wall` runtime: the same interpreter inside WebAssembly where Linux's confinement is not to be had.

Here the engine is all there is between the program and the machine; should it have a hole, nothing stands behind it. It is lent an empty
directory of its own, its library to read, and its streams: no file of the machine, which rules for files would need a view for. What it may
use is watched from beside it. Nothing here or in its program needs Linux.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from functools import cached_property

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.wire import SCRIPT, SCRIPTS
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import DEVNULL, Completed, Exit, Launch, PythonCode, Reason, Support, Usage
from agent_sandbox.runtime.process.zygote import argv_for, packages
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import MODULE, Cache, Entry
from agent_sandbox.runtime.wasm.recipe import Package
from agent_sandbox.runtime.wasm.runtime import cache_for

if TYPE_CHECKING:
    from typing import IO

NOTE = "one wall only: between this program and the machine there was the WebAssembly engine, and no confinement of the kernel's behind it"
PROGRAM = "agent_sandbox.runtime.wasm.one_wall_program"
_REASONS = {"wall": Reason.TIMED_OUT, "cpu": Reason.CPU_LIMIT, "disk": Reason.DISK_LIMIT, "abort": Reason.SIGNALLED}
_PATIENCE_BYTES = 64 << 20  # dropped output after which a run is ended
_CHUNK = 65536
_STARTING_SECONDS = 60.0  # for the engine to load, at most
_ABORT = 6  # SIGABRT, as elsewhere a program that breaks the engine's rules ends


class OneWallGuest:
    """One run."""

    layers: int | None = None
    irrevocable = False

    def __init__(self, launch: Launch, program: PythonCode, module: Entry, found: Package) -> None:
        self.launch = launch
        self.refused = ""
        self.notes: tuple[str, ...] = (NOTE,)
        self._own = tempfile.mkdtemp(prefix="agent-sandbox-")
        self._killed = self._closed = False
        try:
            self._process = self._start(launch, program, module, found)
        except BaseException:
            remove(self._own)
            raise
        self._began = time.monotonic()

    def _start(self, launch: Launch, program: PythonCode, module: Entry, found: Package) -> subprocess.Popen[bytes]:
        root, library = os.path.join(self._own, "root"), os.path.join(self._own, "library")
        os.mkdir(library)
        _put(found.library, os.path.join(library, found.library_name))
        for made in ("tmp", SCRIPTS.lstrip("/")):
            os.makedirs(os.path.join(root, made))
        with open(os.path.join(root, SCRIPT.lstrip("/")), "w", encoding="utf-8", errors="surrogateescape") as script:
            script.write(program.source)
        limits = launch.limits
        message = {
            "module": module.path,
            "digest": module.digest,
            "library": library,
            "root": root,
            "report": os.path.join(self._own, "report"),
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
        path = os.path.join(self._own, "told")
        with open(path, "w", encoding="ascii") as file:
            json.dump(message, file)
        given = launch.stdin
        stdin = subprocess.PIPE if isinstance(given, bytes) else subprocess.DEVNULL if given == DEVNULL else given
        return subprocess.Popen(
            argv_for(PROGRAM, packages(), path),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._own,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
        )

    def wait(self) -> Completed:
        """Take its output until it has ended, then say how."""
        arrived: queue.Queue[tuple[str, bytes]] = queue.Queue(16)  # bounded: who prints faster than it is taken has to wait
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for name, stream in streams.items():
            threading.Thread(target=_carry, args=(name, stream, arrived), daemon=True).start()
        if isinstance(self.launch.stdin, bytes):
            threading.Thread(target=_feed, args=(self._process.stdin, self.launch.stdin), daemon=True).start()
        kept: dict[str, list[bytes]] = {name: [] for name in streams}
        taken, ended_by = dict.fromkeys(streams, 0), None
        open_streams = set(streams)
        wall = self.launch.limits.wall_seconds
        deadline = None if wall is None else self._began + wall + _STARTING_SECONDS  # it watches its own clock, once it has begun
        while open_streams:
            left = None if deadline is None or ended_by is not None else max(0.0, deadline - time.monotonic())
            try:
                name, data = arrived.get(timeout=left)
            except queue.Empty:
                ended_by = Reason.TIMED_OUT
                self._process.kill()
                continue
            if not data:
                open_streams.discard(name)
            elif self._take(name, data, taken, kept):
                ended_by = ended_by or Reason.OUTPUT_LIMIT
                self._process.kill()
        code = self._process.wait()
        return Completed(self._exit(code, ended_by, taken), b"".join(kept["stdout"]), b"".join(kept["stderr"]))

    def _take(self, name: str, data: bytes, taken: dict[str, int], kept: dict[str, list[bytes]]) -> bool:
        """Keep and pass on what the limit allows. Whether patience with it has ended."""
        limit = self.launch.limits.output_bytes
        room = len(data) if limit is None else max(0, limit - taken[name])
        taken[name] += len(data)
        if data := data[:room]:
            if self.launch.collect:
                kept[name].append(data)
            if self.launch.on_output is not None:
                self.launch.on_output("stdout" if name == "stdout" else "stderr", data)
        return limit is not None and taken[name] > max(16 * limit, _PATIENCE_BYTES)

    def _exit(self, code: int, ended_by: Reason | None, taken: dict[str, int]) -> Exit:
        reported = self._reported()
        said = reported.get("reason", "")
        reason = Reason.KILLED if self._killed else ended_by or _REASONS.get(str(said))
        number = _ABORT if reason is Reason.SIGNALLED else -code if code < 0 else None
        if reason is None:
            reason = Reason.SIGNALLED if number is not None else Reason.EXITED
        limit = self.launch.limits.output_bytes
        hit = [
            name for name, each in (("wall", Reason.TIMED_OUT), ("cpu", Reason.CPU_LIMIT), ("disk", Reason.DISK_LIMIT)) if reason is each
        ]
        if limit is not None and any(count > limit for count in taken.values()):
            hit.append("output")
        cpu = reported.get("cpu", 0.0)
        usage = Usage(time.monotonic() - self._began, float(cpu) if isinstance(cpu, int | float) else 0.0)
        return Exit(code if number is None else 128 + number, reason, number, tuple(hit), usage)

    def _reported(self) -> dict[str, object]:
        """What the process around the program said at its end. Out of the program's reach."""
        try:
            with open(os.path.join(self._own, "report"), encoding="ascii") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def kill(self) -> None:
        """End the run at once, from any thread."""
        self._killed = True
        self._process.kill()

    def interrupt(self, number: int) -> None:
        """Forward a signal."""
        with suppress(OSError, ValueError):
            self._process.send_signal(number)

    def wake_on(self, fd: int) -> None:
        """Not needed: `wait` here is one that a signal handler interrupts."""

    def close(self) -> None:
        """Kill it if it runs, and free what it holds. Idempotent."""
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
        remove(self._own)

    def __enter__(self) -> OneWallGuest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _put(file: str, there: str) -> None:
    try:
        os.link(file, there)
    except OSError:  # another filesystem, or one without links
        shutil.copyfile(file, there)


def _carry(name: str, stream: IO[bytes], arrived: queue.Queue[tuple[str, bytes]]) -> None:
    while data := os.read(stream.fileno(), _CHUNK):
        arrived.put((name, data))
    arrived.put((name, b""))


def _feed(stream: IO[bytes], data: bytes) -> None:
    with suppress(OSError):  # it need not be read
        stream.write(data)
    with suppress(OSError):
        stream.close()


def remove(top: str) -> None:
    """Remove a tree that a program has made, however deep it is: what lies further down is first brought up, so no path grows long."""
    number = 0
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        with os.scandir(directory) as entries:
            found = list(entries)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            number += 1
            waiting.append(os.path.join(top, f".{number}"))
            os.rename(entry.path, waiting[-1])
        if directory != top:
            os.rmdir(directory)
    os.rmdir(top)


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
        return recipe.find_package()

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
