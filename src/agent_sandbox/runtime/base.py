"""The interface of every runtime: its traits, whether it is ready, whether it supports a launch, and `launch`, which returns a guest.

Code outside `runtime/` uses a runtime only through this interface and the registry. The interface is small because its arguments are
values: a new option is a field of `Launch`, not another parameter everywhere.
"""

from __future__ import annotations

import math

from agent_sandbox._fast.values import TYPE_CHECKING, Enum, Protocol, dataclass, field
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.mount_plan import MountPlan
from agent_sandbox.policy.model import Guarantee, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from agent_sandbox.kernel.doors import Doors
    from agent_sandbox.runtime.observe import SeenAttempt
    from agent_sandbox.runtime.router.model import Feature

COMMAND = "command"  # instead of a language: a native program with its arguments
DEVNULL = -3  # the value of `subprocess.DEVNULL`, without importing that module


class ExitReason(Enum):
    """Reasons why a run ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed-out"
    CPU_LIMIT = "cpu-limit"
    OUT_OF_MEMORY = "out-of-memory"
    FUEL_LIMIT = "fuel-limit"
    OUTPUT_LIMIT = "output-limit"
    DISK_LIMIT = "disk-limit"
    SHARE_LIMIT = "share-limit"  # it held too much of what the machine has only so many of, such as open files
    GARBLED = "garbled"  # the guest sent its host a malformed message
    KILLED = "killed"  # we killed it: it was cancelled, or its supervisor ended


@dataclass(frozen=True)
class Usage:
    """The resources that a run used. `peak_memory_bytes` is the cgroup's if there is one, else the largest process's.

    `cpu_seconds` may lack the time in which the kernel takes the last process apart. `peak_processes` counts threads, too, and our own
    processes in the sandbox; it is 0 without a cgroup. `fuel` counts instructions executed inside WebAssembly; None if they were not
    counted. A program that has broken out of the engine can forge it.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    peak_processes: int = 0
    fuel: int | None = None


@dataclass(frozen=True)
class Exit:
    """The end of a run. `code` is the program's own exit code, or 128 plus the number of the signal that ended it, as in a shell.

    `limits_hit` never names the limit on open files. Without a cgroup, it does not name memory for a refused allocation. Only the program
    sees these errors (EMFILE, ENOMEM), and the kernel does not count them.
    """

    code: int
    reason: ExitReason = ExitReason.EXITED
    signal: int | None = None
    limits_hit: tuple[str, ...] = ()  # of "wall", "cpu", "memory", "processes", "output", "disk", "share", "fuel"
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Argv:
    """A native program. The first word is looked up in the guest's PATH, inside the view."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class ScriptFile:
    """The file that Python code was read from: its name as typed, its absolute path, and the directory whose modules it can import.

    `environment` is the virtual environment whose packages it can import; empty for those of our own interpreter.
    """

    name: str
    path: str
    directory: str
    environment: str = ""


@dataclass(frozen=True)
class PythonCode:
    """Python source, run as a script in a guest that is forked from a zygote. The zygote never sees the source.

    With `file`, it runs as `python FILE` would; without, as a script of its own in the working directory.
    """

    source: str
    argv: tuple[str, ...] = ()
    file: ScriptFile | None = None


@dataclass(frozen=True)
class JavaScriptCode:
    """JavaScript source, for a runtime that brings a JavaScript interpreter. Other runtimes run a `Script` with a native interpreter."""

    source: str
    argv: tuple[str, ...] = ()


Hosted = PythonCode | JavaScriptCode  # run by an interpreter that is in the guest already: no file is executed


@dataclass(frozen=True)
class Script:
    """Source that a native interpreter runs from a file. Its command line is `words`, the path of the file, then `argv`."""

    words: tuple[str, ...]
    source: str
    name: str  # of the file, such as main.js
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class OuterProgram:
    """The mark of a launch whose program is one of the machine that runs the guest's program on the view.

    Such a program is an OCI runtime, a user-space kernel or a virtual machine monitor. It takes the place of the guest's program, so that
    limits, ending, output, exit code, changes and record are the same: it runs in the guest's namespaces and cgroup, with the guest's
    standard streams, as a user who is not root of the machine, and ends with init. The runtime that launches it moves the view below a
    directory (`outer_view`), and translates the program that it was asked to run into the command line and `files`, which are written, with
    their directories, before it starts.

    Without `capabilities` it has the walls of every guest: the filter, Landlock, no capability. With some of
    `kernel.namespaces.OUTER_PROGRAM`, it is user 0 of the guest's user namespace, in a mount namespace of its own, without Landlock, under
    a filter that permits making walls. Then it must itself confine the guest's program.
    """

    files: tuple[tuple[str, bytes], ...] = ()
    capabilities: frozenset[str] = frozenset()
    agent: bool = False  # it passes two sockets to a program of ours inside, which gets the guest's program and reports its end


@dataclass(frozen=True)
class Terminal:
    """The size of a guest's terminal. Everything that the guest writes to it, stderr too, arrives as stdout."""

    rows: int
    columns: int


