"""Quoting: a command that goes through the rewrite is, letter for letter, the command that the sandbox's shell gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_sandbox.coding_agents.shell_words import contained, quote, unquote

# No zero bytes, which no command line can hold, and no surrogates, which are no UTF-8. Those that break quoting come more often.
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8") | st.sampled_from("'\"\\$`!\n #;&|<>(){}[]*?~=-"), max_size=40)
SHELLS = [shell for shell in ("/bin/sh", "/bin/bash", "/bin/dash", "/usr/bin/zsh") if Path(shell).exists()]


@given(st.lists(TEXTS, min_size=1, max_size=20))
@settings(max_examples=60)
@example(["'", "''", "'\"'\"'", "\\'", "a'b", "\n", "", "-n", "--", "$(id)", "`id`", "!!", "é", "\x7f\x1b", "~", "x=1", "# no comment"])
def test_every_text_is_one_word_of_every_shell(texts: list[str]) -> None:
    line = "printf '%s\\0' " + " ".join(map(quote, texts))
    for shell in SHELLS:
        done = subprocess.run([shell, "-c", line], capture_output=True, check=True)
        assert done.stdout.decode().split("\0")[:-1] == texts, shell


def test_without_quoting_the_same_texts_are_other_words() -> None:
    """The control: this test can fail."""
    done = subprocess.run(["/bin/sh", "-c", "printf '%s\\0' $HOME 'a b'"], capture_output=True, check=True, env={"HOME": "x y"})
    assert done.stdout.decode().split("\0")[:-1] != ["$HOME", "a b"]


@given(TEXTS)
def test_unquote_knows_what_quote_makes_and_nothing_else(text: str) -> None:
    assert unquote(quote(text)) == text
    other = unquote(text)
    assert other is None or quote(other) == text


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program in place of ours that starts the shell as the sandbox does, without a sandbox: thousands of those would take long."""
    path = tmp_path_factory.mktemp("bin") / "agent-sandbox"
    path.write_text('#!/bin/sh\n[ "$1 $2 $4 $#" = "shell-prefix --project -- 5" ] || exit 99\nexec bash -c "$5"\n')
    path.chmod(0o755)
    return path


_PARTS = st.sampled_from(
    ["echo", "printf %s", "true", "false", "exit 3", "cat", "x=1", "$x", "it's", '"a  b"', "'c  d'", "$((1+2))", "\\'"]
)
_JOINTS = st.sampled_from([" ", "; ", " && ", " || ", " | ", "\n", " 2>&1 ", "  "])
# Commands of any letters are executed: none that writes a file, names a directory or stays in the background.
_HARMLESS = TEXTS.filter(lambda text: not set("/<>&") & set(text))
COMMANDS = st.lists(st.tuples(_PARTS | _HARMLESS, _JOINTS), min_size=1, max_size=6).map(lambda parts: "".join(a + b for a, b in parts))


@given(COMMANDS)
@settings(max_examples=80)
@example("cat <<'EOF'\nit's $HOME\nEOF\n")
@example('echo "it\'s" \'a "b"\' \\\n  c; for i in 1 2; do printf \'%s\\n\' "$i"; done')
@example("-n")
def test_a_command_does_the_same_through_the_rewrite(stand_in: Path, command: str) -> None:
    place = stand_in.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(stand_in)])
        line = contained(command, "/some where/it's")
    outcomes = []
    for words in (["bash", "-c", command], ["sh", "-c", line]):
        done = subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL, cwd=place, env={"PATH": "/usr/bin:/bin"})
        outcomes.append((done.returncode, done.stdout))
    assert outcomes[0] == outcomes[1], line
