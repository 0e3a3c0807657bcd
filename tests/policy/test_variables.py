"""The variables that an approver is shown with their values."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.policy.variables import decides_what_runs, shown_variables

NAMING = (
    *("PATH", "GIT_SSH_COMMAND", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "NODE_OPTIONS"),
    *(
        "EDITOR",
        "VISUAL",
        "PAGER",
        "MANPAGER",
        "GIT_PAGER",
        "BASH_ENV",
        "ENV",
        "PROMPT_COMMAND",
        "GIT_ASKPASS",
        "SSH_ASKPASS",
        "SUDO_ASKPASS",
    ),
    *("GIT_EXTERNAL_DIFF", "GIT_EXEC_PATH", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0", "RUBYOPT", "PERL5OPT", "JAVA_TOOL_OPTIONS", "CC"),
    *("RUSTC_WRAPPER", "CFLAGS", "MAKEFLAGS", "npm_config_script_shell", "LESSOPEN", "IFS", "HOME", "BASH_FUNC_ls%%", "RSYNC_RSH_COMMAND"),
)


@pytest.mark.parametrize("name", NAMING)
def test_a_variable_that_decides_what_runs_is_shown(name: str) -> None:
    assert decides_what_runs(name, "anything")


@pytest.mark.parametrize(
    "name", ["GITHUB_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "TOKEN_PATH", "GIT_PASSWORD", "LD_SECRET", "API_KEY_FILE"]
)
def test_a_value_under_the_name_of_a_secret_is_never_shown(name: str) -> None:
    assert not decides_what_runs(name, "/usr/bin/anything") and not decides_what_runs(name, "() { evil; }")


@pytest.mark.parametrize("value", ["/opt/evil/bin", "./evil", "~/evil:/usr/bin", "() { evil; }"])
def test_a_value_that_is_a_path_or_a_function_is_shown_under_any_name(value: str) -> None:
    assert decides_what_runs("ANYTHING", value) and not decides_what_runs("ANYTHING", "words about /a/path")


def test_a_header_that_git_is_given_is_not_shown_and_a_program_is() -> None:
    header = {"GIT_CONFIG_KEY_0": "http.extraHeader", "GIT_CONFIG_VALUE_0": "Authorization: Bearer canary"}
    assert dict(shown_variables(header)) == {"GIT_CONFIG_KEY_0": "http.extraHeader"}
    program = {"GIT_CONFIG_KEY_0": "core.sshCommand", "GIT_CONFIG_VALUE_0": "sh -c evil"}
    assert dict(shown_variables(program)) == program


def test_the_details_for_an_approver_have_these_values_escaped_and_a_digest_of_all() -> None:
    env = {"PATH": "/opt/evil\n  PATH=/usr/bin\x1b[2K", "GITHUB_TOKEN": "canary", "LANG": "C"}
    lines = Work(Command(("git", "push")), env).text().split("\n")
    assert lines[:2] == ["given: 1 of 3 variables, which name programs or paths:", "  PATH=/opt/evil\\x0a  PATH=/usr/bin\\x1b[2K"]
    assert lines[2].startswith("given: variables and input with the digest ") and len(lines) == 3 and "canary" not in "".join(lines)
    other = Work(Command(("git", "push")), {**env, "GITHUB_TOKEN": "another"}).text().split("\n")
    assert other[:2] == lines[:2] and other[2] != lines[2], "a value that is not shown counts, too"
    assert Work(Code("python", "x = 1"), {"LANG": "C"}).text().split("\n")[0] == "x = 1"
