"""Races: a directory becomes a link to the outside, over and over, while host code works below it.

`make test` and `make security` run a sample of seconds with a fixed seed, `make torture` ten minutes with a fresh one. Each says how often
host code succeeded, because an idle race shows nothing, and how often an ordinary open was led outside, because a lame one does not either.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import mount_tools
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.workspace import beneath
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, meanwhile
from tests.workspace.diff.previews import lines_of_diff
from tests.workspace.racing import Swapper

SAMPLE_SECONDS, TORTURE_SECONDS = 2.0, 600.0
SEED = 4
LARGE = 48 << 20  # what lies outside is larger than the guest may fill

LENGTHS = pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SAMPLE_SECONDS, id="sample"),
        pytest.param(TORTURE_SECONDS, id="full", marks=[pytest.mark.torture, pytest.mark.timeout(1200)]),
    ],
)


def _seed(seconds: float) -> int:
    seed = SEED if seconds == SAMPLE_SECONDS else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when the race is lost
    return seed


def _race(tmp_path: Path, seconds: float, seed: int) -> dict[str, int]:
    """Swap a directory with a link to the outside, as fast as it goes, while each of our readers walks below it. Counts how each went."""
    outside_tree, inside = tmp_path / "outside", tmp_path / "inside"
    (outside_tree / "sub").mkdir(parents=True)
    (outside_tree / "sub" / "canary").write_text("CANARY")
    (inside / "directory" / "sub").mkdir(parents=True)
    (inside / "directory" / "sub" / "canary").write_text("own")
    (inside / "link").symlink_to(outside_tree)
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "r").symlink_to(inside)
    counts = dict.fromkeys(("opened", "walked", "refused", "placed", "through the link", "violations"), 0)
    handle = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    here = os.open(".", os.O_RDONLY)
    deadline = time.monotonic() + seconds
    order = random.Random(seed)
    os.chdir(tmp_path / "view")
    try:
        with Swapper(inside / "directory", inside / "link"):
            while time.monotonic() < deadline:
                _attempt(order.randrange(4), handle, inside, counts)
    finally:
        os.fchdir(here)
        os.close(here)
        os.close(handle)
    assert (outside_tree / "sub" / "canary").read_text() == "CANARY"
    assert sorted(os.listdir(outside_tree / "sub")) == ["canary"], "nothing was made out there"
    return counts


def _attempt(which: int, handle: int, inside: Path, counts: dict[str, int]) -> None:
    try:
        if which == 0:
            fd = beneath.open_file(handle, "directory/sub/canary")
            counts["opened"] += 1
            counts["violations"] += os.read(fd, 16) != b"own"
            os.close(fd)
        elif which == 1:
            for entry in beneath.walk(handle):
                counts["violations"] += entry.name == "canary" and entry.status.st_size != 3
            counts["walked"] += 1
        elif which == 2:
            with mount_tools.directory_for("/directory/sub/made") as place:
                counts["placed"] += 1
                counts["violations"] += "outside" in os.readlink(place)
        else:  # the control arm: what an ordinary open is led to
            with open(inside / "directory/sub/canary", "rb") as file:
                counts["through the link"] += file.read() == b"CANARY"
    except (OSError, WorkspaceError):
        counts["refused"] += 1


def _check(counts: dict[str, int]) -> None:
    assert counts["violations"] == 0, counts
    assert min(count for name, count in counts.items() if name != "violations") > 0, f"an idle race shows nothing: {counts}"


@case(4)
@LENGTHS
def test_swapping_directories_leads_none_of_our_readers_outside(number: int, seconds: float, tmp_path: Path, tell: Tell) -> None:
    seed = _seed(seconds)
    counts = _race(tmp_path, seconds, seed)
    _check(counts)
    tell(
        f"{counts['opened'] + counts['walked'] + counts['placed']} successes, 0 violations (seed {seed})",
        control=f"an ordinary open was led out {counts['through the link']} times",
    )


SWAP = """
import ctypes, os
os.makedirs("directory/sub")
open("directory/sub/canary", "w").write("own")
os.symlink(OUTSIDE, "link")
libc = ctypes.CDLL(None)
assert libc.renameat2(-100, b"directory", -100, b"link", 2) == 0
print("under way", flush=True)
while True:
    libc.renameat2(-100, b"directory", -100, b"link", 2)
"""


@case(4)
@LENGTHS
def test_a_guest_that_swaps_directories_while_we_read_and_measure_its_layers_gains_nothing(
    number: int, seconds: float, box: Box, tell: Tell
) -> None:
    """`diff` may be typed while a run goes on, and the keeper measures the layers ten times a second. Both would find large secrets."""
    outside_tree = box.project.parent / "outside"
    (outside_tree / "sub").mkdir(parents=True)
    (outside_tree / "sub" / "canary").write_text("CANARY")
    with (outside_tree / "large").open("wb") as large:
        os.posix_fallocate(large.fileno(), 0, LARGE)
    kept = box.with_(limits=replace(GENEROUS, disk_bytes=LARGE // 3, wall_seconds=2 * seconds + 30)).kept
    counts = dict.fromkeys(("read", "shown", "through the link", "violations"), 0)
    with meanwhile(kept, SWAP.replace("OUTSIDE", repr(str(outside_tree)))) as ended:
        with kept.layers() as place:
            upper = next(path.parent.parent for path in place.rglob("sub"))
            layers = os.open(place, os.O_RDONLY)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                _look(kept, layers, upper, counts)
            os.close(layers)
        assert not ended, "what lies outside was not counted as the guest's"
    _check(counts)
    assert ended[0].exit.reason is ExitReason.KILLED and (outside_tree / "sub" / "canary").read_text() == "CANARY"
    tell(
        f"{counts['read']} readings, {counts['shown']} files shown, none from outside; not taken for its disk use",
        control=f"an ordinary open in the layer was led out {counts['through the link']} times, to more than the disk limit",
    )


def _look(kept: Box, layers: int, upper: Path, counts: dict[str, int]) -> None:
    with suppress(OSError, WorkspaceError):  # it changed under way, and that was noticed
        for change in kept.read(layers):
            text = "\n".join(lines_of_diff(change, layers))
            counts["shown"] += "+own" in text
            counts["violations"] += "CANARY" in text
        counts["read"] += 1
    with suppress(OSError):
        counts["through the link"] += (upper / "directory/sub/canary").read_text() == "CANARY"
