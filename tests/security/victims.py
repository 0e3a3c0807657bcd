"""Supervisors to be killed: each does one kind of work over and over, through the Python interface or on the command line.

Between them they cover both presets, kept layers and throw-away ones, Python and native programs, with and without waiting guests, and a
person at a terminal. Every one works in a place of its own, whose temporary directory, home and state nobody else touches.
"""

from __future__ import annotations

import os
import pty
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox import Sandbox, SandboxError
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.store import Store
from tests.e2e.program import PROGRAM
from tests.leftovers import children, process
from tests.security.harness import Box, knows

LINGERING = "echo x >> proof; (setsid sleep 300 &) ; sleep 0.03"
STAYING = "echo x >> proof; (setsid sleep 300 &) ; sleep 300"
STUBBORN = "trap '' HUP INT TERM; " + STAYING


@dataclass(frozen=True)
class Place:
    """Where one supervisor works."""

    top: Path

    @classmethod
    def make(cls, top: Path) -> Place:
        for name in ("project/.git", "home", "tmp"):
            (top / name).mkdir(parents=True)
        return cls(top)

    @property
    def project(self) -> Path:
        return self.top / "project"

    @property
    def temporary(self) -> tuple[Path, ...]:
        """Directories in which nothing may be left."""
        return self.top / "tmp", self.top / "home"

    @property
    def environment(self) -> dict[str, str]:
        names = dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), "tmp") | dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), "home")
        return {
            **os.environ,
            **{name: str(self.top / part) for name, part in names.items()},
            "AGENT_SANDBOX_STATE": str(self.top / "state"),
        }


def _pooled(place: Place) -> Callable[[], object]:
    """Locked Python runs that a pool is filled for."""
    sandbox = Sandbox(validate_code=False)
    return lambda: sandbox.run("import time; time.sleep(0.01)")


def _native(place: Place) -> Callable[[], object]:
    """Locked native runs that leave something in the background."""
    sandbox = Sandbox(validate_code=False, allow_subprocess=True, timeout_seconds=600)
    return lambda: sandbox.run(["sh", "-c", "cd /tmp; " + LINGERING])


def _cloned(place: Place) -> Callable[[], object]:
    """Runs on a clone of the machine that is thrown away, native and Python in turn."""
    box = _box(place, ProcessRuntime(warm=2))
    return lambda: (box.shell(LINGERING), box.python("import time; time.sleep(0.01)"))


def _kept(place: Place) -> Callable[[], object]:
    """Runs on a clone whose layers are kept: one at a time."""
    state = Store.open(str(place.top / "state")).sandbox_for(str(place.project))
    box = _box(place, ProcessRuntime()).with_(state=state)
    return lambda: box.shell(LINGERING)


def _box(place: Place, runtime: ProcessRuntime) -> Box:
    return Box(runtime, place.project, place.top / "home", Ledger(str(place.top / "state/ledger.jsonl"), clock=time.time))


APPLICATIONS: dict[str, Callable[[Place], Callable[[], object]]] = {"pooled": _pooled, "native": _native, "cloned": _cloned, "kept": _kept}
LINES: dict[str, tuple[str, ...]] = {
    "run, kept": ("run", "--", "sh", "-c", STAYING),
    "run, thrown away": ("--throw-away", "run", "--", "sh", "-c", STAYING),
    "code": ("code", "-", "--language", "python"),
    "terminal": ("run", "--", "sh", "-c", STAYING),
    "stubborn terminal": ("run", "--", "sh", "-c", STUBBORN),
}
AT_A_TERMINAL = frozenset({"terminal", "stubborn terminal"})
KINDS = (*APPLICATIONS, *LINES)
SOURCE = "import time\nopen('proof', 'w')\ntime.sleep(300)\n"


