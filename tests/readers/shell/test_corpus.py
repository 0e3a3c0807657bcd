"""Every command of the corpus is understood as it is labelled, and no text whatever makes the reader stumble."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import EffectKind
from tests.readers.shell.corpus import LETTERS, corpus

CORPUS = corpus()
COMMANDS = [command for command, _, _ in CORPUS]
PIECES = [
    "$(",
    "`",
    "'",
    '"',
    "{",
    "}",
    ",",
    "(",
    ")",
    ";",
    "|",
    "&",
    "<<E",
    "\nE\n",
    "\\",
    "$'",
    "${",
    "$((",
    "))",
    "for x in ",
    "do ",
    "done",
]
PIECES += [
    "if ",
    "then ",
    "fi",
    "case a in ",
    "esac",
    "[[ ",
    " ]]",
    "f() ",
    "rm ",
    "eval ",
    "bash -c ",
    "x=",
    "$x",
    " ",
    "\n",
    ">",
    "<",
    "..",
    "xargs ",
]


def test_the_corpus_is_large_and_every_sort_of_effect_is_in_it() -> None:
    assert len(CORPUS) >= 300
    assert len(set(COMMANDS)) == len(CORPUS)
    assert {kind for _, _, kinds in CORPUS for kind in kinds} == set(LETTERS.values()) == set(EffectKind)


def test_every_command_has_the_tools_and_the_effects_that_it_is_labelled_with() -> None:
    understood = [(command, understand(command)) for command in COMMANDS]
    assert [(command, found.tools, found.kinds) for command, found in understood] == CORPUS


def test_a_command_in_front_or_behind_takes_no_effect_away() -> None:
    for command, tools, kinds in CORPUS:
        if EffectKind.UNKNOWN in kinds or command.startswith("#") or "<<" in command:
            continue
        for wrapped in (f"( {command}\n)", f"if true; then {command}\nfi", f"true && {{ {command}\n}}"):
            found = understand(wrapped)
            assert (found.tools, found.kinds) == (tools, kinds), wrapped


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(COMMANDS), st.text(max_size=4)), max_size=25).map("".join))
def test_no_text_makes_it_raise_and_the_same_text_has_the_same_answer(text: str) -> None:
    assert understand(text) == understand(text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=6), st.sampled_from(["rm", "env", "sudo", "find", "-exec", "bash", "-c", "xargs", "git", "-o"])),
        max_size=8,
    )
)
def test_no_argument_list_makes_it_raise(argv: list[str]) -> None:
    understand_argv(argv)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 50_000,
        "$(" * 50_000,
        "{" * 50_000,
        "{a,b}" * 1_000,
        "a;" * 50_000,
        "`a`;" * 20_000,
        "$((1+" * 10_000,
        "cat <<A\n" * 10_000,
        "for a in 1 2 3 4 5 6 7 8; do " * 12 + "rm x" + "; done" * 12,
        "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }};" for i in range(40)) + "f0",
        "".join(f"alias a{i}='a{i + 1}; a{i + 1}';" for i in range(40)) + "a0",
        "x=aaaaaaaa;" + "x=$x$x;" * 60 + "$x",
        "eval 'eval \"eval ls\"';" * 2_000,
        "env " * 20_000 + "ls",
        "if a; then " * 2_000,
        '"$(' * 10_000,
        "${a:-" * 10_000,
        "echo {1..1000000000}",
        "printf '%1000000000s' x | sh",
    ],
)
def test_what_is_made_to_be_endless_comes_to_an_end_and_is_said_to_be_unknown_where_it_was_cut(text: str) -> None:
    found = understand(text)
    assert len(found.uses) < 10_000
