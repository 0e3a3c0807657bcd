"""The secrets broker: the sandbox holds placeholders, and the values are put in on the way out.

A value is put in only towards the hosts it is bound to, only over TLS that is read here and verified beyond, and only at the place that its
binding names. In what comes back from those hosts it is replaced by the placeholder, in every common encoding. A placeholder at any other
place is left as it is; the inspection finds it there and refuses the request. Requests to AWS are signed (`aws_signature`).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote_plus, unquote_to_bytes

from agent_sandbox.egress.aws_signature import Signing, key_of, signing_of
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets, spellings_of
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.http1 import Fields
from agent_sandbox.egress.rules import ambiguity, overriding, rewriting
from agent_sandbox.policy.bound_secrets import AUTHORIZATION, AWS_NAMES, AWS_SECRET, BoundSecret
from agent_sandbox.policy.hosts import covers

_SEARCHED = "x"  # in the place of a value; with nothing there, what follows would be taken for the value
_BESIDE = b"x-user"  # the name under which the rest of a field with a value is searched: as an authorization it would be a credential
_MUCH = 1 << 20  # bytes of an answer for which a faster search is worth its making
_RULE = SearchRule("value", "a value of the broker", "")
_SCHEME = re.compile(rb"(?:[A-Za-z][A-Za-z0-9-]* +)?")


@dataclass(frozen=True)
class Placed:
    """A part of a request with the values put in, the same part without the placeholders (to be searched), and the secrets' names."""

    target: bytes
    fields: Fields
    searched_target: bytes
    searched_fields: Fields
    names: tuple[str, ...]
    signing: Signing | None = None


