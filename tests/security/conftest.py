"""The boxes that are attacked, and what the table prints of each attack: what happened, and what the control arm showed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest

from tests.security.fixtures import box, home, inside, runtime, wasm

__all__ = ["box", "home", "inside", "runtime", "tell", "wasm"]


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
