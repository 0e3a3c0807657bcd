"""What a plan was told about the disk: each answer that could change makes the observations fail, and nothing else does."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.workspace.view.observations import Observations, entries_of, kind_behind, kind_of, writable_directories_of_others


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = Path(os.path.realpath(tmp_path))
    (top / "dir").mkdir()
    (top / "dir" / "file").write_text("x")
    (top / "link").symlink_to("dir")
    return top


def _observed(tree: Path) -> Observations:
    disk = Observations()
    for path in ("dir/file", "dir/missing", "none/below", "link"):
        disk.real(f"{tree}/{path}")
    for question in (entries_of, kind_behind):
        disk.ask(question, f"{tree}/dir")
    return disk


def test_observations_hold_while_nothing_changes(tree: Path) -> None:
    disk = _observed(tree)
    (tree / "dir" / "file").write_text("other content")
    (tree / "unasked").mkdir()
    assert disk.hold()


def _replace(path: Path, to: str) -> None:
    path.rename(path.with_name("old"))
    path.symlink_to(to)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a name that was missing is there": lambda tree: (tree / "dir" / "missing").write_text("x"),
    "a directory that was missing is there": lambda tree: os.mkdir(tree / "none"),
    "a file became a link": lambda tree: _replace(tree / "dir" / "file", "/etc"),
    "a directory became a link": lambda tree: _replace(tree / "dir", "old"),
    "a link leads elsewhere": lambda tree: _replace(tree / "link", "/etc"),
    "a link is gone": lambda tree: os.unlink(tree / "link"),
    "a listed directory has one more": lambda tree: os.mkdir(tree / "dir" / "more"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_observations_fail_when_an_answer_changes(tree: Path, change: str) -> None:
    disk = _observed(tree)
    assert disk.hold(), "the control arm"
    CHANGES[change](tree)
    assert not disk.hold()


NAMES = st.sampled_from(["a", "b", "c", "ring", "abs", "gone", "up"])


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_a_real_path_is_the_one_of_the_standard_library(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    top = Path(os.path.realpath(tmp_path_factory.getbasetemp() / "links"))
    if not top.exists():
        (top / "a" / "b" / "c").mkdir(parents=True)
        for where in (top, top / "a", top / "a" / "b"):
            for name, to in (("ring", "ring"), ("abs", f"{top}/a"), ("gone", "nowhere/at/all"), ("up", "..")):
                (where / name).symlink_to(to)
    path = "/".join((str(top), *parts))
    assert Observations().real(path) == os.path.realpath(path)


def test_an_entry_is_of_its_own_kind_and_leads_to_another(tree: Path) -> None:
    assert kind_of(f"{tree}/link") == stat.S_IFLNK
    assert kind_behind(f"{tree}/link") == stat.S_IFDIR
    assert kind_of(f"{tree}/none/below") == kind_behind(f"{tree}/none") == 0


def test_a_listing_names_links_with_their_targets_and_leaves_out_sockets_and_the_like(tree: Path) -> None:
    os.mkfifo(tree / "fifo")
    assert entries_of(str(tree)) == (("dir", stat.S_IFDIR, True), ("link", stat.S_IFLNK, "dir"))
    assert entries_of(f"{tree}/dir") == (("file", stat.S_IFREG, True),)
    assert entries_of(f"{tree}/none") is None


def test_directories_of_others_are_found_only_if_this_user_may_write_there() -> None:
    found = writable_directories_of_others("/var")
    me = os.geteuid()
    others = [name for name in os.listdir("/var") if os.path.isdir(f"/var/{name}") and not os.path.islink(f"/var/{name}")]
    others = [name for name in others if os.stat(f"/var/{name}").st_uid != me and os.access(f"/var/{name}", os.W_OK | os.X_OK)]
    if me:
        assert set(found) == set(others)
    assert set(found) <= set(others)
