"""What waits in a sandbox, as `diff` and `status` show it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once


def test_changes_in_the_project_come_first_then_those_elsewhere_and_caches_are_folded(shell: Shell, tmp_path: Path) -> None:
    outside = tmp_path.parent / "elsewhere"
    outside.mkdir()
    shell("run", f"echo x > new.txt; mkdir __pycache__; echo c > __pycache__/m.pyc; rm greeting.txt; echo y > ~/note; echo z > {outside}/z")
    shown = shell("diff").stdout.decode()
    assert shown.index("b/new.txt") < shown.index("Caches and scratch files")
    assert "deleted file mode" in shown
    assert "m.pyc" not in shown
    assert "m.pyc" in shell("diff", "--all").stdout.decode()
    assert "A +1 -0 + new.txt" in shell("diff", "--stat").stdout.decode()


def test_a_project_below_a_scratch_directory_is_not_noise_for_that(shell: Shell, project: Path) -> None:
    assert str(project).startswith("/var/tmp") or os.environ.get("TMPDIR")
    shell("run", "echo x > new.txt")
    assert [change["place"] for change in shell.json("diff")["changes"]] == ["project"]


def test_the_document_of_a_diff_names_each_change_and_keeps_odd_names(shell: Shell) -> None:
    shell("run", "touch $'odd\\377name'; chmod 600 greeting.txt")
    changes = {change["kind"]: change for change in shell.json("diff")["changes"]}
    assert changes["added"]["path_hex"].endswith(b"odd\xffname".hex())
    assert (changes["mode"]["before"]["mode"], changes["mode"]["after"]["mode"]) == ("0644", "0600")


def test_what_a_guest_wrote_cannot_act_on_the_terminal_that_shows_it(shell: Shell) -> None:
    shell("run", "printf '\\033]0;owned\\007\\n' > greeting.txt; touch $'\\033[31mred'")
    for line in (["diff"], ["diff", "--stat"], ["--json", "diff"], ["status"]):
        assert b"\x1b" not in shell(*line).stdout


def test_status_tells_what_the_sandbox_is(shell: Shell, project: Path) -> None:
    before = shell.json("status")
    assert (before["exists"], before["created"]) == (False, None)
    shell("run", "echo x > new.txt")
    after = shell.json("status")
    assert after["project"] == str(project)
    assert after["changes"]["project"] == 1
    assert after["in_use_by"] is None
    assert "1 in the project" in shell("status").stdout.decode()


def test_reset_says_when_there_was_nothing_to_forget(shell: Shell) -> None:
    assert "nothing to forget" in words(shell("reset"))


def test_projects_do_not_share_a_sandbox(shell: Shell, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / ".git").mkdir(parents=True)
    shell("run", "echo x > new.txt")
    assert Shell(other, shell.env)("diff").stdout == b""
    assert shell("--project", str(other), "diff").stdout == b""
