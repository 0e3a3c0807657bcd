"""Words become arguments as bash makes them, as far as the text tells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from agent_sandbox.readers.shell.analyze import understand

# Each is an argument of `rm`, so that the reader says what it makes of it. All of them are known from the text alone.
WORDS = [
    "a",
    "'a b'",
    '"a b"',
    "a\\ b",
    '"a\\"b"',
    '"a\\b"',
    "''",
    '""',
    "a''b",
    "$'a\\tb'",
    "$'\\x41\\102\\u0043'",
    "$'\\e\\''",
    "$'a\\qb'",
    '$"a"',
    "{a,b}",
    "{a,b}{c,d}",
    "x{a,{b,c}}y",
    "{1..3}",
    "{ab..cd}",
    "{1..x}",
    '"${v:-"x y"}"',
    "\"${v:-'x'}\"",
    "${v-x}",
    "${v:=x}",
    "$'\\cG'",
    "{3..1}",
    "{a..c}",
    "{-1..1}",
    "{a}",
    "{}",
    "{a,}",
    "'{a,b}'",
    "\\{a,b}",
    "{a,'b c'}",
    "a{",
    "$v",
    '"$v"',
    "${v}",
    "x${v}y",
    "$s",
    '"$s"',
    "${v:1}",
    "${v:0:2}",
    "$v$v",
    "$(echo a b)",
    '"$(echo a b)"',
    "$(printf '%s-%s' a b)",
    "`echo a`",
    "`echo \\`echo a\\``",
    "$(echo YQ== | base64 -d)",
    "$(echo cba | rev)",
    "$(echo abc | tr a-c b-d)",
    "$(echo abc | tr -d b)",
    "$(echo 6162 | xxd -r -p)",
    "$(echo -n a)",
    "$(echo -e 'a\\x62')",
    "a#b",
    "a\\\nb",
    "a$",
    "$",
    "é",
    "a=b",
    "-x",
    "a${IFS}b",
    '"a${IFS:0:1}b"',
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.skipif(shutil.which("xxd") is None, reason="xxd is not installed")
def test_the_arguments_are_those_that_bash_hands_over() -> None:
    head = "v=abc; s='p q'; "
    script = head + "".join(f"printf '%s\\0' {word}; printf '\\1\\0'; " for word in WORDS)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"})
    told = done.stdout.decode().split("\1\0")
    for word, words in zip(WORDS, told, strict=False):
        (use,) = [use for use in understand(f"{head}rm {word}").uses if use.tool == "rm"]
        assert (word, list(use.arguments)) == (word, words.split("\0")[:-1])


@pytest.mark.parametrize(
    "word",
    [
        "$u",
        "$(cat f)",
        "$((1 + 1))",
        "${v/a/b}",
        "${#v}",
        "$RANDOM",
        "<(ls)",
        "$(date)",
        "$(printf '%5s' a)",
        "{1..99999}",
        "{1..9..2}",
        "${v:+x}",
        "${e:-x}",
        "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}",
        "$(printf)",
        "$(a=b echo x)",
        "$(rev)",
        "$(echo zz | xxd -r -p)",
        "$(echo x; echo y)",
        "$(echo $u)",
        "$(echo x | cat)y$u",
        "$(echo 1 | base32 -d)",
        "$(base64 -d f)",
    ],
)
def test_what_the_text_does_not_tell_is_unknown(word: str) -> None:
    assert any("…" in argument for use in understand(f"v=abc; e=; rm {word}").uses for argument in use.arguments)