class Clock:
    """The wall clock of a run whose program calls its host. It is stopped while the host decides, records or asks a person.

    The runtime replaces `stop` and `resume` by its own functions.

    With `patient`, the host may ask a person, and the answer may take longer than the time left of the run. `ends` is the latest end of the
    run, by the monotonic clock, including time spent waiting.
    """

    def __init__(self, *, patient: bool = False, ends: float | None = None) -> None:
        self.patient = patient
        self.ends = math.inf if ends is None else ends
        self.stop: Callable[[], None] = _nothing
        self.resume: Callable[[], None] = _nothing


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Talk:
    """A conversation between running Python code and its host: tool calls, and the turns of a session.

    `hear` answers a request of the program, in the thread that waits for the guest. It raises `Nonsense` for a malformed request; any
    exception ends the run. `offer` is sent to the program: descriptions of "tools", and whether it takes "turns". `clock` is stopped during
    `hear`, unless `hear` resumes it.
    """

    hear: Callable[[bytes], bytes]
    offer: Mapping[str, Any]
    clock: Clock = field(default_factory=Clock, compare=False)


class Nonsense(Exception):
    """A guest has sent a malformed request. The message is for the caller."""


class StateNotKept(SandboxError):
    """Raised if a state of a guest with checkpoints cannot be kept or shown. Nothing has changed, and the run goes on."""


@dataclass(frozen=True)
class Confined:
    """A guest that is confined and waits for its program.

    `process` is the pid of a process in the guest's namespaces, given for launches with `inspect`; `/proc/PID/root` shows the guest's
    files. `layers` is a descriptor of the guest's upper layers, open as long as the guest; None when nothing can be written. `doors` are
    those of a launch with `network`, and `inward` is a socket of a launch with `inward`, from which sockets of the guest's network are
    received (`kernel.doors.give_sockets`). Who receives them closes them.
    """

    process: int | None
    layers: int | None
    doors: Doors | None = None
    inward: int | None = None


