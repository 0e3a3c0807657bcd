"""The inventory of a sandbox against one that is checked in: whatever appears that was not there before fails, and is looked at."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import pytest

from tests.security import inventory
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, outside

NOBODYS = "65534"  # the number of a group that has none in a user namespace
GOLDEN = Path(__file__).parent / "golden" / ("inventory-root.txt" if ROOT else "inventory-rootless.txt")


def _golden() -> tuple[set[str], set[str]]:
    """What must be there, and what may be: lines with a question mark depend on what this kernel has or on what lies in /."""
    lines = GOLDEN.read_text().splitlines()
    return {line for line in lines if not line.startswith("? ")}, {line[2:] for line in lines if line.startswith("? ")}


def _groups() -> str:
    """Our groups as a rootless sandbox shows them: the kernel forbids dropping any, and only our own has a number inside (THREATS)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return " ".join(each if int(each) == os.getegid() else NOBODYS for each in status["Groups"].split())


def _keep_a_key() -> None:
    """Keep a key in a keyring of ours, as everybody has after a login: /proc tells of it."""
    number = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, b"user", b"a-key-of-a-test", b"x", 1, -2)


@case(49, prio="P1")
@pytest.mark.parametrize("way", ["zygote", "program"])
def test_a_look_around_finds_what_it_found_before_and_nothing_new(number: int, way: str, box: Box, tell: Tell) -> None:
    _keep_a_key()
    if way == "zygote":
        seen = box.probe(inventory.source(inside=True))
    else:
        seen = json.loads(box.run("python3", "-c", inventory.source(inside=True)).stdout)
    always, perhaps = _golden()
    if not ROOT:
        always = {line if line != "process: Groups " else f"process: Groups {_groups()}" for line in always}
    if box.runtime.traits.images:
        always.remove("mount: /sys tmpfs nodev nosuid rw")  # an image has an empty directory there
        always -= {line for line in always if line.startswith("mount: / ")}
        always.add("mount: / overlay nodev nosuid rw")  # the image is one directory, also for a user
        always.add("variable: PYTHONDONTWRITEBYTECODE")  # of the box
    assert (set(seen) - always - perhaps, always - set(seen)) == (set(), set()), "what is new, and what has gone"
    differing = [line for line in outside(inventory.source(inside=False)) if line not in always | perhaps]
    assert {f"namespace: {name} of the machine" for name in inventory.NAMESPACES} <= set(differing)
    assert any(line.startswith("mounts: elsewhere a directory of the machine") for line in differing)
    assert any(line.startswith("exists: /sys/") for line in differing)
    assert f"process: tracer 0, parent {os.getpid()}" in " ".join(differing)
    tell(f"{len(seen)} lines, all of them known", control=f"outside {len(differing)} others")
