"""Policy files: which count, in which order, and what an option can change of what they say."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.limits import MIB
from agent_sandbox.policy.model import cloned
from agent_sandbox.surfaces import policies
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.current import ceiling_of, project_of
from agent_sandbox.surfaces.policies import Layers, layers_of, under

CEILING = cloned(masks=())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path


def found(tree: Path) -> Layers:
    return layers_of(str(tree / "project"), system=str(tree / "system.toml"), user=str(tree / "user.toml"))


def limits(tree: Path, **flags: float | None) -> tuple[float | None, float | None]:
    made = under(found(tree), CEILING, flags).policy.limits
    return made.memory_bytes and made.memory_bytes / MIB, made.wall_seconds


def test_without_files_there_are_no_layers(tree: Path) -> None:
    assert found(tree) == Layers()
    (tree / "project" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert found(tree) == Layers()
    (tree / "project" / "pyproject.toml").write_text("this is not TOML and not ours")
    assert found(tree) == Layers()


def test_each_file_is_found_and_has_its_place(tree: Path) -> None:
    for name in ("system.toml", "user.toml", "project/agent-sandbox.toml"):
        (tree / name).write_text("[files]\nwrite = false\n")
    layers = found(tree)
    assert [layer.origin for layer in layers.system] == [str(tree / "system.toml")]
    assert [layer.origin for layer in layers.below] == [str(tree / "user.toml"), str(tree / "project" / "agent-sandbox.toml")]
    assert under(layers, CEILING, {}).policy.files.write is False
    (tree / "system.toml").unlink()
    assert found(tree).system == () and len(found(tree).below) == 2


def test_a_pyproject_counts_where_it_has_our_table(tree: Path) -> None:
    (tree / "project" / "pyproject.toml").write_text("[tool.agent-sandbox.processes]\nallow = false\n")
    assert under(found(tree), CEILING, {}).policy.processes is False


def test_an_option_counts_more_than_the_users_and_the_projects_file_and_not_more_than_the_systems(tree: Path) -> None:
    (tree / "system.toml").write_text("[limits]\nmemory_mb = 1024\n")
    (tree / "project" / "agent-sandbox.toml").write_text("[limits]\nmemory_mb = 256\ntimeout_seconds = 5\n")
    assert limits(tree) == (256, 5)
    assert limits(tree, memory_bytes=512 * MIB) == (512, 5)
    assert limits(tree, memory_bytes=4096 * MIB) == (1024, 5)
    assert limits(tree, memory_bytes=None, wall_seconds=None) == (1024, None)
    made = under(found(tree), CEILING, {"output_bytes": 16 * MIB}).policy
    assert made.limits.output_bytes == 16 * MIB
    (tree / "user.toml").write_text("[limits]\noutput_bytes = 10\n")
    assert under(found(tree), CEILING, {"output_bytes": 16 * MIB}).policy.limits.output_bytes == 10


def test_a_project_cannot_widen_what_the_user_says(tree: Path) -> None:
    (tree / "user.toml").write_text("[files]\nwrite = false\n[processes]\nallow = false\n")
    (tree / "project" / "agent-sandbox.toml").write_text("[files]\nwrite = true\n[processes]\nallow = true\n")
    policy = under(found(tree), CEILING, {}).policy
    assert not policy.files.write and not policy.processes


def test_a_network_that_is_asked_for_is_warned_of_once(tree: Path) -> None:
    (tree / "user.toml").write_text("[network]\noutbound = true\n")
    assert len(under(found(tree), CEILING, {}).warnings) == 1


@pytest.mark.parametrize("place", ["user.toml", "project/agent-sandbox.toml"])
def test_a_file_that_is_there_and_cannot_be_understood_stops_everything(tree: Path, place: str) -> None:
    path = tree / place
    path.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match="is not UTF-8"):
        found(tree)
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(PolicyError, match="more than 1048576 bytes"):
        found(tree)
    path.unlink()
    path.mkdir()
    with pytest.raises(PolicyError, match=r"no regular file|cannot be read"):
        found(tree)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(PolicyError, match=r"no regular file|cannot be read"):
        found(tree)


def test_a_link_in_the_project_is_not_followed_and_one_of_the_users_own_is(tree: Path) -> None:
    (tree / "elsewhere.toml").write_text("[files]\nwrite = false\n")
    (tree / "user.toml").symlink_to(tree / "elsewhere.toml")
    assert len(found(tree).below) == 1
    (tree / "project" / "agent-sandbox.toml").symlink_to(tree / "elsewhere.toml")
    with pytest.raises(PolicyError, match="cannot be read"):
        found(tree)


def test_a_file_beneath_what_is_no_directory_is_none(tree: Path) -> None:
    (tree / "file").write_text("")
    assert layers_of(str(tree / "project"), system=str(tree / "file" / "x"), user=str(tree / "user.toml")) == Layers()
    (tree / "loop").symlink_to(tree / "loop")
    with pytest.raises(PolicyError, match="cannot be read"):
        layers_of(str(tree / "project"), system=str(tree / "loop"), user=str(tree / "user.toml"))


def test_what_is_learnt_is_learnt_under_the_systems_file_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "system.toml").write_text('[files]\ndenied = ["/srv"]\n[limits]\nmemory_mb = 512\n')
    (tree / "project" / "agent-sandbox.toml").write_text("[files]\nwrite = false\n[limits]\ntimeout_seconds = 5\n")
    monkeypatch.setattr(policies, "layers_of", partial(layers_of, system=str(tree / "system.toml"), user=str(tree / "user.toml")))
    request = Request("policy", ("learn", "true"), {"--timeout": ("60",), "--project": (str(tree / "project"),)})
    policy = ceiling_of(request, project_of(request))
    assert policy.files.write and policy.files.bars("/srv/x")
    assert (policy.limits.memory_bytes, policy.limits.wall_seconds) == (512 * MIB, 60)
