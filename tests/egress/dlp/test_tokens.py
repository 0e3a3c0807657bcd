"""Tokens of services, and values that only their context makes secret: found in a request, and not taken for one another's look-alikes."""

from __future__ import annotations

import codecs

import pytest

from agent_sandbox.egress.dlp.rules import default_rules
from tests.egress.dlp.samples import BASE64, HEX, LETTERS, TOKENS, find, rules_found, some

REQUEST = 'POST /v1/items?page=2 HTTP/1.1\r\nHost: api.example.com\r\nX-Trace: {}\r\n\r\n{{"items": [1, 2, 3], "note": "done"}}'


def test_every_rule_on_tokens_has_a_sample() -> None:
    assert {rule.id for rule in default_rules() if rule.token} == set(TOKENS)


@pytest.mark.parametrize("rule", TOKENS)
def test_a_token_is_found_in_a_request(rule: str) -> None:
    assert rule in rules_found(REQUEST.format(TOKENS[rule]()).encode())


@pytest.mark.parametrize("rule", TOKENS)
def test_a_token_is_found_written_backwards_and_in_rot13(rule: str) -> None:
    token = TOKENS[rule]()
    assert (rule, ("reversed",)) in {(each.rule, each.layers) for each in find(REQUEST.format(token[::-1]).encode())}
    assert (rule, ("rot13",)) in {(each.rule, each.layers) for each in find(REQUEST.format(codecs.encode(token, "rot13")).encode())}


def test_the_request_without_a_token_is_clean() -> None:
    """The control of the tests above: what they find is the token and nothing of the request."""
    assert find(REQUEST.format("7f3a").encode()) == []


@pytest.mark.parametrize("rule", sorted(set(TOKENS) - {"private-key", "slack-webhook", "discord-webhook", "braintree-token"}))
def test_the_beginning_of_a_token_alone_is_no_token(rule: str) -> None:
    assert rule not in rules_found(REQUEST.format(TOKENS[rule]()[:9]).encode())


def test_a_post_quantum_key_of_age_is_found() -> None:
    assert "age-key" in rules_found(REQUEST.format(TOKENS["age-key"]().replace("KEY-1", "KEY-PQ-1")).encode())


SECRETS = {
    "address-with-password": lambda: f"DATABASE_URL=postgres://app:{some(LETTERS, 14)}@db.example.com:5432/main",
    "authorization": lambda: f"Authorization: Bearer {some(LETTERS, 40)}",
    "assigned-secret": lambda: f'{{"client_secret": "{some(LETTERS, 24)}"}}',
    "aws-secret-key": lambda: f"aws_secret_access_key = {some(BASE64, 40)}\n",
    "azure-storage-key": lambda: f"DefaultEndpointsProtocol=https;AccountKey={some(BASE64, 86)}==;",
    "azure-signature": lambda: f"https://a.example.com/c?sv=2022&sig={some(LETTERS, 43)}%3D&se=1",
    "azure-client-secret": lambda: " " + some(LETTERS, 3) + "8Q~" + some(LETTERS, 34) + " ",
    "defined-secret": lambda: f"define('AUTH_KEY', '{some(LETTERS, 30)}');",
    "word-password": lambda: f"machine example.com login ada password {some(LETTERS, 12)}\n",
    "element-password": lambda: f"<server><password>{some(LETTERS, 12)}</password></server>",
    "option-password": lambda: f"mysql --password={some(LETTERS, 14)} main",
    "called-with-password": lambda: f'client.login("ada", "{some(LETTERS, 12)}")',
    "password-hash": lambda: f"root:$6$ab12${some(LETTERS, 86)}:19000:0",
    "database-password-line": lambda: f"db.example.com:5432:main:ada:{some(LETTERS, 12)}\n",
    "user-row": lambda: f"INSERT INTO users VALUES (1, 'ada', '{some(HEX, 40)}', 1);",
    "lone-key": lambda: some(HEX, 64) + "\n",
    "random-in-context": lambda: f"the api key is {some(LETTERS, 40)}, he wrote; api key: {some(LETTERS, 40)}",
}


def test_every_rule_on_context_has_a_sample() -> None:
    assert {rule.id for rule in default_rules() if rule.kind == "secret" and not rule.token} == set(SECRETS)


@pytest.mark.parametrize("rule", SECRETS)
def test_a_value_in_its_context_is_found(rule: str) -> None:
    assert rule in rules_found(SECRETS[rule]().encode())


@pytest.mark.parametrize(
    "text",
    [
        "password = os.environ['PASSWORD']",
        'password: "${DB_PASSWORD}"',
        "token = request.headers.get(name)",
        'api_key = "<your-api-key>"',
        "secret_key=changeme",
        "https://user:password@example.com/ is no address of ours".replace("password", "$PASSWORD"),
        "Authorization: Bearer <token>",
        "the token of the parser is consumed by the key function",
        "sha256:" + "0123456789abcdef" * 4,
        "integrity sha512-" + "q8Zk" * 21 + "==",
        'key = f"-----BEGIN ' + 'PRIVATE KEY-----\\n{body}\\n"',
        'PASSWD = "root:x:0:0:root:/root:/bin/sh"',
        'SERVER_AUTH = "1.3.6.1.5.5.7.3.1"',
        'credentials = "{0}:{1}".format(user, word)',
        "sort_key = 'include'",
        "commit 2b1f9c0d7e6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c",
    ],
)
def test_code_examples_and_digests_are_no_secrets(text: str) -> None:
    assert rules_found(text.encode()) == set()


def test_entropy_alone_is_no_secret_and_in_context_it_is() -> None:
    value = some(LETTERS, 40)
    assert rules_found(f"etag of the object {value} as stored".encode()) == set()
    assert "random-in-context" in rules_found(f"your access token: {value} as stored".encode())
