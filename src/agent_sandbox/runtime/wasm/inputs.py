"""What a program looks into while it runs, each with a digest of what it found: so that a later run can tell what has changed since."""

from __future__ import annotations

import hashlib
import os
import stat

from agent_sandbox.kernel.wire import SCRIPTS
from agent_sandbox.runtime.wasm.view import VIEW

MOST = 4096  # that are noted: many more than people would look through


class Inputs:
    """Files and directories, in the order in which the program first opened them, as they were then."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], str] = {}

    def note(self, kind: str, path: str) -> None:
        """It opens this, by the name that it has in our own process. Neither the interpreter's library nor its own text is an input."""
        if not path.startswith(VIEW) or path.startswith(VIEW + SCRIPTS) or (kind, path) in self._found or len(self._found) >= MOST:
            return
        digest = _listing(path) if kind == "directory" else _content(path)
        if digest is not None:
            self._found[kind, path] = digest

    def report(self) -> bytes:
        """A line for each: what it is, its digest, and its path inside in hexadecimal."""
        lines = (f"{kind} {digest} {os.fsencode(path[len(VIEW) :]).hex()}\n" for (kind, path), digest in self._found.items())
        return "".join(lines).encode()


def _content(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # opened to be written, and not readable
        return None


def _listing(path: str) -> str | None:
    try:
        names = sorted(map(os.fsencode, os.listdir(path)))
    except OSError:
        return None
    return hashlib.sha256(b"\0".join(names)).hexdigest()
