"""Secrets that leave in pieces: over several requests, fields, messages or names, to one host.

Two things are remembered for each host, within bounds. The last characters that were sent at each place (a field of the query, the end
of the path, the body, …), to which what is sent there next is joined. And the pieces of each secret that were sent anywhere, in any order:
what makes them up to most of it is refused. The pieces before that have left.

Only the user's own secrets are sought in this way, and what the broker puts in: their exact values are known. Not found: pieces that are
encrypted or mixed with other text; pieces of fewer than `SHORTEST` characters that are sent out of order, or between other values at the
same place; and pieces that lie more than `MOST_REQUESTS` requests apart.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.policy.secret_content import looks_random

SHORTEST = 5  # characters of a piece that is recognised wherever it is sent
MOST_REQUESTS = 1000  # to a host, after which a piece is forgotten
MOST_TEXT = 16 << 10  # bytes of one text that is taken apart
_MOST_PLACES, _MOST_TEXTS = 1024, 256  # that are remembered; and of one request
_MOST_OF_IT = 0.75  # of a secret is as good as all of it
_TOKEN = re.compile(rb"[A-Za-z0-9+/_.~=!@#$^*()-]{5,}")
_NAME = "name"  # the place of names of hosts, which have no capital letters
_BORDERS = re.compile(rb"[/=]")


@dataclass
class _Host:
    """The requests that a host was sent, and the parts of secrets: for each character, the request that it was last sent with."""

    requests: int = 0
    covered: dict[int, list[int]] = field(default_factory=dict)


class Fragments:
    """The pieces of secrets that one run may have sent, for each host."""

    def __init__(self, own: OwnSecrets) -> None:
        self._own = own
        plain: dict[str, bytes] = {}  # of the spellings of a value, the first is the value itself
        for spelling, rule in own.spellings:
            plain.setdefault(rule.id, spelling)
        self._values = tuple(plain.items())
        self._begins: dict[bytes, list[tuple[int, int]]] = {}  # of pieces: the secret, and where in it
        for number, (_, value) in enumerate(self._values):
            if looks_random(value) and b"://" not in value:  # of words, each may be sent for its own sake
                for place in range(len(value) - SHORTEST + 1):
                    for begin in {value[place : place + SHORTEST], value[place : place + SHORTEST].lower()}:
                        self._begins.setdefault(begin, []).append((number, place))
        self._longest_piece = 2 * max(map(len, plain.values()), default=0)  # in an encoding
        self._longest = max((len(spelling) for spelling, _ in own.spellings), default=0)
        self._tails: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether there is no secret to look for."""
        return not self._values

    def completed(self, host: str, texts: Iterable[tuple[str, bytes]]) -> str:
        """Return the rule of a secret that these texts, each with its place, make up together with what the host was sent; else nothing.

        What completes a secret is not remembered: it is not sent.
        """
        if self.idle:
            return ""
        texts = [each for _, each in zip(range(_MOST_TEXTS), texts, strict=False)]
        tails = dict(self._joined(host, texts))
        if name := self._found({place: text for (_, place), (text, _) in tails.items()}):
            return name
        known = self._hosts.setdefault(host, _Host())
        self._hosts.move_to_end(host)
        known.requests += 1
        pieces = list(self._pieces(texts)) if self._begins else []
        if name := self._covering(known, pieces):
            return name
        for number, start, end in pieces:
            covered = known.covered.setdefault(number, [-MOST_REQUESTS] * len(self._values[number][1]))
            covered[start:end] = [known.requests] * (end - start)
        for key, (_, tail) in tails.items():
            self._tails[key] = tail
            self._tails.move_to_end(key)
        while len(self._tails) > _MOST_PLACES:
            self._tails.popitem(last=False)
        while len(self._hosts) > _MOST_PLACES:
            self._hosts.popitem(last=False)
        return ""

    def _joined(self, host: str, texts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[tuple[str, str], tuple[bytes, bytes]]]:
        """Yield for each place the text to look at, and what is to be remembered of it."""
        now: dict[str, bytes] = {}
        for place, text in texts:
            now[place] = now.get(place, b"") + text
        for place, text in now.items():
            tail = self._tails.get((host, place), b"")
            seen = tail + (text[: self._longest] if place == "body" or len(text) > MOST_TEXT else text)
            yield (host, place), (seen, (tail + text)[-self._longest + 1 :])

    def _found(self, texts: dict[str, bytes]) -> str:
        """Return the rule of a secret that is in one of the texts, each at its place; else nothing."""
        for _, _, rule in self._own.matches(b"\n".join(texts.values())):
            return rule.id
        return self.in_name(texts[_NAME]) if _NAME in texts else ""

    def in_name(self, text: bytes) -> str:
        """Return the rule of a secret that is in the name of a host, which has no capital letters; else nothing."""
        return next((name for name, value in self._values if value.lower() in text), "")

    def _pieces(self, texts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[int, int, int]]:
        """Yield the number of a secret, and the beginning and the end of a piece of it, for each piece among the words of texts."""
        words = dict.fromkeys((word, where == _NAME) for where, text in texts for word in _TOKEN.findall(text[:MOST_TEXT]))
        for word, folded in words:
            parts = _BORDERS.split(word) if b"/" in word or b"=" in word else ()
            for piece in (word, *parts, *(_decoded(word) if len(word) <= self._longest_piece else ())):
                for number, place in self._begins.get(piece[:SHORTEST], ()):
                    value = self._values[number][1]
                    if value.startswith(piece, place) or (folded and value.lower().startswith(piece, place)):
                        yield number, place, place + len(piece)

    def _covering(self, known: _Host, pieces: Iterable[tuple[int, int, int]]) -> str:
        """Return the rule of a secret of which these pieces, with those before them, are most; else nothing."""
        added: dict[int, set[int]] = {}
        for number, start, end in pieces:
            added.setdefault(number, set()).update(range(start, end))
        for number, places in added.items():
            name, value = self._values[number]
            before = known.covered.get(number, ())
            places |= {place for place, when in enumerate(before) if known.requests - when < MOST_REQUESTS}
            if len(places) >= _MOST_OF_IT * len(value):
                return name
        return ""


