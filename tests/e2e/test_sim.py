"""`sim` and `--simulate`: what a command would do, and nothing of it done."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from agent_sandbox.cli.render.messages import RESET
from tests.e2e.program import Shell, tree, words
from tests.e2e.sitting import sitting
from tests.workspace.view.hidden import ESCAPED

pytestmark = pytest.mark.once

OUR_COLOURS = re.compile(rb"\x1b\[(?:[0-9]+(?:;[0-9]+)*)?m")
CANARIES = {what: text.encode(errors="surrogateescape") for what, text in ESCAPED.items() if text not in ("\ud800", "\0")}


@pytest.fixture
def repository(shell: Shell) -> Shell:
    """A real repository, with something staged."""
    (shell.cwd / ".git").rmdir()
    mine = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@localhost", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@localhost"}
    typed = Shell(shell.cwd, {**shell.env, **mine})
    script = "git init -q -b main && git config user.name A && git config user.email a@localhost && git add . && git commit -qm first"
    subprocess.run(["bash", "-c", f"{script} && echo more >> greeting.txt && git add ."], cwd=shell.cwd, env=typed.environment, check=True)
    return typed


def test_a_commit_is_told_in_words_and_not_made(repository: Shell) -> None:
    before = tree(repository.cwd)
    done = repository("--simulate", "run", "git commit -m 'fix: bug'")
    assert done.returncode == 0, words(done)
    shown = done.stdout.decode()
    assert re.search(r"^git: would make a commit on main \([0-9a-f]{7} to [0-9a-f]{7}\): commit: fix: bug$", shown, re.MULTILINE)
    assert re.search(r"^and \d objects of ", shown, re.MULTILINE) and "objects/" not in shown
    assert "medium: it changes what git has recorded" in shown
    assert b"[main " in done.stderr  # what git itself says goes where diff sends it
    assert tree(repository.cwd) == before
    assert repository("diff").stdout == b"" and repository.json("status")["changes"]["project"] == 0


def test_each_effect_has_its_risk(shell: Shell) -> None:
    (shell.cwd / "old").mkdir()
    for number in range(120):
        (shell.cwd / "old" / str(number)).touch()
    line = (
        "rm -r old; mkdir -p .github/workflows; echo x > .github/workflows/x.yml; echo x > f; cp f s; chmod u+s s; ln -s /etc out; exit 3"
    )
    document = shell.json("sim", line)
    assert document["schema"] == "agent-sandbox/simulation/1" and document["ended"]["code"] == 3
    risks = {os.path.basename(each["path"]): each["risk"] for each in document["changes"]}
    assert {name: risks[name]["level"] for name in ("old", "x.yml", "f", "s", "out")} == {
        "old": "high",
        "x.yml": "high",
        "f": "low",
        "s": "high",
        "out": "high",
    }
    assert "120 entries" in risks["old"]["why"] and "rights of its owner" in risks["s"]["why"]
    assert document["risk"]["level"] == "high"
    # The same command line without any of this is nothing to mind.
    assert shell.json("sim", "echo x > f")["risk"]["level"] == "low"


def test_what_cannot_be_read_is_still_listed_and_nothing_to_rely_on(shell: Shell) -> None:
    document = shell.json("sim", "mkdir d; echo x > d/hidden; chmod 000 d/hidden d; echo x > plain")
    assert [os.path.basename(each["path"]) for each in document["changes"]] == ["d", "hidden", "plain"]
    # Root reads it all the same, and what nobody can read is not called harmless.
    assert (document["risk"]["level"], document["kept"]) == (("low", True) if os.geteuid() == 0 else ("high", False))


@pytest.mark.slow
def test_a_command_is_judged_by_its_text_as_well(repository: Shell) -> None:
    predicted = repository.json("sim", "git push --force nowhere main")["predicted"]
    assert {"destroys", "network"} <= {each["effect"] for each in predicted}
    assert any(each["risk"]["level"] == "high" for each in predicted)


@pytest.mark.both
def test_what_waits_in_the_sandbox_is_there_and_stays_as_it_is(shell: Shell) -> None:
    shell("run", "echo waiting > new.txt; mkdir d; echo one > d/one; echo kept > kept.txt")
    waiting, before = shell("diff").stdout, tree(shell.cwd)
    done = shell("sim", "cat new.txt; echo more >> new.txt; echo two > d/two; rm kept.txt; ls d")
    assert done.returncode == 0 and done.stderr == b"waiting\none\ntwo\n"
    assert b"+waiting\n+more\n" in done.stdout and b"b/d/two" in done.stdout and b"b/d/one" not in done.stdout
    assert b"kept.txt is undone" in done.stdout
    assert shell("diff").stdout == waiting and tree(shell.cwd) == before
    bare = json.loads(shell("--json", "sim", "--throw-away", "cat new.txt || touch made.txt").stdout)
    assert bare["kept"] and not bare["on_the_sandbox"] and [each["path"] for each in bare["changes"]] == [str(shell.cwd / "made.txt")]
    assert shell("carry-out", bare["digest"], "--yes").returncode == 0, "it has nothing to do with what waits"


@pytest.mark.slow
def test_code_can_be_simulated_too_and_a_program_without_a_shell(shell: Shell) -> None:
    (shell.cwd / "write.py").write_text("open('made.txt', 'w').write('x')\n")
    assert b"made.txt" in shell("code", "--simulate", "write.py").stdout
    done = shell("simulate", "--", "bash", "-c", "touch made.txt; exit 7")
    assert done.returncode == 7 and b"made.txt" in done.stdout and b"it failed" in done.stdout
    assert not (shell.cwd / "made.txt").exists()


@pytest.mark.slow
def test_a_variable_that_looks_secret_is_named_without_its_value(shell: Shell) -> None:
    done = shell("sim", "--env", "API_TOKEN=hunter2-value", "--env", "PLAIN=word", "true")
    assert b"variable API_TOKEN" in done.stdout and b"hunter2-value" not in done.stdout and b"PLAIN" not in done.stdout


@pytest.mark.slow
def test_options_that_mean_something_else_are_refused(shell: Shell) -> None:
    for option in (["--diff"], ["--watch-reads"]):
        done = shell("run", "--simulate", *option, "true")
        assert done.returncode == 2 and "does not go with a simulation" in words(done)


@pytest.mark.slow
def test_nothing_that_a_guest_chose_reaches_a_terminal_as_it_is(shell: Shell) -> None:
    names = [b"n" + canary + b"m" for canary in CANARIES.values() if b"/" not in canary]
    octal = ["".join(f"\\{byte:03o}" for byte in name) for name in names]
    plant = "; ".join(f"touch \"$(printf '{name}')\"; : < \"/root/.ssh/$(printf '{name}')\"" for name in octal)
    line = f"exec 2>/dev/null; {plant}; printf '{octal[0]}' > content.txt; mkdir -p .git/hooks; touch \".git/hooks/$(printf '{octal[0]}')\""
    for form in ([], ["--json"]):
        shown = shell("sim", *form, line).stdout
        assert shown and [what for what, canary in CANARIES.items() if canary in shown] == [], form
    with sitting(shell, "sim", "--no-pager", "--quiet", line) as person:
        person.end()
        shown = OUR_COLOURS.sub(b"", person.seen.replace(b"\r\n", b"\n").replace(RESET, b"", 1))
    assert b"Effect plan" in shown and [what for what, canary in CANARIES.items() if canary in shown] == []
