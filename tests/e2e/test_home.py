"""From the home directory and from `/`: a run that keeps nothing works, hides the user's secrets, and changes nothing real."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words

CANARY = "canary-7b1f0c"
SECRETS = (".ssh/id_ed25519", ".aws/credentials", ".netrc", ".bash_history")
REVEALED = (".ssh", ".aws", ".netrc", ".bash_history")
IN_A_PROJECT = "work/.env"  # found by a search of the directory that stands in for the project; the whole machine is never searched


@pytest.fixture
def home(shell: Shell, tmp_path: Path) -> Path:
    """A home directory with secrets that all hold the canary, and a file that does not."""
    home = tmp_path / "home"
    for name in (*SECRETS, IN_A_PROJECT):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"TOKEN={CANARY}\n")
    (home / "notes.txt").write_text("notes\n")
    return home


def _standing(shell: Shell, place: Path, home: Path) -> Shell:
    return Shell(place, {**shell.env, "HOME": str(home)})


@pytest.mark.parametrize("where", ["home", "root"])
def test_a_throw_away_run_works_there_and_hides_the_secrets_of_the_home(shell: Shell, home: Path, where: str) -> None:
    user = _standing(shell, home if where == "home" else Path("/"), home)
    files = [str(home / name) for name in (*SECRETS, *([IN_A_PROJECT] if where == "home" else []))]
    done = user("run", "--throw-away", "--", "sh", "-c", 'pwd; cat "$0" "$@" || true', str(home / "notes.txt"), *files)
    assert done.returncode == 0 and done.stdout.decode() == f"{user.cwd}\nnotes\n", words(done)
    revealed = [word for name in REVEALED for word in ("--reveal", str(home / name))]
    shown = user("run", "--throw-away", *revealed, "--", "cat", *files[: len(SECRETS)])
    assert shown.stdout.decode().count(CANARY) == len(SECRETS), "a hidden file is there, and can be read once it is revealed"


def test_a_throw_away_run_there_changes_nothing_and_keeps_nothing(shell: Shell, home: Path, tmp_path: Path) -> None:
    user = _standing(shell, home, home)
    done = user("run", "--throw-away", "--", "sh", "-c", "echo changed > notes.txt; rm -r work; cat notes.txt")
    assert done.stdout == b"changed\n", words(done)
    assert (home / "notes.txt").read_text() == "notes\n" and (home / "work" / ".env").exists()
    assert not list((tmp_path / "state").glob("sandboxes/*"))
    shown = user("diff", "rm notes.txt")
    assert shown.returncode == 0 and b"-notes" in shown.stdout and (home / "notes.txt").exists()


@pytest.mark.once
@pytest.mark.parametrize("line", [["run", "true"], ["code", "notes.py"], ["sim", "--throw-away", "true"], ["status"], ["promote", "--yes"]])
def test_what_would_be_kept_is_refused_there_with_what_to_do_instead(shell: Shell, home: Path, tmp_path: Path, line: list[str]) -> None:
    (home / "notes.py").write_text("open('made', 'w')\n")
    user = _standing(shell, home, home)
    refused = user(*line)
    assert refused.returncode == 2, (line, words(refused))
    assert "the project would be the home directory" in words(refused)
    assert "--throw-away" in words(refused) and "--project" in words(refused)
    assert not list((tmp_path / "state").glob("sandboxes/*")) and not (home / "made").exists()
    below = _standing(shell, home / "work", home)
    shutil.copy(home / "notes.py", home / "work")
    assert below(*line).returncode == 0, "below the home directory the same line works"
