"""Recognise, from how a run ended, that its runtime lacked something and another one may have it.

The program wrote this text and may write what it likes: it can bring about one more run, under the same guarantees, and nothing else.
"""

from __future__ import annotations

from agent_sandbox.readers.bounds import shown

_REJECTED = "Possibly unhandled promise rejection: "  # QuickJS, before the error that a promise was rejected with
_TAIL = 4096  # bytes of stderr that are looked at: a traceback ends with what matters
_MISSING = ("ModuleNotFoundError: ", "ImportError: ")
_UNSUPPORTED = (
    "RuntimeError: can't start new thread",
    "OSError: [Errno 58] ",  # ENOTSUP as WASI counts
    "OSError: [Errno 52] ",  # ENOSYS
    "ReferenceError: ",  # of JavaScript: a name that only Node.js has
)
_UNAVAILABLE = " is unavailable on wasm32-wasi"  # what `ctypes` and `mmap` say there, after the name
_AFTERTHOUGHT = "RuntimeWarning: "  # follows the error that ended an event loop


def lack_in(code: int, stderr: bytes) -> str | None:
    """What the runtime seems to have lacked, in the words of the error that ended the program; None when it ended in another way."""
    if code == 0:
        return None
    lines = stderr[-_TAIL:].decode("utf-8", "replace").splitlines()
    # JavaScript's stack follows, set in.
    last = next((line for line in reversed(lines) if line and not line[0].isspace() and _AFTERTHOUGHT not in line), "")
    last = last.removeprefix(_REJECTED)
    if last.startswith((*_MISSING, *_UNSUPPORTED)) or (last.startswith("OSError: ") and last.endswith(_UNAVAILABLE)):
        return shown(last, 200)
    if last.startswith("AttributeError: module '") and " has no attribute " in last:
        return shown(last, 200)
    return None
