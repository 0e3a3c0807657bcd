"""Ordinary requests pass: package installs, API calls, uploads of sources, binaries and archives, telemetry and lockfiles."""

from __future__ import annotations

import pytest

from bench.traffic import benign_requests
from tests.egress.dlp.samples import TOKENS, find

REQUESTS = 330  # thirty of each kind; the benchmark makes thousands


def rules_held(text: bytes) -> set[str]:
    return {each.rule for each in find(text) if each.action != "alert"}


def test_ordinary_requests_are_not_held() -> None:
    """Installed files differ from machine to machine, and some hold an example of a key: one request in a hundred may."""
    held = [(kind, rules) for kind, request in benign_requests(17, REQUESTS) if (rules := rules_held(request))]
    assert len(held) <= REQUESTS // 100, held
    made = {kind for kind, _ in held} & {"package install", "API call", "telemetry", "form", "image upload", "lockfile"}
    assert not made, held


def test_a_secret_in_any_of_them_is_held() -> None:
    """The control: the same requests with a key at their end."""
    for kind, request in benign_requests(17, 11):
        if kind != "zip upload":  # its last bytes are the table of contents, which nothing follows
            assert rules_held(request + b"\n" + TOKENS["github-token"]().encode() + b"\n"), kind


@pytest.mark.parametrize(
    "text",
    [
        b'"dependencies": {"minipass": "^7.0.4", "get-token": "~1.2.3"}',
        b'"result_key": "AggregateComplianceByConformancePacks"',
        b'"ClientRequestToken": "bcd2f1b8-9a78-44d3-8a7a-4dd07d7cf635"',
        b"csrf_token=bcd2f1b89a7844d38a7a4dd07d7cf635&q=1",
        b'<assemblyIdentity publicKeyToken="1fc8b3b9a1e18e3b"></assemblyIdentity>',
        b"Token: '#dcdccc',",
        b"IMAGE_REL_I386_TOKEN = 0x000C,",
        b"private_key: PKCS7PrivateKeyTypes,",
        b"self.key_password = key_password\n",
        b'_SK_START = b"-----BEGIN OPENSSH PRIVATE' + b' KEY-----"\n_SK_END',
        b"arn:aws:lambda:eu-west-1:568282634449:function:f",
        b"amqp://guest:guest@localhost//",
        b"sessionToken?: stringValueMaxLength1000;",
    ],
)
def test_what_programs_and_their_manuals_write_is_not_held(text: bytes) -> None:
    assert rules_held(text) == set()


@pytest.mark.parametrize(
    "text",
    [
        b'"minipassword": "h4Nter-7xQ2"',
        b'"secret_key": "q8Zr1tLw0PzVb3Kd"',
        b'"access_token": "bcd2f1b8-9a78-44d3-8a7a-4dd07d7cf635"',
        b"Token: '9dcdcccf00aa81b2c3d4',",
        b"private_key = 'q8Zr1tLw0PzVb3KdPKCS7'",
        b"password = h4Nter-7xQ2\n",
        b'"-----BEGIN PRIVATE' + b' KEY-----",\n"MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"',
        b"amqp://guest:h4Nter7xQ2@localhost//",
    ],
)
def test_what_looks_like_it_and_is_a_secret_is_held(text: bytes) -> None:
    assert rules_held(text) != set()
