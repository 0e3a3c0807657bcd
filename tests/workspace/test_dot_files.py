"""A home shows the dot-files that are listed as harmless, the programs that the caller can start, and its projects."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent_sandbox.workspace.dot_files import hidden_in_home, program_places
from agent_sandbox.workspace.secret_search import SearchMemory
from tests.policy.test_secret_content import pem


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def put(home: Path, *paths: str, content: str = "x") -> None:
    for path in paths:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(content)


def hidden(home: Path, *, projects: Iterable[str] = (), search_path: str = "", already: Iterable[str] = ()) -> set[str]:
    memory = SearchMemory(str(home.parent / "memory"))
    programs = program_places(search_path)
    masks = hidden_in_home(str(home), memory, projects=projects, programs=programs, hidden={str(home / path) for path in already})
    return {os.path.relpath(mask.path, home) for mask in masks}


def test_a_tool_that_nobody_has_heard_of_is_hidden_and_what_builds_need_is_not(home: Path) -> None:
    put(
        home, ".newagent/auth.json", ".config/newcloud/token", ".local/share/newtool/db", ".local/state/newtool/x", ".cache/newtool/session"
    )
    put(
        home,
        ".tokenrc",
        ".config/Code/User/globalStorage/state.vscdb",
        ".jupyter/jupyter_server_config.json",
        ".local/share/jupyter/runtime/x",
    )
    put(
        home,
        ".bashrc",
        ".gitconfig",
        ".cargo/registry/x",
        ".rustup/x",
        ".config/git/config",
        ".cache/pip/x",
        ".local/bin/tool",
        ".m2/repository/x",
    )
    put(home, ".local/share/uv/python/x", ".gradle/caches/x", ".nvm/x", ".npm/_cacache/x", "documents/.hidden/x", "readme")
    put(home, ".gradle/init.gradle", ".m2/settings.xml")
    assert hidden(home) == {
        *(".newagent", ".config/newcloud", ".local/share/newtool", ".local/state/newtool", ".cache/newtool", ".tokenrc", ".config/Code"),
        *(".jupyter/jupyter_server_config.json", ".local/share/jupyter/runtime", ".gradle/init.gradle", ".m2/settings.xml"),
    }


@pytest.mark.parametrize(
    "secret", ["export OPENAI_API_KEY=sk-" + "abcdefghijklmnopqrstuvwx1", "token = ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"]
)
@pytest.mark.parametrize("name", [".bashrc", ".gitconfig", ".config/pip/pip.conf", ".cargo/config.toml"])
def test_settings_that_are_shown_are_hidden_if_they_hold_a_token(home: Path, name: str, secret: str) -> None:
    put(home, name, content="alias ll='ls -l'\n")
    assert hidden(home) == set()
    put(home, name, content=f"alias ll='ls -l'\n{secret}\n")
    assert hidden(home) == {name}


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".config/mise/config.local.toml",
            ".config/mise/conf.d/work.toml",
            ".oh-my-zsh/custom/work.zsh",
            ".config/git/work",
            ".conda/condarc",
        ),
        *(".config/sccache/config", ".config/ccache/ccache.conf", ".config/nvim/init.lua", ".emacs.d/init.el", ".sbt/1.0/work.sbt"),
    ],
)
def test_settings_in_a_shown_directory_are_hidden_if_they_hold_a_token(home: Path, name: str) -> None:
    put(home, name, content="setting = 1\n")
    assert hidden(home) == set()
    put(home, name, content="setting = 1\ntoken = ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8\n")
    assert hidden(home) == {name}


def test_the_profile_of_an_agents_browser_is_hidden_and_the_browsers_beside_it_are_not(home: Path) -> None:
    put(home, ".cache/ms-playwright/mcp-chrome-profile/Default/Cookies", ".cache/ms-playwright/mcp-chromium-0a1b2c3/Default/Cookies")
    put(home, ".cache/ms-playwright/chromium-1181/chrome-linux/chrome", ".cache/ms-playwright/.links/x")
    assert hidden(home) == {".cache/ms-playwright/mcp-chrome-profile", ".cache/ms-playwright/mcp-chromium-0a1b2c3"}


def test_the_homes_of_snaps_are_hidden_but_for_a_project_in_one(home: Path) -> None:
    put(home, "snap/bitwarden/current/.config/Bitwarden/data.json", "snap/code/common/token", "snap/code/common/app/main.py", "other/x")
    assert hidden(home) == {"snap/bitwarden", "snap/code"}
    assert hidden(home, projects=[str(home / "snap/code/common/app")]) == {"snap/bitwarden", "snap/code/common/token"}
    assert hidden(home, projects=[str(home / "snap")]) == set(), "as a project it is searched"


def test_a_key_at_the_top_of_a_home_is_hidden_and_other_files_are_not(home: Path) -> None:
    key = pem(b"PRIVATE KEY").decode()
    put(home, "ec2.pem", "id_backup", content=key)
    put(home, "credentials.json", "notes.txt", "chain.pem")
    put(home, "documents/ec2.pem", content=key)
    assert hidden(home) == {"ec2.pem", "id_backup", "credentials.json"}
    assert hidden(home, projects=[str(home)]) == set(), "as a project it is searched"


def test_a_project_in_a_hidden_directory_stays_and_its_neighbours_do_not(home: Path) -> None:
    put(home, ".work/one/app.py", ".work/two/app.py", ".work/token", ".config/thing/plugin/x", ".config/thing/secret")
    assert hidden(home, projects=[str(home / ".work/one")]) == {".work/two", ".work/token", ".config/thing"}
    assert hidden(home, projects=[str(home / ".config/thing/plugin")]) == {".work", ".config/thing/secret"}


def test_programs_that_the_caller_can_start_stay_with_their_libraries(home: Path) -> None:
    put(home, ".tool/bin/tool", ".tool/lib/code", ".tool/credentials", ".other/bin/other", ".hidden/real/bin/linked", ".hidden/real/lib/x")
    put(home, ".hidden/token", ".local/share/agent/versions/one", ".local/share/agent/token")
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/linked").symlink_to(home / ".hidden/real/bin/linked")
    (home / ".local/bin/agent").symlink_to(home / ".local/share/agent/versions/one")
    path = os.pathsep.join((str(home / ".tool/bin"), str(home / ".local/bin"), "relative", "", "/usr/bin"))
    assert hidden(home, search_path=path) == {".tool/credentials", ".other", ".hidden/token", ".local/share/agent/token"}


def test_a_link_is_hidden_with_its_target_in_the_home_and_shown_if_that_is_elsewhere(home: Path, tmp_path: Path) -> None:
    put(home, "stuff/newtool/token", "dotfiles/app/x")
    put(tmp_path, "opt/program/x")
    (home / ".newtool").symlink_to(home / "stuff/newtool")
    (home / ".program").symlink_to(tmp_path / "opt/program")
    (home / ".app").symlink_to(home / "dotfiles/app")
    assert hidden(home, projects=[str(home / "dotfiles")]) == {".newtool"}
    assert hidden(home) == {".newtool", ".app"}


def test_a_project_is_kept_in_a_home_that_is_known_by_a_link(home: Path, tmp_path: Path) -> None:
    put(home, ".work/one/app.py", ".work/token")
    (tmp_path / "linked").symlink_to(home)
    assert hidden(tmp_path / "linked", projects=[str(home / ".work/one")]) == {".work/token"}


def test_what_has_a_mask_already_gets_no_second_one(home: Path) -> None:
    put(home, ".ssh/id_rsa", ".other/x")
    assert hidden(home, already=[".ssh"]) == {".other"}


def test_odd_names_and_missing_homes_are_no_trouble(home: Path) -> None:
    (home / os.fsdecode(b".a\n\xff")).mkdir()
    os.mkfifo(home / ".pipe")
    os.mkfifo(home / ".bashrc")
    assert hidden(home) == {os.fsdecode(b".a\n\xff"), ".pipe"}
    assert hidden(home / "missing") == set()
