"""`allowed_commands`, `denied_commands` and `allow_shell` of the SDK."""

from __future__ import annotations

from agent_sandbox import Sandbox, SandboxStatus, shell

STARTS = """
import shutil, subprocess
def tried(*argv):
    try:
        return subprocess.run(argv, capture_output=True, text=True).returncode
    except OSError as error:
        return type(error).__name__
print(tried("git", "--version"), tried("ls"), tried("/usr/bin/ls"), tried("sh", "-c", "true"))
"""


def test_code_starts_the_programs_that_are_allowed_and_no_others() -> None:
    with Sandbox(allow_subprocess=True, allowed_commands=["git"], allow_shell=False) as sandbox:
        assert sandbox.execute(STARTS).stdout.split() == ["0", "FileNotFoundError", "FileNotFoundError", "FileNotFoundError"]
    with Sandbox(allow_subprocess=True, allowed_commands=["git"]) as sandbox:
        assert sandbox.execute(STARTS).stdout.split()[3] == "0", "a shell is there unless it is ruled out"
    with Sandbox(allow_subprocess=True, allowed_commands=["git"], validate_code=False) as sandbox:  # where nobody sees it coming
        assert sandbox.execute("source /dev/stdin", language="bash", stdin="git --version && ls").exit_code == 127
    with Sandbox(allow_subprocess=True) as sandbox:
        assert sandbox.execute(STARTS).stdout.split() == ["0"] * 4, "the control arm"


def test_a_program_that_is_not_allowed_is_a_refusal_with_its_remedy() -> None:
    with Sandbox(allow_subprocess=True, allowed_commands=["git"], denied_commands=["rm"], allow_shell=False) as sandbox:
        for work, missing in (
            (["npm", "install"], "--allow git,npm"),
            (["rm", "x"], "take rm off"),
            (shell("git log"), "'bash'"),
        ):
            refused = sandbox.run(work)
            assert refused.status is SandboxStatus.FAILED and missing in (refused.error or "")
        assert sandbox.run(["git", "--version"]).stdout.startswith("git version")


def test_code_in_other_languages_runs_on_its_interpreter() -> None:
    with Sandbox(allow_subprocess=True, allowed_commands=["git"], max_memory_mb=None, max_processes=None) as sandbox:
        code = "const s = require('child_process').spawnSync; console.log(s('git', ['--version']).status, s('ls').status)"
        assert sandbox.execute(code, language="javascript").stdout == "0 null\n"
