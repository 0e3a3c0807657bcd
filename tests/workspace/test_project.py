from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.workspace.project import find_project


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "users/me"
    (home / "code/app/src/deep").mkdir(parents=True)
    return home


@pytest.mark.parametrize("marker", [".git", "agent-sandbox.toml"])
def test_the_nearest_directory_with_a_marker_is_the_project(home: Path, marker: str) -> None:
    (home / "code/.git").mkdir()
    (home / "code/app" / marker).touch()
    found = find_project(str(home / "code/app/src/deep"), home=str(home))
    assert (found.path, found.marker) == (str(home / "code/app"), marker)


def test_without_a_marker_the_current_directory_is_the_project(home: Path) -> None:
    assert find_project(str(home / "code/app"), home=str(home)).path == str(home / "code/app")


def test_a_stray_marker_in_or_above_the_home_directory_does_not_count(home: Path) -> None:
    (home / ".git").mkdir()
    (home.parent / ".git").mkdir()
    assert find_project(str(home / "code/app"), home=str(home)).path == str(home / "code/app")


@pytest.mark.needs_root
@pytest.mark.parametrize("marker", [".git", "agent-sandbox.toml"])
def test_a_marker_that_somebody_else_put_above_a_project_does_not_count(tmp_path: Path, home: Path, marker: str) -> None:
    shared = tmp_path / "shared"
    (shared / "mine/src").mkdir(parents=True)
    (shared / marker).touch()
    os.chown(shared / marker, 60_706, 60_706)
    assert find_project(str(shared / "mine"), home=str(home)).path == str(shared / "mine")
    os.chown(shared / "mine", 60_706, 60_706)
    assert find_project(str(shared / "mine"), home=str(home)).path == str(shared), (
        "unless the directory is theirs, too: root may work there"
    )
    os.chown(shared / marker, 0, 0)
    assert find_project(str(shared / "mine/src"), home=str(home)).path == str(shared), "and ours does"


def test_the_home_directory_what_contains_it_and_the_root_are_refused_unless_named(home: Path) -> None:
    (home / ".git").mkdir()
    for directory in (str(home), str(home.parent), "/"):
        with pytest.raises(PolicyError) as refused:
            find_project(directory, home=str(home))
        assert "--project" in refused.value.hint
        assert find_project(directory, home=str(home), explicit=True).path == directory


def test_a_link_to_the_home_directory_is_the_home_directory(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(PolicyError):
        find_project(str(tmp_path / "link"), home=str(home))
    with pytest.raises(PolicyError):
        find_project(str(home), home=str(tmp_path / "link"))


def test_a_directory_that_is_not_there_or_is_none_is_said(home: Path) -> None:
    (home / "file").touch()
    for path in (home / "missing", home / "file"):
        with pytest.raises(PolicyError):
            find_project(str(path), home=str(home))


def test_names_that_are_not_utf8_are_names_too(home: Path) -> None:
    odd = os.fsdecode(os.fsencode(home) + b"/\xff\xfe")
    os.makedirs(odd + "/.git")
    os.makedirs(odd + "/in")
    assert os.fsencode(find_project(odd + "/in", home=str(home)).path).endswith(b"/\xff\xfe")


@pytest.mark.parametrize(("fstype", "remote"), [("nfs4", "network"), ("fuse.sshfs", "fuse"), ("fuseblk", "fuse"), ("ext4", None)])
def test_a_network_or_fuse_filesystem_is_noted(home: Path, fstype: str, remote: str | None) -> None:
    text = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:40 / {home}/code rw - {fstype} server:/x rw\n"
    found = find_project(str(home / "code/app"), home=str(home), mounts=mountinfo.parse(text.encode()))
    assert (found.fstype, found.remote) == (fstype, remote)
