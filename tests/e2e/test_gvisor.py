"""`--runtime gvisor`, as its user sees it."""

from __future__ import annotations

import json
from pathlib import Path

from tests import gvisor
from tests.e2e.program import Shell, words


def test_a_run_on_it_has_its_exit_code_and_its_changes_are_reviewed_like_any_other(shell: Shell, project: Path) -> None:
    gvisor.runtime().close()
    done = shell("run", "--runtime", "gvisor", "--", "sh", "-c", "uname -v; cat; echo inside > made.txt; ls -d /; exit 3", stdin=b"given\n")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 3 and lines[1:] == ["given", "/"] and lines[0] not in Path("/proc/version").read_text(), words(done)
    assert b"made.txt" in shell("diff", "--name-only").stdout and not (project / "made.txt").exists()
    code = shell("code", "-", "-l", "python", "--runtime", "gvisor", stdin=b"print(open('made.txt').read(), end='')")
    assert (code.returncode, code.stdout) == (0, b"inside\n"), words(code)


def test_a_policy_that_requires_a_kernel_in_user_space_goes_there_or_nowhere(shell: Shell, tmp_path: Path) -> None:
    strict = tmp_path / "strict.toml"
    strict.write_text('requires = ["user-space-kernel"]\n')
    refused = shell("run", "--policy", str(strict), "--runtime", "process", "true")
    assert refused.returncode == 125 and "user-space-kernel" in words(refused)
    usable = gvisor.runtime()
    usable.close()
    lines = shell("run", "--policy", str(strict), "--runtime", "auto", "--explain", "true").stdout.decode().splitlines()
    assert lines[0].startswith("runtime: gvisor: the cheapest that gives every required guarantee")
    assert "passed over: process: does not give user-space-kernel" in lines
    document = shell.json("run", "--policy", str(strict), "--runtime", "auto", "--throw-away", "true")
    assert (document["exit"], document["runtime"]) == (0, "gvisor"), json.dumps(document)


def test_without_that_requirement_the_lighter_one_is_taken(shell: Shell) -> None:
    document = shell.json("run", "--runtime", "auto", "--throw-away", "true")
    assert (document["exit"], document["runtime"]) == (0, "process")
