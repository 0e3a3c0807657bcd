"""The forms of `diff`, what a command would change, and what a terminal is spared."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.workspace.changes import is_noise
from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting
from tests.workspace.view.hidden import ESCAPED

pytestmark = pytest.mark.once

OUR_COLOURS = re.compile(rb"\x1b\[(?:[0-9]+(?:;[0-9]+)*)?m")
FORMS = [["diff"], ["diff", "--all"], ["diff", "--stat"], ["diff", "-s"], ["diff", "--name-only"], ["--json", "diff"], ["status"]]


def raw(character: str) -> bytes:
    return character.encode(errors="surrogateescape")


CANARIES = {what: raw(character) for what, character in ESCAPED.items() if character != "\ud800"}


def octal(content: bytes) -> str:
    return "".join(f"\\{byte:03o}" for byte in content)


def plant(shell: Shell) -> None:
    """A file with every character that must not be shown as it is, and a file named with each."""
    content = b"".join(b"line " + canary + b" end\n" for canary in CANARIES.values())
    names = [f"touch \"$(printf 'n{octal(canary)}m')\"" for canary in CANARIES.values() if canary != b"\0"]
    assert (
        shell("run", f"printf '{octal(content)}' > planted.py; printf '{octal(content)}' > greeting.txt; " + "; ".join(names)).returncode
        == 0
    )


def test_nothing_a_guest_wrote_reaches_a_pipe_or_a_terminal_as_it_is(shell: Shell) -> None:
    plant(shell)
    for form in FORMS:
        shown = shell(*form).stdout
        assert [what for what, canary in CANARIES.items() if canary in shown] == [], form
    for form in FORMS:
        with sitting(shell, *form, "--no-pager") if form != ["status"] else sitting(shell, *form) as person:
            assert person.end() == 0
            shown = OUR_COLOURS.sub(b"", person.seen.replace(b"\r\n", b"\n"))
        assert [what for what, canary in CANARIES.items() if canary in shown] == [], form
        assert b"\x1b" not in shown


def test_a_line_or_a_name_that_imitates_ours_is_told_from_it(shell: Shell) -> None:
    shell("run", "printf -- '-- a/x\\n++ b/x\\n@@ -1 +1 @@\\n# Elsewhere on the machine: 0 changes\\n' > f; touch $'x\\n# Caches'")
    lines = shell("diff").stdout.decode().splitlines()
    ours = [line for line in lines if not line.startswith((" ", "-", "+"))]
    assert [line.split()[0] for line in ours] == ["diff", "new", "@@", "diff", "new", "#"] and lines[-1].startswith(
        "# Promote exactly this:"
    )
    assert "+# Elsewhere on the machine: 0 changes" in lines and "+@@ -1 +1 @@" in lines


def test_two_columns_are_as_wide_as_the_terminal(shell: Shell) -> None:
    shell("run", "echo 'good day' > greeting.txt")
    with sitting(Shell(shell.cwd, {**shell.env, "NO_COLOR": "1"}), "diff", "--side-by-side") as person:
        assert person.end() == 0
        assert f"-1 {'hello':<46}│ +1 good day".encode() in person.seen


def test_only_what_is_asked_for_is_shown(shell: Shell) -> None:
    shell("run", "mkdir docs; for f in a.py b.py docs/c.md docs/d.py; do echo x > $f; done")
    assert shell("diff", "--name-only", "--only", "*.md").stdout == b"docs/c.md\n"
    assert shell("diff", "--name-only", "--only", "docs").stdout == b"docs\ndocs/c.md\ndocs/d.py\n"
    assert shell("diff", "--name-only", "--only", "a.py", "--only", str(shell.cwd / "b.py")).stdout == b"a.py\nb.py\n"
    done = shell("diff", "--only", "../x")
    assert done.returncode == 2 and "'..'" in words(done)


def test_two_forms_at_once_are_refused(shell: Shell) -> None:
    done = shell("diff", "--stat", "--patch")
    assert done.returncode == 2 and "choose one" in words(done)
    assert shell("diff", "--raw").returncode == 2


def test_the_document_has_hunks_as_data_and_loses_no_byte(shell: Shell) -> None:
    shell("run", r"printf 'hello\ncaf\351\nend' > greeting.txt")
    (change,) = shell.json("diff")["changes"]
    assert (change["added"], change["removed"]) == (2, 0)
    (hunk,) = change["hunks"]
    assert (hunk["old_start"], hunk["old_lines"], hunk["new_start"], hunk["new_lines"]) == (1, 1, 1, 3)
    assert hunk["lines"] == [
        {"kind": "same", "text": "hello"},
        {"kind": "added", "text": "caf\ufffd", "text_base64": "Y2Fm6Q=="},
        {"kind": "added", "text": "end", "newline": False},
    ]


def test_a_directory_that_goes_is_shown_with_all_that_is_in_it(shell: Shell) -> None:
    shell("run", "rm -r src")
    shown = shell("diff").stdout.decode()
    assert "deleted dir mode" in shown and '-print("hello")' in shown
    assert shell("diff", "--stat").stdout.decode().count("src/app.py") == 1


def test_a_patch_carries_the_changes_over_to_the_real_tree(shell: Shell, project: Path) -> None:
    shell(
        "run",
        "echo more >> greeting.txt; printf '\\0\\1' > data.bin; ln -s greeting.txt link; rm src/app.py; echo x > ~/elsewhere-of-the-patch",
    )
    done = shell("diff", "--patch")
    scratch = is_noise(str(Path.home()))  # of a user who was made for these tests
    assert done.returncode == 0 and (scratch or "1 change elsewhere on the machine" in words(done))
    environment = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(project.parent)}
    shutil.rmtree(project / ".git")  # a directory that only looks like a repository
    subprocess.run(["git", "apply"], cwd=project, input=done.stdout, env=environment, check=True)
    assert (project / "greeting.txt").read_text() == "hello\nmore\n"
    assert (project / "data.bin").read_bytes() == b"\0\1"
    assert (project / "link").readlink() == Path("greeting.txt")
    assert not (project / "src/app.py").exists()
    assert b"elsewhere-of-the-patch" not in done.stdout


def test_what_is_not_in_a_patch_is_said_and_lost_content_fails(shell: Shell) -> None:
    shell("run", "mkdir empty __pycache__; echo x > __pycache__/a.pyc")
    done = shell("diff", "--patch")
    assert (done.returncode, done.stdout) == (0, b"") and "an empty directory" in words(done)
    assert "2 changes in caches of the project (--all adds them)" in words(done)
    assert b"__pycache__/a.pyc" in shell("diff", "--patch", "--all").stdout
    assert shell("diff", "--patch", "--quiet").stderr == b""
    shell("run", "mkfifo pipe")
    done = shell("diff", "--patch")
    assert done.returncode == 1 and "pipe: a fifo" in words(done)


def test_a_patch_is_not_for_a_terminal_unless_that_is_said(shell: Shell) -> None:
    shell("run", r"printf '\033[31mred\n' > red")
    with sitting(shell, "diff", "--patch") as person:
        assert person.end() == 2
        assert b"a terminal would act on them" in person.seen and b"\x1b" not in person.seen
    assert b"\x1b[31mred" in shell("diff", "--patch").stdout
    with sitting(shell, "diff", "--patch", "--raw") as person:
        assert person.end() == 0
        assert b"\x1b[31mred" in person.seen


@pytest.mark.both
@pytest.mark.parametrize("line", [["diff", "CMD"], ["--diff", "run", "CMD"], ["run", "--diff", "CMD"], ["diff", "--", "bash", "-c", "CMD"]])
def test_what_a_command_would_change_is_shown_and_nothing_is_kept(shell: Shell, project: Path, line: list[str]) -> None:
    command = "echo said; echo 'new content' > file.txt; rm greeting.txt"
    done = shell(*(command if word == "CMD" else word for word in line))
    shown = done.stdout.decode()
    assert done.returncode == 0
    assert "+new content\n" in shown and "-hello\n" in shown and "said" not in shown
    assert "said" in words(done)
    assert not (project / "file.txt").exists() and (project / "greeting.txt").exists()
    assert shell("diff").stdout == b""


def test_what_code_would_change_is_shown_too(shell: Shell) -> None:
    done = shell("code", "--diff", "-", "--language", "python", stdin=b"open('made', 'w').write('by code')")
    assert b"+by code\n" in done.stdout and shell("diff").stdout == b""


def test_a_command_that_fails_is_shown_and_its_code_passed_on(shell: Shell) -> None:
    done = shell("diff", "--stat", "echo x > new.txt; exit 7")
    assert done.returncode == 7 and b"new.txt" in done.stdout
    assert shell("diff", "--timeout", "0.2", "echo x > new.txt; sleep 100").returncode == 124
    assert shell("diff", "--", "no-such-program").returncode == 127


def test_the_document_of_a_command_says_how_it_ended(shell: Shell) -> None:
    document = json.loads(shell("diff", "--json", "echo said; echo x > new.txt; exit 7").stdout)
    assert document["run"]["exit"] == 7 and document["sandbox"] is None
    assert [change["path"] for change in document["changes"]] == [str(shell.cwd / "new.txt")]


def test_the_patch_of_a_command_is_what_git_takes(shell: Shell) -> None:
    done = shell("diff", "--patch", "echo said; echo x > new.txt")
    assert done.stdout.endswith(b"--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n") and b"said" not in done.stdout


class TestPager:
    """Long output on a terminal goes through a pager; nothing else does."""

    @pytest.fixture
    def pager(self, tmp_path: Path) -> Path:
        """A pager that says so, shows what it may need, and passes the first lines on."""
        script = tmp_path / "pager of mine"
        script.write_text('#!/bin/sh\necho "PAGED secure=$LESSSECURE"\nhead -n 3\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        return script

    def test_what_does_not_fit_goes_through_it_and_quitting_early_is_no_error(self, shell: Shell, pager: Path) -> None:
        shell("run", "seq 200000 > long; echo x > short")
        paged = Shell(shell.cwd, {**shell.env, "PAGER": f"'{pager}'", "NO_COLOR": "1"})
        with sitting(paged, "diff", "--all") as person:
            assert person.end() == 0
            assert b"PAGED secure=1\r\ndiff --git a/long b/long" in person.seen
            assert b"Traceback" not in person.seen and b"+1\r\n" not in person.seen
        for line in (["diff", "--only", "short"], ["diff", "--stat"], ["diff", "--only", "long", "--no-pager"]):
            with sitting(paged, *line) as person:
                assert person.end() == 0
                assert b"PAGED" not in person.seen
        assert b"PAGED" not in paged("diff").stdout

    def test_ours_is_asked_before_the_usual_one_and_a_missing_one_is_done_without(self, shell: Shell, pager: Path) -> None:
        shell("run", "seq 100 > long")
        ours = Shell(shell.cwd, {**shell.env, "PAGER": "false", "AGENT_SANDBOX_PAGER": f"'{pager}'"})
        with sitting(ours, "diff") as person:
            assert person.end() == 0
            assert b"PAGED" in person.seen
        for named in ("no-such-pager", "cat", "", "'"):
            with sitting(Shell(shell.cwd, {**shell.env, "PAGER": named}), "diff") as person:
                assert person.end() == 0
                assert b"+100" in person.seen and b"Traceback" not in person.seen

    def test_ctrl_c_is_the_pagers_and_leaves_no_traceback(self, shell: Shell, tmp_path: Path) -> None:
        script = tmp_path / "patient"
        script.write_text("#!/bin/sh\ntrap 'echo INTERRUPTED; exit 0' INT\ncat >/dev/null &\necho READY\nwhile :; do sleep 0.1; done\n")
        script.chmod(0o755)
        shell("run", "seq 100 > long")
        with sitting(Shell(shell.cwd, {**shell.env, "PAGER": str(script)}), "diff") as person:
            person.expect(b"READY")
            person.type(b"\x03")
            person.expect(b"INTERRUPTED")
            person.end()  # the shell around us was interrupted, too
            assert b"Traceback" not in person.seen and b"KeyboardInterrupt" not in person.seen

    @pytest.mark.skipif(shutil.which("less") is None, reason="needs less")
    def test_less_shows_colours_and_offers_no_shell(self, shell: Shell) -> None:
        shell("run", "seq 100 > long")
        environment = dict.fromkeys(("LESS", "LESSOPEN"), "")
        with sitting(Shell(shell.cwd, {**shell.env, **environment, "PAGER": "less"}), "diff") as person:
            person.expect(b"\x1b[32m+1")
            person.type(b"!")
            person.expect(b"not available")
            person.type(b"\r")
            person.type(b"q")
            assert person.end() == 0