class Broker:
    """The secrets of one run."""

    def __init__(self, secrets: Iterable[BoundSecret]) -> None:
        self.secrets = tuple(secrets)
        self._scrubbers: dict[tuple[str, ...], _Spellings] = {}

    def bound(self, host: str) -> tuple[BoundSecret, ...]:
        """Return the secrets that are bound to a canonical host."""
        return tuple(each for each in self.secrets if covers(each.hosts, host)) if self.secrets else ()

    def place(self, host: str, method: bytes, target: bytes, fields: Fields) -> Placed:
        """Put the values into the head of a request that goes to a canonical host over TLS.

        Raises ValueError for a foreign credential, and for a request that a secret of its host does not go into.
        """
        everything = self.bound(host)
        asked = re.sub(r"/(?:\./)+", "/", target.partition(b"?")[0].decode("ascii"))  # apt writes /./, which leads nowhere else
        plain = not (ambiguity(asked) or rewriting(fields))
        methods = (method.decode("ascii"), *overriding(fields))
        bound = tuple(each for each in everything if all(each.goes_with(asks, asked) for asks in methods) and (plain or not each.paths))
        for each in everything:
            if each not in bound and any(key == each.header and _with_value(value, each, "") is not None for key, value in fields):
                raise ValueError(f"the secret {each.name} goes into {each.scope} of {host} alone")
        names: list[str] = []
        written, searched = [], []
        for key, value in fields:
            owners = [each for each in bound if each.header == key]
            if owner := next((each for each in owners if _with_value(value, each, each.value) is not None), None):
                names.append(owner.name)
                written.append((key, _with_value(value, owner, owner.value) or b""))
                searched.append((_BESIDE, _beside(value, owner)))
            elif owners:
                raise ValueError(f"the field {key.decode()} of requests to {host} is for the secret {owners[0].name} alone")
            else:
                written.append((key, value))
                searched.append((key, value))
        signing = self._signing(host, target, written, searched, names) if any(each.place == AWS_SECRET for each in bound) else None
        onward, looked = target, target
        for each in bound:
            if name := each.named("query"):
                path, mark, query = onward.partition(b"?")
                put = _in_query(query, name, each.placeholder, each.value)
                if mark and put is not None:
                    names.append(each.name)
                    onward = path + mark + put
                    path, mark, query = looked.partition(b"?")
                    looked = path + mark + (_in_query(query, name, each.placeholder, _SEARCHED) or b"")
        return Placed(onward, tuple(written), looked, tuple(searched), tuple(names), signing)

    def _signing(
        self, host: str, target: bytes, written: list[tuple[bytes, bytes]], searched: list[tuple[bytes, bytes]], names: list[str]
    ) -> Signing | None:
        """Return how a request to AWS is signed, and take the placeholders out of its fields. Raises ValueError if it cannot be signed.

        A request without any signature goes on as it is: what everybody may read needs none.
        """
        bound = self.bound(host)
        key = key_of(bound, host)
        holders = {each.placeholder.encode() for each in bound if each.place in AWS_NAMES}
        asks = any(name == b"authorization" for name, _ in written) or any(each in unquote_to_bytes(target) for each in holders)
        if not asks:
            return None
        if key is None:
            raise ValueError(f"{host} hands out credentials: bind the key of AWS to it by its own name")
        signing = signing_of(key, target, tuple(written))
        names.append(AWS_NAMES[AWS_SECRET])
        for number, (name, value) in enumerate(searched):
            if name == b"authorization":
                searched[number] = (_BESIDE, b" ".join((signing.scope.region, signing.scope.service)))
            elif name == b"x-amz-security-token" and value in holders:
                searched[number] = (_BESIDE, b"")
        written[:] = [each for each in written if each[0] not in (b"authorization", b"x-amz-security-token")]
        if key.token:
            written.append((b"x-amz-security-token", key.token.encode()))
        return signing

    def in_body(self, host: str) -> tuple[BoundSecret, ...]:
        """Return the secrets that may go into bodies to a canonical host."""
        return tuple(each for each in self.bound(host) if each.named("body"))

    def place_in_body(self, host: str, kind: bytes, body: bytes) -> tuple[bytes, bytes, tuple[str, ...]]:
        """Return a body of this content type with the values put in, the same without the placeholders, and the names of the secrets."""
        names, searched = [], body
        for each in self.in_body(host):
            replace = {b"application/json": _in_json, b"application/x-www-form-urlencoded": _in_query}.get(
                kind.partition(b";")[0].strip().lower()
            )
            if replace is None:
                continue
            put, without = (
                replace(text, each.named("body"), each.placeholder, new) for text, new in ((body, each.value), (searched, _SEARCHED))
            )
            if put is not None and without is not None:
                body, searched = put, without
                names.append(each.name)
        return body, searched, tuple(names)

    def scrubber(self, host: str) -> Scrubber | None:
        """Return what takes the values out of a response of a canonical host; None if no secret is bound to it."""
        bound = self.bound(host)
        if not bound:
            return None
        key = tuple(each.name for each in bound)
        if key not in self._scrubbers:
            self._scrubbers[key] = _Spellings(bound)
        return Scrubber(self._scrubbers[key])


