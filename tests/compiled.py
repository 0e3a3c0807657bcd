"""The WebAssembly interpreter that `make setup` has compiled, for tests to use as if their user, or root for all users, had compiled it."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from scripts.compile_wasm import CACHE, RECORDS


def runtime(*, warm: int = 0) -> WasmRuntime:
    """A runtime on it. A test that runs without `make setup` fails, and is told what to do."""
    made = WasmRuntime(str(CACHE), str(RECORDS), warm=warm)
    assert made.ready, "it has not been compiled: make setup"
    return made


def offer(cache_home: Path, state: Path) -> None:
    """Put it where a user with these directories would have it."""
    _link({cache_home / "agent-sandbox" / "wasm": CACHE, state / "wasm": RECORDS})


def give(cache_home: Path, state: Path) -> None:
    """Put a copy of it there, which is theirs: where root has compiled it, nobody else may take its lock."""
    for copy, source in ((cache_home / "agent-sandbox" / "wasm", CACHE), (state / "wasm", RECORDS)):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*-counting*", "lock"))


def offer_to_all(shared: Path) -> None:
    """Put it where root compiles for all users, if this is `$AGENT_SANDBOX_SHARED_CACHE`."""
    _link({shared / "wasm" / "cache": CACHE, shared / "wasm" / "records": RECORDS})


def _link(targets: dict[Path, Path]) -> None:
    for link, target in targets.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
