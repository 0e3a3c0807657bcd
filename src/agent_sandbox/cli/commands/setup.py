"""`setup`: what a new user does once. Makes the state directory, checks the machine, compiles, and says what to do next."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.doctor import examine
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.remedies import Situation
from agent_sandbox.cli.render.messages import shown
from agent_sandbox.cli.render.table import report
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import usage
from agent_sandbox.workspace.store import Store

# What it takes in all. The compiler says nothing on its way, but the processor's time that it needs is much the same on most machines.
_EXPECTED_CPU_SECONDS = 340.0
_WHAT_TAKES_SO_LONG = """Compiling the WebAssembly interpreter, twice: as fast as it can be, and so that it counts what it executes.
This happens once, and takes some minutes. Ordinary runs can use the first before the second is done."""
_WIDTH = 30
_LOOK_SECONDS = 0.25


def compile_wasm() -> tuple[str, str]:
    """Compile it unless that has been done; returns "ready", "not-installed" or "failed", and what to say of it."""
    try:
        runtime = here().wasm()
        if runtime.compiler is not None:
            print("The WebAssembly interpreter is being compiled in the background. Waiting for that.", file=sys.stderr)
        elif not runtime.ready_to_count:
            print(_WHAT_TAKES_SO_LONG, file=sys.stderr)
        # Also where it seems ready: it looks whether that is so.
        code, said = _watched(runtime.building(counting=True), lambda: runtime.compiler)
        if code:
            return "failed", f"the WebAssembly interpreter could not be compiled: {said}"
    except RuntimeUnavailable as error:
        return "not-installed", f"{error.message} ({error.hint})"
    except OSError as error:
        return "failed", f"the WebAssembly interpreter could not be compiled: {error.strerror}"
    return "ready", 'Python and JavaScript can run inside WebAssembly: Sandbox(runtime="wasm").'


def _watched(command: list[str], compiler: Callable[[], int | None]) -> tuple[int, str]:
    """Run it, with a bar where somebody is watching. Returns its exit code and the last line of what it said.

    It may have to wait for another, which was there before it: `compiler` says who it is.
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
    found = usage.read_stat(pid)
    used = found.own_ticks / os.sysconf("SC_CLK_TCK") if found is not None else 0.0
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


def setup(request: Request) -> int:
    """The verb `setup`. Exits with 1 when nothing can run on this machine."""
    store = Store.open(here().host.state)
    situation = Situation.look()
    rows = [row for row in examine(situation) if row.required or row.status != "ok"]
    broken = any(row.fatal for row in rows)
    wasm, said = ("skipped", "") if broken else compile_wasm()
    if request.has("--json"):
        from agent_sandbox.cli.render.json import path_fields, print_document

        problems = [{"name": row.name, "found": row.found, "remedy": row.remedy} for row in rows if row.fatal]
        print_document("setup", {**path_fields("state_dir", store.path), "usable": not broken, "problems": problems, "wasm": wasm})
        return 1 if broken else 0
    report(rows, situation.name)
    print(f"State is kept in {store.path}.")
    if not broken:
        print(said)
        print(_NEXT)
    return 1 if broken else 0
