from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.clone_inventory import Inventory, NoInventory, recall, remember
from tests.workspace.layers.overlays import in_namespace


def listed(project: Path, file: Path) -> Inventory:
    names = remember(str(project), str(file))
    assert isinstance(names, Inventory)
    assert recall(str(file)) == names
    return names


def test_every_name_of_a_project_is_remembered_with_its_type(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src/empty").mkdir(parents=True)
    (project / "src/app.py").touch()
    (project / "link").symlink_to("/etc")
    os.mkfifo(project / "pipe")
    odd = os.fsdecode(b"line\nbreak \xff")
    (project / odd).touch()
    names = listed(project, tmp_path / "names")
    assert names.in_directory("") == {"src": "d", "link": "l", "pipe": "o", odd: "f"}
    assert names.in_directory("src") == {"app.py": "f", "empty": "d"}
    assert names.in_directory("src/empty") == {}
    assert names.in_directory("link") is None, "a link is not followed"
    assert len(names) == 6


def test_an_empty_project_is_a_finished_list(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert listed(tmp_path / "project", tmp_path / "names").in_directory("") == {}


def test_what_is_too_much_to_list_is_unfinished_and_says_so(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for number in range(4):
        (project / str(number)).touch()
    assert isinstance(remember(str(project), str(tmp_path / "names"), limit=4), Inventory)
    names = remember(str(project), str(tmp_path / "names"), limit=3)
    assert isinstance(names, NoInventory) and "more than 3" in names.why
    assert recall(str(tmp_path / "names")) == names


def test_other_filesystems_and_what_is_skipped_are_named_but_not_entered(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "mounted").mkdir(parents=True)
    (project / "state").mkdir()
    (project / "state/secret").touch()

    def body() -> None:
        syscalls.mount("tmpfs", str(project / "mounted"), "tmpfs")
        (project / "mounted/elsewhere").touch()
        names = remember(str(project), str(tmp_path / "names"), skip=[str(project / "state")])
        assert isinstance(names, Inventory)
        assert names.unlisted == {"mounted"} and names.in_directory("mounted") is None and names.in_directory("state") is None
        assert names.in_directory("") == {"mounted": "d", "state": "d"}

    in_namespace(body)


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_list_that_is_missing_torn_or_nonsense_is_an_unfinished_one(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "names"
    assert isinstance(recall(str(file)), NoInventory)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/file").touch()
    remember(str(tmp_path / "project"), str(file))
    file.write_bytes(file.read_bytes()[:keep])
    assert isinstance(recall(str(file)), NoInventory)
    file.write_bytes(b'{"names":2}\n')
    assert isinstance(recall(str(file)), NoInventory)


def test_a_list_is_never_half_replaced(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    before = listed(project, tmp_path / "names")
    (tmp_path / "names.new").mkdir()
    with pytest.raises(OSError):
        remember(str(project), str(tmp_path / "names"))
    assert recall(str(tmp_path / "names")) == before
