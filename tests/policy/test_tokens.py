"""A capability allows what it says, can be narrowed by anybody and widened by nobody."""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.policy.action import Action, Connect, Promote, RunCode, RunCommand, Undo
from agent_sandbox.policy.tokens import (
    MOST_CAVEATS,
    Caveat,
    ForSandbox,
    Genuine,
    Only,
    Pattern,
    RefusedToken,
    Times,
    Token,
    Until,
    attenuate,
    caveats_of,
    check,
    covers,
    genuine,
    hosts_of,
    mint,
    parse,
    speaks_of,
    spell,
    words_of,
)

KEY = Seal(b"k" * 32)
LOG, PUSH = RunCommand.of(["git", "log", "-n", "3"]), RunCommand.of(["git", "push"])


def granted(*more: Caveat) -> Token:
    return mint(KEY, b"i" * 16, (ForSandbox("box"), Until(100.0), Only((("run", "git", "**"),)), *more))


def allows(token: Token, action: Action = LOG, *, sandbox: str = "box", now: float = 1.0, key: Seal = KEY) -> bool:
    return isinstance(check(key, token, action, sandbox=sandbox, now=now), Genuine)


def test_it_allows_what_it_says_and_nothing_else() -> None:
    token = granted()
    assert allows(token, LOG) and allows(token, PUSH)
    assert not allows(token, RunCommand.of(["curl", "x"]))
    assert not allows(token, RunCode.of("python", b"1"))
    assert not allows(token, sandbox="another"), "one that is stolen is of no use elsewhere"
    assert not allows(token, now=100.0) and not allows(token, now=1e9)
    assert not allows(token, key=Seal(b"another key"))


def reaching(*patterns: Pattern) -> Token:
    return mint(KEY, b"i" * 16, (ForSandbox("box"), Until(100.0), Only(patterns)))


def test_a_capability_for_hosts_covers_their_ports_and_methods_and_nothing_else() -> None:
    token = reaching(("network", "api.test", "GET,HEAD"), ("network", "*.web.test"), ("network", "db.test:5432"), ("network", "[::1]:53"))
    covered = (
        *(Connect("api.test", 443, "GET", "/x"), Connect("api.test", 80, "HEAD", "/"), Connect("a.b.web.test", 443, "POST", "/")),
        *(Connect("a.web.test", 443), Connect("db.test", 5432), Connect("::1", 53)),
    )
    assert all(allows(token, each) for each in covered)
    others = (
        *(Connect("api.test", 443, "POST", "/"), Connect("api.test", 443), Connect("api.test", 22, "GET", "/"), Connect("web.test", 443)),
        *(Connect("db.test", 443), Connect("db.test", 54320), Connect("api.test.evil.test", 443, "GET"), Connect("evilweb.test", 443)),
        *(Connect("a.web.test", 443, "POST", "/", "email in the body"), LOG, RunCommand.of(["network", "api.test"])),
    )
    assert not any(allows(token, each) for each in others)
    assert hosts_of(token) == ("api.test", "*.web.test", "db.test:5432", "[::1]:53")
    narrow = attenuate(token, Only((("network", "a.web.test"),)))
    assert allows(narrow, Connect("a.web.test", 443, "GET", "/")) and not allows(narrow, Connect("b.web.test", 443, "GET", "/"))
    wrong = reaching(("network",), ("network", "http://x"), ("network", "a.test", "GET", "/x"), ("network", "a.test", "get"))
    assert not allows(wrong, Connect("a.test", 443, "GET", "/x")) and hosts_of(wrong) == ("a.test",)


def test_a_token_speaks_of_an_action_also_when_it_has_ended_and_never_for_another_sandbox() -> None:
    token, action = reaching(("network", "api.test")), Connect("api.test", 443, "GET", "/")
    assert not allows(token, action, now=1e9) and speaks_of(KEY, token, action, sandbox="box")
    assert not speaks_of(KEY, token, action, sandbox="another") and not speaks_of(Seal(b"another"), token, action, sandbox="box")
    assert not speaks_of(KEY, token, Connect("web.test", 443), sandbox="box") and not speaks_of(KEY, granted(), action, sandbox="box")


def test_who_holds_it_can_narrow_it_without_the_key() -> None:
    narrow = attenuate(granted(), Only((("run", "git", "log", "**"),)), Until(50.0))
    assert allows(narrow, LOG) and not allows(narrow, PUSH) and not allows(narrow, now=60.0)


def test_a_restriction_cannot_be_taken_away_reordered_or_changed() -> None:
    wide, narrow = granted(), attenuate(granted(), Only((("run", "git", "log", "**"),)))
    assert not allows(Token(narrow.identity, narrow.caveats[:-1], narrow.signature))
    assert not allows(Token(narrow.identity, narrow.caveats[::-1], narrow.signature))
    assert not allows(Token(narrow.identity, narrow.caveats, wide.signature))
    assert not allows(Token(narrow.identity, (), narrow.signature))
    assert not allows(Token(b"j" * 16, wide.caveats, wide.signature))


patterns = st.lists(st.sampled_from(["run", "git", "log", "g*", "*", "**", "-n"]), min_size=1, max_size=4).map(tuple)
caveats = st.one_of(
    st.builds(Until, st.floats(0, 200)),
    st.builds(Times, st.integers(1, 5)),
    st.builds(ForSandbox, st.sampled_from(["box", "other"])),
    st.builds(lambda found: Only(tuple(found)), st.lists(patterns, min_size=1, max_size=3)),
)


@given(st.lists(caveats, max_size=4), caveats, st.floats(0, 200), st.sampled_from(["box", "other"]), st.sampled_from([LOG, PUSH]))
def test_narrowing_never_allows_more(before: list[Caveat], added: Caveat, now: float, sandbox: str, action: Action) -> None:
    token = granted(*before)
    if allows(attenuate(token, added), action, sandbox=sandbox, now=now):
        assert allows(token, action, sandbox=sandbox, now=now)


