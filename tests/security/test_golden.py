"""The inventory of a sandbox against one that is checked in: whatever appears that was not there before fails, and is looked at."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.security import inventory
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, outside

GOLDEN = Path(__file__).parent / "golden" / ("inventory-root.txt" if ROOT else "inventory-rootless.txt")


def _golden() -> tuple[set[str], set[str]]:
    """What must be there, and what may be: lines with a question mark depend on what this kernel has or on what lies in /."""
    lines = GOLDEN.read_text().splitlines()
    return {line for line in lines if not line.startswith("? ")}, {line[2:] for line in lines if line.startswith("? ")}


@case(49, prio="P1")
@pytest.mark.parametrize("way", ["zygote", "program"])
def test_a_look_around_finds_what_it_found_before_and_nothing_new(number: int, way: str, box: Box, tell: Tell) -> None:
    if way == "zygote":
        seen = box.probe(inventory.source(inside=True))
    else:
        seen = json.loads(box.run("python3", "-c", inventory.source(inside=True)).stdout)
    always, perhaps = _golden()
    if box.runtime.traits.images:
        always.remove("mount: /sys tmpfs nodev nosuid rw")  # an image has an empty directory there
        always.add("variable: PYTHONDONTWRITEBYTECODE")  # of the box
    assert (set(seen) - always - perhaps, always - set(seen)) == (set(), set()), "what is new, and what has gone"
    differing = [line for line in outside(inventory.source(inside=False)) if line not in always | perhaps]
    assert {f"namespace: {name} of the machine" for name in inventory.NAMESPACES} <= set(differing)
    assert any(line.startswith("mounts: elsewhere a directory of the machine") for line in differing)
    assert any(line.startswith("exists: /sys/") for line in differing)
    assert f"process: tracer 0, parent {os.getpid()}" in " ".join(differing)
    tell(f"{len(seen)} lines, all of them known", control=f"outside {len(differing)} others")
