"""The command line as it is read."""

from __future__ import annotations

import pytest

from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS
from agent_sandbox.cli.help import help_for
from agent_sandbox.cli.parser import Request, UsageError, parse


def test_options_are_the_same_before_and_after_the_verb() -> None:
    expected = Request("run", ("make",), {"--json": ("",), "--timeout": ("5m",)})
    assert parse(["--json", "--timeout", "5m", "run", "make"]) == expected
    assert parse(["run", "--json", "--timeout=5m", "make"]) == expected


def test_from_the_first_word_of_a_command_on_nothing_is_ours() -> None:
    assert parse(["run", "ls", "--json", "--", "-l"]).words == ("ls", "--json", "--", "-l")
    after_dashes = parse(["run", "--json", "--", "ls", "--json"])
    assert (after_dashes.words, after_dashes.separated) == (("ls", "--json"), True)


def test_for_other_verbs_options_may_follow_the_words() -> None:
    request = parse(["code", "-", "--language", "python", "--", "--language"])
    assert (request.words, request.value("--language")) == (("-", "--language"), "python")


def test_an_option_given_twice_keeps_every_value_and_the_last_one_counts() -> None:
    request = parse(["run", "-e", "A=1", "--env=B=2", "--timeout", "1", "--timeout", "2", "x"])
    assert request.values("--env") == ("A=1", "B=2")
    assert request.value("--timeout") == "2"


@pytest.mark.parametrize(
    "line",
    [
        ["run"],
        ["run", "--"],
        ["run", "--timeout"],
        ["inspect", "--eval=", "1"],
        *(["run", name, "", "true"] for name in ("--runtime", "--image", "--project", "--deny-command", "--policy")),
        ["run", "--json=yes", "x"],
        ["--json"],
        ["--", "run", "x"],
        ["status", "extra"],
        ["--stat", "run", "x"],
        ["frobnicate"],
        ["run", "--frobnicate", "x"],
        ["status", "-x"],
    ],
)
def test_a_line_that_cannot_be_understood_is_refused(line: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(line)


@pytest.mark.parametrize(
    ("line", "suggested"),
    [
        (["stauts"], "'status'"),
        (["dif"], "'diff'"),
        (["prom"], "'promote'"),
        (["help", "x", "--quite"], "--quiet"),
        (["run", "--memroy", "1G", "x"], "--memory"),
        (["--memroy", "1G", "run", "x"], "--memory"),
        (["log", "--memroy", "1G"], None),  # memory is no option of log
        (["run", "--frob", "x"], None),
        (["run", "-x", "x"], None),
        (["frobnicate"], None),
        (["ls"], None),
    ],
)
def test_only_a_near_word_that_would_be_understood_is_suggested(line: list[str], suggested: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        parse(line)
    assert raised.value.hint == f"did you mean {suggested}?" if suggested else "did you mean" not in raised.value.hint


def test_an_option_of_another_verb_is_refused_by_the_name_of_that_verb() -> None:
    with pytest.raises(UsageError) as raised:
        parse(["run", "--forget", "x", "true"])
    assert "snapshots" in raised.value.hint
    with pytest.raises(UsageError):
        parse(["capabilities", "--project", "."])


def test_help_explains_options_as_their_verb_uses_them() -> None:
    for verb, option, words in (("revoke", "--all", "granted"), ("grant", "--allow", "too"), ("approve", "--timeout", "--for-run")):
        (told,) = help_for(verb).verbs
        assert words in next(each.summary for each in told.options if each.name == option)
    assert all(set(verb.helps) <= set(verb.options) for verb in VERBS.values())
    elsewhere = [option for option in OPTIONS.values() for name in VERBS if f"; {name}: " in f"; {option.help}"]
    assert elsewhere == [], "an option's help is about the verb that is asked for"


def test_every_option_of_a_verb_is_in_the_table_and_has_words_for_help() -> None:
    offered = {name for verb in VERBS.values() for name in (*verb.options, *COMMON)}
    assert offered <= OPTIONS.keys()
    assert [name for name in offered if not OPTIONS[name].help] == []
