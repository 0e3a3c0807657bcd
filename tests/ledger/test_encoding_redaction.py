"""What looks like a secret is in no entry; what does not is as it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent_sandbox.ledger.encoding import REMOVED, is_suspicious, without_secrets
from agent_sandbox.ledger.event import LONGEST_TEXT, Cut, Intent, OutcomeEvent
from tests.ledger.samples import ledger_at, read

# Made up, in the shapes that the makers of such tokens document; joined here, so that no scanner takes this file for a leak.
SHAPES = (
    "sk-" + "proj-abcdefghijklmnop1234",
    "gh" + "p_abcdefghijklmnopqrstuvwxyz0123456789",
    "github" + "_pat_11ABCDEFG0abcdefghijklmnop",
    "glpat" + "-abcdefghij0123456789",
    "xox" + "b-1234567890-abcdefghij",
    "AK" + "IAABCDEFGHIJKLMNOP",
    "AI" + "zaSyABCDEFGHIJKLMNOPQRSTUVWXYZ0123456",
    "npm" + "_abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi" + "-AgEIcHlwaS5vcmcCJGFiY2Rl",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc_DEF",
    "SG" + ".abcdefghijklmnop.qrstuvwxyz0123456789",
)


@pytest.mark.parametrize("token", SHAPES)
@pytest.mark.parametrize("words", ["{}", "export X={}", "https://example.org/?q={}", '-H "X: {}"'])
def test_a_token_of_a_known_shape_is_removed_wherever_it_stands(tmp_path: Path, token: str, words: str) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    word = words.format(token)
    ledger.record(Intent({"argv": ["curl", word], "raw": word.encode()}, "digest", "policy", "rule"))
    content = Path(ledger.path).read_bytes()
    assert token.encode() not in content and token.encode().hex().encode() not in content
    (entry,) = read(ledger.path)
    assert isinstance(entry.event, Intent) and REMOVED in str(entry.event.action["argv"])


@pytest.mark.parametrize(
    "argv",
    [
        ["mysql", "--password", "hunter2"],
        ["mysql", "--password=hunter2"],
        ["x", "--api-key", "hunter2"],
        ["x", "--github-token", "hunter2"],
        ["x", "-token", "hunter2"],
        ["curl", "-u", "bob:hunter2", "https://example.org"],
        ["curl", "--user", "bob:hunter2"],
        ["curl", "https://bob:hunter2@example.org/"],
        ["git", "clone", "ssh://x:hunter2@host/path"],
        ["curl", "-H", "Authorization: Bearer hunter2hunter2"],
        ["curl", "-H", "authorization: basic aHVudGVyMjpodW50ZXIy"],
        ["curl", "-H", "X-Api-Key: hunter2"],
        ["curl", "-b", "cookie=hunter2"],
        ["sh", "-c", "PGPASSWORD=hunter2 psql"],
        ["sh", "-c", "export DB_PASSWORD='hunter2'; run"],
        ["curl", "-d", '{"password": "hunter2"}'],
        ["sh", "-c", "aws configure set aws_secret_access_key=hunter2"],
        ["curl", "-H", "Authorization: token hunter2"],
        ["curl", "-H", "X-Auth: hunter2"],
        ["curl", "-ubob:hunter2"],
        ["curl", "--user=bob:hunter2"],
        ["curl", "https://hunter2@example.org/x"],
        ["curl", "https://example.org/?a=1&sig=hunter2"],
        ["curl", "https://example.org/?key=hunter2"],
        ["curl", "https://hooks.slack.com/services/T0/B0/hunter2"],
        ["mysql", "-phunter2"],
        ["sshpass", "-p", "hunter2", "ssh", "host"],
        ["docker", "login", "-u", "bob", "-p", "hunter2"],
        ["redis-cli", "-a", "hunter2"],
        ["openssl", "enc", "-k", "hunter2"],
        ["openssl", "enc", "-pass", "pass:hunter2"],
        ["env", "DB_PASS=hunter2", "x"],
        ["x", "AccountKey=hunter2;"],
        ["x", "--pass", "hunter2"],
        ["aws", "configure", "set", "aws_secret_access_key", "hunter2"],
        ["npm", "config", "set", "//registry/:_authToken", "hunter2"],
        # A command line is one word.
        ["bash", "-c", "x --password hunter2 y"],
        ["bash", "-c", "x --token 'hunter2'"],
        ["bash", "-c", "curl -u bob:hunter2 https://example.org"],
        ["bash", "-c", "mysql -u root -phunter2 db"],
        ["bash", "-c", "cd x && sshpass -p hunter2 ssh host"],
        ["bash", "-c", "docker login -u bob -p hunter2"],
        ["bash", "-c", "redis-cli -h host -a hunter2 ping"],
        ["echo", "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----"],
        ["echo", "-----BEGIN PRIVATE KEY-----\nhunter2 and no end"],
    ],
)
def test_a_secret_after_a_name_that_says_so_is_removed(tmp_path: Path, argv: list[str]) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    ledger.record(Intent({"argv": argv}, "digest", "policy", "rule"))
    content = Path(ledger.path).read_bytes()
    assert b"hunter2" not in content and b"aHVudGVy" not in content and REMOVED.encode() in content


@pytest.mark.parametrize(
    "argv",
    [
        ["git", "log", "--author", "bob"],
        ["cat", "tokens.txt", "password.py", "secrets/"],
        ["grep", "-rn", "api_key", "src"],
        ["echo", "the secret is out", "a key: of sorts"[:5]],
        ["git", "clone", "https://example.org/a/b.git"],
        ["ssh", "git@example.org"],
        ["pytest", "-k", "token and not slow"],
        ["ls", "-u", "x"],
        ["mkdir", "-p", "a/b"],
        ["docker", "run", "-p", "80:80", "x"],
        ["bash", "-c", "mkdir -p a && git log -p && python -u x.py"],
        ["bash", "-c", "docker run -p 80:80 x"],
        ["ssh", "-p", "22", "host"],
        ["git", "remote", "add", "origin", "git@example.org:a/b.git"],
    ],
)
def test_words_that_only_sound_like_it_are_kept(argv: list[str]) -> None:
    assert without_secrets({"argv": argv}) == {"argv": argv}


def test_every_pattern_is_reached_through_a_hint() -> None:
    assert all(map(is_suspicious, SHAPES))
    assert not any(map(is_suspicious, ("RunCommand", "echo", "hello", "/home/u/project", "HOME", "PATH", "0123456789abcdef" * 4)))


def test_an_option_for_a_user_is_looked_for_where_a_word_begins() -> None:
    """Not in the name of a directory: a run below `/home/me/work-units` would load what only a secret needs."""
    assert not any(map(is_suspicious, ("/tmp/pytest-of-ubuntu/project", "run-unit-tests", "x86-u")))
    assert all(map(is_suspicious, ("-u", "-uname:word", "curl -u me:word", "curl\t-u\nme:word", "-U")))


def test_a_long_text_is_looked_through_as_far_as_it_is_kept() -> None:
    facts = without_secrets({"text": "password=hunter2 " + "x" * 100_000, "raw": b"password=hunter2 " + b"x" * 100_000})
    for name in ("text", "raw"):
        cut = facts[name]
        assert (
            isinstance(cut, Cut) and "hunter2" not in cut.start and cut.length == 100_017 and len(cut.start) <= LONGEST_TEXT + len(REMOVED)
        )


def test_a_secret_that_lies_across_the_end_of_what_is_kept_is_removed() -> None:
    for length in range(LONGEST_TEXT - 60, LONGEST_TEXT + 5):
        facts = without_secrets(
            {"text": "x" * length + " ghp_" + "A" * 36 + "y" * 2000, "raw": b"x" * length + b" ghp_" + b"A" * 36 + b"y" * 99}
        )
        assert all("ghp_A" not in str(facts[name]) for name in ("text", "raw")), length


@pytest.mark.parametrize(
    "piece",
    ["token", "eyJ-", "://a:", "-----BEGIN ", "secret.", "password =", "bearer ", "mysql ", "-u a", "authorization:a ", "x-auth", "?key"],
)
def test_no_text_makes_it_slow(piece: str) -> None:
    """A thousand times what it takes, so that it fails for a pattern that does not end and not for a busy machine."""
    started = time.process_time()
    without_secrets({"argv": [piece * (LONGEST_TEXT // len(piece))] * 10})
    assert time.process_time() - started < 10


def test_an_outcome_is_cleaned_too(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    ledger.record(
        OutcomeEvent(1, "raised", {"message": "cannot reach https://bob:hunter2@example.org", "nested": {"deep": ["--token", "hunter2"]}})
    )
    assert b"hunter2" not in Path(ledger.path).read_bytes()
