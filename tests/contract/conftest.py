"""The boxes and sandboxes that the contract is tried in: one for each runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.assembly import here
from agent_sandbox.ledger.event import Event
from tests import compiled
from tests.ledger.samples import read
from tests.security.fixtures import box, home, runtime

__all__ = ["box", "home", "runtime"]


@pytest.fixture(scope="module", params=["process", "wasm"])
def sandboxes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sandbox]]:
    """What makes sandboxes, on each runtime of Python code. They are closed at the end, and run whatever code they are given."""
    made: list[Sandbox] = []
    cache, state = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("state")
    compiled.offer(cache, state)

    def make(**settings: Any) -> Sandbox:
        made.append(Sandbox(runtime=request.param, **{"validate_code": False, **settings}))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("AGENT_SANDBOX_STATE", str(state))
        yield make
        for sandbox in made:
            sandbox.close()
        (here().process() if request.param == "process" else here().wasm()).close()


@pytest.fixture
def events(sandboxes: object) -> Callable[[], list[Event]]:
    """What the ledger of these sandboxes has gained since the test began."""
    path = here().ledger().path
    before = len(list(read(path))) if os.path.exists(path) else 0
    return lambda: [entry.event for entry in read(path)][before:]
