"""A host of AWS for tests, as far as signatures go: it checks each request with the key, the way the service's documentation describes.

Written apart from the product's own signing: it goes by the fields that the request says are signed.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse

KEY_ID, SECRET, TOKEN = "AKIDEXAMPLE1234567", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "session-token-9a8b7c6d5e4f"


def problem(request: bytes, *, secret: str = SECRET, key_id: str = KEY_ID) -> str:
    """Return what is wrong with the signature of a request; empty if it is valid."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.lower()] = " ".join(value.split())
    authorization = fields.get("authorization", "")
    if not authorization.startswith("AWS4-HMAC-SHA256 "):
        return "it has no signature"
    said = dict(part.strip().split("=", 1) for part in authorization.removeprefix("AWS4-HMAC-SHA256 ").split(","))
    key, date, region, service, end = said["Credential"].split("/")
    if key != key_id or end != "aws4_request":
        return f"the key {key} is not known"
    names = said["SignedHeaders"].split(";")
    if missing := [name for name in ("host", *(each for each in fields if each.startswith("x-amz-"))) if name not in names]:
        return f"not signed: {missing}"
    told = fields.get("x-amz-content-sha256")
    if told and len(told) == 64 and told != hashlib.sha256(body).hexdigest():
        return "the body is another"
    path, _, query = target.partition("?")
    if service != "s3":
        path = urllib.parse.quote(path, safe="/-_.~")
    parameters = sorted(tuple((pair + "=").split("=")[:2]) for pair in query.split("&") if pair)
    canonical = [method, path, "&".join("=".join(pair) for pair in parameters)]
    canonical += [f"{name}:{fields[name]}" for name in names]
    canonical += ["", said["SignedHeaders"], told or hashlib.sha256(body).hexdigest()]
    scope = f"{date}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", fields["x-amz-date"], scope, hashlib.sha256("\n".join(canonical).encode()).hexdigest()])
    signing = ("AWS4" + secret).encode()
    for part in (date, region, service, "aws4_request"):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    return "" if hmac.new(signing, text.encode(), hashlib.sha256).hexdigest() == said["Signature"] else "the signature is wrong"
