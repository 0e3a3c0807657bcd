"""What exactly is said of a command: which paths, which addresses, which words for what is not known."""

from __future__ import annotations

import inspect
import sys

import pytest

from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import Effect, EffectKind


@pytest.mark.parametrize(
    ("command", "effects"),
    [
        ("cp -r src backup", [Effect(EffectKind.READS, "src"), Effect(EffectKind.WRITES, "backup")]),
        ("cp -t dst a b", [Effect(EffectKind.WRITES, "dst"), Effect(EffectKind.READS, "a"), Effect(EffectKind.WRITES, "b")]),
        ("grep -e pattern file", [Effect(EffectKind.READS, "file")]),
        ("tar xf a.tar", [Effect(EffectKind.READS, "a.tar"), Effect(EffectKind.WRITES, ".")]),
        ("tar -xOf a.tar", [Effect(EffectKind.READS, "a.tar")]),
        ("tar --delete -f a.tar x", [Effect(EffectKind.DESTROYS, "a.tar")]),
        ("tar -cf - x --remove-files", [Effect(EffectKind.READS, "x"), Effect(EffectKind.DESTROYS, "x")]),
        ("sed -e 's/a/b/w out' f", [Effect(EffectKind.READS, "f"), Effect(EffectKind.WRITES, "out")]),
        ("sed -i -f script f", [Effect(EffectKind.WRITES, "f")]),
        ("sed 's/s:x/y/' f", [Effect(EffectKind.READS, "f")]),
        ("sed 's|a s/b|c/d|x' f", [Effect(EffectKind.READS, "f")]),
        ("curl --version", []),
        (
            "curl -d @body.json -H 'A: b' https://x.example/",
            [Effect(EffectKind.NETWORK, "https://x.example/"), Effect(EffectKind.READS, "body.json")],
        ),
        ("curl -c jar --url https://x.example", [Effect(EffectKind.NETWORK, "https://x.example"), Effect(EffectKind.WRITES, "jar")]),
        ("curl", [Effect(EffectKind.NETWORK)]),
        ("wget --spider https://x.example", [Effect(EffectKind.NETWORK, "https://x.example")]),
        ("wget -i urls -P d", [Effect(EffectKind.NETWORK), Effect(EffectKind.READS, "urls"), Effect(EffectKind.WRITES, "d")]),
        ("find a b -newer c -fprint out", [Effect(EffectKind.READS, "a"), Effect(EffectKind.READS, "b"), Effect(EffectKind.WRITES, "out")]),
        (
            "awk -f prog.awk data",
            [Effect(EffectKind.READS, "data"), Effect(EffectKind.READS, "prog.awk"), Effect(EffectKind.RUNS_CODE, "awk")],
        ),
        ("awk '{print > \"out\"}' f", [Effect(EffectKind.READS, "f"), Effect(EffectKind.WRITES, "awk")]),
        ("gawk -i inplace '{print}' f", [Effect(EffectKind.READS, "f"), Effect(EffectKind.WRITES, "inplace")]),
        ("rsync -n a b", [Effect(EffectKind.READS, "a"), Effect(EffectKind.READS, "b")]),
        (
            "rsync --remove-source-files a b",
            [Effect(EffectKind.READS, "a"), Effect(EffectKind.WRITES, "b"), Effect(EffectKind.DESTROYS, "a")],
        ),
        (
            "rsync -e 'sh -c x' a h:b",
            [
                Effect(EffectKind.NETWORK, "h:b"),
                Effect(EffectKind.READS, "a"),
                Effect(EffectKind.WRITES, "h:b"),
                Effect(EffectKind.RUNS_CODE, "sh -c x"),
            ],
        ),
        ("ssh -o ProxyCommand=x h", [Effect(EffectKind.NETWORK, "h"), Effect(EffectKind.RUNS_CODE, "ProxyCommand=x")]),
        ("ssh", [Effect(EffectKind.NETWORK)]),
        (
            "psql -f x.sql",
            [Effect(EffectKind.NETWORK, "database"), Effect(EffectKind.WRITES, "database"), Effect(EffectKind.READS, "x.sql")],
        ),
        (r"psql -c '\! id'", [Effect(EffectKind.NETWORK, "database"), Effect(EffectKind.RUNS_CODE, "database")]),
        ("sqlite3 a.db", [Effect(EffectKind.WRITES, "a.db")]),
        ("sqlite3 a.db '.shell id'", [Effect(EffectKind.READS, "a.db"), Effect(EffectKind.RUNS_CODE, "sqlite3")]),
        ("python", [Effect(EffectKind.RUNS_CODE, "standard input")]),
        ("python -m json.tool", [Effect(EffectKind.RUNS_CODE, "python -m")]),
        ("git", []),
        ("git $X", [Effect(EffectKind.UNKNOWN, "…")]),
        ("git frobnicate", [Effect(EffectKind.UNKNOWN, "git frobnicate")]),
        ("git diff -o out.patch", [Effect(EffectKind.READS, "git diff"), Effect(EffectKind.WRITES, "out.patch")]),
        ("git rebase -x 'make' main", [Effect(EffectKind.WRITES, "git rebase"), Effect(EffectKind.RUNS_CODE, "git rebase")]),
        ("git bisect run make", [Effect(EffectKind.WRITES, "git bisect"), Effect(EffectKind.RUNS_CODE, "git bisect")]),
        ("git prune", [Effect(EffectKind.DESTROYS, "git prune")]),
        ("git remote show origin", [Effect(EffectKind.NETWORK, "git remote")]),
        ("git submodule foreach ls", [Effect(EffectKind.WRITES, "git submodule"), Effect(EffectKind.RUNS_CODE, "git submodule")]),
        ("git archive -o a.tar HEAD", [Effect(EffectKind.WRITES, "git archive")]),
        ("npm", []),
        ("npm $X", [Effect(EffectKind.UNKNOWN, "…")]),
        ("pip frobnicate", [Effect(EffectKind.UNKNOWN, "frobnicate")]),
        ("kill -l", []),
        ("bash --version", []),
        ("ls > /dev/stderr", []),
        ("sudo -l", [Effect(EffectKind.PRIVILEGE)]),
        ("xargs", []),
        ("find . -exec", [Effect(EffectKind.READS, ".")]),
        ("f() { f() { rm x; }; f; }; f", [Effect(EffectKind.DESTROYS, "x")]),
        ("set -- rm x; $1 $2", [Effect(EffectKind.DESTROYS, "x")]),
        ("set -e; set rm x; $1 x", [Effect(EffectKind.UNKNOWN)]),
        ("set -- rm x; shift; $1", [Effect(EffectKind.UNKNOWN)]),
        ("env -- rm x", [Effect(EffectKind.DESTROYS, "x")]),
        ("bash -c", [Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.UNKNOWN)]),
        ("function f() { rm x; }; f", [Effect(EffectKind.DESTROYS, "x")]),
        ("true |\n\n rm x", [Effect(EffectKind.DESTROYS, "x")]),
        ("case a in\n b) rm x\nesac", [Effect(EffectKind.DESTROYS, "x")]),
        ("[[ a &&\n b ]]", []),
        ("a.b=c x", [Effect(EffectKind.UNKNOWN, "a.b=c")]),
        ("x=1; x=2 rm ${x}", [Effect(EffectKind.DESTROYS, "1")]),
        ("export -p A; export B=c; rm $B", [Effect(EffectKind.DESTROYS, "c")]),
        ("export 1=2; local", []),
        ('cat <<E\n"a" $(rm x)\nE', [Effect(EffectKind.DESTROYS, "x")]),
        ("cat <<E", []),
        ("rm ${@}", [Effect(EffectKind.DESTROYS, "…")]),
        ("echo MFRGG=== | base32 -d | sh", [Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.UNKNOWN, "abc")]),
        ("echo 'rm x' | cat | sh", [Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.DESTROYS, "x")]),
        ("{ echo x; } | sh", [Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.UNKNOWN)]),
        ("printf | sh", [Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.UNKNOWN)]),
        ("cat f | rev | sh", [Effect(EffectKind.READS, "f"), Effect(EffectKind.RUNS_CODE, "standard input"), Effect(EffectKind.UNKNOWN)]),
        ("ls 3>&- 2>&1", []),
        ("rm -- -rf", [Effect(EffectKind.DESTROYS, "-rf")]),
        ("tar -I", [Effect(EffectKind.RUNS_CODE, "tar")]),
    ],
)
def test_an_effect_names_what_it_is_on(command: str, effects: list[Effect]) -> None:
    assert list(understand(command).effects) == effects


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("$X y", "it starts a program whose name it computes: …"),
        ("r? x", "it starts a program whose name it computes: r?"),
        ("r[lm] x", "it starts a program whose name it computes: r[lm]"),
        ('eval "$X"', "eval runs a command line that it computes"),
        ("bash -c 'if'", "bash runs a text that is no command line: 'then' is missing"),
        ("f() { g; }; g() { f; }; " + "env " * 30 + "ls", "it goes on for longer than is read"),
    ],
)
def test_what_the_text_does_not_tell_is_said_in_words(command: str, words: str) -> None:
    found = understand(command)
    assert found.unknown == (words,)
    assert not found.read_only


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("'", "a ' is not closed"),
        ('"', 'a " is not closed'),
        ("`", "a ` is not closed"),
        ("`a )`", "what stands in backticks is no command line"),
        ("$'", "a $' is not closed"),
        ("${", "a ${ is not closed"),
        ("$(", "a ( is not closed"),
        ("(", "a ( is not closed"),
        ("a=(", "a ( is not closed"),
        ("[[ a", "a [[ is not closed"),
        ("a )", "')' stands where no command can"),
        ("a >", "nothing follows '>'"),
        ("if a; then b", "'fi' is missing"),
        ("if a; then b; else c", "'fi' is missing"),
        ("for a in b; rm", "'do' is missing"),
        ("for ((;;", "a (( is not closed"),
        ("while a; do b", "'done' is missing"),
        ("case a b", "'in' is missing"),
        ("case a in b", "a pattern of 'case' is not closed"),
        ("{ a", "'}' is missing"),
        (";&", "';&' stands where no command can"),
        ("$(" * 45, "it is nested too deep"),
        ("( " + "$(" * 45, "it is nested too deep"),
        (";;", "';;' stands where no command can"),
        ("a" * 140_000, "it has 140000 characters; at most 131072 are read"),
        ("( " * 60 + ")" * 60, "it is nested too deep"),
        ("${a:-" * 60, "it is nested too deep"),
        ("a;" * 3000, "it has more than 2000 commands"),
    ],
)
def test_what_cannot_be_read_says_why_and_counts_as_unknown(command: str, why: str) -> None:
    found = understand(command)
    assert found.unreadable == why
    assert found.kinds == {EffectKind.UNKNOWN}