@dataclass(frozen=True)
class Launch:
    """Everything a runtime needs to run something once.

    `env` is complete: the guest has these variables and no others. `on_output` is called with ("stdout" | "stderr", bytes) from the
    thread that waits, as output arrives; what it raises ends the run. With `collect` off, output is only passed on, not kept. Each of
    `on_ready` is called when the guest is confined and waits for its program; what it raises ends the launch. Each of `on_tick` is called
    about twenty times a second while the guest runs, in the thread that waits.
    """

    program: Argv | Hosted | Script
    root: MountPlan
    cwd: str
    env: Mapping[str, str]
    limits: Limits
    requires: frozenset[Guarantee]
    stdin: bytes | int = b""  # bytes, a descriptor to read from, or DEVNULL
    processes: bool = True  # whether the program may start processes; it may always start threads
    writable: bool = True  # whether the program may write outside its scratch directories
    system: bool = False  # give the guest namespaced capabilities for package managers; only if we run as root
    terminal: Terminal | None = None
    executables: tuple[str, ...] = ()  # if `processes` is false, the only files that may be executed
    preload: tuple[str, ...] = ()  # modules that the zygote of PythonCode has imported
    deterministic: int | None = None  # the seed of a run that requires DETERMINISTIC; None for other runs
    watch_inputs: bool = False  # fill `Completed.inputs`; only in a deterministic run
    observe: bool = False  # fill `Completed.observed`
    network: tuple[int, ...] = ()  # the ports at which connections to any address arrive at `Confined.doors`; empty for no network
    inward: bool = False  # give `Confined.inward`: servers of the guest are to be reached from outside
    on_output: Callable[[str, bytes], None] | None = None
    collect: bool = True
    inspect: bool = False  # `on_ready` needs a process in the guest's namespaces
    on_ready: tuple[Callable[[Confined], None], ...] = ()
    on_tick: tuple[Callable[[], None], ...] = ()
    talk: Talk | None = None  # for PythonCode
    outer: OuterProgram | None = None  # the program is not the guest's own, but runs it
    inside: bytes = b""  # for a runtime that is built on the process runtime: what its process in the sandbox must know of the run
    checkpoints: bool = False  # the guest is an `Interpreter` whose states can be kept and woken; only for PythonCode with turns

    @property
    def leaves_nothing(self) -> bool:
        """Whether nothing of the run is read or served after its program has ended."""
        read = self.writable or self.watch_inputs or self.observe or self.terminal is not None
        return not (read or self.network or self.inward or self.on_tick or self.talk is not None)


@dataclass(frozen=True)
class Completed:
    """The end and the output of a run. If output exceeded its limit, the rest was dropped and `exit.limits_hit` contains "output".

    `inputs` lists the files that the program opened, as the guest reports them; the report is hostile, like the output. `observed` lists
    the attempts of the run, each with a count, in the order of first appearance.
    """

    exit: Exit
    stdout: bytes
    stderr: bytes
    inputs: bytes = b""
    observed: tuple[tuple[SeenAttempt, int], ...] = ()


@dataclass(frozen=True)
class Demands:
    """The parts of a launch that not every runtime supports. The router checks them before there is a launch."""

    terminal: bool = False
    system: bool = False
    inspect: bool = False
    observe: bool = False
    preload: tuple[str, ...] = ()
    inward: bool = False
    checkpoints: bool = False
    image: str = ""

    @classmethod
    def of(cls, launch: Launch) -> Demands:
        """Return the demands of a launch."""
        wanted = launch.observe, launch.preload, launch.inward, launch.checkpoints
        return cls(launch.terminal is not None, launch.system, launch.inspect, *wanted)


@dataclass(frozen=True)
class Traits:
    """The properties of a runtime, the same on every host: what it can run, and the guarantees without which a launch fails.

    `languages` includes `COMMAND` for native programs; `brings` are the languages whose interpreter is part of the runtime, so that the
    machine needs none. `features`, `modules` and `absent` describe its Python: features beyond modules, top-level modules, and dotted names
    that its modules lack. None means everything that the machine has.
    """

    name: str
    cost: int  # the router tries the cheapest first
    languages: frozenset[str]
    guarantees: frozenset[Guarantee]
    brings: frozenset[str] = frozenset()
    views: bool = True  # its guests see what a mount plan shows
    features: frozenset[Feature] | None = None
    modules: frozenset[str] | None = None
    absent: frozenset[str] = frozenset()
    images: bool = False  # its guests see the files of a container image, and of the machine only what the policy names

    @property
    def whole(self) -> bool:
        """Whether this runtime has every module and feature that the machine has, so that it can run any code."""
        return self.features is None and self.modules is None


