"""The timeline of a stored sandbox: each run with --timeline is a step, whose files can be looked at and returned to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.test_schemas import checked

pytestmark = pytest.mark.once


def step(shell: Shell, script: str) -> int:
    return shell("run", "--timeline", script).returncode


def test_runs_are_steps_with_their_changes_and_errors_and_branches(shell: Shell, project: Path) -> None:
    """Steps 1 to 3, back before 2, and another run: a branch."""
    assert step(shell, "echo one > one; echo more >> greeting.txt") == 0
    assert step(shell, "rm one; echo two > two; exit 3") == 3
    assert shell("run", "--timeline", "--", "sh", "-c", "echo TWO > two").returncode == 0
    shown = checked(shell("--json", "timeline", "."))
    assert [(each["text"], each["files"], each["error"]) for each in shown["steps"]] == [
        ("echo one > one; echo more >> greeting.txt", ["greeting.txt changed", "one new"], None),
        ("rm one; echo two > two; exit 3", ["one gone", "two new"], "exited 3"),
        ("sh -c echo TWO > two", ["two changed"], None),
    ]
    assert [(each["number"], each["parent"]) for each in shown["steps"]] == [(1, 0), (2, 1), (3, 2)] and not shown["present"]
    back = checked(shell("--json", "rewind", ".", "--error"))
    assert back["step"]["number"] == 2 and back["kept"]["automatic"]
    assert shell("run", "--", "sh", "-c", "cat one; test -e two || echo none").stdout == b"one\nnone\n"
    assert shell("rewind", ".", "2").returncode == 0 and checked(shell("--json", "timeline", "."))["present"] == 2
    assert step(shell, "echo other > branch") == 0
    name = shown["sandbox"]
    lines = shell("timeline", name).stdout.decode().splitlines()
    assert "files only" in lines[0] and "4 runs" in lines[0]
    marks = {line[3:8].strip(): line[:2].strip() for line in lines[1:]}
    number = max(marks, key=int)
    assert marks == {"1": "*", "2": "✗", "3": "", number: "*"}, "the old future stays there, and did not lead here"
    assert (project / "greeting.txt").read_text() == "hello\n" and not (project / "branch").exists(), "the machine itself is not touched"


def test_files_before_a_run_are_read_listed_and_compared(shell: Shell, project: Path) -> None:
    assert step(shell, "mkdir d; echo 111 > d/f; echo a > gone") == 0
    assert step(shell, "echo 222 > d/f; rm gone greeting.txt") == 0  # of the same size: only the content differs
    assert step(shell, "rm -r d") == 0
    assert [shell("inspect", ".", number, "--file", "d/f").stdout for number in "23"] == [b"111\n", b"222\n"]
    assert shell("inspect", ".", "2", "--file", "greeting.txt").stdout == b"hello\n", "what the sandbox had not changed is as it is"
    assert shell("inspect", ".", "2", "--list", "d").stdout == b"f\n"
    for path in ("greeting.txt", "gone", "never"):
        missing = shell("inspect", ".", "3", "--file", path)
        assert missing.returncode == 1 and "No such file" in words(missing), path
    assert shell("inspect", ".", "1", "--file", "d/f").returncode == 1, "it was not there yet"
    assert shell("inspect", ".", "2", "--file", "d").returncode == 1 and shell("inspect", ".", "2", "--list", "d/f").returncode == 1
    told = checked(shell("--json", "inspect", ".", "2", "3", "--diff"))
    assert told["files"] == {"d/f": "changed", "gone": "gone", "greeting.txt": "gone"}
    assert checked(shell("--json", "inspect", ".", "3", "--diff"))["files"] == {"d": "gone", "d/f": "gone"}, "with the present"


@pytest.mark.both
def test_no_link_that_a_run_made_leads_out_of_its_state(shell: Shell, project: Path) -> None:
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "canary").write_text("canary")
    assert step(shell, f"ln -s {outside} way; ln -s {outside}/canary file; rm -r src; ln -s {outside} src; mkfifo pipe") == 0
    assert step(shell, "echo x > y") == 0
    for path in ("way/canary", "file", "src/canary", "pipe"):
        refused = shell("inspect", ".", "2", "--file", path)
        assert refused.returncode == 1 and b"canary" not in refused.stdout, path
    for path in ("way", "src"):
        assert shell("inspect", ".", "2", "--list", path).returncode == 1
    assert shell("inspect", ".", "2", "--file", str(outside / "canary")).stdout == b"canary", "the control: it can be read by its own path"


def test_what_a_stored_sandbox_cannot_do_is_said(shell: Shell) -> None:
    nothing = shell("timeline", ".")
    assert nothing.returncode == 2 and "run --timeline -- COMMAND" in words(nothing)
    assert step(shell, "echo x") == 0
    for line, why in (
        (("inspect", ".", "1"), "no variables"),
        (("inspect", ".", "1", "--eval", "1"), "no variables"),
        (("fork", ".", "1"), "no memory to fork"),
        (("rewind", ".", "7"), "no step 7"),
        (("rewind", ".", "--error"), "has failed"),
        (("timeline", ".", "--end"), "not a session"),
    ):
        refused = shell(*line)
        assert refused.returncode == 2 and why in words(refused), (line, refused)
    for option in ("--throw-away", "--diff", "--simulate"):
        refused = shell("run", "--timeline", option, "--", "true")
        assert refused.returncode == 2 and option in words(refused)
