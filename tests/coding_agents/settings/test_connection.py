"""Connecting programs and taking it back: the files after each, what is refused, and what a crash leaves."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli.commands.connect import PROGRAMS
from agent_sandbox.coding_agents.own_commands import hook_command, server_words
from agent_sandbox.coding_agents.settings.connection import Connections, FileChange, Target
from agent_sandbox.coding_agents.settings.places import SettingsPlace
from agent_sandbox.errors import PolicyError

SCOPES = ("user", "project")


class Machine:
    """A home and a project of somebody, and what connecting does there."""

    def __init__(self, top: Path) -> None:
        self.home, self.project, self.connections = top / "home", top / "project", Connections(str(top / "records"))
        self.home.mkdir()
        self.project.mkdir()

    def targets(self, program: str, scope: Any) -> list[Target]:
        connected = PROGRAMS[program]
        place = SettingsPlace(scope, str(self.home), str(self.project), root=str(self.home / "root"))
        assert connected.notes(scope)
        return connected.targets(place)

    def connect(self, program: str, scope: str = "user") -> list[FileChange]:
        changes = self.connections.plan(self.targets(program, scope))
        self.connections.make(changes)
        return changes

    def undo(self, program: str, scope: str = "user") -> list[FileChange]:
        changes = self.connections.plan_undo(self.targets(program, scope))
        self.connections.make(changes)
        return changes


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def tree(top: Path) -> dict[str, str]:
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_settings_is_connected_and_taken_back(machine: Machine, program: str, scope: str) -> None:
    top = machine.home if scope == "user" else machine.project
    changes = machine.connect(program, scope)
    assert changes and all(change.before is None and change.diff.startswith("--- /dev/null\n") for change in changes)
    made = tree(top)
    assert server_words()[0] in "".join(made.values()) and "mcp" in "".join(made.values())
    assert not tree(machine.project if scope == "user" else machine.home), "the other scope is left alone"
    if program in ("claude", "codex", "gemini"):
        assert json.dumps(hook_command(program)) in "".join(made.values())
    assert machine.connect(program, scope) == [] and tree(top) == made, "a second time changes nothing"
    machine.undo(program, scope)
    assert tree(top) == {} and machine.undo(program, scope) == []


SETTINGS = {
    (
        "claude",
        ".claude/settings.json",
    ): '{"model":"opus",  "permissions": {"allow": ["Bash(npm test)", "WebSearch", "Read"], "deny": ["Read"]}}',
    ("claude", ".claude.json"): '{\n    "projects": {"x": {"history": ["é"]}},\n    "numStartups": 4\n}\n',
    ("codex", ".codex/hooks.json"): '{"hooks": {"PreToolUse": [{"hooks": [{"type": "command", "command": "mine"}]}], "Stop": []}}\n',
    (
        "codex",
        ".codex/config.toml",
    ): '# mine\nmodel = "o9"  # best\nsandbox_mode = "danger-full-access"\n\n[mcp_servers.other]\ncommand = "x"\n',
    ("gemini", ".gemini/settings.json"): '// mine\n{\n  "hooks": {\n    "AfterTool": [], // none\n  },\n  "ui": {"theme": "x"}\n}\n',
    ("cursor", ".cursor/mcp.json"): '{\n\t"mcpServers": {\n\t\t"other": {"command": "x"}\n\t}\n}',
    ("vscode", ".config/Code/User/mcp.json"): '{\n  "servers": {}, // none yet\n  "inputs": [],\n}\n',
}


def written(machine: Machine, program: str) -> None:
    for (owner, name), text in SETTINGS.items():
        if owner == program:
            path = machine.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o640)


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_of_a_person_are_kept_and_come_back_letter_for_letter(machine: Machine, program: str) -> None:
    written(machine, program)
    before = tree(machine.home)
    machine.connect(program)
    after = tree(machine.home)
    for name, text in before.items():
        lost = [line for line in text.splitlines() if line.strip() and line not in after[name].splitlines()]
        assert len(text.splitlines()) == 1 or len(lost) <= 2, (name, lost)
        assert (machine.home / name).stat().st_mode & 0o777 == 0o640
    machine.undo(program)
    assert tree(machine.home) == before


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_person_changed_since_is_kept_when_it_is_taken_back(machine: Machine, program: str) -> None:
    written(machine, program)
    before = {target.path: _meaning(Path(target.path)) for target in machine.targets(program, "user") if target.form != "text"}
    machine.connect(program)
    for path in before:
        text = Path(path).read_text()
        Path(path).write_text(f"# new\n{text}" if path.endswith(".toml") else text.replace("{", '{"later": 1,', 1))
    machine.undo(program)
    for path, document in before.items():
        later = {} if path.endswith(".toml") else {"later": 1}
        assert _ordered(_meaning(Path(path))) == _ordered({**(document or {}), **later}), path
    assert machine.undo(program) == []


def _meaning(path: Path) -> Any:
    if not path.exists():
        return None
    from agent_sandbox.coding_agents.settings import json_text  # the reader with comments

    return tomllib.loads(path.read_text()) if path.suffix == ".toml" else json_text.read(path.read_text(), comments=True).value


def _ordered(value: Any) -> Any:
    """The order of a list of rules has no meaning, and rules that were taken out come back at its end."""
    if isinstance(value, dict):
        return {name: _ordered(each) for name, each in value.items()}
    return sorted(map(json.dumps, value)) if isinstance(value, list) else value


def test_claude_cannot_go_on_without_its_hook(machine: Machine) -> None:
    written(machine, "claude")
    machine.connect("claude")
    settings = json.loads((machine.home / ".claude/settings.json").read_text())
    (entry,) = settings["hooks"]["PreToolUse"]
    assert entry["matcher"] == "*" and entry["hooks"][0]["onFailure"] == "block"
    permissions = settings["permissions"]
    assert permissions["allow"] == ["WebSearch"] and permissions["disableBypassPermissionsMode"] == "disable"
    assert {"Read", "Write", "Edit", "NotebookEdit", "Glob", "Grep", "WebFetch"} <= set(permissions["deny"])
    assert permissions["deny"].count("Read") == 1 and "Bash" not in permissions["deny"]


@pytest.mark.parametrize("mode", ["bypassPermissions", "acceptEdits"])
def test_a_mode_of_claude_that_asks_nothing_is_taken_away_and_comes_back(machine: Machine, mode: str) -> None:
    path = machine.home / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"permissions": {"defaultMode": mode}}))
    machine.connect("claude")
    assert json.loads(path.read_text())["permissions"]["defaultMode"] == "default"
    machine.undo("claude")
    assert json.loads(path.read_text())["permissions"]["defaultMode"] == mode


def test_the_machine_gets_a_hook_that_no_project_can_switch_off(machine: Machine) -> None:
    (change,) = machine.connect("claude", "machine")
    assert change.path == str(machine.home / "root/etc/claude-code/managed-settings.json")
    assert hook_command("claude") in json.loads(Path(change.path).read_text())["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
    machine.undo("claude", "machine")
    assert not os.path.exists(change.path)


def test_codex_falls_back_to_its_own_read_only_sandbox(machine: Machine) -> None:
    written(machine, "codex")
    machine.connect("codex")
    settings = tomllib.loads((machine.home / ".codex/config.toml").read_text())
    assert settings["sandbox_mode"] == "read-only" and set(settings["mcp_servers"]) == {"other", "agent-sandbox"}
    rule = (machine.home / ".codex/rules/agent-sandbox.rules").read_text()
    assert f'prefix_rule(pattern = ["{server_words()[0]}", "shell-prefix"], decision = "allow")' in rule
    hooks = json.loads((machine.home / ".codex/hooks.json").read_text())["hooks"]["PreToolUse"]
    assert [entry["hooks"][0]["command"] for entry in hooks] == ["mine", hook_command("codex")]


def test_codex_is_not_connected_while_a_profile_has_a_wider_sandbox(machine: Machine) -> None:
    path = machine.home / ".codex/config.toml"
    path.parent.mkdir()
    path.write_text(wider := '[profiles.fast]\nmodel = "o9"\nsandbox_mode = "workspace-write"\n')
    before = tree(machine.home)
    with pytest.raises(PolicyError, match=r"profile 'fast'.*\[profiles.fast\]"):
        machine.connect("codex")
    assert tree(machine.home) == before
    path.write_text(wider.replace("workspace-write", "read-only"))
    machine.connect("codex")


def test_gemini_allows_only_rewritten_commands_without_asking(machine: Machine) -> None:
    machine.connect("gemini")
    allow, ask, deny = tomllib.loads((machine.home / ".gemini/policies/agent-sandbox.toml").read_text())["rule"]
    assert (allow["commandPrefix"], allow["decision"]) == (f"{server_words()[0]} shell-prefix", "allow")
    assert (ask["toolName"], ask["decision"]) == ("run_shell_command", "ask_user") and allow["priority"] > ask["priority"]
    assert deny["decision"] == "deny" and {"read_file", "write_file", "replace", "web_fetch"} <= set(deny["toolName"])


def test_a_hook_of_an_earlier_installation_is_replaced(machine: Machine) -> None:
    path = machine.home / ".claude/settings.json"
    path.parent.mkdir()
    older = {"matcher": "*", "hooks": [{"type": "command", "command": "/old/agent-sandbox hook claude || { exit 2; }"}]}
    path.write_text(json.dumps({"hooks": {"PreToolUse": [older]}}))
    machine.connect("claude")
    (entry,) = json.loads(path.read_text())["hooks"]["PreToolUse"]
    assert entry["hooks"][0]["command"] == hook_command("claude")


BROKEN = {
    "half": '{"permissions": {',
    "comments": '{"a": 1} // c',
    "a name twice": '{"a": 1, "a": 2}',
    "a list": "[]",
    "hooks that are a text": '{"hooks": "x"}',
    "hooks that are no list": '{"hooks": {"PreToolUse": {}}}',
    "empty": "",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_settings_are_refused_and_untouched(machine: Machine, text: str) -> None:
    path = machine.home / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"settings\.json"):
        machine.connect("claude")
    assert tree(machine.home) == {".claude/settings.json": text}, "nor is the other file changed"


@pytest.mark.parametrize(
    "text", ["model = ", "[a]\nx = 1\n[a]\n", "sandbox_mode = '''\nx'''\n", 'mcp_servers = { agent-sandbox = { command = "x" } }\n']
)
def test_broken_or_unusual_toml_is_refused_and_untouched(machine: Machine, text: str) -> None:
    path = machine.home / ".codex/config.toml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"config\.toml"):
        machine.connect("codex")
    assert tree(machine.home) == {".codex/config.toml": text}


def test_files_that_are_not_plainly_ours_are_refused(machine: Machine, tmp_path: Path) -> None:
    path, other = machine.home / ".cursor/mcp.json", tmp_path / "dotfiles.json"
    path.parent.mkdir()
    other.write_text("{}")

    def refused(match: str) -> None:
        with pytest.raises(PolicyError, match=match):
            machine.connect("cursor")
        assert other.read_text() == "{}"

    path.symlink_to(other)
    refused("is a symlink")
    path.unlink()
    os.link(other, path)
    refused("second name")
    path.unlink()
    path.mkdir()
    refused("not a file")
    path.rmdir()
    path.write_bytes(b"\xff")
    refused("not UTF-8")
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    refused("is a symlink")
    path.parent.unlink()
    path.parent.write_text("")
    refused("not a directory")


@pytest.mark.needs_root
def test_files_of_other_users_are_refused(machine: Machine) -> None:
    path = machine.home / ".cursor/mcp.json"
    path.parent.mkdir()
    path.write_text("{}")
    os.chown(path, 12345, 12345)
    with pytest.raises(PolicyError, match="another user"):
        machine.connect("cursor")
    os.chown(path, 0, 0)
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(PolicyError, match="another user"):
        machine.connect("cursor")
    assert path.read_text() == "{}"


def test_a_file_that_changes_between_the_diff_and_the_change_is_not_overwritten(machine: Machine) -> None:
    path = machine.home / ".cursor/mcp.json"
    path.parent.mkdir()
    path.write_text("{}")
    changes = machine.connections.plan(machine.targets("cursor", "user"))
    path.write_text('{"x": 1}')
    with pytest.raises(PolicyError, match="changed meanwhile"):
        machine.connections.make(changes)
    assert path.read_text() == '{"x": 1}'


def test_a_crash_leaves_the_old_text_or_the_new_one_and_can_be_taken_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each system call that changes something fails once; then the program comes again."""
    written(machine, "codex")
    before = tree(machine.home)
    machine.connect("codex")
    after = tree(machine.home)
    machine.undo("codex")
    real, calls = os.rename, 0

    for failing in range(20):
        calls = 0

        def rename(source: str, target: str, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise KeyboardInterrupt
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        try:
            machine.connect("codex")
            crashed = False
        except KeyboardInterrupt:
            crashed = True
        monkeypatch.setattr(os, "rename", real)
        for name, text in tree(machine.home).items():
            assert text in (before.get(name), after[name]), "a file is whole"
        machine.undo("codex")
        assert tree(machine.home) == before
        if not crashed:
            break
    else:
        pytest.fail("it never succeeded")
    assert failing > 3, "the control: it was cut off in the middle"


def test_a_broken_record_is_an_error(machine: Machine, tmp_path: Path) -> None:
    machine.connect("cursor")
    (record,) = (tmp_path / "records").iterdir()
    record.write_text("{}")
    with pytest.raises(PolicyError, match="is broken"):
        machine.undo("cursor")


def test_the_hook_in_the_settings_answers(machine: Machine) -> None:
    """The command as it stands in the file, started as the program starts it."""
    machine.connect("claude")
    command = json.loads((machine.home / ".claude/settings.json").read_text())["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
    event = {"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "ls"}, "cwd": str(machine.project)}
    done = subprocess.run(["sh", "-c", command], input=json.dumps(event).encode(), capture_output=True, check=False)
    assert done.returncode == 0 and b"shell-prefix" in done.stdout, done
    assert subprocess.run(["sh", "-c", command], input=b"garbage", capture_output=True, check=False).returncode == 2
