"""The modules of the agent, as one archive of bytecode. The view need not show our package, and a guest may have changed what it shows."""

from __future__ import annotations

import importlib.util
import io
import marshal
import zipfile

from agent_sandbox._fast.functions import cache
from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

_MODULES = """
    _fast _fast.contexts _fast.values _fast.sockets _fast.functions errors kernel kernel.seccomp kernel.syscall_rules
    kernel.syscalls kernel.wire runtime runtime.guest runtime.guest.native runtime.guest.script_runner runtime.guest.entry
    runtime.guest_rpc runtime.guest_rpc.codec runtime.guest_rpc.inside runtime.guest_rpc.client runtime.guest_rpc.transfer
    runtime.gvisor.agent
"""
_PACKAGES = ("agent_sandbox", "agent_sandbox.runtime.gvisor")  # empty inside: their text here imports or explains what is not there
_UNCHECKED_HASH = (1).to_bytes(4, "little")  # flags of bytecode whose source nobody looks for (PEP 552)
_HEADER = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + bytes(8)
_PROGRAM = "agent_sandbox.runtime.gvisor.agent"
BOOT = f"import sys; sys.path.insert(0, sys.argv[1]); from {_PROGRAM} import main; main()"  # its first argument is the archive


@cache
def archive() -> bytes:
    """Return the archive, for the interpreter that we run on."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name in _PACKAGES:
            _add(file, f"{name.replace('.', '/')}/__init__.pyc", compile("", f"<{name}>", "exec"))
        for name in (f"agent_sandbox.{each}" for each in _MODULES.split()):
            spec = importlib.util.find_spec(name)
            if spec is None or spec.loader is None:
                raise ImportError(f"no module {name}")
            path = name.replace(".", "/") + ("/__init__" if spec.submodule_search_locations is not None else "")
            _add(file, f"{path}.pyc", spec.loader.get_code(name))  # type: ignore[attr-defined]
    return content.getvalue()


def _add(file: zipfile.ZipFile, path: str, code: CodeType | None) -> None:
    file.writestr(zipfile.ZipInfo(path), _HEADER + marshal.dumps(code))
