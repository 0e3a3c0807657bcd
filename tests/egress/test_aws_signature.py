"""Signatures for AWS: the published examples, what a client signed with placeholders, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import threading

import pytest

from agent_sandbox.egress.aws_signature import AwsKey, Scope, Signing, canonical_path
from agent_sandbox.egress.http1 import Fields, MessageReader, RequestHead
from agent_sandbox.egress.inspection import Inspection
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.secrets import Broker
from agent_sandbox.egress.web import Customs
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import AWS_KEY, AWS_NAMES, AWS_SECRET, AWS_TOKEN, BoundSecret, Secret, new_placeholder
from agent_sandbox.policy.network import network_rules
from agent_sandbox.secret_values import bound
from tests.egress.aws_host import KEY_ID, SECRET, TOKEN, problem

EMPTY = hashlib.sha256(b"").hexdigest()
SUITE = ("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", b"20150830", b"us-east-1", b"service")
S3 = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", b"20130524", b"us-east-1", b"s3")
DATED = (b"x-amz-date", b"20150830T123600Z")
OF_S3 = ((b"host", b"examplebucket.s3.amazonaws.com"), (b"x-amz-content-sha256", EMPTY.encode()), (b"x-amz-date", b"20130524T000000Z"))
FORM = (b"content-type", b"application/x-www-form-urlencoded")
# Names and values of AWS's "Signature Version 4 test suite", and of the examples in the documentation of S3 and IAM.
PUBLISHED: dict[str, tuple[tuple[str, str, bytes, bytes, bytes], bytes, str, Fields, bytes, str]] = {
    "get-vanilla": (SUITE, b"GET", "/", (DATED,), b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    "get-vanilla-query-order-key-case": (
        *(SUITE, b"GET", "/?Param2=value2&Param1=value1", (DATED,), b""),
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
    ),
    "get-unreserved": (
        *(SUITE, b"GET", "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", (DATED,), b""),
        "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
    ),
    "post-vanilla": (SUITE, b"POST", "/", (DATED,), b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
    "post-x-www-form-urlencoded": (
        *(SUITE, b"POST", "/", (FORM, DATED), b"Param1=value1"),
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
    ),
    "S3: GET Bucket Lifecycle": (S3, b"GET", "/?lifecycle", OF_S3, b"", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
    "S3: Get Bucket (List Objects)": (
        *(S3, b"GET", "/?max-keys=2&prefix=J", OF_S3, b""),
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "IAM: ListUsers": (
        ("AKIDEXAMPLE", SUITE[1], b"20150830", b"us-east-1", b"iam"),
        b"GET",
        "/?Action=ListUsers&Version=2010-05-08",
        ((b"host", b"iam.amazonaws.com"), (FORM[0], FORM[1] + b"; charset=utf-8"), DATED),
        b"",
        "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
    ),
}


@pytest.mark.parametrize(("key", "method", "target", "fields", "body", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_examples_have_their_published_signatures(
    key: tuple[str, str, bytes, bytes, bytes], method: bytes, target: str, fields: Fields, body: bytes, expected: str
) -> None:
    key_id, secret, *scope = key
    payload = dict(fields).get(b"x-amz-content-sha256")
    every = fields if dict(fields).get(b"host") else ((b"host", b"example.amazonaws.com"), *fields)
    signed = Signing(AwsKey("", key_id, secret), Scope(*scope), payload).signed(method, target.encode(), every, body)
    assert dict(signed)[b"authorization"].decode().endswith(f"Signature={expected}")


def test_a_path_is_encoded_twice_except_for_s3() -> None:
    assert canonical_path(b"/a%20b//./c/../d/", b"sqs") == b"/a%2520b/d/"
    assert canonical_path(b"/a%20b//./c%2Fd(e)", b"s3") == b"/a%20b//./c/d%28e%29"
    assert canonical_path(b"/", b"sqs") == canonical_path(b"", b"sqs") == b"/"


HOST = Origin("s3.eu-west-1.amazonaws.com", 443, True)
HOLDERS = {place: new_placeholder(name, bytes(12)) for place, name in AWS_NAMES.items()}
VALUES = {AWS_KEY: KEY_ID, AWS_SECRET: SECRET, AWS_TOKEN: TOKEN}
RULES = network_rules(outbound=True)


def customs(*places: str, hosts: tuple[str, ...] = ("*.amazonaws.com",)) -> Customs:
    secrets = [BoundSecret(AWS_NAMES[each], HOLDERS[each], VALUES[each], hosts, each) for each in places or (AWS_KEY, AWS_SECRET)]
    return Customs(RULES, Inspection(None, [(each.name, each.placeholder) for each in secrets], b"k" * 32), Broker(secrets))


def claim(service: str = "s3", key: str = HOLDERS[AWS_KEY], signature: str = "0" * 64) -> tuple[bytes, bytes]:
    text = (
        f"AWS4-HMAC-SHA256 Credential={key}/20260101/eu-west-1/{service}/aws4_request, SignedHeaders=host;x-amz-date, Signature={signature}"
    )
    return b"authorization", text.encode()


NOW = (b"x-amz-date", b"20260101T000000Z")


def left(guard: Customs, method: bytes, target: str, *fields: tuple[bytes, bytes], body: bytes = b"", origin: Origin = HOST) -> bytes:
    """Return the request as it leaves."""
    head = RequestHead(method, target.encode(), ((b"host", origin.field), *fields), len(body))
    passage = guard.admit(origin, head)
    onward = (passage.feed(body) if body else b"") + (passage.finish() if body else b"")
    return passage.onward(len(onward)) + onward


@pytest.mark.parametrize("service", ["s3", "dynamodb"])
@pytest.mark.parametrize("target", ["/", "/bucket/a%20b/%C3%A9?b=2&a=1&a=0&c", "/?list-type=2&prefix=x%2Fy"])
def test_what_was_signed_with_placeholders_leaves_with_a_valid_signature(service: str, target: str) -> None:
    digest = (b"x-amz-content-sha256", hashlib.sha256(b'{"a": 1}').hexdigest().encode())
    for fields in ((), (digest,), ((b"content-type", b"application/json"), (b"range", b"bytes=0-9"), (b"x-amz-meta-a", b" b   c "))):
        sent = left(customs(), b"PUT", target, claim(service), NOW, *fields, body=b'{"a": 1}')
        assert problem(sent) == "" and b"a: 1}" not in sent[:20]
        assert problem(sent, secret="another") == "the signature is wrong", "the control: this host really checks"
        assert HOLDERS[AWS_KEY].encode() not in sent and SECRET.encode() not in sent
        assert (b"Range: bytes=0-9" in sent) == (len(fields) == 3)


def test_the_token_of_a_session_is_put_in_and_signed() -> None:
    for fields in ((), ((b"x-amz-security-token", HOLDERS[AWS_TOKEN].encode()),)):
        sent = left(customs(AWS_KEY, AWS_SECRET, AWS_TOKEN), b"GET", "/", claim(), NOW, *fields)
        assert problem(sent) == "" and sent.count(TOKEN.encode()) == 1


def test_what_needs_no_signature_goes_without_one() -> None:
    assert b"Authorization" not in left(customs(), b"GET", "/public/data")


REFUSED: dict[str, tuple[str, tuple[tuple[bytes, bytes], ...], str]] = {
    "a foreign key": ("/", (claim(key="AKIDOFSOMEBODYELSE"), NOW), "the bound key of AWS alone"),
    "another scheme": ("/", ((b"authorization", b"Bearer abc"), NOW), "the bound key of AWS alone"),
    "version 4A": ("/", ((b"authorization", claim()[1].replace(b"HMAC-SHA256", b"ECDSA-P256-SHA256")), NOW), "alone"),
    "two signatures": ("/", (claim(), claim(), NOW), "alone"),
    "no date": ("/", (claim(),), "X-Amz-Date"),
    "pieces that are signed one by one": (
        "/",
        (claim(), NOW, (b"x-amz-content-sha256", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD")),
        "signed one by one",
    ),
    "an address that is signed": (
        f"/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={HOLDERS[AWS_KEY]}%2F20260101%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Signature=00",
        (),
        "signed in its query",
    ),
    "the placeholder of the secret in the path": (f"/{HOLDERS[AWS_SECRET]}", (claim(), NOW), "the placeholder of the secret"),
    "the placeholder of the key in another field": ("/", (claim(), NOW, (b"x-note", HOLDERS[AWS_KEY].encode())), "the placeholder of"),
    "the placeholder of the key in a region": (
        "/",
        ((claim()[0], claim()[1].replace(b"eu-west-1", HOLDERS[AWS_KEY].encode())), NOW),
        "alone",
    ),
}


@pytest.mark.parametrize(("target", "fields", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_signed_afresh_is_refused(target: str, fields: tuple[tuple[bytes, bytes], ...], why: str) -> None:
    with pytest.raises(FlowRefused) as refused:
        pytest.fail(f"it left: {left(customs(), b'GET', target, *fields)!r}")
    assert refused.value.status == 403 and why in str(refused.value)


def test_nothing_is_signed_for_other_hosts_over_plain_http_or_where_credentials_are_handed_out() -> None:
    for origin in (Origin("evil.example", 443, True), Origin(HOST.name, 80, False), Origin("sts.amazonaws.com", 443, True)):
        with pytest.raises(FlowRefused):
            left(customs(), b"GET", "/", claim("sts"), NOW, origin=origin)
    named = customs(hosts=("sts.amazonaws.com",))
    assert problem(left(named, b"GET", "/", claim("sts"), NOW, origin=Origin("sts.amazonaws.com", 443, True))) == "", (
        "bound by its name it is"
    )


def test_a_body_without_a_digest_is_held_up_to_a_bound() -> None:
    assert problem(left(customs(), b"POST", "/", claim("lambda"), NOW, body=b"x" * (1 << 20))) == ""
    with pytest.raises(FlowRefused) as refused:
        left(customs(), b"POST", "/", claim("lambda"), NOW, body=b"x" * (9 << 20))
    assert refused.value.status == 413


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"


STREAMED = (claim(), NOW, (b"content-encoding", b"aws-chunked"), (b"x-amz-content-sha256", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"))


def test_a_body_in_chunks_of_s3_goes_on_as_it_is_and_is_searched_without_its_borders() -> None:
    body = chunked(b"one " * 100_000, b"two")
    sent = left(customs(), b"PUT", "/b/k", *STREAMED, body=body)
    assert problem(sent) == "" and sent.endswith(body)
    holder = HOLDERS[AWS_SECRET].encode()
    hidden = {
        "in one chunk": chunked(b"text " + holder),
        "in two chunks": chunked(holder[:20], holder[20:]),
        "in the trailer": chunked(b"a").replace(b"AAAAAA==", holder),
        "behind the end": chunked(b"a") + holder,
        "after much": chunked(b"x" * 700_000, holder[:9], holder[9:]),
    }
    for body in (*hidden.values(), b"no chunks", chunked(b"a")[:-1]):
        with pytest.raises(FlowRefused):
            pytest.fail(f"it left: {left(customs(), b'PUT', '/b/k', *STREAMED, body=body)[-200:]!r}")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("more", [("?a=1&b=2",), ("", "-d", "a=b&c=d", "-H", "Content-Type: text/plain"), ("", "-X", "DELETE")])
@pytest.mark.parametrize("service", ["execute-api", "s3"])
def test_our_signature_is_the_one_that_curl_makes(more: tuple[str, ...], service: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    reader = MessageReader()
    got: list[object] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while not got or (isinstance(got[0], RequestHead) and got[0].length and len(got) < 2):
                reader.receive(connection.recv(65536))
                got.extend(each for _ in range(2) if isinstance(each := reader.next(), RequestHead | bytes))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{server.getsockname()[1]}/stage/pets{more[0]}"
    words = ["curl", "-sS", "--aws-sigv4", f"aws:amz:eu-west-1:{service}", "--user", f"{KEY_ID}:{SECRET}", *more[1:], url]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    thread.join()
    server.close()
    head = got[0]
    assert isinstance(head, RequestHead)
    theirs = dict(head.fields)[b"authorization"]
    scope = Scope(*theirs.split(b"Credential=")[1].split(b",")[0].split(b"/")[1:4])
    body = b"".join(each for each in got[1:] if isinstance(each, bytes))
    ours = Signing(AwsKey("", KEY_ID, SECRET), scope, dict(head.fields).get(b"x-amz-content-sha256")).signed(
        head.method, head.target, head.fields, body
    )
    assert dict(ours)[b"authorization"].replace(b" ", b"") == theirs.replace(b" ", b"")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "file",
            '{"Version": 1, "AccessKeyId": "AKIDEXAMPLE1234567", "SecretAccessKey": "SECRETOFAWS12345", "SessionToken": "TOKENOFAWS12345"}',
        ),
        (
            "file",
            '{"Credentials": {"AccessKeyId": "AKIDEXAMPLE1234567", "SecretAccessKey": "SECRETOFAWS12345", '
            '"SessionToken": "TOKENOFAWS12345"}}',
        ),
        (
            "file",
            "[other]\naws_access_key_id=x\n[default]\naws_access_key_id = AKIDEXAMPLE1234567\naws_secret_access_key = SECRETOFAWS12345\n"
            "aws_session_token = TOKENOFAWS12345\n",
        ),
        ("env", ""),
    ],
)
def test_a_key_is_read_from_every_source_and_is_three_secrets(tmp_path: object, source: str, text: str) -> None:
    path = f"{tmp_path}/key"
    with open(path, "w") as file:
        file.write(text)
    written = "AWS_SECRET_ACCESS_KEY" + (f"=file:{path}" if source == "file" else "") + "@*.amazonaws.com+aws"
    environment = dict(zip(AWS_NAMES.values(), ("AKIDEXAMPLE1234567", "SECRETOFAWS12345", "TOKENOFAWS12345"), strict=True))
    found = bound([Secret.read(written)], environment if source == "env" else {}, home="/", project=None)
    assert {each.name: each.value for each in found} == environment
    assert {each.place for each in found} == {AWS_KEY, AWS_SECRET, AWS_TOKEN}


def test_half_a_key_or_another_name_is_refused() -> None:
    with pytest.raises(PolicyError, match="no whole key"):
        bound([Secret.read("AWS_SECRET_ACCESS_KEY@a.amazonaws.com+aws")], {"AWS_SECRET_ACCESS_KEY": "x" * 20}, home="/", project=None)
    for written in ("MY_KEY@a.amazonaws.com+aws", "AWS_ACCESS_KEY_ID@a.amazonaws.com+aws-key"):
        with pytest.raises(PolicyError, match="no key of AWS"):
            Secret.read(written)