def _no_mutation_is_accepted(count: int, seed: int) -> None:
    random = Random(seed)
    token = attenuate(granted(Times(3)), Only((("run", "git", "log", "**"),)))
    whole = spell(token)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=+/ \n\0é"
    tried = 0
    while tried < count:
        text = whole
        for _ in range(random.choice((1, 1, 1, 2, 6))):
            place = random.randrange(len(text) + 1)
            match random.randrange(5):
                case 0:
                    text = text[:place] + random.choice(alphabet) + text[place + 1 :]
                case 1:
                    text = text[:place] + random.choice(alphabet) + text[place:]
                case 2:
                    text = text[:place] + text[place + random.randrange(1, 20) :]
                case 3:
                    parts = text.split(".")
                    random.shuffle(parts)
                    text = ".".join(parts)
                case 4:
                    text = text[:place] + text[random.randrange(len(text) + 1) :]
        if text != whole:
            tried += 1
            found = parse(text)
            assert found is None or not allows(found), f"seed {seed}: {text}"
    assert allows(parse(whole) or token), "the control"


def test_no_mutation_of_a_token_is_accepted() -> None:
    _no_mutation_is_accepted(5_000, seed=3)


@pytest.mark.torture
def test_no_mutation_of_a_token_is_accepted_in_a_hundred_thousand() -> None:
    _no_mutation_is_accepted(100_000, seed=4)


@given(st.lists(caveats, max_size=5))
def test_a_token_is_spelt_in_one_way(found: list[Caveat]) -> None:
    token = granted(*found)
    assert parse(spell(token)) == token


@given(st.text(max_size=80) | st.text("cap1.ABab_-=", max_size=40))
def test_what_is_no_token_is_none_or_allows_nothing(text: str) -> None:
    found = parse(text)
    assert found is None or not allows(found)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[]", b"null", b'{"until":1}', b'{"until":NaN}', b'{"until":1e999}', b'{"times":true}', b'{"times":0}'),
        *(b'{"only":[]}', b'{"only":[[]]}', b'{"only":[[1]]}', b'{"sandbox":""}', b'{"sandbox":"box" }', b'{"sandbox":"box","until":1.0}'),
        *(b'{"new":1}', b"[" * 5000, b"\xff"),
    ],
)
def test_a_restriction_that_is_not_understood_allows_nothing(text: bytes) -> None:
    token = granted()
    narrowed = Token(token.identity, (*token.caveats, text), Seal(token.signature).on(text))
    assert isinstance(genuine(KEY, narrowed), Genuine), "it is signed as it should be"
    assert not allows(narrowed)


def test_no_token_is_made_without_a_sandbox() -> None:
    with pytest.raises(ValueError, match="sandbox"):
        mint(KEY, os.urandom(16), (Until(1.0),))
    unbound = Token(b"i" * 16, (), KEY.on(b"capability 1\n" + b"i" * 16))
    assert not allows(unbound)
    with pytest.raises(ValueError, match="identity"):
        mint(KEY, b"short", (ForSandbox("box"),))


@pytest.mark.parametrize(
    "caveat", [Times(0), Times(-1), Times(1 << 40), Until(float("nan")), Until(float("inf")), Only(()), ForSandbox("")]
)
def test_a_restriction_that_cannot_be_is_not_made(caveat: Caveat) -> None:
    with pytest.raises(ValueError, match=r"restriction|JSON"):
        granted(caveat)


def test_there_is_an_end_to_narrowing() -> None:
    token = granted()
    with pytest.raises(ValueError, match="too many"):
        attenuate(token, *[Until(50.0)] * MOST_CAVEATS)
    assert isinstance(genuine(KEY, Token(token.identity, (b"x",) * 100_000, token.signature)), RefusedToken)


@pytest.mark.parametrize(
    ("pattern", "words", "covered"),
    [
        (("run", "git"), ("run", "git"), True),
        (("run", "git"), ("run", "git", "push"), False),
        (("run", "git", "**"), ("run", "git"), True),
        (("run", "git", "**"), ("run", "git", "push", "--force"), True),
        (("run", "git", "**"), ("run",), False),
        (("run", "git*"), ("run", "github"), True),
        (("run", "*"), ("run", "anything"), True),
        (("**",), ("run", "anything"), True),
        (("run", "**", "x"), ("run", "a", "x"), False),
        (("promote", "/home/u/*"), ("promote", "/home/u/p"), True),
        (("promote", "/home/u"), ("promote", "/home/u/p"), False),
        (("run", "g?t"), ("run", "git"), False),
    ],
)
def test_a_pattern_covers_word_by_word(pattern: Pattern, words: Pattern, covered: bool) -> None:
    assert covers(pattern, words) is covered


def test_every_action_has_words() -> None:
    assert words_of(Promote("/p", "d", 1)) == ("promote", "/p", "d")
    assert words_of(Undo("/p", "7")) == ("undo", "/p", "7")
    assert words_of(RunCode.of("python", b"1"))[:2] == ("code", "python")


def test_a_token_does_not_print_its_signature() -> None:
    token = granted()
    assert token.signature.hex() not in repr(token) and spell(token).rpartition(".")[2] not in repr(token)


def test_a_token_narrows_itself_spells_itself_and_says_what_it_claims() -> None:
    token = granted().attenuate(Times(1))
    assert token == attenuate(granted(), Times(1)) and parse(str(token)) == token
    assert caveats_of(token)[-1] == Times(1)
    assert caveats_of(Token(token.identity, (b"nonsense",), token.signature)) == (None,)
