from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany, remove_tree
from tests.workspace.racing import Swapper, deep_tree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "tree").mkdir()
    fd = os.open(tmp_path / "tree", os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)
    place = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    remove_tree(place, "tree")  # pytest's own means give up on deep trees
    os.close(place)


def content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def test_a_regular_file_below_the_directory_is_opened(tree: int, tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir()
    (tmp_path / "tree/a/file").write_text("inside")
    assert content(beneath.open_file(tree, "a/file")) == b"inside"


@pytest.mark.parametrize("path", ["../canary", "/etc/passwd", "a/../../canary", "./a", "a//b", "", "a/", "a\0b"])
def test_a_path_that_is_not_plain_is_refused_before_anything_is_opened(tree: int, tmp_path: Path, path: str) -> None:
    (tmp_path / "canary").write_text("secret")
    with pytest.raises(OSError) as refused:
        beneath.open_file(tree, path)
    assert refused.value.errno == errno.EINVAL


@pytest.mark.parametrize("target", ["../canary", "/proc/self/root/etc/passwd", "inside"])
def test_no_link_is_followed_wherever_it_leads(tree: int, tmp_path: Path, target: str) -> None:
    (tmp_path / "canary").write_text("secret")
    (tmp_path / "tree/inside").write_text("x")
    (tmp_path / "tree/link").symlink_to(target)
    assert (tmp_path / "tree/link").exists()  # a naive open would follow it
    with pytest.raises(OSError) as refused:
        beneath.open_file(tree, "link")
    assert refused.value.errno == errno.ELOOP


def test_what_is_no_regular_file_is_refused_without_being_opened(tree: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tree/fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{tree}/socket")
        for name in ("fifo", "socket"):
            with pytest.raises(OSError, match="not a regular file"):
                beneath.open_file(tree, name)


def test_a_link_swapped_in_under_way_is_never_followed(tmp_path: Path, tree: int) -> None:
    """The control arm: over the same race, a plain open does read the canary, so the race is real."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("canary")
    (tmp_path / "tree/d").mkdir()
    (tmp_path / "tree/d/file").write_text("inside")
    (tmp_path / "tree/l").symlink_to(tmp_path / "outside")
    seen = {"inside": 0, "refused": 0, "naive": 0}
    with Swapper(tmp_path / "tree/d", tmp_path / "tree/l"):
        for _ in range(200_000):
            try:
                assert content(beneath.open_file(tree, "d/file")) == b"inside"
                seen["inside"] += 1
            except OSError as error:
                assert error.errno in (errno.ELOOP, errno.ENOENT)
                seen["refused"] += 1
            seen["naive"] += (tmp_path / "tree/d/file").read_text() == "canary"
            if min(seen.values()) > 200:
                break
    assert min(seen.values()) > 0, seen


def test_a_walk_gives_every_entry_with_directories_first(tree: int, tmp_path: Path) -> None:
    base = tmp_path / "tree"
    (base / "b/c").mkdir(parents=True)
    (base / "b/c/d").write_text("x")
    (base / "a").symlink_to("/etc")
    (base / "z").write_text("x")
    assert [entry.path for entry in beneath.walk(tree)] == ["a", "b", "b/c", "b/c/d", "z"]


@pytest.mark.slow
def test_a_tree_of_ten_thousand_levels_is_walked_with_a_handful_of_descriptors(tree: int) -> None:
    deep_tree(tree, 10_000)
    before = len(os.listdir("/proc/self/fd"))
    most, last = 0, None
    for entry in beneath.walk(tree):
        if entry.depth % 1000 == 0:
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
        last = entry
    assert last is not None and last.depth == 10_000 and last.name == "leaf"
    assert most < 8
    fd = beneath.open_file(tree, last.path)  # far beyond PATH_MAX
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_that_are_not_utf8_come_back_as_they_were(tree: int) -> None:
    os.close(os.open(b"\xff\n\x1b", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=tree))
    (entry,) = beneath.walk(tree)
    assert os.fsencode(entry.path) == b"\xff\n\x1b"


def test_a_walk_beyond_its_limit_is_refused(tree: int, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"tree/{number}").touch()
    assert len(list(beneath.walk(tree, limit=20))) == 20
    with pytest.raises(TooMany):
        list(beneath.walk(tree, limit=19))


def test_a_directory_closed_by_the_guest_is_read_and_closed_again(tree: int, tmp_path: Path) -> None:
    closed = tmp_path / "tree/closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner/file").write_text("x")
    closed.chmod(0)
    assert [entry.path for entry in beneath.walk(tree)] == ["closed", "closed/inner", "closed/inner/file"]
    assert stat.S_IMODE(closed.stat().st_mode) == 0
    with closing(beneath.walk(tree)) as walk:
        next(walk)
    assert stat.S_IMODE(closed.stat().st_mode) == 0, "a walk that is given up puts modes back too"
    closed.chmod(0o700)


def test_attributes_of_a_link_are_its_own(tree: int, tmp_path: Path) -> None:
    (tmp_path / "tree/file").write_text("x")
    os.setxattr(tmp_path / "tree/file", "user.colour", b"red")
    (tmp_path / "tree/link").symlink_to("file")
    assert beneath.xattrs(tree, "file") == {"user.colour": b"red"}
    assert beneath.xattrs(tree, "link") == {}


@pytest.mark.needs_root
def test_a_mount_inside_the_tree_is_listed_but_not_entered(tree: int, tmp_path: Path) -> None:
    from tests.workspace.layers.overlays import in_namespace

    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/canary").write_text("x")
    (tmp_path / "tree/mount").mkdir()

    def body() -> None:
        syscalls.mount(str(tmp_path / "outside"), str(tmp_path / "tree/mount"), None, syscalls.MS_BIND)
        assert os.listdir(tmp_path / "tree/mount") == ["canary"]
        assert [entry.path for entry in beneath.walk(tree)] == ["mount"]

    in_namespace(body)
