"""Protected classes as the engine asks for them: of a real tree and of real content."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from agent_sandbox.workspace.promotion.inspect import look_at, protected_classes
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
