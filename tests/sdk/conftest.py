"""What the tests of the SDK share: a sandbox that runs any code with the settings it has anyway, and an end to what serves them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.assembly import here


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(validate_code=False) as made:
        yield made
