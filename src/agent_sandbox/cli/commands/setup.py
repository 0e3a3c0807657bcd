"""`setup`, for a new user, once: make the state directory, check the machine, compile the WebAssembly interpreter, print the next steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.doctor import examine
from agent_sandbox.cli.remedies import CheckRow, DoctorResult, Situation
from agent_sandbox.cli.render.messages import Console, shown
from agent_sandbox.cli.results import OMITTED, Omitted, PathName, VerbResult
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import usage
from agent_sandbox.workspace.store import Store

# The compiler reports no progress, but the processor time that it needs is much the same on most machines.
_EXPECTED_CPU_SECONDS = 340.0
_WHAT_TAKES_SO_LONG = """Compiling the WebAssembly interpreter, twice: as fast as it can be, and so that it counts what it executes.
This happens once, and takes some minutes. Ordinary runs can use the first before the second is done."""
_WIDTH = 30
Compiled = Literal["ready", "not-installed", "failed", "skipped"]
_LOOK_SECONDS = 0.25


def compile_wasm() -> tuple[Compiled, str]:
    """Compile the WebAssembly interpreter, unless it is compiled already. Returns the outcome, and a message about it."""
    try:
        runtime = here().wasm()
        if runtime.compiler is not None:
            print("The WebAssembly interpreter is being compiled in the background. Waiting for that.", file=sys.stderr)
        elif not runtime.ready_to_count:
            print(_WHAT_TAKES_SO_LONG, file=sys.stderr)
        # Also where it seems ready: the compiler checks that.
        code, said = _watched(runtime.building(counting=True), lambda: runtime.compiler)
        if code:
            return "failed", f"the WebAssembly interpreter could not be compiled: {said}"
    except RuntimeUnavailable as error:
        return "not-installed", f"{error.message} ({error.hint})"
    except OSError as error:
        return "failed", f"the WebAssembly interpreter could not be compiled: {error.strerror}"
    return "ready", 'Python and JavaScript can run inside WebAssembly: Sandbox(runtime="wasm").'


def _watched(command: list[str], compiler: Callable[[], int | None]) -> tuple[int, str]:
    """Run the compiler `command`, with a progress bar on a terminal. Returns its exit code and the last line of its messages.

    It waits if another process is already compiling. `compiler` returns the id of that process, whose progress is then shown.
    """
    began = time.monotonic()
    said = b""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        try:
            while True:
                try:
                    _, said = child.communicate(timeout=_LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    _show(compiler() or child.pid, time.monotonic() - began)
        except BaseException:
            child.kill()
            raise
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
    return child.returncode, shown(said.decode(errors="replace").strip().rpartition("\n")[2])


def _show(pid: int, seconds: float) -> None:
    if not sys.stderr.isatty():
        return
    stat = usage.read_stat(pid)
    used = stat.own_ticks / os.sysconf("SC_CLK_TCK") if stat is not None else 0.0
    done = int(_WIDTH * min(used / _EXPECTED_CPU_SECONDS, 0.99))
    sys.stderr.write(f"\r[{'=' * done}{' ' * (_WIDTH - done)}] {seconds:.0f} s")
    sys.stderr.flush()


_NEXT = """
Next:
  cd YOUR-PROJECT
  agent-sandbox run "echo 'new content' > file.txt"
  agent-sandbox diff

Completion for your shell:
  bash   agent-sandbox completion bash > ~/.local/share/bash-completion/completions/agent-sandbox
  zsh    agent-sandbox completion zsh > a directory of your $fpath, as _agent-sandbox"""


@dataclass(frozen=True)
class ProblemFacts:
    """A required check that failed."""

    name: str
    found: str
    remedy: str


@dataclass(frozen=True)
class SetupResult(VerbResult):
    """The outcome of `setup`. `rows` are the checks that are required or failed. Outside Linux only `wasm` is set up."""

    kind = "setup"

    state_dir: PathName | Omitted
    usable: bool
    problems: tuple[ProblemFacts, ...] | Omitted
    wasm: Compiled
    message: str
    host: str | Omitted = OMITTED
    rows: tuple[CheckRow, ...] | Omitted = OMITTED

    @property
    def code(self) -> int:
        """1 if no sandbox can run on this machine, else 0."""
        return 0 if self.usable else 1

    def text(self, console: Console) -> None:
        if isinstance(self.rows, Omitted) or isinstance(self.host, Omitted):
            print(self.message)
            return
        DoctorResult(self.host, self.usable, self.rows).text(console)
        print(f"State is kept in {self.state_dir}.")
        if self.usable:
            print(self.message)
            print(_NEXT)


def setup() -> SetupResult:
    """Make the state directory, check the machine, and compile the WebAssembly interpreter."""
    store = Store.open(here().host.state)
    situation = Situation.look()
    rows = tuple(row for row in examine(situation) if row.required or row.status != "ok")
    problems = tuple(ProblemFacts(row.name, row.found, row.remedy) for row in rows if row.fatal)
    compiled: tuple[Compiled, str] = ("skipped", "") if problems else compile_wasm()
    return SetupResult(PathName(store.path), not problems, problems, *compiled, situation.name, rows)
