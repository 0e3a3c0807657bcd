"""The product under attack: its own command line, on a scratch project with a state, keys and a home of its own.

Each command runs in a fork of the self-test. So the code is the product's own, and no interpreter has to start for it. The user's state,
keys, ledger and projects are not used: the scratch places lie in the bench, and are removed with it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import Assembly, Host
from agent_sandbox.cli.commands import approve, diff, grant, log, promote, run, sim, status
from agent_sandbox.cli.main import main
from agent_sandbox.engine import stored_run
from agent_sandbox.kernel import forks
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Found, NoAnswer, patience
from agent_sandbox.selftest.probe import PRODUCT
from agent_sandbox.workspace import sandbox_inventory
from agent_sandbox.workspace.layers import readback, renames, squash
from agent_sandbox.workspace.originals import capture, files

# `main` imports the code of a verb when it is used, and a verb the code that it needs. Imported here, it is in every fork.
PRELOADED = (approve, diff, grant, log, promote, run, sim, status, stored_run, sandbox_inventory, capture, files, readback, renames, squash)
_FAILED = 250  # the exit code of a command that did not even return one


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Said:
    """How a command ended, and its output. `code` is negative if a signal ended it."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Product:
    """The command line of the product."""

    name: str = PRODUCT

    @contextmanager
    def scratch(self, bench: DecoyBench, policy: str = "") -> Iterator[Scratch]:
        """Make a scratch project with this policy file, in the bench."""
        top = tempfile.mkdtemp(prefix="product-", dir=bench.path)
        place = Scratch(top)
        for directory in (place.project, place.home, place.elsewhere):
            os.mkdir(directory, mode=0o700)
        place.write("agent-sandbox.toml", policy)
        yield place  # the bench removes it with everything else


@dataclass(frozen=True)
class Scratch:
    """A scratch project and everything that belongs to it. Call it with the words of a command line."""

    top: str

    @property
    def project(self) -> str:
        """The project."""
        return f"{self.top}/project"

    @property
    def home(self) -> str:
        """The home of the user."""
        return f"{self.top}/home"

    @property
    def elsewhere(self) -> str:
        """A directory outside the project."""
        return f"{self.top}/elsewhere"

    @property
    def state(self) -> str:
        """The state directory."""
        return f"{self.top}/state"

    @property
    def keys(self) -> str:
        """The directory of the ledger's key and anchor."""
        return f"{self.top}/keys"

    @property
    def assembly(self) -> Assembly:
        """The builder of the product's parts for this place."""
        cache, config = f"{self.home}/.cache/agent-sandbox", f"{self.home}/.config/agent-sandbox"
        return Assembly(Host(self.home, self.state, cache, self.keys, config, background=False))

    def write(self, name: str, text: str) -> None:
        """Write a real file of the project."""
        Path(self.project, name).write_text(text, encoding="utf-8")

    def read(self, name: str) -> str | None:
        """Return the text of a real file of the project; None if there is no such file."""
        try:
            return Path(self.project, name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def __call__(self, *line: str, prepare: Callable[[], None] = _nothing) -> Said:
        """Run a command line to its end. `prepare` is called in its process before."""
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        try:
            pid = self._start(line, prepare, output, errors)
            status = _ended(pid)
            return Said(os.waitstatus_to_exitcode(status), _text(output), _text(errors))
        finally:
            os.close(output)
            os.close(errors)

    def must(self, *line: str) -> Said:
        """Run an honest command line. Raises `NoAnswer` if it does not succeed: then the refusal of a dishonest one shows nothing."""
        said = self(*line)
        if said.code != 0:
            verb = next(word for word in line if not word.startswith("-"))
            raise NoAnswer(f"without an attack, `{verb}` does not work either: exit code {said.code}, {reason(said.err)}")
        return said

    def is_asked(self, *line: str) -> bool:
        """Run a command line until it ends, or until it waits for the answer of a person. Returns whether it waits; then it is ended."""
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        pid = self._start(line, _nothing, nowhere, nowhere)
        waiting = Path(self.state, "approvals", "waiting")
        deadline = time.monotonic() + patience()
        try:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if list(waiting.glob("*/question")):
                    return True
                if time.monotonic() > deadline:
                    raise NoAnswer(f"`{' '.join(line)}` neither ended nor asked")
                time.sleep(0.01)
            pid = 0
            return False
        finally:
            os.close(nowhere)
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for question in waiting.glob("*/*"):  # the killed asker's; the next asker must not wait with it
                question.unlink()

    def _start(self, line: tuple[str, ...], prepare: Callable[[], None], output: int, errors: int) -> int:
        pid = forks.fork()
        if pid == 0:
            code = _FAILED
            try:
                sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
                code = self._perform(line, prepare, output, errors)
            finally:
                os._exit(code)
        return pid

    def _perform(self, line: tuple[str, ...], prepare: Callable[[], None], output: int, errors: int) -> int:
        """Become a process of the command line: its directory, environment and streams. Returns its exit code."""
        os.chdir(self.project)
        path = os.environ.get("PATH", os.defpath)
        os.environ.clear()
        places = {"HOME": self.home, "AGENT_SANDBOX_STATE": self.state, "AGENT_SANDBOX_KEYS": self.keys}
        os.environ.update({"PATH": path, "LANG": "C.UTF-8", "NO_COLOR": "1", "AGENT_SANDBOX_NO_BACKGROUND": "1", **places})
        nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number, stream in enumerate((nowhere, output, errors)):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = map(_writer, (1, 2))
        prepare()
        code = main(list(line))
        sys.stdout.flush()
        sys.stderr.flush()
        return code


def reason(errors: str) -> str:
    """Return the last message of a command that is no hint."""
    lines = [line for line in errors.strip().splitlines() if not line.lstrip().startswith("hint:")]
    return lines[-1] if lines else "it said nothing"


def _writer(stream: int) -> TextIO:
    return open(stream, "w", encoding="utf-8", errors="surrogateescape", closefd=False)


def _ended(pid: int) -> int:
    """Wait for a process of ours. If this wait is interrupted, the process is killed."""
    try:
        return os.waitpid(pid, 0)[1]
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _text(stream: int) -> str:
    os.lseek(stream, 0, os.SEEK_SET)
    with open(stream, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        return file.read()


def findings(**broken: bool | str) -> Found:
    """Return findings from the names of ways, each with whether it got through, or with the evidence of that."""
    named = {way.replace("_", " "): seen for way, seen in broken.items()}
    reached = {way: seen if isinstance(seen, str) else "it was done" for way, seen in named.items() if seen}
    return Found(reached, {way: "refused" for way, seen in named.items() if not seen})
