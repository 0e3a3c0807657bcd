"""Which of the layers of earlier runs a view of other trees leaves out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.kernel.mount_plan import quote_target
from agent_sandbox.workspace.stored_sandbox import unseen


def layer(top: Path, generation: int, target: str, *files: str) -> None:
    upper = top / str(generation) / quote_target(target) / "upper"
    upper.mkdir(parents=True)
    for name in files:
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_text("changed")


@pytest.mark.parametrize(
    ("shown", "missed"),
    [
        ({"/", "/home/u", "/srv"}, ()),
        ({"/"}, ("/home/u",)),
        ({"/home/u", "/usr"}, ()),
        ({"/etc", "/usr", "/var/lib"}, ("/etc", "/var/lib")),
        ({"/home"}, ("/home/u",)),
        ({"/home/u/project", "/home/u/other"}, ("/home/u/project",)),
        (set(), ()),
    ],
)
def test_only_what_is_covered_and_holds_something_is_missed(tmp_path: Path, shown: set[str], missed: tuple[str, ...]) -> None:
    layer(tmp_path, 1, "/", "etc/hosts", "var/lib")
    layer(tmp_path, 2, "/home/u", "project/a.txt")
    layer(tmp_path, 2, "/srv")
    top = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert unseen(top, (2, 1, 7), shown) == missed
    finally:
        os.close(top)
