"""The examples of the seed documents are run as they are written: the same text, in a namespace that has what the text takes as given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_sandbox.assembly import here

Example = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def example() -> Example:
    """Run the text of an example and give back its names."""

    def run(text: str, **given: Any) -> dict[str, Any]:
        names = {"__name__": "example", **given}
        exec(compile(text, "<example>", "exec"), names)
        return names

    return run
