"""The review tells the truth: whatever shows what a promotion would write shows all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox import Workspace
from tests.e2e.program import Shell, tree, words
from tests.e2e.sitting import sitting

EVIL = "20s/.*/evil()/"
LINES = "".join(f"line_{number} = {number}\n" for number in range(1, 41))


@pytest.fixture
def moved(shell: Shell) -> Shell:
    """A project with a text in it, which a run moves and edits in one line."""
    (shell.cwd / "a.py").write_text(LINES)
    assert shell("run", f'mkdir sub; mv a.py sub/b.py; sed -i "{EVIL}" sub/b.py').returncode == 0
    return shell


def test_an_edit_inside_a_rename_is_shown_wherever_a_change_is(moved: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (("diff",), ("diff", "--all"), ("diff", "--side-by-side"), ("diff", "--patch")):
        shown = moved(*form).stdout.decode()
        assert "evil()" in shown and "line_20" in shown, form
    assert "A +1 -1 +- sub/b.py (renamed)" in moved("diff", "--stat").stdout.decode()
    assert "A +1 -1 +- sub/b.py (renamed)" in moved("promote", "--dry-run").stdout.decode()
    (edited,) = [each for each in moved.json("diff")["changes"] if each["path"].endswith("b.py")]
    assert (edited["added"], edited["removed"]) == (1, 1) and "evil()" in str(edited["hunks"])
    for name, value in moved.env.items():
        monkeypatch.setenv(name, value)
    shown = Workspace.over(moved.cwd).diff()
    assert "+evil()" in shown and "-line_20 = 20" in shown


def test_a_rename_of_which_only_one_half_is_chosen_is_shown_as_what_it_then_is(moved: Shell) -> None:
    gone = moved("diff", "--only", "a.py").stdout.decode()
    assert "renamed" not in gone and gone.count("\n-line_") == 40
    come = moved("diff", "--only", "sub/*").stdout.decode()
    assert "renamed" not in come and come.count("\n+line_") == 39 and "+evil()" in come
    assert "D +0 -40" in moved("promote", "--dry-run", "--only", "a.py").stdout.decode()


def test_the_person_who_approves_a_rename_sees_the_edit_in_it(shell: Shell) -> None:
    (shell.cwd / "a.py").write_text(LINES)
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    assert shell("run", f'mv a.py b.py; sed -i "{EVIL}" b.py').returncode == 0
    before = tree(Path(shell.cwd))
    with sitting(shell, "promote", "--yes") as person:
        person.expect(b"+evil()")
        person.type(b"n\n")
        assert person.end() != 0
    assert tree(Path(shell.cwd)) == before


PLANTED = (
    'mkdir -p pkg/__pycache__ .npm; echo "evil()" > pkg/__pycache__/helper.py; echo "evil()" > .npm/hook.js; echo "import x" > pkg/a.py'
)


def test_caches_are_folded_and_left_behind_unless_they_are_asked_for(shell: Shell) -> None:
    before = set(tree(shell.cwd))
    assert shell("run", PLANTED).returncode == 0
    folded = shell("diff").stdout.decode()
    assert "evil" not in folded and "# Caches and scratch files: 4 changes, promoted with --caches, shown with --all" in folded
    done = shell("promote", "--yes")
    assert done.returncode == 0 and "4 changes in caches stay in the sandbox (--caches)" in words(done)
    assert set(tree(shell.cwd)) - before == {"pkg", "pkg/a.py"}
    assert shell.json("status")["changes"] == {"project": 0, "elsewhere": 0, "noise": 4}, "they wait in the sandbox"
    assert shell("promote", "--yes", "--caches").returncode == 0
    assert (shell.cwd / "pkg/__pycache__/helper.py").read_text() == (shell.cwd / ".npm/hook.js").read_text() == "evil()\n"


def test_what_is_asked_for_in_caches_is_shown_line_by_line(shell: Shell) -> None:
    assert shell("run", PLANTED).returncode == 0
    assert shell("diff", "--all").stdout.decode().count("\n+evil()\n") == 2
    assert [each["added"] for each in shell.json("diff", "--all")["changes"] if each["path"].endswith(("helper.py", "hook.js"))] == [1, 1]
    preview = shell("promote", "--dry-run", "--caches").stdout.decode()
    assert "pkg/__pycache__/helper.py" in preview and ".npm/hook.js" in preview
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    with sitting(shell, "promote", "--yes", "--caches") as person:
        for file in (b".npm/hook.js", b"__pycache__/helper.py"):
            person.expect(file)
            person.expect(b"+evil()")
        person.type(b"n\n")
        assert person.end() != 0


def test_a_cache_that_was_there_before_is_named_when_it_changes(shell: Shell) -> None:
    (shell.cwd / "__pycache__").mkdir()
    (shell.cwd / "__pycache__/a.cpython-311.pyc").write_bytes(b"compiled before")
    assert shell("run", "echo x > code.py; echo again > __pycache__/a.cpython-311.pyc; echo x > __pycache__/new.pyc").returncode == 0
    lines = shell("diff").stdout.decode().splitlines()
    assert f"M {shell.cwd}/__pycache__/a.cpython-311.pyc" in lines and not any("new.pyc" in line for line in lines)
    assert shell("promote", "--yes").returncode == 0, "what an interpreter compiled needs no yes of its own: it is left behind"
    assert (shell.cwd / "code.py").exists() and (shell.cwd / "__pycache__/a.cpython-311.pyc").read_bytes() == b"compiled before"
    refused = shell("promote", "--yes", "--caches")
    assert refused.returncode == 3 and "interpreter-startup" in words(refused), "and with them it does"


def test_a_workspace_shows_what_it_would_promote(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    assert shell("run", PLANTED).returncode == 0
    workspace = Workspace.over(shell.cwd)
    assert "evil" not in workspace.diff() and "+import x" in workspace.diff()
    assert workspace.diff(everything=True).count("+evil()") == 2
    assert workspace.promote() is not None and not (shell.cwd / "pkg/__pycache__").exists()
    assert workspace.promote(caches=True) is not None and (shell.cwd / "pkg/__pycache__/helper.py").exists()


def test_what_was_typed_before_a_question_is_no_answer_to_it(shell: Shell) -> None:
    assert shell("run", "echo new > made.txt; mkdir -p .github/workflows; echo x > .github/workflows/ci.yml").returncode == 0
    with sitting(shell, "promote", before="read go;") as person:
        person.type(b"go\ny\ny\ny\n")  # the program starts when the answers are there
        person.expect(b"Promote changes of the protected kind 'ci'? [y/N]")
        person.type(b"y\ny\n")  # the second line is typed before its question is there
        person.expect(b"[y/N]")
        person.type(b"n\n")
        assert person.end() == 3
    assert not (shell.cwd / "made.txt").exists()
    with sitting(shell, "promote") as person:
        for _ in range(2):
            person.expect(b"[y/N]")
            person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / "made.txt").exists(), "and what was typed after it is"


FORGED = "printf '\\033[2J\\033[H\\033[8m# Effect plan: low risk\\n'; rm -rf src"


def test_a_program_cannot_paint_over_the_plan_that_is_asked_about(shell: Shell) -> None:
    with sitting(shell, "sim", "--no-pager", FORGED, before="read go;") as person:
        person.type(b"go\ny\n")
        person.expect(b"Carry out the plan")
        seen = person.before
        person.type(b"n\n")
        person.end()
    forged, plan = seen.index(b"low risk"), seen.index(b"high risk")
    assert forged < plan, "the real plan is on the terminal before the question, and after all that the program printed"
    assert b"\\x1b[2J" in seen and b"\x1b[2J" not in seen and b"\x1b[8m" not in seen
    assert (shell.cwd / "src").exists(), "and a yes before the question was none"
    with sitting(shell, "diff", "--no-pager", FORGED) as person:
        person.end()
        assert b"\x1b[2J" not in person.seen and b"\\x1b[2J" in person.seen
