"""Variables that make other programs run something are part of what a command line asks for; ordinary ones are not."""

from __future__ import annotations

import pytest

from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.effects import EffectKind


@pytest.mark.parametrize(
    ("line", "tool"),
    [
        ("GIT_SSH_COMMAND='curl x' git fetch", "curl"),
        ("export PAGER='sh -c date'; git log", "date"),
        ("complete -C 'rm x' ls; compgen -C 'touch y'", "touch"),
        ("mapfile -C 'rm z' -c 1 lines", "rm"),
        ("hash -p /usr/bin/curl ls; ls", "curl"),
    ],
)
def test_a_command_in_a_variable_or_a_callback_is_a_program(line: str, tool: str) -> None:
    assert tool in understand(line).tools


@pytest.mark.parametrize(
    "line",
    [
        "LD_PRELOAD=./x.so ls",
        "BASH_ENV=./x bash -c true",
        "BASH_FUNC_ls='() { date; }' bash -c ls",
        "PS1='$(date)' bash -i",
        "NODE_OPTIONS='--require ./x.js' node y.js",
        "PATH=/tmp/bin:$PATH ls",
        "enable -f ./x.so x",
    ],
)
def test_what_is_loaded_by_a_variable_runs_code(line: str) -> None:
    assert EffectKind.RUNS_CODE in understand(line).kinds


@pytest.mark.parametrize(
    "line", ["EDITOR=vim true", "PAGER= true", "LD_PRELOAD= true", "PS1='> ' true", "PATH=/usr/bin:/opt/x true", "A=1 true"]
)
def test_an_ordinary_variable_is_nothing(line: str) -> None:
    found = understand(line)
    assert not found.effects and not found.tools, "true is a builtin"


@pytest.mark.parametrize("line", ["echo ${x@P}", "x='a[$(date)]'; (( x ))", "declare -i 'n=a[$(date)]'", "let 'a[$(date)]'"])
def test_a_text_with_a_command_in_it_is_said_to_be_unknown(line: str) -> None:
    found = understand(line)
    assert found.unknown or "date" in found.tools


@pytest.mark.parametrize(
    ("line", "tool"),
    [
        (r"printf '\x72m x' | sh", "rm"),
        (r"printf 'date\trm\n' | sh", "date"),
        (r"printf 'echo a\\\\b; date' | sh", "date"),
        (r"printf 'l\qs' | sh", "sh"),
        ("echo $((true); date)", "date"),
    ],
)
def test_what_a_shell_makes_of_a_text_is_worked_out_as_far_as_that_is_known(line: str, tool: str) -> None:
    assert tool in understand(line).tools


@pytest.mark.parametrize("line", ["IFS=,; x=curl,y; $x", "declare -n a=b", "local -n a=b"])
def test_where_words_or_names_become_others_it_is_said_to_be_unknown(line: str) -> None:
    assert understand(line).unknown
