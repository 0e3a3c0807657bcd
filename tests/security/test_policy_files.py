"""Policy files that an agent, or whoever made the repository, has written: they only take away, and what is wrong with one runs nothing."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.decide import Allow, decide
from agent_sandbox.policy.files.document import parse_toml
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy_files import layers_of, under
from tests.e2e.program import Shell, words
from tests.security.conftest import Tell
from tests.security.harness import case

pytestmark = pytest.mark.once

USERS = """
[files]
write = false
denied = ["/etc/hostname"]
[processes]
commands = ["ls", "cat"]
max = 5
[network]
outbound = false
[limits]
memory_mb = 64
timeout_seconds = 5
[code]
validate = true
blocked = ["pickle.loads"]
"""
WIDENING = """
name = "harmless"
extends = "high"
requires = []
[files]
read = true
write = true
allowed = ["/"]
denied = []
allow_hidden = true
[processes]
allow = true
shell = true
commands = ["*"]
denied_commands = []
max = 1000000
[network]
outbound = true
inbound = true
hosts = ["*.com"]
[limits]
memory_mb = 1000000
timeout_seconds = 1000000
[code]
validate = false
blocked = []
"""


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


def _in_force(project: Path, users: str, tmp_path: Path) -> tuple[object, ...]:
    file = tmp_path / "policy.toml"
    file.write_text(users)
    found = under(layers_of(str(project), system="/nowhere", user=str(file)), cloned(masks=()), {})
    policy, limits = found.policy, found.policy.limits
    runs = tuple(isinstance(decide(policy, (), RunCommand.of([name]), now=0.0), Allow) for name in ("ls", "curl", "bash"))
    numbers = (limits.memory_bytes, limits.wall_seconds, limits.processes)
    network = policy.network
    return policy.files.write, policy.files.denied, runs, network, *numbers, found.validate, found.blocked


@pytest.mark.both
@case(103)
@pytest.mark.parametrize("name", ["agent-sandbox.toml", "pyproject.toml"])
def test_a_file_in_the_repository_widens_nothing(number: int, project: Path, tmp_path: Path, tell: Tell, name: str) -> None:
    before = _in_force(project, USERS, tmp_path)
    widening = WIDENING
    if name == "pyproject.toml":
        widening = "[tool.agent-sandbox]\n" + WIDENING.replace("[", "[tool.agent-sandbox.", 99).replace("= [tool.agent-sandbox.", "= [")
    (project / name).write_text(widening)
    assert _in_force(project, USERS, tmp_path) == before
    (project / name).unlink()
    assert _in_force(project, WIDENING, tmp_path) != before
    tell("what was in force before is in force after", control="the same lines as the user's own file leave more")


@case(103)
def test_there_is_no_setting_that_runs_or_redirects_anything(number: int, project: Path, tell: Tell) -> None:
    settings = ('hooks = ["evil"]', 'base_url = "http://evil"', '[mcp]\nservers = ["evil"]', 'run = "evil"', "[tool]\nx = 1")
    for setting in settings:
        (project / "agent-sandbox.toml").write_text(setting)
        with pytest.raises(PolicyError, match="there is no setting"):
            layers_of(str(project), system="/nowhere", user="/nowhere")
    (project / "agent-sandbox.toml").write_text("[files]\nwrite = false\n")
    assert layers_of(str(project), system="/nowhere", user="/nowhere").below[0].get("files.write") is False
    tell("each is refused by its name", control="a setting that there is is read")


@case(103)
def test_an_agent_that_rewrites_the_policy_of_its_project_needs_a_yes_for_that(
    number: int, project: Path, shell: Shell, tell: Tell
) -> None:
    """It may write the file in its sandbox. There it says nothing, and it leaves the sandbox only under its own name for approval."""
    (project / "agent-sandbox.toml").write_text('[processes]\ndenied_commands = ["touch"]\n')
    rewriting = "echo > agent-sandbox.toml; mkdir -p sub; echo > sub/agent-sandbox.toml; echo '[tool.agent-sandbox]' > pyproject.toml"
    shell("run", rewriting)
    assert shell("run", "touch made").returncode == 126, "what it wrote in there is not read"
    refused = shell("promote", "--yes")
    assert refused.returncode != 0 and "policy" in words(refused)
    assert "touch" in (project / "agent-sandbox.toml").read_text() and not (project / "sub").exists()
    assert shell("promote", "--yes", "--approve", "policy").returncode == 0
    assert shell("run", "touch made").returncode == 0
    tell(
        "the promotion was refused, and nothing of it was done", control="approved by the name of its class, it is carried over and counts"
    )


@case(103)
@pytest.mark.parametrize(
    "attack", ["echo > agent-sandbox/policy.toml", "rm -r agent-sandbox", "mv agent-sandbox old; mkdir new; ln -s new agent-sandbox"]
)
def test_a_project_that_holds_the_users_own_policy_needs_a_yes_to_change_it(
    number: int, project: Path, shell: Shell, tell: Tell, attack: str
) -> None:
    """Many keep ~/.config, or what it links to, under version control, and let an agent work on it."""
    own = project / "agent-sandbox/policy.toml"
    own.parent.mkdir()
    own.write_text('[processes]\ndenied_commands = ["curl"]\n')
    assert shell("run", f"{attack}; echo x > other").returncode == 0
    refused = shell("promote", "--yes")
    assert refused.returncode != 0 and "policy" in words(refused) and "curl" in own.read_text()
    assert shell("promote", "--yes", "--approve", "policy").returncode == 0
    assert not own.exists() or "curl" not in own.read_text()
    tell("the promotion was refused", control="approved by the name of its class, it is carried over")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text('token = "CANARY-in-a-secret"\nCANARY-bare\n')
    path.symlink_to(secret)


def _directory(path: Path) -> None:
    path.mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a pipe": _fifo,
    "a link to a secret": _link,
    "a directory": _directory,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "far too long": lambda path: path.write_bytes(b"#" * (2 << 20)),
    "a terabyte of nothing": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "brackets without end": lambda path: path.write_text("x = " + "[" * 500_000),
    "tables without end": lambda path: path.write_text("x = " + "{a=" * 200_000),
    "a key without end": lambda path: path.write_text(".".join(["a"] * 500_000) + " = 1"),
    "a number without end": lambda path: path.write_text("[limits]\nmemory_mb = " + "9" * 500_000),
    "another number without end": lambda path: path.write_text("[limits]\nmemory_mb = 0x" + "f" * 500_000),
    "a list without end": lambda path: path.write_text("[files]\ndenied = [" + '"/a",' * 100_000 + "]"),
    "the same key twice": lambda path: path.write_text("[files]\nwrite = false\nwrite = true\n"),
    "a mark of byte order": lambda path: path.write_bytes(b"\xef\xbb\xbf[files]\nwrite = false\n"),
    "a NUL": lambda path: path.write_bytes(b'name = "a\0b"\n'),
    "no UTF-8": lambda path: path.write_bytes(b'name = "\xff\xfe"\n'),
    "escapes in a name": lambda path: path.write_text('name = "\\u001b[2J\\u202e"\n'),
    "escapes in a key": lambda path: path.write_text('"\\u001b]0;x\\u0007\\u202e\\u2066" = 1\n'),
    "escapes in a path": lambda path: path.write_text('[files]\ndenied = ["\\u001b[2J\\u202e.."]\n'),
}  # fmt: skip


@case(103)
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_file_is_an_error_that_shows_nothing(number: int, project: Path, tell: Tell, how: str) -> None:
    path = project / "agent-sandbox.toml"
    HOSTILE[how](path)
    with pytest.raises(PolicyError) as caught:
        layers_of(str(project), system="/nowhere", user="/nowhere")
    said = str(caught.value)
    assert str(path) in said and len(said) < 1000 and "CANARY" not in said
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_text('name = "fine"\n')
    assert layers_of(str(project), system="/nowhere", user="/nowhere").below[0].name == "fine"
    tell(said.replace(str(project), "")[:100].encode("ascii", "backslashreplace").decode(), control="a file of one line is read")


@case(103)
def test_with_a_hostile_file_nothing_is_run_and_the_terminal_is_not_touched(number: int, project: Path, shell: Shell, tell: Tell) -> None:
    for how in ("a link to a secret", "escapes in a key", "a pipe"):
        HOSTILE[how](project / "agent-sandbox.toml")
        done = shell("run", "echo ran")
        assert done.returncode == 2 and done.stdout == b"" and "CANARY" not in words(done)
        assert words(done).replace("\n", "").isprintable()
        (project / "agent-sandbox.toml").unlink()
    assert shell("run", "echo ran").stdout == b"ran\n"
    tell("exit 2 and one printable message", control="without the file the command runs")


@case(103)
def test_a_file_that_changes_while_it_is_read_is_one_of_both_or_an_error(number: int, project: Path, tell: Tell) -> None:
    one, other = '[files]\nwrite = false\nname = "one"\n', '[processes]\ncommands = ["ls"]\n' + "#" * 200_000
    # `name` belongs to the top: a mixture of the two, or `one` itself, is a mistake; `other` is whole.
    path, done = project / "agent-sandbox.toml", threading.Event()
    path.write_text(other)

    def change() -> None:
        while not done.is_set():
            for content in (one, other):
                path.with_name("new").write_text(content)
                os.replace(path.with_name("new"), path)

    thread = threading.Thread(target=change)
    thread.start()
    found = set[object]()
    try:
        for _ in range(200):
            try:
                found.add(layers_of(str(project), system="/nowhere", user="/nowhere").below[0].settings)
            except PolicyError as error:
                found.add("cannot be read" in error.message or "files.name" in error.message)
    finally:
        done.set()
        thread.join()
    assert found <= {True, (("processes.commands", ("ls",)),)}
    tell("whole or refused, never a mixture, and never no file at all", control=f"{len(found)} of the two were seen")


def test_what_is_only_large_is_read_and_a_message_quotes_little() -> None:
    large = "[files]\ndenied = [" + ", ".join(f'"/secrets/{number}"' for number in range(1000)) + "]\n"
    assert len(parse_toml(large, origin="x").get("files.denied")) == 1000
    with pytest.raises(PolicyError) as caught:
        parse_toml('[limits]\nmemory_mb = "' + "secret " * 1000 + '"', origin="x")
    assert len(str(caught.value)) < 300


@pytest.mark.both
@case(104)
def test_looking_at_a_tree_runs_nothing_that_is_in_it(number: int, project: Path, tmp_path: Path, shell: Shell, tell: Tell) -> None:
    mark = tmp_path / "ran"
    spy = f"#!/bin/sh\ntouch {mark}\n"
    subprocess.run(["git", "init", "-q", project], check=True)
    for name in ("git", "python3", "less", "diff"):
        (project / name).write_text(spy)
        (project / name).chmod(0o755)
    for hook in ("pre-commit", "post-checkout", "post-index-change"):
        place = project / ".git/hooks" / hook
        place.parent.mkdir(exist_ok=True)
        place.write_text(spy)
        place.chmod(0o755)
    with (project / ".git/config").open("a") as config:
        config.write(f'[core]\nfsmonitor = {project}/git\npager = {project}/less\n[diff "x"]\ntextconv = {project}/diff\n')
    (project / ".gitattributes").write_text("* diff=x\n")
    python = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "agent_sandbox.py", "json.py", "setup.py"):
        (project / name).write_text(python)
    (project / "evil.pth").write_text(f"import os; {python}")
    (project / ".envrc").write_text(f"touch {mark}\n")
    seen = Shell(project, {**shell.env, "PATH": f".:{os.environ['PATH']}"})
    seen("run", "echo changed > greeting.txt")
    for verb in (
        ["status"],
        ["diff"],
        ["log"],
        ["policy", "explain"],
        ["policy", "lint"],
        ["policy", "test", "git status"],
        ["approve"],
        ["reset"],
    ):
        assert seen(*verb).returncode in (0, 1, 3), verb
        assert not mark.exists(), f"{verb} ran something of the project"
    subprocess.run(["git", "status"], cwd=project, capture_output=True, check=False)
    assert mark.exists(), "the control arm"
    tell("no verb that looks ran any of it", control="git status runs the monitor that the repository names")
