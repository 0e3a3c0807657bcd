"""The boxes that are attacked, and what the table prints of each attack: what happened, and what the control arm showed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from agent_sandbox.runtime.base import Runtime
from tests.security import runtimes
from tests.security.fixtures import box, home, inside, wasm

__all__ = ["box", "home", "inside", "runtime", "tell", "wasm"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runtime" in metafunc.fixturenames:
        chosen = [runtimes.PROCESS] if "inside" in metafunc.fixturenames else runtimes.on(metafunc.function.__name__)
        metafunc.parametrize("runtime", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """Each runtime that an attack is tried on."""
    made = runtimes.make(request.param, tmp_path_factory.mktemp("runtime"))
    yield made
    made.close()


class Tell(Protocol):
    """Say for the table what happened to an attack, and what the same attack does where that wall is missing."""

    def __call__(self, happened: str, *, control: str) -> None: ...


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """A line in the table."""

    def say(happened: str, *, control: str) -> None:
        record_property("happened", happened)
        record_property("control", control)

    return say
