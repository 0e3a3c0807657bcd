"""`setup`, for a new user, once: make the state directory, check the machine, compile the WebAssembly interpreter, print the next steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.doctor import examine
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.remedies import CheckRow, DoctorResult, Situation
from agent_sandbox.cli.render.messages import Console, counted, shown
from agent_sandbox.cli.results import OMITTED, Omitted, PathName, VerbResult
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import usage
from agent_sandbox.workspace.store import Store

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.compiler import Compilation

_WHAT_TAKES_SO_LONG = """Compiling the WebAssembly interpreters {for_whom}: Python and JavaScript, each as fast as it can be, and once more
so that it counts what it executes. This happens once, on {cores}, and takes some minutes."""
Compiled = Literal["ready", "not-installed", "failed", "skipped"]
_LOOK_SECONDS = 0.25


def compile_wasm() -> tuple[Compiled, str]:
    """Compile the WebAssembly interpreter, unless it is compiled already. Returns the outcome, and a message about it."""
    host = here().host
    try:
        runtime = here().wasm()
        if runtime.compilation is not None:
            print("The WebAssembly interpreter is being compiled by another process. Waiting for that.", file=sys.stderr)
        elif not runtime.ready_to_count:
            for_whom = "for all users of this machine" if host.compiles_for_all else "for you"
            print(_WHAT_TAKES_SO_LONG.format(for_whom=for_whom, cores=counted(_cores(), "processor")), file=sys.stderr)
        # Also where it seems ready: the compiler checks that.
        code, said = _watched(runtime.building(counting=True), lambda: runtime.compilation)
        if code:
            return "failed", f"the WebAssembly interpreter could not be compiled: {said}"
    except RuntimeUnavailable as error:
        return "not-installed", f"{error.message} ({error.hint})"
    except OSError as error:
        return "failed", f"the WebAssembly interpreter could not be compiled: {error.strerror}"
    return "ready", 'Python and JavaScript can run inside WebAssembly: Sandbox(runtime="wasm").'


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watched(command: list[str], state: Callable[[], Compilation | None]) -> tuple[int, str]:
    """Run the compiler `command`, and show its progress on a terminal. Returns its exit code and the last line of its messages.

    It waits if another process is already compiling. `state` returns the compilation that goes on, whoever does it.
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
                    _show(state(), time.monotonic() - began)
        except BaseException:
            child.kill()
            raise
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
    return child.returncode, shown(said.decode(errors="replace").strip().rpartition("\n")[2])


def _show(state: Compilation | None, seconds: float) -> None:
    """Show on a terminal which file is being made. The time is measured; how much is left inside a file, the engine does not tell."""
    if not sys.stderr.isatty() or state is None or not state.step:
        return
    stat = usage.read_stat(state.pid)
    used = f", {stat.own_ticks / os.sysconf('SC_CLK_TCK'):.0f} s of processor time" if stat is not None else ""
    sys.stderr.write(f"\r\x1b[K{state.step} of {state.steps}: {state.what} ({seconds:.0f} s{used})")
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


@dataclass(frozen=True)
class MachineSetupResult(VerbResult):
    """The outcome of `setup microvm`. `emulated` says that the machine's processor is emulated, which is slow."""

    kind = "setup-microvm"

    kernel: str
    memory_mib: int
    emulated: bool
    template: PathName

    def text(self, console: Console) -> None:
        how = ", on an emulated processor" if self.emulated else ""
        print(f"A virtual machine with Linux {self.kernel} is ready{how}: agent-sandbox run --runtime microvm -- COMMAND")


def setup_microvm(what: str, console: Console) -> MachineSetupResult:
    """Make the template of the runtime microvm, unless it is there. Raises `RuntimeUnavailable` with what is missing."""
    if what != "microvm":
        raise UsageError(f"setup knows no {what!r}", hint="agent-sandbox setup, or: agent-sandbox setup microvm")
    runtime = here().microvm()
    recipe = runtime.recipe()
    made = runtime.make(recipe, lambda step: console.note(f"making a virtual machine, once: {step}"))
    return MachineSetupResult(recipe.kernel.version, made.memory_mib, made.accelerator == "tcg", PathName(made.directory))


def setup() -> SetupResult:
    """Make the state directory, check the machine, and compile the WebAssembly interpreter."""
    store = Store.open(here().host.state)
    situation = Situation.look()
    rows = tuple(row for row in examine(situation) if row.required or row.status != "ok")
    problems = tuple(ProblemFacts(row.name, row.found, row.remedy) for row in rows if row.fatal)
    compiled: tuple[Compiled, str] = ("skipped", "") if problems else compile_wasm()
    return SetupResult(PathName(store.path), not problems, problems, *compiled, situation.name, rows)