@dataclass(frozen=True)
class Supervisor:
    """One that was started. `terminal` is the far side of the terminal it sits at."""

    kind: str
    pid: int
    handle: int
    terminal: int | None = None

    @property
    def on_the_command_line(self) -> bool:
        return self.kind in LINES

    def ended(self) -> bool:
        """Whether it has ended."""
        return bool(select.select([self.handle], [], [], 0)[0])

    def kill(self) -> bool:
        """Kill -9. Whether there was something to kill."""
        if self.ended():
            return False
        signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        return True

    def stop(self) -> None:
        """Have it stand still."""
        signal.pidfd_send_signal(self.handle, signal.SIGSTOP)

    def hang_up(self) -> bool:
        """Take its terminal away."""
        assert self.terminal is not None
        os.close(self.terminal)
        return True

    def close(self) -> bool:
        """End it if it lives, wait for that, and let go of it. Whether it lived."""
        lived = self.kill()
        os.waitpid(self.pid, 0)
        os.close(self.handle)
        if self.terminal is not None:
            with suppress(OSError):  # hung up already
                os.close(self.terminal)
        return lived


def start(kind: str, place: Place) -> Supervisor:
    """Start one. The Python ones are forks of this process, which saves them a second of imports that nobody is interested in."""
    if kind in AT_A_TERMINAL:
        pid, terminal = pty.fork()
    else:
        pid, terminal = os.fork(), None
    if pid == 0:
        try:
            _become(kind, place)
        finally:
            os._exit(1)
    if terminal is not None:
        os.set_inheritable(terminal, False)  # a copy in the next one would keep this one's terminal from hanging up
    return Supervisor(kind, pid, os.pidfd_open(pid), terminal)


def _become(kind: str, place: Place) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.set_wakeup_fd(-1)
    os.chdir(place.project)
    os.environ.clear()
    os.environ.update(place.environment)
    if kind not in AT_A_TERMINAL:
        _redirect(SOURCE.encode() if kind == "code" else b"", place)
        os.setsid()
    if kind in LINES:
        os.execv(PROGRAM[0], [*PROGRAM, *LINES[kind]])
    work = APPLICATIONS[kind](place)
    for _ in range(2 if kind != "kept" else 1):
        threading.Thread(target=_endlessly, args=(work,)).start()
    threading.Event().wait()


def _endlessly(work: Callable[[], object]) -> None:
    while True:
        with suppress(SandboxError, OSError):  # what it was working with has been killed: an application goes on
            work()


def _redirect(stdin: bytes, place: Place) -> None:
    reading, writing = os.pipe()
    os.write(writing, stdin)
    said = os.open(place.top / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, fd in enumerate((reading, said, said)):
        os.dup2(fd, number)
    os.closerange(3, 1024)


def roles(supervisor: int, without: AbstractSet[int] = frozenset()) -> dict[str, list[int]]:
    """The living family of a supervisor: its zygotes (executed or forked, they keep its runs), newborns (that help for a moment, or are not
    yet what they are going to be), inits, and whatever belongs to a guest. Less the zygotes `without`, and their runs. Only the family is
    looked at, not every process of the machine: the stages to be hit last a millisecond."""
    found: dict[str, list[int]] = {}
    for zygote in [pid for pid in _living(children(supervisor)) if pid not in without]:
        # To lead a session is the first thing that a zygote does.
        found.setdefault("zygote" if _leads_a_session(zygote) else "newborn", []).append(zygote)
        for child in _living(children(zygote)):
            found.setdefault("init" if _is_in_a_namespace(child) else "newborn", []).append(child)
            guests = _living(children(child))
            while guests:
                found.setdefault("guest", []).extend(guests)
                guests = [pid for guest in guests for pid in _living(children(guest))]
    return found


def _living(pids: list[int]) -> list[int]:
    """Without those that are dead and only wait to be collected."""
    return [pid for pid in pids if (found := process(pid)) is not None and not found.zombie]


def _leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _is_in_a_namespace(pid: int) -> bool:
    """Whether it has another number to those beside it."""
    try:
        return len(knows(pid)["NSpid"].split()) > 1
    except (OSError, KeyError):
        return False
