"""Policy files: which count, in which order, and what an option can change of what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox import Sandbox, SandboxStatus, Workspace, policy_files
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import MIB, cloned
from agent_sandbox.policy_files import Layers, layers_of, under

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


def test_a_network_that_a_project_asks_for_is_warned_of_once(tree: Path) -> None:
    (tree / "project" / "agent-sandbox.toml").write_text("[network]\noutbound = true\n")
    bound = under(found(tree), CEILING, {})
    assert len(bound.warnings) == 1 and not bound.policy.network.outbound
    (tree / "project" / "agent-sandbox.toml").write_text("")
    assert under(found(tree), CEILING, {}).warnings == ()


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


@pytest.fixture
def of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for the system's file, which no test may write."""
    path = tmp_path / "system.toml"
    monkeypatch.setattr(policy_files, "SYSTEM", str(path))
    return path


def test_the_systems_file_binds_every_sandbox(of_the_machine: Path) -> None:
    wide = {"allow_subprocess": True, "validate_code": False, "allow_file_read": True}
    before = Sandbox(**wide)  # type: ignore[arg-type]
    of_the_machine.write_text('[processes]\nallow = false\n[limits]\ntimeout_seconds = 8\n[code]\nblocked = ["pickle"]\n')
    start = "import subprocess; print(subprocess.run(['true']).returncode)"
    with before, Sandbox(**wide) as bound:  # type: ignore[arg-type]
        assert before.execute(start).stdout == "0\n"
        refused = bound.execute(start)
        assert (refused.status, refused.stdout) == (SandboxStatus.FAILED, "")
        assert bound.execute("while True: pass", timeout=30).status is SandboxStatus.TIMEOUT
        assert "line 1: pickle" in (bound.execute("import pickle").error or "")
        assert before.execute("import pickle").error is None


def test_what_the_systems_file_asks_about_is_asked_in_every_sandbox(of_the_machine: Path) -> None:
    of_the_machine.write_text('[approvals]\ntools = ["lookup"]\n')
    asked: list[Action] = []

    def lookup(name: str) -> str:
        return name.upper()

    def answer(action: Action, ask: Ask) -> bool:
        asked.append(action)
        return len(asked) == 1

    with Sandbox(tools=[lookup], approver=answer) as sandbox:
        assert sandbox.execute("print(lookup('a'))").stdout == "A\n"
        assert sandbox.execute("print(lookup('a'))").stdout == ""
    assert len(asked) == 2


def test_the_files_hold_in_a_workspace_as_on_the_command_line(of_the_machine: Path, project: Path) -> None:
    canary = project / "greeting.txt"
    before = Workspace.over(project)
    (project / "agent-sandbox.toml").write_text(f'[files]\ndenied = ["{canary}"]\n[approvals]\ncommands = ["rm **"]\n')
    after = Workspace.over(project, approver=lambda action, ask: False)
    assert before.run(["cat", "greeting.txt"]).exit_code == 0
    assert after.run(["cat", "greeting.txt"]).exit_code == 1
    denied = after.run(["rm", "agent-sandbox.toml"])
    assert "not approved" in (denied.error or "") and denied.verdict is not None
    assert before.run(["rm", "agent-sandbox.toml"]).exit_code == 0
    before.reset()
