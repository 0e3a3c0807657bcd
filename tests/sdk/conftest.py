"""What the tests of the SDK share: a sandbox with the default settings, and an end to the process that serves all sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_sandbox import Sandbox, shared


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    shared.runtime().close()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made