def _decoded(word: bytes) -> Iterator[bytes]:
    """Yield what a word may be when it is decoded, and the word backwards."""
    yield word[::-1]
    if len(word) % 2 == 0:
        with suppress(ValueError):
            yield bytes.fromhex(word.decode("ascii"))
    with suppress(binascii.Error):
        bare = word.rstrip(b"=")
        yield base64.b64decode(bare + b"=" * (-len(bare) % 4), altchars=b"-_" if b"-" in bare or b"_" in bare else None, validate=True)


def texts_of_target(target: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the places and texts of the target of a request: the parts of its path, and the fields of its query."""
    path, _, query = target.partition(b"?")
    parts = [unquote_to_bytes(part) for part in path.split(b"/") if part]
    for number, part in enumerate(parts):
        yield f"path {number}", part
    if len(parts) > 1:
        yield "path", parts[-1]
    yield from _of_form(query, "query")


def texts_of_name(name: str) -> tuple[str, list[tuple[str, bytes]]]:
    """Return the domain of a canonical name, and the places and texts of what stands before it."""
    labels = name.split(".")
    return ".".join(labels[-2:]), [(_NAME, label.encode()) for label in labels[:-2]]


def texts_of_body(kind: bytes, body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the places and texts of a body of this content type: the fields of a form or of JSON, the parts of a multipart body, or all."""
    kind, _, parameters = kind.partition(b";")
    kind = kind.strip().lower()
    yield "body", body
    if len(body) > MOST_TEXT:
        return
    if kind == b"application/x-www-form-urlencoded":
        yield from _of_form(body, "form")
    elif kind.endswith(b"json"):
        try:
            yield from _of_json(json.loads(body), "", 0)
        except (ValueError, RecursionError):
            return
    elif kind.startswith(b"multipart/") and (border := re.search(rb'boundary="?([^";,\s]+)', parameters)):
        for part in body.split(b"--" + border[1])[1:-1]:
            yield "part", part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")


def _of_form(form: bytes, kind: str) -> Iterator[tuple[str, bytes]]:
    for part in form.split(b"&") if form else ():
        name, _, value = (unquote_to_bytes(each.replace(b"+", b" ")) for each in part.partition(b"="))
        yield f"{kind} {name[:40].decode('latin-1')}", value
        yield kind, value


def _of_json(value: object, name: str, depth: int) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, dict) and depth < 20:
        for key, each in value.items():
            yield "json", key.encode(errors="surrogatepass")
            yield from _of_json(each, key[:40], depth + 1)
    elif isinstance(value, list) and depth < 20:
        for each in value:
            yield from _of_json(each, name, depth + 1)
    elif isinstance(value, str):
        text = value.encode(errors="surrogatepass")
        yield "json", text
        yield f"json {name}", text
