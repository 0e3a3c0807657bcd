"""The examples of the document "Agent Sandbox" that concern the network, run on a small internet that writes down what it hears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.engine import trust
from tests.egress.world import OTHER, PUBLIC, World, in_world
from tests.seeds.conftest import Example
from tests.seeds.examples_001 import PERMISSIONS, PROCESS_ISOLATION

pytest.importorskip("h2", reason="needs the extra `network`")

NAMES = {"api.openai.com": PUBLIC, "raw.github.com": PUBLIC, "github.com": OTHER, "x.malware.com": OTHER}
FETCH = """
import urllib.request
for host in ("api.openai.com", "raw.github.com", "github.com", "x.malware.com"):
    try:
        urllib.request.urlopen(f"https://{host}/page", timeout=30).read()
        print(host)
    except OSError:
        pass
"""


@pytest.fixture
def visited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[list[str], set[str], set[str]]]:
    """Run something on the small internet; return the hosts that its program reached, those that were visited, and the names asked for."""
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))

    def visit(act: Callable[[], Any]) -> tuple[list[str], set[str], set[str]]:
        def live(world: World) -> tuple[list[str], set[str], set[str]]:
            trust.system_roots = lambda: world.trusted
            said = act().stdout.split()
            return said, {line.split()[1].partition("/")[0] for line in world.heard}, set(world.asked)

        return in_world(NAMES, live)

    return visit


Visited = Callable[[Callable[[], Any]], tuple[list[str], set[str], set[str]]]


def test_the_network_permission_opens_what_it_lists(example: Example, visited: Visited) -> None:
    permissions = example(PERMISSIONS)["permissions"]
    said, heard, asked = visited(lambda: Sandbox(permissions=permissions, validate_code=False).execute(FETCH))
    assert said == ["api.openai.com", "raw.github.com"]
    assert heard == asked == {"api.openai.com", "raw.github.com"}


def test_allow_network_opens_the_public_web_and_is_off_as_written(example: Example, visited: Visited) -> None:
    assert visited(lambda: Sandbox(allow_network=False, validate_code=False).execute(FETCH)) == ([], set(), set())
    said, heard, _ = visited(lambda: Sandbox(allow_network=True, validate_code=False).execute(FETCH))
    assert said == [*NAMES] and heard == {*NAMES}


@pytest.mark.parametrize(("written", "reached"), [("network_disabled=True", []), ("network_disabled=False", [*NAMES])])
def test_an_isolation_has_a_network_if_it_is_not_disabled(example: Example, visited: Visited, written: str, reached: list[str]) -> None:
    text = PROCESS_ISOLATION.replace("network_disabled=True", written).replace("'print(\"isolated\")'", repr(FETCH))
    assert repr(FETCH) in text, "it is what is run"
    said, heard, _ = visited(lambda: example(text)["result"])
    assert said == reached and heard == {*reached}
