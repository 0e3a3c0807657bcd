"""One spelling for each value, and an error for what has none."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import canonical_digest, canonical_form
from agent_sandbox.policy.action import RunCommand

# Texts that JSON in ASCII spells alike, or nearly so: a character beyond the first plane, the two surrogates of UTF-16 for it, one of them
# alone, and the escapes themselves as text.
ALIKE = (
    "\U0001f600",
    "\ud83d\ude00",
    "\ud83d",
    "\ude00",
    "\\ud83d\\ude00",
    "\\ud83d\ude00",
    "\ud83d\\ude00",
    "\ude00\ud83d",
    '\ud83d", "\ude00',
)


def test_what_has_no_canonical_form_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="list has no canonical form"):
        canonical_form([1])


def test_a_set_has_one_order_and_a_number_one_spelling() -> None:
    assert canonical_form((frozenset({"b", "a"}), 30.0, 1.5, None)) == [["a", "b"], 30, 1.5, None]


def test_no_two_texts_have_one_digest() -> None:
    assert [(one, other) for one, other in combinations(ALIKE, 2) if canonical_digest(one) == canonical_digest(other)] == []
    assert len({RunCommand.of(["echo", text]).digest() for text in ALIKE}) == len(ALIKE)
    assert canonical_digest(("\ud83d", "\ude00")) != canonical_digest(("\ud83d\ude00",))


def test_a_set_of_texts_that_look_alike_has_one_order() -> None:
    assert canonical_form(frozenset(ALIKE)) == canonical_form(frozenset(reversed(ALIKE)))


_TEXTS = st.text(st.one_of(st.characters(), st.sampled_from('\ud83d\ude00\\u"d')), max_size=6)


@given(st.lists(_TEXTS, max_size=3), st.lists(_TEXTS, max_size=3))
def test_two_lists_of_words_have_one_digest_only_if_they_are_the_same(one: list[str], other: list[str]) -> None:
    assert (canonical_digest(tuple(one)) == canonical_digest(tuple(other))) is (one == other)
