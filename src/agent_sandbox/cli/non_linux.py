"""The command line on systems other than Linux.

Commands, diffs and promotions need Linux's namespaces and overlays. Elsewhere, only the Python SDK runs code, inside WebAssembly and
without isolation by the kernel.
"""

from __future__ import annotations

import platform
import sys
from typing import NoReturn

from agent_sandbox.assembly import NOT_LINUX, check_system, here
from agent_sandbox.cli.remedies import CheckRow, DoctorResult
from agent_sandbox.cli.results import OMITTED, VerbResult
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.kernel.mount_plan import MountPlan, ThrowAway
from agent_sandbox.policy.model import Limits
from agent_sandbox.runtime.base import Launch, PythonCode

_LIMITS = Limits(wall_seconds=20)
_SECOND_WALL = "use Linux for both walls: a virtual machine, a container in one, or under Windows WSL2"


def doctor_elsewhere() -> DoctorResult:
    """Check the features that work on this system, and return the result of `doctor`."""
    check_system()
    return DoctorResult.of(_rows(), f"{platform.system() or sys.platform} {platform.release()}")


def setup_elsewhere() -> VerbResult:
    """Compile the WebAssembly interpreter."""
    from agent_sandbox.cli.commands.setup import SetupResult, compile_wasm  # one verb of several

    check_system()
    compiled, message = compile_wasm()
    return SetupResult(OMITTED, compiled == "ready", OMITTED, compiled, message)


def refuse_elsewhere(verb: str) -> NoReturn:
    """Raise `RuntimeUnavailable` for a verb that needs Linux."""
    check_system()
    hint = f"{_SECOND_WALL}; from Python, Sandbox(runtime='auto') runs Python code here with one wall"
    raise RuntimeUnavailable(f"{verb!r} does not work here: {NOT_LINUX}", missing=("linux",), hint=hint)


def _rows() -> list[CheckRow]:
    gives = "a second barrier, in case the engine has a hole"
    return [CheckRow("second wall", "missing", gives, NOT_LINUX, _SECOND_WALL, required=False), _one_wall()]


def _one_wall() -> CheckRow:
    """Test a line of Python inside WebAssembly."""
    name, gives = "wasm", "Python code inside WebAssembly, with one wall and none of the machine's files"
    launch = Launch(PythonCode("print('works')"), MountPlan(ThrowAway(0), ()), "/tmp", {}, _LIMITS, frozenset(), writable=False)
    try:
        with here().one_wall().launch(launch) as guest:
            completed = guest.wait()
    except SandboxError as error:
        return CheckRow(name, "missing", gives, error.message, error.hint)
    if completed.stdout != b"works\n":
        return CheckRow(name, "missing", gives, f"its interpreter ended with {completed.exit.code}", "run: agent-sandbox setup")
    return CheckRow(name, "ok", gives, f"a line of it ran in {completed.exit.usage.wall_seconds * 1000:.0f} ms")
