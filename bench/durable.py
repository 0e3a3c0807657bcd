"""A session with pandas inside WebAssembly that is saved to disk and resumed, as a program would do it, and how large that is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from agent_sandbox import Sandbox, SandboxSession, SessionCheckpoint
from agent_sandbox.assembly import here
from bench.peers import Call, Missing, Staged
from scripts.compile_wasm import CACHE, RECORDS

SMALL, LARGE = 1_000, 250_000  # rows: 32 bytes each
_PREPARED = """
import numpy, pandas
frame = pandas.DataFrame({{"id": range({rows}), **{{name: numpy.random.random({rows}) for name in ("a", "b", "c")}}}})
frame.head(100).to_csv("/tmp/head.csv")
"""
_SEEN = 'assert open("/tmp/head.csv").readline()\nlen(frame)'


def saving(rows: int) -> Call:
    """Save a session that holds a table of so many rows. It goes on afterwards."""
    session, saved = _session(rows), [_session_saved(rows)]

    def before() -> None:
        saved.pop().delete()

    return Staged(before, lambda: saved.append(session.checkpoint()))


def resuming(rows: int) -> Call:
    """Resume such a session from the disk, up to the answer of its first turn."""
    checkpoint, opened = _session_saved(rows), list[SandboxSession]()
    sandbox = _sandbox()

    def before() -> None:
        while opened:
            opened.pop().close()

    def call() -> None:
        opened.append(sandbox.resume(checkpoint))
        _expect(opened[0], rows)

    return Staged(before, call)


class SavedSize:
    """The megabytes of such a session on the disk."""

    def __init__(self, rows: int) -> None:
        self._checkpoint = _session_saved(rows)

    def __call__(self) -> None:
        """Do nothing: the size is known."""

    def figures(self, *, times: int) -> list[float]:
        """Return the size, so many times."""
        return [self._checkpoint.bytes / 1e6] * times


def _session_saved(rows: int) -> SessionCheckpoint:
    with _session(rows) as session:
        return session.checkpoint()


def _session(rows: int) -> SandboxSession:
    session = _sandbox().session()
    prepared = session.run(_PREPARED.format(rows=rows))
    if not prepared.success:
        raise Missing(f"the session could not be prepared: {(prepared.stderr or prepared.error or '').strip()[-200:]}")
    _expect(session, rows)
    return session


def _expect(session: SandboxSession, rows: int) -> None:
    if session.run(_SEEN).value != rows:
        raise Missing("the session has lost its table or its file")


def _sandbox() -> Sandbox:
    """A sandbox with the interpreter that was compiled for this checkout."""
    cache = Path(here().host.state).parent / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    for link, target in ((cache / "agent-sandbox" / "wasm", CACHE), (Path(here().host.state) / "wasm", RECORDS)):
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(target)
    return Sandbox(runtime="wasm", validate_code=False, max_memory_mb=1024)
