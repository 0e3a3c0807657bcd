"""Private keys and tokens are recognised in what a file holds; certificates, templates and defaults of a developer's machine are not."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.secret_content import A_TOKEN, PRIVATE_KEY, is_public, secret_in

BODY = b"MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQDKqxr1vZ6h\n" * 3
HEX = b"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def pem(kind: bytes) -> bytes:
    return b"-----BEGIN " + kind + b"-----\n" + BODY + b"-----END " + kind + b"-----\n"


@pytest.mark.parametrize(
    "content",
    [
        *(pem(kind + b"PRIVATE KEY") for kind in (b"", b"RSA ", b"EC ", b"DSA ", b"OPENSSH ", b"ENCRYPTED ")),
        pem(b"PGP PRIVATE KEY BLOCK"),
        pem(b"CERTIFICATE") + pem(b"PRIVATE KEY"),
        pem(b"PRIVATE KEY").replace(b"\n", b"\r\n"),
        b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123\n\n" + BODY,
        pem(b"PRIVATE KEY").decode().encode("utf-16"),
        b'{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\n' + BODY.replace(b"\n", b"\\n") + b'"}',
        b"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\n",
        b"# created: 2024\nAGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ\n",
        b"AGE-SECRET-KEY-PQ-1QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ\n",
        b'{"kty": "RSA", "n": "x", "e": "AQAB", "d": "y"}',
        b"untrusted comment: minisign encrypted secret key\nRWRTY0Iy\n",
    ],
)
def test_a_private_key(content: bytes) -> None:
    assert secret_in(content) == PRIVATE_KEY


def test_a_binary_private_key_under_the_name_of_a_key() -> None:
    pkcs8 = b"\x30\x82\x04\xbd\x02\x01\x00\x30\x0d\x06\x09" + b"\1" * 100
    assert secret_in(pkcs8, named_so=True) == PRIVATE_KEY and not secret_in(pkcs8)
    certificate = b"\x30\x82\x03\xbd\x30\x82\x02\x01\x00" + b"\1" * 100
    assert not secret_in(certificate, named_so=True)
    assert secret_in(b"\x95\x01\xd8\x04secret key packet", named_so=True) == PRIVATE_KEY


@pytest.mark.parametrize("kind", [b"CERTIFICATE", b"PUBLIC KEY", b"RSA PUBLIC KEY", b"PGP PUBLIC KEY BLOCK", b"CERTIFICATE REQUEST"])
def test_what_is_public_in_a_file_for_keys(kind: bytes) -> None:
    assert not secret_in(pem(kind), named_so=True)


def test_a_document_that_quotes_the_header_of_a_key() -> None:
    quote = b"Paste it between `-----BEGIN PRIVATE KEY-----` and `-----END PRIVATE KEY-----`, one line each.\n"
    assert not secret_in(quote)
    assert secret_in(quote, named_so=True) == PRIVATE_KEY


@pytest.mark.parametrize(
    "content",
    [
        b"aws_access_key_id = AKIA" + b"QWERTYUIOP123456",
        b"GITHUB=ghp_" + b"a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8",
        b"X=github_pat_" + b"11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789",
        b"slack: xoxb-" + b"123456789012-abcdefghij",
        b"OPENAI=sk-" + b"proj-abcdefghijklmnopqrstuvwx",
        b"ANTHROPIC=sk-ant-" + b"api03-abcdefghijklmnopqrstuvwx",
        b"STRIPE=sk_live_" + b"abcdefghijklmnop1234",
        b"//registry.example.org/:_authToken=npm_" + b"a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8",
        b"DB_PASSWORD=" + HEX[:32],
        b'{"client_secret": "' + HEX[:40] + b'"}',
        b"api_key: 'Zx81kQ0pLm2vB7nC'",
        b'[http "https://github.com/"]\n\textraheader = AUTHORIZATION: basic eC1hY2Nlc3MtdG9rZW46Z2hz\n',
        b"index-url = https://bob:Xk2p9Qz@pypi.example.org/simple",
        b"index-url = https://Zx81kQ0pLm2vB7nC4tYw:@pypi.example.org/bob/",
        b"index-url = https://Zx81kQ0pLm2vB7nC4tYw@pypi.example.org/bob/",
        b"registry = https://Zx81kQ0pLm2vB7nC4tYw:x@npm.example.org/",
        b"channels:\n  - https://conda.example.org/t/bo-3f1c9a52-77d0-4b1e-9c3a-5e0d1a2b3c4d/bob\n",
        b"DATABASE_URL=postgres://app:Xk2p9QzLL@db.internal/app",
        b"password=https://bob:Xk2p9QzLL@db.example.net/",
        b"token = k2p9.Xz81mQ0pLm2vB7nC",
        b"secret_key = a9f(k2p!Xz81mQ0pLm2v",
        b"export SESSION_TOKEN=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    ],
)
def test_a_token(content: bytes) -> None:
    assert secret_in(content) == A_TOKEN


@pytest.mark.parametrize(
    "content",
    [
        b"DB_PASSWORD=postgres\nSECRET_KEY=dev-secret\nAPI_TOKEN=\nDEBUG=1\n",
        b"DATABASE_URL=postgres://postgres:postgres@localhost:5432/app",
        b"REDIS_URL=redis://:password@localhost",
        b"SECRET_KEY=change-me-in-production-please-123",
        b"TOKEN=${GITHUB_TOKEN}\nKEY={{ vault_api_key_2024 }}\nPASSWORD_FILE=/run/secrets/db-password-2024",
        b"API_KEY=your-api-key-here-1234567890",
        b"aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
        b"//registry.example.org/:_authToken=${NPM_TOKEN}\n",
        b"KEYBOARD_LAYOUT=us-international-2024",
        b"PASSWORD=xxxxxxxxxxxxxxxxxxxx1",
        b"homepage = https://example.org/user@2x.png",
        b"url = ssh://git-codecommit-user@git.example.org/v1/repos/x",
        b"url = https://somebody1984@git.example.org/somebody/project.git",
        b"index-url = https://${TOKEN_OF_THE_INDEX_2024}@pypi.example.org/",
        b"see https://forum.example.org/t/how-to-set-this-up-in-2024/1234",
        b".. _mod_authnz_ldap: https://httpd.apache.org/docs/2.2/mod/mod_authnz_ldap.html",
        b"user.password = hasher.encode_md5_hash(md5_hash)",
        b"password = settings['DATABASES2']['PASSWORD']",
        b"api_key = config_v2.credentials2",
        b"",
        b"\0" * 5000,
    ],
)
def test_a_placeholder_a_reference_or_a_default(content: bytes) -> None:
    assert secret_in(content) == ""


def test_public_content() -> None:
    assert is_public(pem(b"CERTIFICATE")) and is_public(b"ssh-ed25519 AAAA me") and not is_public(HEX)
