"""Where only some tools are allowed, these work as ever, and nothing else is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import Denied, LaunchFailed
from agent_sandbox.kernel import landlock
from agent_sandbox.policy.model import ProgramRules, cloned
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.security.harness import Box


def gated(box: Box, *allowed: str, shell: bool = False, denied: tuple[str, ...] = ()) -> Box:
    """The same box, in which only these tools may be started."""
    return box.with_(policy=cloned(masks=box.rules.masks, limits=box.limits, programs=ProgramRules((allowed,), denied, lines=shell)))


def unread(box: Box, line: str) -> Outcome:
    """Run a line that reaches the shell as its input: nobody has looked at it beforehand."""
    return box.run("bash", "-s", stdin=line.encode())


def said(outcome: Outcome) -> str:
    assert outcome.exit.code == 0, (outcome.exit, outcome.stderr.decode(errors="replace"), outcome.refused)
    return outcome.stdout.decode()


def test_git_works_with_all_that_belongs_to_it(box: Box) -> None:
    subprocess.run(["git", "init", "-q", box.project], check=True)
    lines = (
        "git add -A && git -c user.name=a -c user.email=a@b commit -q -m one && git log --format=%s; "
        "git ls-remote http://127.0.0.1:1/none; git grep -c hello"
    )
    outcome = gated(box, "git", shell=True).shell(lines)
    assert said(outcome).splitlines()[0] == "one" and "greeting.txt" in outcome.stdout.decode()
    assert b"Failed to connect" in outcome.stderr, "its helper for http has started, and there is no network"


def test_an_interpreter_loads_its_modules(box: Box) -> None:
    python = gated(box, "python3")
    assert said(python.run("/usr/bin/python3", "-c", "import ssl, sqlite3, ctypes, _decimal; print('loaded')")) == "loaded\n"
    assert any("runs what it is given" in note for note in python.run("/usr/bin/python3", "-c", "").notes)
    assert said(gated(box, "git").python("import sqlite3, ssl; print('loaded')")) == "loaded\n", "so does code that needs none to start"


def test_what_is_not_allowed_is_not_found(box: Box) -> None:
    inside = unread(gated(box, "ls", shell=True), "npm install; echo $?; /usr/bin/id; echo $?; ls /usr/bin; type -a id cat")
    lines = inside.stdout.decode().split()
    assert lines[:2] == ["127", "127"] and {"ls", "bash", "sh"} <= set(lines[2:]) <= {"ls", "bash", "sh", "dash"}
    assert "id" in said(box.shell("ls /usr/bin")).split(), "the control arm: without such rules it is there"


def test_a_command_that_is_not_allowed_is_denied_before_anything_runs(box: Box) -> None:
    with pytest.raises(Denied, match="does not allow the program 'npm'"):
        gated(box, "git", "curl").run("npm", "install")
    with pytest.raises(Denied, match="'bash'"):
        gated(box, "git").run("bash", "script.sh")
    assert said(gated(box, "git").shell("git --version")), "a line has a shell that reads it"


def test_a_script_of_the_project_runs_through_an_allowed_interpreter_only(box: Box) -> None:
    (box.project / "build.sh").write_text("#!/bin/bash\necho built\n")
    (box.project / "build.sh").chmod(0o755)
    inside = gated(box, "git", shell=True)
    assert unread(inside, "./build.sh").exit.code == 126
    assert said(inside.shell("bash build.sh")) == "built\n"
    assert said(box.shell("./build.sh")) == "built\n", "the control arm"


def test_denied_tools_are_not_there_and_the_rest_is(box: Box) -> None:
    policy = cloned(masks=box.rules.masks, limits=box.limits, programs=ProgramRules(denied=("basename", "mkfs*")))
    line = "basename a/b; echo $?; /bin/basename a/b; dirname a/b; cp /bin/true ./mine && ./mine && echo mine"
    inside = unread(box.with_(policy=policy), line)
    assert inside.stdout.decode().split() == ["127", "a", "mine"]


# Every mount with its options, but for devices, which hold no code.
_MOUNTS = """
import json, os, stat
mounts = [line.split()[4:6] for line in open("/proc/self/mountinfo")]
print(json.dumps({place: options.split(",") for place, options in mounts if not stat.S_ISCHR(os.stat(place).st_mode)}))
"""


def test_nothing_that_is_mounted_can_be_executed_but_single_read_only_files(box: Box) -> None:
    mounts = gated(box, "git").probe(_MOUNTS)
    code = [place for place, options in mounts.items() if "noexec" not in options]
    assert code and all("ro" in mounts[place] and os.path.isfile(place) for place in code)
    assert "/usr/bin/git" in code and not any(place.startswith(str(box.project)) for place in code)
    assert any("noexec" not in options for place, options in box.probe(_MOUNTS).items() if place in ("/", "/usr")), "the control arm"


def test_a_kept_sandbox_is_not_changed_by_what_may_be_executed_in_it(box: Box, project: Path) -> None:
    kept = box.kept
    place = project / "bin"
    place.mkdir()
    said(kept.shell(f"cp /bin/true {place}/mine && {place}/mine && ln -s /proc {project}/p"))
    before = kept.changes()
    inside = gated(kept, "git", shell=True)
    assert unread(inside, f"{place}/mine").exit.code == 126, "what an earlier run wrote cannot be executed now"
    assert said(inside.run("git", "--version")) and inside.changes() == before


@pytest.mark.needs_root
def test_a_tool_that_the_sandbox_has_removed_or_replaced_is_the_machines_or_none(box: Box) -> None:
    kept = box.kept
    said(kept.shell("rm /usr/bin/basename && cp /bin/true /usr/bin/dirname && rm -r /usr/games && ln -s /tmp /usr/games && ln -s /proc /p"))
    before = kept.changes()
    inside = gated(kept, "basename", "dirname", shell=True)
    outcome = inside.shell("basename a/b; dirname a/b; exec 3<>/proc/self/mem && echo rewritten")
    assert outcome.stdout == b"a\n" and b"basename: command not found" in outcome.stderr, "nor has a link made /proc writable"
    assert any("/usr/bin/basename is not what it was" in note for note in outcome.notes)
    assert kept.changes() == before


def test_a_kernel_that_cannot_keep_to_it_is_an_error(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 1)
    runtime = ProcessRuntime(single_threaded=True)  # forks this very process, in which the kernel's answer has been changed
    try:
        old = box.with_(runtime=runtime)
        with pytest.raises(LaunchFailed, match="this kernel cannot keep to that: its Landlock lacks EXECUTE and WRITE_FILE"):
            gated(old, "git").run("git", "--version")
        assert said(old.run("git", "--version")), "the control arm: without such rules it runs, and says what is missing"
    finally:
        runtime.close()


def test_the_plan_says_what_can_be_executed(box: Box) -> None:
    plan = gated(box, "git").session().explain(Work(Command(("git",)), {"PATH": "/usr/bin"}))
    assert plan.code is not None and "/usr/bin/git" in plan.code.programs and plan.code.libraries
    assert any(line.startswith("nothing can be executed but ") and "/usr/bin/git," in line for line in plan.describe())
