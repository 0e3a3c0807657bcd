"""The recorder of a run's exchanges, and the answers of a run that gets them from a record, both without sockets.

What is recorded is what the program inside saw: with placeholders instead of secrets. Fields that hold credentials are left out, and what
the search finds is replaced by asterisks. A body is not kept if it is longer than a bound, if it cannot be searched, or if a secret lies in
it where it cannot be replaced. The egress has no files: each exchange goes to the supervisor in small pieces, and whoever made the request
waits until the supervisor has taken it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from agent_sandbox.egress.dlp.scanner import Finding, Scanner, Search
from agent_sandbox.egress.http1 import Fields, ResponseHead
from agent_sandbox.egress.inspection import unpacked
from agent_sandbox.egress.recorded_exchange import MOST_BODY, MOST_RULES, BodyDigest, RecordedExchange, key_of, read_exchange, replaced
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.hosts import bracketed
from agent_sandbox.policy.secrets import names_a_secret

MOST_HELD = 96 << 20  # bytes of bodies that are held at once for the record
PIECE = 32 << 10  # bytes that go to the supervisor in one message
_AT_ONCE = 128 << 10  # bytes that are searched before other exchanges have their turn
_ROUNDS = 8  # of replacing: a value that is written in many ways is found once in each
_CREDENTIALS = frozenset(b"authorization proxy-authorization cookie cookie2 set-cookie set-cookie2 authentication-info".split())
_CHALLENGES = (b"www-authenticate", b"proxy-authenticate")  # which ask for a credential, and hold none
_QUERY = re.compile(rb"([?&;]([^=&;]*)=)([^&;]*)")
_SIGNED = ("sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "code", "state")
_COMPRESSED, _UNREADABLE = "compressed", "unreadable"

Part = Literal["begin", "head", "request_body", "body", "end"]
Send = Callable[[Part, bytes], Awaitable[None]]  # a piece of a part of an exchange, to the supervisor
Ask = Callable[[str], Awaitable[RecordedExchange | None]]  # for the recorded answer to the request with this key


def origin_of(origin: Origin) -> str:
    """Return the origin as a record writes it."""
    return f"http{'s' if origin.tls else ''}://{bracketed(origin.name)}:{origin.port}"


class AskedRequest:
    """A request whose key is computed while its body passes."""

    def __init__(self, salt: bytes, origin: Origin, method: bytes, target: bytes, secrets: Iterable[BoundSecret]) -> None:
        self.names = tuple((each.placeholder.encode(), b"{secret %b}" % each.name.encode()) for each in secrets)
        self.method, self.origin = method.decode("ascii"), origin_of(origin)
        self.target = replaced(target, self.names)
        self._salt, self._digest = salt, BodyDigest(self.names)
        self.sent = 0

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body."""
        self.sent += len(piece)
        self._digest.feed(piece)

    def key(self) -> str:
        """Return the key, once the body is complete."""
        return key_of(self._salt, self.method, self.origin, self.target, self._digest.digest())


@dataclass(frozen=True)
class RecordedAnswers:
    """The answers of a run that gets them from a record."""

    salt: bytes
    ask: Ask
    secrets: tuple[BoundSecret, ...] = ()

    def asked(self, origin: Origin, method: bytes, target: bytes) -> AskedRequest:
        """Return a request whose key is to be computed."""
        return AskedRequest(self.salt, origin, method, target, self.secrets)