@dataclass(frozen=True)
class Support:
    """The guarantees of a runtime on this host, proved by a real launch.

    `missing` maps each guarantee that the runtime does not give here to the reason and remedy.
    """

    runtime: str
    guarantees: frozenset[Guarantee]
    missing: Mapping[str, str]

    @property
    def available(self) -> bool:
        """Whether this runtime can run anything at all on this host."""
        return Guarantee.FILES_CONFINED in self.guarantees


class Guest(Protocol):
    """A running program and all processes that it started. All of them have ended when `wait` returns."""

    launch: Launch
    layers: int | None  # a descriptor of its upper layers, readable until `close`; None when nothing is read back
    notes: tuple[str, ...]  # what is weaker or different than a caller may expect
    refused: str  # why the program could not be started inside; empty if it was started
    irrevocable: bool  # whether a second run is forbidden, because the program called a tool of the caller

    def wait(self) -> Completed:
        """Pass input and output until all processes of the guest have ended, and return its end. A failing program raises nothing."""
        ...

    def kill(self) -> None:
        """Kill the guest and everything it started, from any thread. Harmless when it has already ended."""
        ...

    def interrupt(self, number: int) -> None:
        """Forward a signal (SIGINT, SIGTERM, SIGWINCH, …) to the guest's main program. Harmless when it has already ended."""
        ...

    def close(self) -> None:
        """Kill the guest if it runs, and free its resources. Idempotent."""
        ...

    def wake_on(self, fd: int) -> None:
        """Make `wait` also watch this descriptor, which becomes readable when our process gets a signal."""
        ...

    @property
    def terminal(self) -> int | None:
        """Return a descriptor of the guest's terminal, valid until `wait`; None if the guest has no terminal."""
        ...


class Interpreter(Guest, Protocol):
    """A guest whose interpreter stays alive and runs its program in turns."""

    @property
    def waiting(self) -> bool:
        """Whether the guest is alive and waits for its next turn."""
        ...

    def turn(self, work: bytes, launch: Launch, *, idle: float | None) -> tuple[Completed, bytes | None]:
        """Run one turn under the limits and callbacks of `launch`. The guest then waits at most `idle` seconds for the next turn.

        Return the output of the turn and the guest's answer. If the guest ended during the turn, return its end and None.
        """
        ...

    @property
    def memory_kills(self) -> int:
        """How many of its processes the kernel has killed so far because its memory limit was reached."""
        ...

    def settle(self) -> None:
        """Kill the guest if it runs, and wait until all its processes have ended. Its layers can still be read."""
        ...

    def ended(self) -> Exit:
        """Return the end of a guest that did not survive until its next turn."""
        ...


class Runtime(Protocol):
    """A kind of isolation. Safe to use from many threads."""

    @property
    def traits(self) -> Traits:
        """Return the properties of this runtime."""
        ...

    def absence(self) -> str:
        """Return the reason why this runtime cannot be used now; empty if it can.

        Raises `RuntimeUnavailable` when something is missing that only the user can install.
        """
        ...

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Start preparing this runtime in the background, and return why it is not ready; empty if it is. Raises as `absence` does.

        `announce` is called with one line about a process that was started and may outlive the caller.
        """
        ...

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; empty if it does."""
        ...

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces on this host, proved by a real launch. Never raises."""
        ...

    def launch(self, launch: Launch) -> Guest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run.

        Raises `RuntimeUnavailable` when a required guarantee cannot be given here, `LaunchFailed` when building the sandbox failed.
        """
        ...

    @property
    def identity(self) -> dict[str, str]:
        """Return the versions that, with the input of a deterministic run, fully determine its outcome.

        Raises `RuntimeUnavailable` if this runtime has no deterministic runs.
        """
        ...

    def close(self, *, leaving: bool = False) -> None:
        """End the guests that wait for a program. Running guests go on. `leaving` says that this process is about to exit."""
        ...
