"""The review tells the truth: whatever shows what a promotion would write shows all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox import Workspace
from tests.e2e.program import Shell, tree
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
