"""What was hashed is what is shown and written, whatever happens to the file afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import Drift
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.contents import MOST_REMEMBERED, SMALLEST_UNREMEMBERED, Mixed, ReadFile
from agent_sandbox.workspace.diff.compare import MachineFiles, compare
from agent_sandbox.workspace.digests import ContentDigests
from agent_sandbox.workspace.promotion.inspect import look_at
from agent_sandbox.workspace.promotion.plan import Plan, plan
from agent_sandbox.workspace.promotion.promote import promote
from tests.workspace.promotion.trees import ME, Edited

SEEN, LATER = b"what was seen\n", b"what came too"[:13] + b"\n"


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Edited]:
    made = Edited(tmp_path, lambda project: None, lambda after: _write(after / "new", SEEN))
    yield made
    made.close()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(1_600_000_000_000_000_000, 1_600_000_000_000_000_000))
    path.chmod(0o444)


def _meddle(edited: Edited) -> None:
    """Change the content alone: size, mode and time stay."""
    (edited.after / "new").chmod(0o644)
    _write(edited.after / "new", LATER)


def _shown(edited: Edited, contents: Mixed) -> tuple[bytes, ...]:
    (change,) = edited.changes
    return compare(change, contents, MachineFiles()).new


def _planned(edited: Edited, hashes: ContentDigests) -> Plan:
    root = str(edited.project)
    return plan(edited.changes, look_at(root, edited.changes), root=root, classes={}, digests=hashes.by_path())


def test_a_diff_shows_what_was_hashed(edited: Edited) -> None:
    contents = Mixed(edited)
    digests = ContentDigests(edited.changes, contents).by_path()
    assert list(digests.values()) == [sha256(SEEN).hexdigest()]
    _meddle(edited)
    assert _shown(edited, contents) == (SEEN,)
    assert _shown(edited, Mixed(contents)) == (SEEN,), "also through another source that adds merged files"
    assert _shown(edited, Mixed(edited)) == (LATER,), "without the memory it is read again, so that the test can fail"


def test_a_promotion_writes_what_was_hashed(edited: Edited) -> None:
    contents = Mixed(edited)
    made = _planned(edited, ContentDigests(edited.changes, contents))
    _meddle(edited)
    with pytest.raises(Drift, match="not the one that was approved"):
        promote(made, Mixed(edited), str(edited.promotions), holder=ME)
    assert not os.listdir(edited.project)
    promote(made, contents, str(edited.promotions), holder=ME)
    new = edited.project / "new"
    assert new.read_bytes() == SEEN and new.stat().st_mode & 0o777 == 0o444 and new.stat().st_mtime == 1_600_000_000


def test_content_that_is_not_the_approved_one_is_refused_from_memory_too(edited: Edited) -> None:
    (change,) = edited.changes
    made = _planned(edited, ContentDigests(edited.changes, Mixed(edited)))
    for content, why in ((LATER, "not the one that was approved"), (SEEN + SEEN, "has changed since it was looked at")):
        contents = Mixed(edited)
        contents.remember(change.path, ReadFile(content, sha256(content).hexdigest(), time.time_ns()))
        with pytest.raises(Drift, match=why):
            promote(made, contents, str(edited.promotions), holder=ME)
    assert not os.listdir(edited.project)


def test_a_merged_file_takes_the_place_of_one_that_was_read(edited: Edited) -> None:
    (change,) = edited.changes
    contents = Mixed(edited)
    ContentDigests(edited.changes, contents).by_path()
    above = Mixed(contents)
    for each in (above, contents):
        each.put(change.path, LATER)
        assert each.recall(change.path) is None
        with open(each.open_file(change), "rb") as file:
            assert file.read() == LATER


def test_memory_has_a_limit(edited: Edited) -> None:
    contents = Mixed(edited)
    largest = bytes(SMALLEST_UNREMEMBERED - 1)
    contents.remember("/large", ReadFile(bytes(SMALLEST_UNREMEMBERED), "", 0))
    assert contents.recall("/large") is None
    room = MOST_REMEMBERED // len(largest)
    for number in range(room + 1):
        contents.remember(f"/{number}", ReadFile(largest, "", 0))
    assert contents.recall(f"/{room - 1}") is not None and contents.recall(f"/{room}") is None


def test_a_file_that_cannot_be_read_is_named(edited: Edited) -> None:
    (change,) = edited.changes
    missing = replace(change, path=f"{edited.project}/missing")

    with pytest.raises(Exception, match="missing' in the sandbox cannot be read"):
        ContentDigests((change, missing), Mixed(edited)).by_path()

    class Longer:
        def open_file(self, change: Change) -> int:
            fd = os.memfd_create("longer", os.MFD_CLOEXEC)
            os.write(fd, SEEN + LATER)
            return fd

    with pytest.raises(Exception, match="cannot be read: it has changed since its size was read"):
        ContentDigests((change,), Mixed(Longer())).by_path()
