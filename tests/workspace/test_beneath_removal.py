from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.beneath import remove_tree
from tests.workspace.layers.overlays import edit, in_namespace
from tests.workspace.racing import Swapper, deep_tree


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_everything_below_is_removed_and_nothing_behind_a_link(place: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/canary").write_text("x")
    (tmp_path / "tree/a/b").mkdir(parents=True)
    os.mkfifo(tmp_path / "tree/a/fifo")
    (tmp_path / "tree/a/link").symlink_to(tmp_path / "outside")
    (tmp_path / "tree/top").symlink_to("..")
    remove_tree(place, "tree")
    assert os.listdir(tmp_path) == ["outside"]
    assert (tmp_path / "outside/canary").exists()


def test_what_is_not_there_is_no_error_and_a_link_or_file_is_removed_itself(place: int, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    remove_tree(place, "missing")
    remove_tree(place, "link")
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_only_a_name_is_taken(place: int, name: str) -> None:
    with pytest.raises(WorkspaceError):
        remove_tree(place, name)


@pytest.mark.slow
def test_a_tree_of_ten_thousand_levels_is_removed(place: int, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = os.open(tmp_path / "tree", os.O_RDONLY)
    deep_tree(tree, 10_000)
    os.close(tree)
    remove_tree(place, "tree")
    assert os.listdir(tmp_path) == []


def test_directories_closed_by_the_guest_or_by_overlayfs_are_removed(place: int, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    layer = tmp_path / "layer"
    for name in ("upper", "work"):
        (layer / name).mkdir(parents=True)

    def close(merged: Path) -> None:
        (merged / "a/b").mkdir(parents=True)
        (merged / "a/b/file").write_text("x")
        (merged / "a/b").chmod(0)
        (merged / "a").chmod(0)

    edit(tmp_path / "base", layer, close)
    assert (layer / "work/work").stat().st_mode & 0o777 == 0
    remove_tree(place, "layer")
    assert os.listdir(tmp_path) == ["base"]


def naive_remove(path: str) -> None:
    """What one writes first: looks, then acts, by path."""
    for name in os.listdir(path):
        child = os.path.join(path, name)
        if os.path.isdir(child) and not os.path.islink(child):
            naive_remove(child)
        else:
            os.unlink(child)
    os.rmdir(path)


@pytest.mark.slow
def test_a_link_swapped_in_under_way_leads_no_removal_outside(place: int, tmp_path: Path) -> None:
    """The control arm removes the same trees in the same race by path, and does hit the canary."""
    outside = tmp_path / "outside"
    canaries = 40

    def plant() -> None:
        outside.mkdir(exist_ok=True)
        for number in range(canaries):
            (outside / str(number)).touch()

    def grow() -> None:
        (tmp_path / "tree").mkdir(exist_ok=True)
        if not (tmp_path / "tree/d").is_dir():
            (tmp_path / "tree/d").unlink(missing_ok=True)
        (tmp_path / "tree/d").mkdir(exist_ok=True)
        for number in range(canaries):
            (tmp_path / "tree/d" / str(number)).touch()
        (tmp_path / "tree/l").symlink_to(outside)

    def raced(remove: object) -> bool:
        assert callable(remove)
        grow()
        with Swapper(tmp_path / "tree/d", tmp_path / "tree/l"):
            for _ in range(3):
                try:
                    remove()
                except (OSError, WorkspaceError):
                    continue
        remove_tree(place, "tree")
        return len(os.listdir(outside)) < canaries

    plant()
    attempts = 1
    while not raced(lambda: naive_remove(str(tmp_path / "tree"))):
        attempts += 1
        assert attempts < 1000, "the race never caught the naive walker, so it proves nothing"
    plant()
    for _ in range(max(attempts, 100)):
        assert not raced(lambda: remove_tree(place, "tree"))


def test_a_mount_inside_is_not_entered_and_is_reported(place: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/canary").write_text("x")
    (tmp_path / "tree/mount").mkdir(parents=True)
    (tmp_path / "tree/other").write_text("x")

    def body() -> None:
        syscalls.mount(str(tmp_path / "outside"), str(tmp_path / "tree/mount"), None, syscalls.MS_BIND)
        inner = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(WorkspaceError, match="mount"):
            remove_tree(inner, "tree")

    in_namespace(body)
    assert (tmp_path / "outside/canary").exists()
    assert os.listdir(tmp_path / "tree") == ["mount"], "what could be removed was"
    remove_tree(place, "tree")


@pytest.mark.needs_root
def test_an_immutable_file_is_reported_with_the_remedy(place: int, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/fixed").write_text("x")
    (tmp_path / "tree/a/free").write_text("x")
    get, put, immutable = 0x80086601, 0x40086602, 0x10
    with open(tmp_path / "tree/a/fixed") as file:
        try:
            flags = int.from_bytes(fcntl.ioctl(file, get, bytes(8)), "little")
            fcntl.ioctl(file, put, (flags | immutable).to_bytes(8, "little"))
        except OSError:
            pytest.skip("this filesystem has no immutable files")
        try:
            with pytest.raises(WorkspaceError, match=r"fixed.*chattr"):
                remove_tree(place, "tree")
            assert os.listdir(tmp_path / "tree/a") == ["fixed"]
        finally:
            fcntl.ioctl(file, put, flags.to_bytes(8, "little"))
    remove_tree(place, "tree")
    assert os.listdir(tmp_path) == []
