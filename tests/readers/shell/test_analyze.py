"""What exactly is said of a command: which paths, which addresses, which words for what is not known."""

from __future__ import annotations

import inspect
import sys

import pytest

from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import Effect, Kind


@pytest.mark.parametrize(
    ("command", "effects"),
    [
        ("cp -r src backup", [Effect(Kind.READS, "src"), Effect(Kind.WRITES, "backup")]),
        ("cp -t dst a b", [Effect(Kind.WRITES, "dst"), Effect(Kind.READS, "a"), Effect(Kind.WRITES, "b")]),
        ("grep -e pattern file", [Effect(Kind.READS, "file")]),
        ("tar xf a.tar", [Effect(Kind.READS, "a.tar"), Effect(Kind.WRITES, ".")]),
        ("tar -xOf a.tar", [Effect(Kind.READS, "a.tar")]),
        ("tar --delete -f a.tar x", [Effect(Kind.DESTROYS, "a.tar")]),
        ("tar -cf - x --remove-files", [Effect(Kind.READS, "x"), Effect(Kind.DESTROYS, "x")]),
        ("sed -e 's/a/b/w out' f", [Effect(Kind.READS, "f"), Effect(Kind.WRITES, "out")]),
        ("sed -i -f script f", [Effect(Kind.WRITES, "f")]),
        ("sed 's/s:x/y/' f", [Effect(Kind.READS, "f")]),
        ("sed 's|a s/b|c/d|x' f", [Effect(Kind.READS, "f")]),
        ("curl --version", []),
        ("curl -d @body.json -H 'A: b' https://x.example/", [Effect(Kind.NETWORK, "https://x.example/"), Effect(Kind.READS, "body.json")]),
        ("curl -c jar --url https://x.example", [Effect(Kind.NETWORK, "https://x.example"), Effect(Kind.WRITES, "jar")]),
        ("curl", [Effect(Kind.NETWORK)]),
        ("wget --spider https://x.example", [Effect(Kind.NETWORK, "https://x.example")]),
        ("wget -i urls -P d", [Effect(Kind.NETWORK), Effect(Kind.READS, "urls"), Effect(Kind.WRITES, "d")]),
        ("find a b -newer c -fprint out", [Effect(Kind.READS, "a"), Effect(Kind.READS, "b"), Effect(Kind.WRITES, "out")]),
        ("awk -f prog.awk data", [Effect(Kind.READS, "data"), Effect(Kind.READS, "prog.awk"), Effect(Kind.RUNS_CODE, "awk")]),
        ("awk '{print > \"out\"}' f", [Effect(Kind.READS, "f"), Effect(Kind.WRITES, "awk")]),
        ("gawk -i inplace '{print}' f", [Effect(Kind.READS, "f"), Effect(Kind.WRITES, "inplace")]),
        ("rsync -n a b", [Effect(Kind.READS, "a"), Effect(Kind.READS, "b")]),
        ("rsync --remove-source-files a b", [Effect(Kind.READS, "a"), Effect(Kind.WRITES, "b"), Effect(Kind.DESTROYS, "a")]),
        (
            "rsync -e 'sh -c x' a h:b",
            [Effect(Kind.NETWORK, "h:b"), Effect(Kind.READS, "a"), Effect(Kind.WRITES, "h:b"), Effect(Kind.RUNS_CODE, "sh -c x")],
        ),
        ("ssh -o ProxyCommand=x h", [Effect(Kind.NETWORK, "h"), Effect(Kind.RUNS_CODE, "ProxyCommand=x")]),
        ("ssh", [Effect(Kind.NETWORK)]),
        ("psql -f x.sql", [Effect(Kind.NETWORK, "database"), Effect(Kind.WRITES, "database"), Effect(Kind.READS, "x.sql")]),
        (r"psql -c '\! id'", [Effect(Kind.NETWORK, "database"), Effect(Kind.RUNS_CODE, "database")]),
        ("sqlite3 a.db", [Effect(Kind.WRITES, "a.db")]),
        ("sqlite3 a.db '.shell id'", [Effect(Kind.READS, "a.db"), Effect(Kind.RUNS_CODE, "sqlite3")]),
        ("python", [Effect(Kind.RUNS_CODE, "standard input")]),
        ("python -m json.tool", [Effect(Kind.RUNS_CODE, "python -m")]),
        ("git", []),
        ("git $X", [Effect(Kind.UNKNOWN, "…")]),
        ("git frobnicate", [Effect(Kind.UNKNOWN, "git frobnicate")]),
        ("git diff -o out.patch", [Effect(Kind.READS, "git diff"), Effect(Kind.WRITES, "out.patch")]),
        ("git rebase -x 'make' main", [Effect(Kind.WRITES, "git rebase"), Effect(Kind.RUNS_CODE, "git rebase")]),
        ("git bisect run make", [Effect(Kind.WRITES, "git bisect"), Effect(Kind.RUNS_CODE, "git bisect")]),
        ("git prune", [Effect(Kind.DESTROYS, "git prune")]),
        ("git remote show origin", [Effect(Kind.NETWORK, "git remote")]),
        ("git submodule foreach ls", [Effect(Kind.WRITES, "git submodule"), Effect(Kind.RUNS_CODE, "git submodule")]),
        ("git archive -o a.tar HEAD", [Effect(Kind.WRITES, "git archive")]),
        ("npm", []),
        ("npm $X", [Effect(Kind.UNKNOWN, "…")]),
        ("pip frobnicate", [Effect(Kind.UNKNOWN, "frobnicate")]),
        ("kill -l", []),
        ("bash --version", []),
        ("ls > /dev/stderr", []),
        ("sudo -l", [Effect(Kind.PRIVILEGE)]),
        ("xargs", []),
        ("find . -exec", [Effect(Kind.READS, ".")]),
        ("f() { f() { rm x; }; f; }; f", [Effect(Kind.DESTROYS, "x")]),
        ("set -- rm x; $1 $2", [Effect(Kind.DESTROYS, "x")]),
        ("set -e; set rm x; $1 x", [Effect(Kind.UNKNOWN)]),
        ("set -- rm x; shift; $1", [Effect(Kind.UNKNOWN)]),
        ("env -- rm x", [Effect(Kind.DESTROYS, "x")]),
        ("bash -c", [Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.UNKNOWN)]),
        ("function f() { rm x; }; f", [Effect(Kind.DESTROYS, "x")]),
        ("true |\n\n rm x", [Effect(Kind.DESTROYS, "x")]),
        ("case a in\n b) rm x\nesac", [Effect(Kind.DESTROYS, "x")]),
        ("[[ a &&\n b ]]", []),
        ("a.b=c x", [Effect(Kind.UNKNOWN, "a.b=c")]),
        ("x=1; x=2 rm ${x}", [Effect(Kind.DESTROYS, "1")]),
        ("export -p A; export B=c; rm $B", [Effect(Kind.DESTROYS, "c")]),
        ("export 1=2; local", []),
        ('cat <<E\n"a" $(rm x)\nE', [Effect(Kind.DESTROYS, "x")]),
        ("cat <<E", []),
        ("rm ${@}", [Effect(Kind.DESTROYS, "…")]),
        ("echo MFRGG=== | base32 -d | sh", [Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.UNKNOWN, "abc")]),
        ("echo 'rm x' | cat | sh", [Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.DESTROYS, "x")]),
        ("{ echo x; } | sh", [Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.UNKNOWN)]),
        ("printf | sh", [Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.UNKNOWN)]),
        ("cat f | rev | sh", [Effect(Kind.READS, "f"), Effect(Kind.RUNS_CODE, "standard input"), Effect(Kind.UNKNOWN)]),
        ("ls 3>&- 2>&1", []),
        ("rm -- -rf", [Effect(Kind.DESTROYS, "-rf")]),
        ("tar -I", [Effect(Kind.RUNS_CODE, "tar")]),
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
    assert found.kinds == {Kind.UNKNOWN}


def test_an_application_that_leaves_little_stack_gets_an_answer_all_the_same() -> None:
    depth, limit = len(inspect.stack()), sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 45)
    try:
        found = understand("( ( ( ( ( ( ( ( ( ( ( rm x ) ) ) ) ) ) ) ) ) ) )")
    finally:
        sys.setrecursionlimit(limit)
    assert found.unreadable == "it is nested too deep"


def test_an_argument_list_is_understood_without_a_shell() -> None:
    assert understand_argv(["rm", "-rf", "a b"]).effects == (Effect(Kind.DESTROYS, "a b"),)
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