@dataclass(eq=False)
class ExchangeRecorder:
    """Records the exchanges of one run. With `bodies`, bodies too. `skip` is told of what is not recorded, and why."""

    salt: bytes
    bodies: bool
    search: Search | None
    send: Send
    skip: Callable[[str], None]
    secrets: tuple[BoundSecret, ...] = ()
    ending: set[asyncio.Task[None]] = field(default_factory=set)  # exchanges that are being handed over
    _held: int = 0
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin(self, origin: Origin, method: bytes, target: bytes, asked: Fields, coding: bytes) -> Recording:
        """Begin to record an exchange. `asked` are the fields that the program sent, `coding` is that of its body."""
        return Recording(self, AskedRequest(self.salt, origin, method, target, self.secrets), asked, _Body(self, coding))

    def hold(self, count: int) -> bool:
        """Count bytes that are held from now on. Returns whether there is room."""
        if self._held + count > MOST_HELD:
            return False
        self._held += count
        return True

    def free(self, count: int) -> None:
        """Count bytes that are no longer held."""
        self._held -= count

    async def write(self, made: RecordedExchange) -> None:
        """Hand an exchange to the supervisor, piece by piece, and wait until it has taken each. Raises ValueError for a malformed one."""
        head = json.dumps(made.head(), separators=(",", ":")).encode("ascii")
        read_exchange({**json.loads(head), "request_body": None, "body": None})
        parts: list[tuple[Part, bytes | None]] = [("head", head)]
        parts += [("request_body", made.request_body), ("body", made.body)]
        async with self._sending:  # pieces of two exchanges do not mix
            await self.send("begin", b"")
            for part, data in parts:
                for place in range(0, max(len(data), 1), PIECE) if data is not None else ():
                    await self.send(part, data[place : place + PIECE])  # type: ignore[index]
            await self.send("end", b"")


class _Body:
    """A body that is kept while it passes, within bounds."""

    def __init__(self, recorder: ExchangeRecorder, coding: bytes) -> None:
        self._recorder, self._coding = recorder, coding.strip().lower()
        self._data: bytearray | None = bytearray() if recorder.bodies else None
        self.length = 0
        self.why = "" if recorder.bodies else "bodies were not recorded"

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        self.length += len(piece)
        if self._data is None:
            return
        if self.length > MOST_BODY or not self._recorder.hold(len(piece)):
            self.drop(
                f"it is longer than the {MOST_BODY >> 20} MiB that are kept" if self.length > MOST_BODY else "too much passed at once"
            )
            return
        self._data += piece

    def drop(self, why: str = "") -> None:
        """Keep nothing of it."""
        if self._data is not None:
            self._recorder.free(len(self._data))
            self._data, self.why = None, self.why or why

    async def kept(self, rules: list[str], names: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes | None, bool]:
        """Return the body without found data, and whether it was unpacked for that. None if it is not kept."""
        if self._data is None:
            return None, False
        body, search = replaced(bytes(self._data), names), self._recorder.search
        if search is None or not body:
            return body, False
        plain, packed = body, self._coding not in (b"", b"identity")
        if packed:
            try:
                plain = unpacked(body, self._coding)
            except FlowRefused:
                self.drop("it is compressed so that it cannot be searched")
                return None, False
        before = len(rules)
        clean, lost = await redacted(search, plain, rules)
        if lost:
            self.drop(lost)
            return None, False
        return (body, False) if len(rules) == before and clean == plain else (clean, packed)


@dataclass(eq=False)
class Recording:
    """One exchange while it is recorded. Call `end` or `drop` at its end."""

    recorder: ExchangeRecorder
    asked: AskedRequest
    fields: Fields
    request: _Body
    ended: bool = False  # it is on its way to the supervisor
    _answer: ResponseHead | None = None
    _body: _Body | None = None

    def sent(self, piece: bytes) -> None:
        """Take a piece of the request's body, as the program sent it."""
        self.asked.feed(piece)
        self.request.feed(piece)

    def answer(self, head: ResponseHead) -> None:
        """Take the head of the answer, as the program gets it."""
        self._answer = head
        self._body = _Body(self.recorder, b", ".join(head.values(b"content-encoding")))

    def received(self, piece: bytes) -> None:
        """Take a piece of the answer's body, as the program gets it."""
        if self._body is not None:
            self._body.feed(piece)

    async def end(self, trailers: Fields) -> None:
        """Record the exchange. It is handed over even if whoever waits for this is cancelled."""
        self.ended = True
        task = asyncio.ensure_future(self._end(trailers))
        self.recorder.ending.add(task)
        task.add_done_callback(self.recorder.ending.discard)
        await asyncio.shield(task)

    async def _end(self, trailers: Fields) -> None:
        answer, body = self._answer, self._body
        assert answer is not None and body is not None
        try:
            rules: list[str] = []
            asked, search, names = self.asked, self.recorder.search, self.asked.names
            sent, _ = await self.request.kept(rules, names)
            received, changed = await body.kept(rules, names)
            without = {b"content-encoding"} if changed else set()
            fields = await _cleaned(search, answer.fields, rules, names, leave_out=without)
            made = RecordedExchange(
                asked.key(),
                asked.method,
                asked.origin,
                await _shown_target(search, asked.target, rules),
                await _cleaned(search, self.fields, rules, names),
                asked.sent,
                answer.status,
                fields,
                await _cleaned(search, trailers, rules, names),
                body.length,
                body.why or self.request.why,
                tuple(dict.fromkeys(each[:200] for each in rules))[:MOST_RULES],
                sent if asked.sent else None,
                received,
            )
            await self.recorder.write(made)
        except Exception:  # what could not be searched or written down is not recorded, and the program has its answer
            self.recorder.skip("an exchange that could not be searched or written down")
        finally:
            self._free()

    def drop(self) -> None:
        """Record nothing of it, unless it has ended. Idempotent."""
        if not self.ended:
            self._free()

    def _free(self) -> None:
        for each in (self.request, self._body):
            if each is not None:
                each.drop()


