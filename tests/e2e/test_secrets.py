"""Secrets in projects and homes, as somebody at the command line meets them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.program import Shell, tree, words
from tests.policy.test_secret_content import HEX, pem

KEY, CERTIFICATE = pem(b"PRIVATE KEY"), pem(b"CERTIFICATE")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def at_home(shell: Shell, home: Path) -> Shell:
    return Shell(shell.cwd, {**shell.env, "HOME": str(home)})


def put(top: Path, files: Mapping[str, str | bytes]) -> None:
    for path, content in files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def git(top: Path, *line: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(top), *identity, *line], check=True, capture_output=True)


def committed(top: Path) -> None:
    git(top, "init", "-q")
    git(top, "add", "-fA")
    git(top, "commit", "-qm", "first")


def test_secrets_below_the_top_are_hidden_and_one_is_shown_when_it_is_revealed(shell: Shell, project: Path) -> None:
    put(project, {"api/.env": "CANARY-1", "api/deep/er/.env.local": "CANARY-2", "certs/tls.pem": KEY, "certs/ca.pem": CERTIFICATE})
    put(project, {"api/.env.example": "template", "keys/deploy": KEY})
    seen = shell("run", "cat api/.env api/deep/er/.env.local certs/tls.pem keys/deploy; cat api/.env.example certs/ca.pem")
    assert seen.stdout == b"template" + CERTIFICATE
    assert shell("run", "--reveal", "api/.env", "cat api/.env certs/tls.pem").stdout == b"CANARY-1"
    assert "tls.pem" in words(shell("run", "true")) and ".env" not in words(shell("run", "true")), "a remark where the content decides"


@pytest.mark.needs_user
def test_a_directory_that_cannot_be_listed_is_hidden_and_a_remark_says_so(shell: Shell, project: Path) -> None:
    put(project, {"closed/.env": "CANARY", "open/app.py": "pass"})
    (project / "closed").chmod(0o300)
    try:
        done = shell("run", "cat closed/.env; cat open/app.py")
    finally:
        (project / "closed").chmod(0o700)
    assert done.stdout == b"pass" and "closed" in words(done), "without the mask a known name could be read"


def test_a_secret_that_appears_later_is_hidden_in_the_next_run(shell: Shell, project: Path) -> None:
    put(project, {"api/app.py": "pass"})
    assert shell("run", "cat api/app.py").stdout == b"pass"
    put(project, {"api/.env": "CANARY"})
    assert shell("run", "ls -A api").stdout == b"app.py\n"


def test_a_hidden_file_is_no_deletion(shell: Shell, project: Path) -> None:
    put(project, {"api/.env": "CANARY", "api/app.py": "pass"})
    before = tree(project)
    assert shell("run", "echo x > api/new.py").returncode == 0
    assert b".env" not in shell("diff").stdout
    assert shell("promote", "--yes").returncode == 0
    assert tree(project) == {**before, **{path: facts for path, facts in tree(project).items() if path == "api/new.py"}}
    assert shell("run", "rm -r api; mkdir api; echo mine > api/.env").returncode == 0
    assert b"CANARY" not in shell("diff").stdout
    assert shell("promote", "--yes").returncode != 0
    assert (project / "api/.env").read_text() == "CANARY" and (project / "api/app.py").exists()


def test_tracked_files_are_shown_and_those_with_a_key_or_a_token_are_hidden_with_a_remark(shell: Shell, project: Path) -> None:
    put(
        project,
        {".env.development": "DB_PASSWORD=postgres\n", "web/.env.test": "DEBUG=1\n", "web/.env.ci": f"API_TOKEN={HEX[:40].decode()}\n"},
    )
    put(project, {"tests/tls.key": KEY})
    committed(project)
    put(project, {".env.local": "CANARY"})
    done = shell("run", "cat .env.development web/.env.test; cat web/.env.ci tests/tls.key .env.local")
    assert done.stdout == b"DB_PASSWORD=postgres\nDEBUG=1\n"
    assert "tls.key': git tracks it, but it holds a private key" in words(done) and "--reveal" in words(done)
    assert ".env.ci': git tracks it, but it holds a token" in words(done)
    notes = shell.json("run", "true")["notes"]
    assert len([note for note in notes if note.startswith("hidden: ")]) == 2


def test_adding_a_secret_to_the_index_inside_shows_nothing(shell: Shell, project: Path) -> None:
    committed(project)
    put(project, {".env": "CANARY"})
    forced = (
        "echo mine > .env; git -c user.name=a -c user.email=a@b add -f .env; git -c user.name=a -c user.email=a@b commit -qm x; rm .env"
    )
    assert shell("run", forced).returncode == 0
    assert b"CANARY" not in shell("run", "cat .env; git checkout -q -- .env; cat .env").stdout
    git(project, "add", "-f", ".env")
    assert b"CANARY" not in shell("run", "--throw-away", "cat .env").stdout, "nor does the real index"
    git(project, "commit", "-qm", "second")
    assert shell("run", "--throw-away", "cat .env").stdout == b"CANARY", "the control arm: HEAD has it"


def test_a_home_shows_what_builds_need_and_no_dot_file_that_is_not_listed(at_home: Shell, home: Path) -> None:
    put(
        home,
        {".newagent/auth.json": "CANARY", ".config/newcloud/token": "CANARY", ".local/share/newtool/db": "CANARY", ".tokenrc": "CANARY"},
    )
    put(home, {".cargo/registry/index": "crate", ".cache/pip/wheel": "wheel", ".bashrc": "alias x=y\n", "notes.txt": "notes"})
    secret = "cat ~/.newagent/auth.json ~/.config/newcloud/token ~/.local/share/newtool/db ~/.tokenrc"
    assert at_home("run", f"{secret}; cat ~/.cargo/registry/index ~/.cache/pip/wheel ~/notes.txt").stdout == b"cratewheelnotes"
    assert at_home("run", "--reveal", str(home / ".newagent"), "cat ~/.newagent/auth.json ~/.tokenrc").stdout == b"CANARY"
    refused = at_home("run", "--reveal", str(home / ".newagent/auth.json"), "true")
    assert refused.returncode != 0 and f"{home}/.newagent; reveal that" in words(refused)


@pytest.mark.once
def test_shell_settings_with_a_token_are_hidden_with_a_remark(at_home: Shell, home: Path) -> None:
    put(home, {".bashrc": "export GH_TOKEN=ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8\n", ".profile": "umask 022\n"})
    done = at_home("run", "cat ~/.bashrc; cat ~/.profile")
    assert done.stdout == b"umask 022\n" and "it holds a token" in words(done)


def test_a_project_below_a_hidden_directory_is_there_and_its_neighbours_are_not(at_home: Shell, home: Path) -> None:
    put(home, {".work/one/app.py": "app", ".work/token": "CANARY", ".work/two/x": "CANARY"})
    inside = Shell(home / ".work/one", at_home.env)
    assert inside("run", "cat app.py; cat ../token ../two/x").stdout == b"app"
    assert inside("run", "echo more >> app.py").returncode == 0 and inside("promote", "--yes").returncode == 0
    assert (home / ".work/one/app.py").read_text() == "appmore\n"


def test_programs_in_a_hidden_directory_of_the_search_path_can_be_started(at_home: Shell, home: Path) -> None:
    put(home, {".tool/bin/tool": "#!/bin/sh\ncat ~/.tool/lib/data\n", ".tool/lib/data": "library", ".tool/token": "CANARY"})
    (home / ".tool/bin/tool").chmod(0o755)
    started = Shell(at_home.cwd, {**at_home.env, "PATH": f"{home}/.tool/bin:{os.environ['PATH']}"})
    assert started("run", "tool; cat ~/.tool/token").stdout == b"library"
    assert at_home("run", f"{home}/.tool/bin/tool").returncode != 0, "the control arm: nobody named it"


@pytest.mark.once
def test_odd_names_do_not_stop_a_run_and_are_printed_safely(shell: Shell, project: Path) -> None:
    odd = os.fsdecode(b"a\n\x1b[31m\xff")
    put(project, {f"{odd}/tls.key": KEY, f"{odd}/.env": "CANARY"})
    committed(project)
    (project / "pipes").mkdir()
    os.mkfifo(project / "pipes/x.pem")
    done = shell("run", "cat */tls.key; ls pipes; git ls-files -d | wc -l")
    assert done.stdout.splitlines()[0] == b"x.pem" and b"PRIVATE" not in done.stdout
    assert b"\x1b[31m" not in done.stderr and b"tls.key" in done.stderr


@pytest.mark.once
def test_status_says_what_is_hidden_although_it_is_tracked(shell: Shell, project: Path) -> None:
    put(project, {"tests/tls.key": KEY})
    committed(project)
    assert "git tracks it, but it holds a private key" in words(shell("status"))
