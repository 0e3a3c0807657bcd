"""The command line where this is not Linux: what there is of it, and for the rest a clear word.

Sandboxes of commands, diffs and promotions stand on Linux's namespaces and overlays. What works elsewhere, from Python, is Python code
inside WebAssembly: one wall instead of two.
"""

from __future__ import annotations

import platform
import sys

from agent_sandbox.assembly import NOT_LINUX, check_system, here
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.table import Row, document, report
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.kernel.mount_plan import MountPlan, ThrowAway
from agent_sandbox.policy.limits import Limits
from agent_sandbox.runtime.base import Launch, PythonCode

_LIMITS = Limits(wall_seconds=20)
_SECOND_WALL = "use Linux for both walls: a virtual machine, a container in one, or under Windows WSL2"


def verb_elsewhere(request: Request) -> int:
    """Do what can be done here. Raises `RuntimeUnavailable` for what cannot."""
    check_system()
    match request.verb:
        case "doctor":
            return _doctor(request)
        case "setup":
            return _setup(request)
        case "completion":
            from agent_sandbox.cli.help import completion as do
        case "help" | "version":
            from agent_sandbox.cli.help import help_or_version as do
        case _:
            hint = f"{_SECOND_WALL}; from Python, Sandbox(runtime='auto') runs Python code here with one wall"
            raise RuntimeUnavailable(f"{request.verb!r} does not work here: {NOT_LINUX}", missing=("linux",), hint=hint)
    return do(request)


def _doctor(request: Request) -> int:
    rows, host = _rows(), f"{platform.system() or sys.platform} {platform.release()}"
    if request.has("--json"):
        document(rows, host)
    else:
        report(rows, host, "Python code runs on this machine, behind one wall.")
    return 1 if any(row.fatal for row in rows) else 0


def _setup(request: Request) -> int:
    from agent_sandbox.cli.commands.setup import compile_wasm

    compiled, said = compile_wasm()
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("setup", {"usable": compiled == "ready", "wasm": compiled})
    else:
        print(said)
    return 0 if compiled == "ready" else 1


def _rows() -> list[Row]:
    gives = "what stands behind the engine, should it have a hole"
    return [Row("second wall", "missing", gives, NOT_LINUX, _SECOND_WALL, required=False), _one_wall()]


def _one_wall() -> Row:
    """A line of Python, tried out."""
    name, gives = "wasm", "Python code inside WebAssembly, with one wall and none of the machine's files"
    launch = Launch(PythonCode("print('works')"), MountPlan(ThrowAway(0), ()), "/tmp", {}, _LIMITS, frozenset(), writable=False)
    try:
        with here().one_wall().launch(launch) as guest:
            completed = guest.wait()
    except SandboxError as error:
        return Row(name, "missing", gives, error.message, error.hint)
    if completed.stdout != b"works\n":
        return Row(name, "missing", gives, f"its interpreter ended with {completed.exit.code}", "run: agent-sandbox setup")
    return Row(name, "ok", gives, f"a line of it ran in {completed.exit.usage.wall_seconds * 1000:.0f} ms")
