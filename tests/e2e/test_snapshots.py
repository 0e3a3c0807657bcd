"""Snapshots as their users meet them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words


def run(shell: Shell, script: str) -> bytes:
    done = shell("run", "--", "sh", "-c", script)
    assert done.returncode == 0, done
    return done.stdout


def test_going_back_and_forth_between_snapshots_shows_each_as_it_was(shell: Shell, project: Path) -> None:
    run(shell, "echo one > greeting.txt; mkdir -p d/e; echo x > d/e/f; ln greeting.txt twin")
    assert shell("snapshot", "first").stdout == b"1\n"
    run(shell, "echo two > greeting.txt; rm -r d; mkdir d; echo y > d/new; rm twin; chmod 700 src")
    assert shell("snapshot").stdout == b"2\n"
    run(shell, "rm -rf ..?* * 2>/dev/null; true")
    assert run(shell, "ls") == b""
    assert shell("rollback", "first").returncode == 0
    assert run(shell, "cat greeting.txt twin d/e/f; ls d; stat -c %h twin").split() == [b"one", b"one", b"x", b"e", b"2"]
    assert shell("rollback", "2").returncode == 0
    assert run(shell, "cat greeting.txt; ls d; test -e twin || echo none; stat -c %a src").split() == [b"two", b"new", b"none", b"700"]
    assert (project / "greeting.txt").read_text() == "hello\n", "the machine itself is not touched"


def test_what_is_left_by_a_rollback_can_be_gone_back_to(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "first")
    run(shell, "echo work of days > file")
    gone_back = shell("rollback")
    assert gone_back.returncode == 0 and "the state before is snapshot 2" in words(gone_back)
    assert run(shell, "cat file") == b"one\n"
    again = shell.json("rollback", "before rollback to first")
    assert again["to"]["automatic"] and again["to"]["label"] == "before rollback to first"
    assert run(shell, "cat file") == b"work of days\n"


def test_a_rollback_when_nothing_ran_since_keeps_nothing(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "first")
    assert shell.json("rollback")["kept"] is None
    assert len(shell.json("snapshots")["snapshots"]) == 1


@pytest.mark.once
def test_snapshots_are_listed_as_a_tree_with_branches_and_one_can_be_forgotten(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "trunk")
    run(shell, "echo two > file")
    shell("snapshot", "left")
    shell("rollback", "trunk")
    run(shell, "echo three > file")
    shell("snapshot", "right")
    lines = shell("snapshots").stdout.decode().splitlines()
    assert [line.split("  20")[0] for line in lines] == ["1 trunk", "  2 left", "  3 right"]
    assert lines[2].endswith("<- the sandbox")
    forgotten = shell.json("snapshots", "--forget", "trunk", "--yes")
    assert [each["label"] for each in forgotten["forgotten"]] == ["trunk"]
    assert [(each["label"], each["parent"], each["head"]) for each in forgotten["snapshots"]] == [
        ("left", None, False),
        ("right", None, True),
    ]
    assert run(shell, "cat file") == b"three\n"
    shell("rollback", "left")
    assert run(shell, "cat file") == b"two\n"


def test_a_diff_after_a_rollback_is_that_of_the_snapshot(shell: Shell, project: Path) -> None:
    run(shell, "echo one > greeting.txt")
    shell("snapshot", "first")
    run(shell, "echo two > greeting.txt; echo x > other")
    shell("rollback", "first")
    document = shell.json("diff")
    assert [(change["path"], change["kind"]) for change in document["changes"]] == [(str(project / "greeting.txt"), "modified")]
    assert "+one" in shell("diff").stdout.decode()


@pytest.mark.once
def test_a_project_where_nothing_ran_has_no_snapshots_and_gets_an_empty_one(shell: Shell) -> None:
    listed = shell("snapshots")
    assert listed.returncode == 0 and listed.stdout == b"" and "no snapshots" in words(listed)
    none = shell("rollback")
    assert none.returncode == 2 and "no snapshots" in words(none)
    assert shell("snapshot", "empty").stdout == b"1\n"
    run(shell, "echo x > file")
    shell("rollback", "empty")
    assert run(shell, "test -e file || echo none") == b"none\n"


@pytest.mark.once
def test_bad_names_are_refused_and_say_what_there_is(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "first")
    for line, said in (
        (("rollback", "nope"), "1 (first)"),
        (("snapshots", "--forget", "7", "--yes"), "no snapshot '7'"),
        (("snapshot", "7"), "cannot be a number"),
        (("snapshot", "a\nb"), "not a label"),
        (("snapshot", "a", "b"), "snapshot"),
    ):
        refused = shell(*line)
        assert refused.returncode == 2 and said in words(refused), (line, refused)
    assert len(shell.json("snapshots")["snapshots"]) == 1


def test_while_a_run_goes_on_there_is_no_snapshot_and_no_rollback(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "first")
    with shell.start("run", "--", "sh", "-c", "echo up; read x; echo two > file", stdin=subprocess.PIPE) as live:
        assert live.stdout is not None and live.stdin is not None
        assert live.stdout.readline() == b"up\n"
        for line in (("snapshot",), ("rollback",), ("snapshots", "--forget", "first", "--yes")):
            refused = shell(*line)
            assert refused.returncode == 125 and "in use by process" in words(refused), refused
        assert shell("snapshots").returncode == 0 and shell("diff").returncode == 0, "who only looks is not refused"
        live.stdin.write(b"\n")
        live.stdin.close()
        assert live.wait() == 0
    assert run(shell, "cat file") == b"two\n"


def test_a_reset_forgets_snapshots_too(shell: Shell) -> None:
    run(shell, "echo one > file")
    shell("snapshot", "first")
    assert shell("reset", "--yes").returncode == 0
    assert shell.json("snapshots")["snapshots"] == []
    assert run(shell, "test -e file || echo none") == b"none\n"


def test_processes_that_make_snapshots_and_runs_at_once_lose_nothing(shell: Shell) -> None:
    run(shell, "echo start > log")
    busy = [shell.start("run", "--", "sh", "-c", f"echo run-{n} >> log") for n in range(3)]
    busy += [shell.start("snapshot", f"s{n}") for n in range(3)]
    made = 0
    for each in busy:
        with each as process:
            process.communicate()
            made += process.args[-2] == "snapshot" and process.returncode == 0  # type: ignore[index]
    assert sorted(run(shell, "cat log").split()) == [b"run-0", b"run-1", b"run-2", b"start"]
    assert len(shell.json("snapshots")["snapshots"]) == made
    for each in shell.json("snapshots")["snapshots"]:
        assert shell("rollback", str(each["id"])).returncode == 0
        assert run(shell, "head -1 log") == b"start\n"
