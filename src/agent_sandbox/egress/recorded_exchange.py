"""A recorded exchange: a request and its answer as values, without credentials, and their form as plain values that is checked when read.

A record may come from anybody, and the egress reads bytes of a guest, so every field is checked. A body is None if it was not kept, and
`why` says why. Found data is replaced by asterisks, and `redacted` names the rules. The target and the fields are for people: a request is
matched by its `key`, a keyed digest, and fields that vary from run to run are no part of that.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable
from hashlib import sha256

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.egress.http1 import MOST_FIELDS, MOST_HEAD, Fields

if TYPE_CHECKING:
    from typing import Any

MOST_BODY = 16 << 20  # bytes of a body that is kept
MOST_RULES = 50  # that are named as having replaced something
_LONGEST_WHY = 500
_KEY = re.compile(r"[0-9a-f]{64}")
_METHOD = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,40}")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+):[0-9]{1,5}")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


@dataclass(frozen=True)
class RecordedExchange:
    """One request and its answer. `sent` and `received` are the lengths of the bodies, whether they were kept or not."""

    key: str
    method: str
    origin: str  # https://api.example.com:443
    target: str
    asked: Fields
    sent: int
    status: int
    answered: Fields
    trailers: Fields
    received: int
    why: str = ""
    redacted: tuple[str, ...] = ()
    request_body: bytes | None = None
    body: bytes | None = None

    def head(self) -> dict[str, Any]:
        """Return everything but the bodies, as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("request_body", "body")}
        return plain | {name: [[_text(key), _text(value)] for key, value in plain[name]] for name in ("asked", "answered", "trailers")}

    def plain(self) -> dict[str, Any]:
        """Return the exchange as plain values."""
        return {**self.head(), "request_body": _packed(self.request_body), "body": _packed(self.body)}

    @property
    def host(self) -> tuple[str, int]:
        """The host and the port."""
        name, _, port = self.origin.partition("://")[2].rpartition(":")
        return name.strip("[]"), int(port)


def key_of(salt: bytes, method: str, origin: str, target: bytes, body: bytes) -> str:
    """Return the key of a request: a keyed digest of its method, its origin, its address with the query, and the digest of its body."""
    return hmac.new(salt, b"\0".join((method.encode(), origin.encode(), target, body)), sha256).hexdigest()


def read_exchange(plain: object) -> RecordedExchange:
    """Return the exchange that plain values are. Raises ValueError, saying what is wrong, for anything else."""
    if not isinstance(plain, dict) or set(plain) != _FIELDS:
        raise ValueError("an exchange has other fields than this version writes")
    made = RecordedExchange(
        _matched(plain, "key", _KEY),
        _matched(plain, "method", _METHOD),
        _matched(plain, "origin", _ORIGIN),
        _string(plain, "target", MOST_HEAD),
        _fields(plain, "asked"),
        _number(plain, "sent", 1 << 60),
        _number(plain, "status", 599),
        _fields(plain, "answered"),
        _fields(plain, "trailers"),
        _number(plain, "received", 1 << 60),
        _string(plain, "why", _LONGEST_WHY),
        _strings(plain, "redacted"),
        _unpacked(plain, "request_body"),
        _unpacked(plain, "body"),
    )
    if made.status < 200 or not 0 < made.host[1] < 65536:
        raise ValueError("an exchange has a status or a port that there is not")
    return made


_FIELDS = {
    *("key", "method", "origin", "target", "asked", "sent", "status", "answered", "trailers", "received", "why", "redacted"),
    *("request_body", "body"),
}


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _packed(body: bytes | None) -> str | None:
    return None if body is None else base64.b64encode(body).decode()


def _unpacked(plain: dict[str, Any], name: str) -> bytes | None:
    value = plain[name]
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > (MOST_BODY + 2) // 3 * 4:
        raise ValueError(f"the {name} of an exchange is no text, or too long")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise ValueError(f"the {name} of an exchange is not in base64") from None


def _string(plain: dict[str, Any], name: str, most: int) -> str:
    value = plain[name]
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"the {name} of an exchange is no text, or too long")
    return value


def _matched(plain: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = _string(plain, name, 500)
    if form.fullmatch(value) is None:
        raise ValueError(f"the {name} of an exchange is malformed")
    return value


def _number(plain: dict[str, Any], name: str, most: int) -> int:
    value = plain[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"the {name} of an exchange is no number that it can be")
    return value


def _strings(plain: dict[str, Any], name: str) -> tuple[str, ...]:
    value = plain[name]
    if not isinstance(value, list) or len(value) > MOST_RULES or not all(isinstance(each, str) and len(each) <= 200 for each in value):
        raise ValueError(f"the {name} of an exchange is no list of texts")
    return tuple(value)


def _fields(plain: dict[str, Any], name: str) -> Fields:
    value = plain[name]
    if not isinstance(value, list) or len(value) > MOST_FIELDS:
        raise ValueError(f"the fields of an exchange ({name}) are no list, or too many")
    fields = tuple(_pair(each) for each in value)
    if sum(len(key) + len(text) for key, text in fields) > MOST_HEAD:
        raise ValueError(f"the fields of an exchange ({name}) are too long")
    return fields


def _pair(value: object) -> tuple[bytes, bytes]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, str) for each in value):
        raise ValueError("a field of an exchange is no pair of texts")
    try:
        key, text = (each.encode("latin-1") for each in value)
    except UnicodeEncodeError:
        raise ValueError("a field of an exchange holds characters that none can hold") from None
    if _NAME.fullmatch(key) is None or _VALUE.fullmatch(text) is None or (key == b"content-length" and not text.isdigit()):
        raise ValueError("a field of an exchange is malformed")
    return key, text


class BodyDigest:
    """The digest of a body as it arrives. Placeholders of secrets, which differ from run to run, are replaced by the secrets' names."""

    def __init__(self, names: Iterable[tuple[bytes, bytes]]) -> None:
        self._names = tuple(names)
        self._digest = sha256()
        self._rest = b""
        self._behind = max((len(placeholder) for placeholder, _ in self._names), default=1) - 1

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        text = replaced(self._rest + piece, self._names)
        cut = len(text) - min(self._behind, len(text))
        self._digest.update(text[:cut])
        self._rest = text[cut:]

    def digest(self) -> bytes:
        """Return the digest of the whole body."""
        self._digest.update(self._rest)
        self._rest = b""
        return self._digest.digest()


def replaced(text: bytes, names: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a text with placeholders replaced by the names of their secrets."""
    for placeholder, name in names:
        text = text.replace(placeholder, name)
    return text