def test_an_application_that_leaves_little_stack_gets_an_answer_all_the_same() -> None:
    depth, limit = len(inspect.stack()), sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 45)
    try:
        found = understand("( ( ( ( ( ( ( ( ( ( ( rm x ) ) ) ) ) ) ) ) ) ) )")
    finally:
        sys.setrecursionlimit(limit)
    assert found.unreadable == "it is nested too deep"


def test_an_argument_list_is_understood_without_a_shell() -> None:
    assert understand_argv(["rm", "-rf", "a b"]).effects == (Effect(EffectKind.DESTROYS, "a b"),)
    assert understand_argv(["sh", "-c", "git push"]).tools == ("sh", "git")
    assert understand_argv(["echo", "$(rm x)"]).effects == (), "no shell, no substitution"
    assert understand_argv([]).read_only


def test_a_use_has_the_tool_and_its_arguments_as_it_would_get_them() -> None:
    (use,) = understand("""r'm' -rf "a b"c {d,e}""").uses
    assert (use.tool, use.arguments) == ("rm", ("-rf", "a bc", "d", "e"))


@pytest.mark.parametrize(
    ("line", "tools"),
    [
        (r"printf '\154\163 x' | sh", ("sh", "ls")),
        (r"printf '\x6cs x' | sh", ("sh", "ls")),
        (r"echo -e '\0154s\tx' | sh", ("sh", "ls")),
        (r"printf 'ls \\nx' | sh", ("sh", "ls")),
        (r"printf 'ls\n\162m x\n' | sh", ("sh", "ls", "rm")),
        ("echo $((ls); (rm x))", ("ls", "rm")),
    ],
)
def test_what_escapes_stand_for_is_what_is_run(line: str, tools: tuple[str, ...]) -> None:
    assert understand(line).tools == tools and not understand(line).unknown


@pytest.mark.parametrize(
    "line", [r"printf 'l\qs' | sh", r"printf 'ls \x' | sh", "IFS=,; a=rm,x; $a", "declare -n r=q; q=rm; $r x", "local -n r=q"]
)
def test_what_a_shell_would_make_of_it_is_not_guessed(line: str) -> None:
    assert understand(line).unknown


@pytest.mark.parametrize(
    "line", ["ls() { rm x; }", "alias ls='rm x'", "f() { g() { rm x; }; }", "f() { f; rm x; }", "if true; then ls() { rm x; }; fi"]
)
def test_what_later_lines_of_a_shell_may_use_is_read_where_it_is_defined(line: str) -> None:
    alone, followed = understand(line), understand(line, goes_on=True)
    assert "rm" not in alone.tools and not alone.unknown, "nothing of this line calls it"
    assert "rm" in followed.tools and any("later commands may" in each for each in followed.unknown)
