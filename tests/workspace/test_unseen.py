"""Which of the layers of earlier runs a view of other trees leaves out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.kernel.mount_plan import quote_target
from agent_sandbox.workspace.stored_sandbox import unseen
from tests.architecture.test_start_up import loaded_by


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


@pytest.mark.parametrize("files", [(), ("a.txt",)], ids=["empty", "with a change"])
def test_an_empty_layer_of_a_gone_mount_costs_the_later_runs_nothing(tmp_path: Path, files: tuple[str, ...]) -> None:
    """Each run of the sandbox looks at it again: what opens paths of guests safely is slow to load."""
    layer(tmp_path, 1, "/mnt/stick", *files)
    code = (
        "import os; from agent_sandbox.workspace.stored_sandbox import unseen; "
        f"top = os.open({str(tmp_path)!r}, os.O_RDONLY | os.O_DIRECTORY); "
        f"assert unseen(top, (1,), {{'/'}}) == {('/mnt/stick',)[: len(files)]!r}"
    )
    assert ("agent_sandbox.workspace.beneath" in loaded_by(code)) is bool(files)