async def redacted(search: Search, text: bytes, rules: list[str]) -> tuple[bytes, str]:
    """Return a text with found data replaced by asterisks, and else why that cannot be done. Adds the rules of what was replaced."""
    for _ in range(_ROUNDS):
        found = await _findings(search, text)
        if why := next((why for why in map(_irreplaceable, found) if why), ""):
            return text, why
        within = [each for each in found if each.layers[:1] != (_COMPRESSED,)]
        rules += [each.rule for each in within]
        if not within:
            return text, ""
        for value in {text[each.start : each.end] for each in within}:
            text = text.replace(value, b"*" * len(value))
    return text, "data that must not be kept was found in it again and again"


def _irreplaceable(finding: Finding) -> str:
    """Return why a finding keeps a body out of the record. Personal data in what is compressed cannot be replaced, and stays."""
    if finding.rule == _UNREADABLE:
        return "it cannot be searched"
    if finding.layers[:1] == (_COMPRESSED,) and finding.kind != "personal":
        return f"it holds a secret that cannot be replaced: {finding.rule.partition(':')[0]}"
    return ""


async def _findings(search: Search, text: bytes) -> list[Finding]:
    """Search a text. Other exchanges go on meanwhile."""
    scanner = Scanner(search)
    found = []
    for place in range(0, len(text), _AT_ONCE):
        found += scanner.feed(text[place : place + _AT_ONCE])
        if place:
            await asyncio.sleep(0)
    return found + scanner.finish()


async def _cleaned(
    search: Search | None,
    fields: Fields,
    rules: list[str],
    names: tuple[tuple[bytes, bytes], ...],
    *,
    leave_out: Iterable[bytes] = (),
) -> Fields:
    """Return fields without credentials and found data."""
    kept = []
    for key, value in fields:
        if key in leave_out or _holds_a_credential(key):
            continue
        line = b"%b: %b" % (key, replaced(value, names))
        if search is not None:
            line, lost = await redacted(search, line, rules)
            if lost or not line.startswith(key + b": "):
                continue
        kept.append((key, line[len(key) + 2 :]))
    return tuple(kept)


def _holds_a_credential(key: bytes) -> bool:
    return key in _CREDENTIALS or (names_a_secret(key.decode("latin-1").replace("-", "_")) and key not in _CHALLENGES)


async def _shown_target(search: Search | None, target: bytes, rules: list[str]) -> str:
    """Return an address for people, without found data and without values of the query whose names say that they are secret."""

    def hidden(found: re.Match[bytes]) -> bytes:
        name = found[2].decode("latin-1").lower()
        return found[1] + (b"*" * len(found[3]) if names_a_secret(name) or name in _SIGNED else found[3])

    shown = _QUERY.sub(hidden, target)
    if search is not None:
        shown, lost = await redacted(search, shown, rules)
        shown = shown.partition(b"?")[0] if lost else shown
    return shown.decode("latin-1")
