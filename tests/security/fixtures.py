"""Fixtures that the contract and the attack suites share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.runtime.base import Runtime
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from tests import compiled
from tests.security.harness import Box


@pytest.fixture(scope="session")
def runtime() -> Iterator[ProcessRuntime]:
    """The process runtime."""
    made = ProcessRuntime()
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's home directory, with secrets in it that nobody may see."""
    directory = tmp_path / "home"
    for name in (".ssh/id_rsa", ".aws/credentials", ".bash_history"):
        secret = directory / name
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text(f"CANARY-{name}-{tmp_path.name}\n")
        secret.chmod(0o600)
    return directory


@pytest.fixture
def box(runtime: Runtime, project: Path, home: Path, tmp_path: Path) -> Box:
    """A sandbox on the whole machine."""
    return Box(runtime, project, home, Ledger(str(tmp_path / "ledger"), clock=time.time))


@pytest.fixture(scope="session")
def wasm() -> Iterator[WasmRuntime]:
    """The runtime inside WebAssembly, as `make setup` has compiled it."""
    made = compiled.runtime()
    yield made
    made.close()


@pytest.fixture
def inside(wasm: WasmRuntime, box: Box) -> Box:
    """A clone of the machine, with the interpreter inside WebAssembly."""
    return box.with_(runtime=wasm)
