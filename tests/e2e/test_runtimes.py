"""`--runtime`: where code runs, as its user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import compiled
from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

OUTSIDE = b"import sys; print('linux' in sys.implementation._multiarch)"


@pytest.fixture
def set_up(project: Path, tmp_path: Path) -> Shell:
    """Somebody who has run `agent-sandbox setup`."""
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")})


def test_code_runs_where_it_is_told_to_and_else_in_the_interpreter_of_the_caller(set_up: Shell) -> None:
    for options, said in (((), b"True\n"), (("--runtime", "wasm"), b"False\n"), (("--runtime=auto", "--throw-away"), b"False\n")):
        assert set_up("code", "-", "-l", "python", *options, stdin=OUTSIDE).stdout == said


@pytest.mark.both
def test_what_the_lighter_one_writes_is_kept_like_any_other_change(set_up: Shell) -> None:
    assert set_up("code", "-", "-l", "python", "--runtime", "wasm", stdin=b"open('made.txt', 'w').write('inside')").returncode == 0
    assert set_up("run", "cat made.txt").stdout == b"inside"
    assert b"made.txt" in set_up("diff", "--name-only").stdout


def test_a_command_runs_on_the_machines_own_programs(set_up: Shell) -> None:
    assert set_up("run", "--runtime", "auto", "echo hello").stdout == b"hello\n"
    refused = set_up("run", "--runtime", "wasm", "echo hello")
    assert refused.returncode == 125 and "no other program" in words(refused)


def test_explain_says_where_and_why_and_runs_nothing(set_up: Shell, project: Path) -> None:
    (project / "work.py").write_text("print(open('made.txt', 'w'))")
    lines = set_up("code", "--explain", "--runtime", "auto", "--throw-away", "work.py").stdout.decode().splitlines()
    assert lines[0].startswith("runtime: wasm: the cheapest that gives every required guarantee")
    assert lines[1] == "passed over: process: costs more"
    assert any(line.startswith("overlay ") for line in lines)
    assert set_up("code", "--explain", "work.py").stdout.startswith(b"runtime: process: ")
    assert set_up("diff").stdout == b""


def test_the_document_of_a_run_has_its_route(set_up: Shell) -> None:
    lacking = b"import importlib, sys\nimportlib.import_module('multi' + sys.byteorder[:0] + 'processing.synchronize')"
    done = set_up("code", "-", "-l", "python", "--runtime", "auto", "--throw-away", "--json", stdin=lacking)
    document = json.loads(done.stdout)
    assert (document["exit"], document["runtime"]) == (0, "process")
    assert document["route"]["passed_over"][0]["runtime"] == "wasm"
    assert document["route"]["fell_forward"].startswith(("ModuleNotFoundError", "ImportError"))


def test_before_it_is_set_up_the_choice_falls_on_the_other_and_the_wish_is_refused(shell: Shell) -> None:
    assert shell("code", "-", "-l", "python", "--runtime", "auto", stdin=OUTSIDE).stdout == b"True\n"
    refused = shell("code", "-", "-l", "python", "--runtime", "wasm", stdin=OUTSIDE)
    assert refused.returncode == 125 and "agent-sandbox setup" in words(refused)
    row = next(row for row in json.loads(shell("doctor", "--json").stdout)["rows"] if row["name"] == "wasm")
    assert (row["status"], row["remedy"]) == ("missing", "run: agent-sandbox setup") and "not been compiled" in row["found"]


def test_a_runtime_that_there_is_not_is_refused_by_name(shell: Shell) -> None:
    refused = shell("run", "--runtime", "vm", "true")
    assert refused.returncode == 2 and "'vm'" in words(refused) and "process, wasm, container, gvisor, microvm, auto" in words(refused)
