"""Protected classes as the engine asks for them: of a real tree and of real content."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import cast

from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.inspect import NewTree, look_at, protected_classes
from tests.workspace.promotion.trees import Edited


def make(tree: Path) -> None:
    (tree / "package.json").write_text(json.dumps({"version": "1", "scripts": {"test": "x"}}))
    (tree / "other").mkdir()
    (tree / "other/package.json").write_text("{}")
    (tree / "README").write_text("x")
    (tree / "ci/.circleci").mkdir(parents=True)
    (tree / "ci/.circleci/config.yml").write_text("x")
    os.symlink("other", tree / "into")


def edit(tree: Path) -> None:
    (tree / "package.json").write_text(json.dumps({"version": "2", "scripts": {"test": "x"}}))
    (tree / "other/package.json").write_text(json.dumps({"scripts": {"install": "evil"}}))
    (tree / "readme").write_text("y")
    shutil.rmtree(tree / "ci")
    os.symlink("into/../..", tree / "out")
    os.symlink("into/../README", tree / "inside")


def test_names_links_and_texts_are_those_of_the_tree_as_it_would_be(tmp_path: Path) -> None:
    edited = Edited(tmp_path, make, edit)
    root = str(edited.project)
    found = protected_classes(edited.changes, look_at(root, edited.changes), edited, root=root)
    assert found == {
        f"{root}/other/package.json": {"package-scripts"},
        f"{root}/readme": {"name-collision"},
        f"{root}/ci": {"ci"},
        f"{root}/out": {"links-out"},
    }
    edited.close()


def test_a_link_to_a_name_that_no_filesystem_can_hold_leads_nowhere(tmp_path: Path) -> None:
    def links(tree: Path) -> None:
        os.symlink("n" * 256, tree / "long")
        os.symlink("../" + "n" * 300, tree / "out")

    edited = Edited(tmp_path, make, links)
    root = str(edited.project)
    found = protected_classes(edited.changes, look_at(root, edited.changes), edited, root=root)
    assert found == {f"{root}/out": {"links-out"}}  # the control arm: where a link leads is still judged
    edited.close()


def test_a_real_tree_deeper_than_a_path_can_be_is_searched_for_links(tmp_path: Path) -> None:
    def deep(tree: Path) -> None:
        directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=directory)
            inner = os.open("d" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        os.symlink("x", "link", dir_fd=directory)
        os.close(directory)

    project = tmp_path / "project"
    project.mkdir()
    deep(project)
    changes = ChangeSet((Change(f"{project}/new", Kind.ADDED, None, Node(EntryType.DIRECTORY, 0o755, 0, 0)),))
    with NewTree(str(project), changes, cast(Contents, None)) as tree:
        complete, links = tree.all_links(str(project))
    assert complete and [os.path.basename(path) for path in links] == ["link"] and len(min(links)) > 4096
    top = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    remove_tree(top, "project")
    os.close(top)
