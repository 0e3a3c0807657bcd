"""The reader calls a variable, a function or the end of a word unknown if a part of the line may or may not have changed it.

Each line really starts `rm`: `test_against_bash` runs them.
"""

from __future__ import annotations

import pytest

from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.state import LineState

HERE_DOCUMENTS = [
    "cat <<E\n\tE\ncat <<F\nE\nrm x\nF\n",  # without the dash, a tab is part of the line
    "cat <<E\nfoo\\\nE\ncat <<F\nE\nrm x\nF\n",  # the line goes on
    "cat <<$X\nfoo\n$X\nrm x\n",
    "cat <<a$X\na\ncat <<F\na$X\nrm x\nF\n",
    "cat <<`x`\n`x`\nrm x\n",
    "sh 3<<<ls <<<'rm x'",
    "sh <<<ls <<<'rm x'",
    "echo 'rm x' | sh 3<<<ls",
    "echo 'rm x' | sh {v}<<<ls",
]
ENDS_OF_LINES = [
    "echo a \\\r\nrm x",
    "rm\n() { :; }",
    '"$\\\n(rm x)"',
    "fo\\\nr i in a; do rm x; done",
    '"`eval \\"rm x\\"`"',
    "time -- rm x",
]
FUNCTIONS = [
    "f() { rm x; }; if false; then f() { :; }; fi; f",
    "f() { rm x; }; (f() { :; }); f",
    "f() { rm x; }; f() { :; } | cat; f",
    "f() { rm x; }; f() { :; } & f",
    "if false; then rm() { :; }; fi; rm x",
    "false && rm() { :; }; rm x",
    "rm() { :; }; unset -f rm; rm x",
    "rm() { :; }; unset rm; rm x",
    "rm() { :; }; f=rm; unset -f $f; rm x",
    "rm() { :; }; command rm x",
    "rm() { :; }; env rm x",
    "rm() { :; }; echo x | xargs rm",
    "rm() { :; }; find . -maxdepth 0 -exec rm {} \\;",
    "rm() { :; }; exec rm x",
    "rm() { :; }; bash -c 'rm x'",
    "rm() { :; }; $(which rm) x",
    'f() { $1 x; [ -n "$2" ] || f rm 2; }; f ls',
    "trap ls EXIT; ls() { rm x; }",
    "trap -- 'rm x' EXIT",
    "x=ls; trap '$x a' EXIT; x=rm",
    "command_not_found_handle() { rm x; }; nonesuch",
    "f() { ${@:1:1} x; }; f rm",
    "set -- sh -c 'ls; rm x'; \"$@\"",
]
VARIABLES = [
    "x=rm; x=ls | cat; $x a",
    "x=rm; x=ls & $x a",
    "x=rm; false && x=ls; $x a",
    "x=rm; true || x=ls; $x a",
    "x=rm; true || x=ls && $x a",
    "x=rm; echo $(x=ls); $x a",
    "x=rm; bash -c 'x=ls'; $x a",
    "x=rm; env export x=ls; $x a",
    "x=ls; bash -c '$x rm a'",
    "x=ls; x=rm eval '$x a'",
    "x=ls; f() { $x a; }; x=rm f",
    "x=rm; f() { local x=ls; }; f; $x a",
    "x=ls; for i in 1 2 3 4 5 6 7 8 9; do $x a; x=rm; done",
    "x=ls; n=; while [ -z $n ]; do $x a; [ $x = rm ] && n=1; x=rm; done",
    "x=ls; printf -v x rm; $x a",
    "x=; : ${x:=rm}; $x a",
    "REPLY=ls; read <<< rm; $REPLY a",
    "declare -l x; x=RM; $x a",
    "x=('' ls); $x rm a",
    "x=rm; x[1]=ls; $x a",
    "x=' a'; rm$x",
    "IFS=x; $(echo rmxa)",
    'set -- r m; IFS=; x="$*"; "$x" a',
    "x='a[1$(rm x)]'; (( x ))",
    "x='a[${z:-$(rm x)}]'; (( x ))",
    "eval -- 'rm x'",
    "compgen -W '$(rm x)' y",
    "shopt -s expand_aliases; alias ls='rm x'; if false; then alias ls=:; fi; eval ls",
    "BASH_ALIASES[ls]=rm; shopt -s expand_aliases; eval 'ls a'",
]
OPTIONS = [
    "echo a | xargs --replace rm",
    "echo a | xargs --max-lines rm",
    "echo a | xargs --process-slot-var ls rm",
    "echo rm | xargs -ils env ls x",
    "flock --conflict-exit-code 5 lock rm x",
    "timeout --sig KILL 5 rm x",
    "env a.b=1 rm x",
    "env -S 'a.b=1 rm x'",
    "bash +c 'rm x'",
    "bash -c +x 'rm x'",
]
LINES = [*HERE_DOCUMENTS, *ENDS_OF_LINES, *FUNCTIONS, *VARIABLES, *OPTIONS]


@pytest.mark.parametrize("line", LINES)
def test_a_program_that_may_be_started_is_foreseen_or_the_line_is_said_to_be_unknown(line: str) -> None:
    found = understand(line)
    assert "rm" in found.tools or found.unknown or found.unreadable


@pytest.mark.parametrize(
    ("line", "tools"),
    [
        ("x=rm && $x a", ("rm",)),
        ("true && x=rm && $x a", ("rm",)),
        ("x=rm; (x=$y); y=$(x=ls); env x=ls git; $x a", ("env", "git", "rm")),
        ("for x in rm ls; do $x a; done", ("rm", "ls")),
        ("f() { rm x; }; f", ("rm",)),
        ("f() { ls; }; f; f() { rm x; }; f", ("ls", "rm")),
        ("unset -f rm; rm x", ("rm",)),
        ("cat <<'E'\n\tE\nE\nrm x", ("cat", "rm")),
        ("cat <<-E\n\tE\nrm x", ("cat", "rm")),
        ("cat <<E\nfoo\\\\\nE\nrm x", ("cat", "rm")),
        ("cat <<'E'\nfoo\\\nE\nrm x", ("cat", "rm")),
        ("echo ls | sh 2>&1 3<a", ("sh", "ls")),
        ("xargs -0 -n 1 --no-run-if-empty rm", ("xargs", "rm")),
        ("timeout -k 5 --foreground 10 rm x", ("timeout", "rm")),
    ],
)
def test_what_is_certain_stays_known(line: str, tools: tuple[str, ...]) -> None:
    found = understand(line)
    assert (found.tools, found.unknown, found.unreadable) == (tools, (), "")


def test_a_value_that_may_have_changed_is_unknown_and_one_of_another_process_is_as_before() -> None:
    state = LineState({"a": "1", "b": "2"})
    earlier = state.copy()
    state.assign("a", "3")
    state.assign("b", "2")
    state.doubt(earlier)
    assert state.variables == {"a": None, "b": "2"}
    state.put_back(earlier)
    assert state.is_like(earlier)
    state.assign("a", "0", add=True)
    assert state.variables["a"] == "10"
