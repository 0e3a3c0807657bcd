"""Help, version and mistyped words."""

from __future__ import annotations

import pytest

from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once


def test_mistyped_words_are_met_with_a_suggestion(shell: Shell) -> None:
    assert "did you mean 'diff'?" in words(shell("dif"))
    assert "did you mean --timeout?" in words(shell("run", "--tiemout", "3", "true"))
    assert "is not an option of 'status'" in words(shell("--timeout", "3", "status"))


def test_help_is_there_for_the_program_and_for_every_verb_it_lists(shell: Shell) -> None:
    overview = shell("--help").stdout.decode()
    listed = overview.partition("verbs:\n")[2].partition("\n\n")[0]
    verbs = [line.split()[0] for line in listed.splitlines()]
    assert {"run", "code", "diff", "status", "reset", "doctor", "setup"} <= set(verbs)
    for verb in verbs:
        assert shell("help", verb).stdout.decode().startswith(f"usage: agent-sandbox {verb}")
    assert shell("run", "--help").stdout == shell("help", "run").stdout


def test_no_words_at_all_are_a_question(shell: Shell) -> None:
    assert shell().stdout == shell("help").stdout


def test_the_version_is_said(shell: Shell) -> None:
    assert shell("--version").stdout.startswith(b"agent-sandbox ")
