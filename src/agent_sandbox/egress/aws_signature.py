"""AWS Signature Version 4, without sockets: what a client signed with placeholders is signed afresh with the real key.

Nothing of the client's signature counts but the scope that it names (date, region, service). The request is signed as it goes on: its
method, path and query, the fields `host`, `content-type`, `content-md5` and all that begin with `x-amz-`, and its body.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

from agent_sandbox.egress.http1 import Fields
from agent_sandbox.policy.bound_secrets import AWS_KEY, AWS_SECRET, AWS_TOKEN, BoundSecret

ALGORITHM = b"AWS4-HMAC-SHA256"
MOST_HASHED = 8 << 20  # bytes of a body that is held, because its digest is part of the signature
_CLAIM = re.compile(
    ALGORITHM
    + rb" +Credential=([^/,\s]+)/([0-9]{8})/([a-z0-9-]{1,40})/([a-z0-9-]{1,40})/aws4_request, *SignedHeaders=([a-z0-9;-]{1,2000}), *"
    rb"Signature=[0-9a-f]{64}"
)
_DIGEST = re.compile(rb"[0-9a-f]{64}|UNSIGNED-PAYLOAD|STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_ONE_ENCODING = ("s3", "s3express", "s3-object-lambda", "s3-outposts")  # the services whose paths are encoded once
_SIGNED = (b"host", b"content-type", b"content-md5")
_GIVING = ("sts.", "sts-", "iam.", "iam-")  # hosts that hand out credentials


@dataclass(frozen=True)
class AwsKey:
    """A key of AWS: its placeholder, its id, the secret, and the token of a session if it is a temporary one."""

    holder: str
    id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Scope:
    """The scope of a signature: a day, a region and a service."""

    date: bytes
    region: bytes
    service: bytes

    @property
    def text(self) -> bytes:
        return b"/".join((self.date, self.region, self.service, b"aws4_request"))


@dataclass(frozen=True)
class Signing:
    """The signing of one request: by whom, for what, and the digest of the body, which is None if the body itself has to be hashed."""

    key: AwsKey
    scope: Scope
    payload: bytes | None

    def signed(self, method: bytes, target: bytes, fields: Fields, body: bytes) -> Fields:
        """Return the fields with the authorization. `body` counts where no field names its digest."""
        payload = hashlib.sha256(body).hexdigest().encode() if self.payload is None else self.payload
        names, lines = _canonical_fields(fields)
        path, _, query = target.partition(b"?")
        form = (method, canonical_path(path, self.scope.service), canonical_query(query), lines, names, payload)
        text = b"\n".join((ALGORITHM, _date(fields), self.scope.text, hashlib.sha256(b"\n".join(form)).hexdigest().encode()))
        derived = b"AWS4" + self.key.secret.encode()
        for part in (self.scope.date, self.scope.region, self.scope.service, b"aws4_request", text):
            derived = hmac.digest(derived, part, "sha256")
        credential = self.key.id.encode() + b"/" + self.scope.text
        value = b"%b Credential=%b, SignedHeaders=%b, Signature=%b" % (ALGORITHM, credential, names, derived.hex().encode())
        return (*(each for each in fields if each[0] != b"authorization"), (b"authorization", value))


def key_of(secrets: tuple[BoundSecret, ...], host: str) -> AwsKey | None:
    """Return the key among the secrets of a host; None if there is none.

    A pattern does not cover the hosts that hand out credentials: those must be bound by their own names.
    """
    parts = {each.place: each for each in secrets if host in each.hosts or not host.startswith(_GIVING)}
    if AWS_SECRET not in parts or AWS_KEY not in parts:
        return None
    token = parts[AWS_TOKEN].value if AWS_TOKEN in parts else ""
    return AwsKey(parts[AWS_KEY].placeholder, parts[AWS_KEY].value, parts[AWS_SECRET].value, token)


def signing_of(key: AwsKey, target: bytes, fields: Fields) -> Signing:
    """Return how a request is to be signed. Raises ValueError where it cannot be: the sentence is for the client."""
    written = [value for name, value in fields if name == b"authorization"]
    if not written and key.holder.encode() in unquote_to_bytes(target):
        raise ValueError("an address that is signed in its query is not signed afresh; let the client sign the fields of the request")
    claim = _CLAIM.fullmatch(written[0]) if len(written) == 1 else None
    if claim is None or claim[1] != key.holder.encode():
        raise ValueError("requests to this host are signed with the bound key of AWS alone: AWS4-HMAC-SHA256, in the field Authorization")
    if not _date(fields):
        raise ValueError("a request that is signed for AWS needs one field X-Amz-Date")
    told = [value for name, value in fields if name == b"x-amz-content-sha256"]
    if len(told) > 1 or (told and not _DIGEST.fullmatch(told[0])):
        raise ValueError(
            "a body whose pieces are signed one by one is not signed afresh; let the client sign the whole body, or none of it"
        )
    return Signing(key, Scope(*claim.group(2, 3, 4)), told[0] if told else None)


def canonical_path(path: bytes, service: bytes) -> bytes:
    """Return a path as it is signed: encoded once more than it is sent, except for S3."""
    if service.decode() in _ONE_ENCODING:
        return quote(unquote_to_bytes(path), safe="/-_.~").encode()
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    end = b"/" if parts and path.endswith(b"/") else b""
    return quote(b"/" + b"/".join(parts) + end, safe="/-_.~").encode()


def canonical_query(query: bytes) -> bytes:
    """Return a query as it is signed: encoded in one way, and sorted."""
    pairs = [part.partition(b"=") for part in query.split(b"&") if part]
    return b"&".join(b"%b=%b" % pair for pair in sorted((_encoded(name), _encoded(value)) for name, _, value in pairs))


def _encoded(text: bytes) -> bytes:
    return quote(unquote_to_bytes(text), safe="-_.~").encode()


def _canonical_fields(fields: Fields) -> tuple[bytes, bytes]:
    """Return the names of the fields that are signed, and their lines."""
    signed: dict[bytes, list[bytes]] = {}
    for key, value in fields:
        if key in _SIGNED or key.startswith(b"x-amz-"):
            signed.setdefault(key, []).append(b" ".join(value.split()))
    lines = b"".join(b"%b:%b\n" % (key, b",".join(signed[key])) for key in sorted(signed))
    return b";".join(sorted(signed)), lines


def _date(fields: Fields) -> bytes:
    found = [value for key, value in fields if key == b"x-amz-date"]
    return found[0] if len(found) == 1 and re.fullmatch(rb"[0-9]{8}T[0-9]{6}Z", found[0]) else b""