def _with_value(value: bytes, secret: BoundSecret, new: str) -> bytes | None:
    """Return the value of a field with the placeholder replaced; None if the placeholder is not all of its credential."""
    scheme = _SCHEME.match(value)
    begin = scheme.end() if scheme else 0
    if value[begin:] == secret.placeholder.encode():
        return value[:begin] + new.encode()
    if secret.place != AUTHORIZATION or value[:begin].strip().lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(value[begin:], validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    if not colon or [user, password].count(secret.placeholder) != 1:
        return None
    pair = ":".join(new if each == secret.placeholder else each for each in (user, password))
    return value[:begin] + base64.b64encode(pair.encode())


def _beside(value: bytes, secret: BoundSecret) -> bytes:
    """Return the rest of a field that holds the placeholder: its scheme, and the other half of a pair."""
    scheme, _, rest = value.rpartition(b" ")
    if rest == secret.placeholder.encode():
        return scheme
    halves = base64.b64decode(rest).decode().split(":", 1)
    return b" ".join((scheme, *(each.encode() for each in halves if each != secret.placeholder)))


def _in_query(query: bytes, name: str, placeholder: str, new: str) -> bytes | None:
    """Return a query or form with the placeholder replaced in the one field of this name; None if it is not there, or is there twice."""
    parts = query.split(b"&")
    found = [place for place, part in enumerate(parts) if unquote_plus(part.partition(b"=")[0].decode("latin-1")) == name]
    if len(found) != 1:
        return None
    key, _, value = parts[found[0]].partition(b"=")
    if unquote_plus(value.decode("latin-1")) != placeholder:
        return None
    parts[found[0]] = key + b"=" + quote(new, safe="").encode()
    return b"&".join(parts)


def _in_json(body: bytes, name: str, placeholder: str, new: str) -> bytes | None:
    """Return an object in JSON with the placeholder replaced in its field of this name; None if it is not there, and there alone."""
    written = re.compile(re.escape(json.dumps(name).encode()) + rb"\s*:\s*" + re.escape(json.dumps(placeholder).encode()))
    found = written.findall(body)
    if len(found) != 1 or body.count(placeholder.encode()) != 1:
        return None
    put = body.replace(json.dumps(placeholder).encode(), json.dumps(new).encode())
    before, after = _object(body), _object(put)
    if before is None or after is None or before.get(name) != placeholder:
        return None
    return put if after == {**before, name: new} else None  # what was replaced is the object's own field, and not a nested one


def _object(body: bytes) -> dict[str, Any] | None:
    def own(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a name twice")
        return dict(pairs)

    try:
        value = json.loads(body, object_pairs_hook=own)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class _Spellings:
    """The ways in which some values can be written, each with what it is replaced by."""

    def __init__(self, secrets: tuple[BoundSecret, ...]) -> None:
        found: dict[bytes, bytes] = {}
        for secret in secrets:
            for spelling in (*spellings_of(secret.value), secret.value.replace("/", "\\/").encode()):
                found.setdefault(spelling, secret.placeholder.encode())
        self.replacements = found
        self.pattern = re.compile(b"|".join(re.escape(each) for each in sorted(found, key=len, reverse=True)))
        self.beginnings = frozenset(each[:length] for each in found for length in range(1, len(each)))
        self.first = frozenset(each[0] for each in found)
        self.longest = max(map(len, found))
        self.lowered = frozenset(each.lower() for each in found)  # as the names of fields are read

    @cached_property
    def sought(self) -> OwnSecrets:
        """A search that finds out far sooner than the pattern that nothing is there, and takes longer to make."""
        return OwnSecrets(tuple((each, _RULE) for each in self.replacements))


class Scrubber:
    """Takes values out of a stream. Any division of the same bytes into pieces gives the same bytes.

    Only bytes that may be the beginning of a value are held back, so an answer that comes bit by bit goes on bit by bit.
    """

    def __init__(self, spellings: _Spellings) -> None:
        self._spellings = spellings
        self._held = b""
        self._seen = 0

    def feed(self, piece: bytes) -> bytes:
        """Take a piece, and return what can go on."""
        text = self._held + piece
        written, place = [], 0
        pending = self._pending(text, place)
        self._seen += len(piece)
        if self._seen > _MUCH and next(self._spellings.sought.matches(text), None) is None:
            self._held = text[pending:]
            return text[:pending]
        while True:
            found = self._spellings.pattern.search(text, place)
            if found is None or found.start() >= pending:
                break
            written += [text[place : found.start()], self._spellings.replacements[found[0]]]
            place = found.end()
            if place > pending:
                pending = self._pending(text, place)
        self._held = text[pending:]
        return b"".join((*written, text[place:pending]))

    def finish(self) -> bytes:
        """Return the rest of the stream."""
        text, self._held = self._held, b""
        return self.clean(text)

    def clean(self, text: bytes) -> bytes:
        """Return a text without values."""
        return self._spellings.pattern.sub(lambda found: self._spellings.replacements[found[0]], text)

    def fields(self, fields: Fields) -> Fields:
        """Return fields without values. One that has a value in its name is left out: no placeholder could stand for it."""
        return tuple((key, self.clean(value)) for key, value in fields if not any(each in key for each in self._spellings.lowered))

    def _pending(self, text: bytes, place: int) -> int:
        """Return where the first beginning of a value stands that the end of the text cuts off; else the end."""
        for start in range(max(place, len(text) - self._spellings.longest + 1), len(text)):
            if text[start] in self._spellings.first and text[start:] in self._spellings.beginnings:
                return start
        return len(text)
