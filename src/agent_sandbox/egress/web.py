"""A request on its way out and its response on the way back, without sockets: judged, searched, with secrets put in and taken out.

A `Customs` is what one run's requests have in common; a `Passage` is one request. Both take values and pieces of bodies, and return those
that go on, or raise `FlowRefused`. Whoever moves the bytes (`exchange`) speaks HTTP/1.1 or HTTP/2 on either side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agent_sandbox.egress.aws_signature import MOST_HASHED, Signing
from agent_sandbox.egress.fragments import MOST_TEXT, texts_of_body, texts_of_target
from agent_sandbox.egress.http1 import Fields, RequestHead, ResponseHead, reason_of, write_request
from agent_sandbox.egress.inspection import HELD, USUAL_METHODS, Inspected, Inspection
from agent_sandbox.egress.rules import FlowRefused, Judged, Origin, declared_by, judge_request, rules_for
from agent_sandbox.egress.secrets import Broker, Scrubber
from agent_sandbox.policy.network import NetworkRules
from agent_sandbox.policy.search_rules import ASK

_WEBSOCKET = frozenset((b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-protocol", b"origin"))
_NOT_BACK = frozenset(
    b"connection keep-alive proxy-connection upgrade alt-svc transfer-encoding content-length trailer proxy-authenticate "
    b"sec-websocket-extensions".split()
)
# Fields whose values clients choose among few: no piece of a secret hides there unseen by the search of the whole head.
_USUAL = frozenset(b"host authorization accept accept-encoding accept-language connection content-length content-type user-agent".split())
_IDENTITY = (b"accept-encoding", b"identity")


@dataclass
class Customs:
    """The checks of every request of a run. `rules` may be replaced at any time: they hold from the next request."""

    rules: NetworkRules
    inspection: Inspection
    broker: Broker

    def admit(self, origin: Origin, head: RequestHead) -> Passage:
        """Return the passage of a request that may leave so far. Raises `FlowRefused`."""
        rules, intent = self.rules, declared_by(head)
        judged = judge_request(rules_for(rules, intent), origin, head)
        target, fields = judged.target, judged.fields
        notes: list[str] = []
        names: tuple[str, ...] = ()
        signing: Signing | None = None
        self.inspection.method(judged.method, notes)
        if self.broker.secrets and origin.tls:
            try:
                placed = self.broker.place(origin.name, judged.method, target, fields)
            except ValueError as error:
                raise FlowRefused(403, str(error)) from None
            seen = self.inspection.head(placed.searched_target, placed.searched_fields, notes)
            if placed.names:
                if seen != (placed.searched_target, placed.searched_fields):
                    raise FlowRefused(403, "the head of the request holds a secret, and data that would have to be replaced")
                target, fields, names, signing = placed.target, placed.fields, placed.names, placed.signing
            else:
                target, fields = seen
        else:
            target, fields = self.inspection.head(target, fields, notes)
        if self.inspection.joins:
            changed = tuple((f"field {key.decode()}", value) for key, value in head.fields if key not in _USUAL)
            method = () if head.method in USUAL_METHODS else (("method", head.method),)
            self.inspection.join(origin.name, (*texts_of_target(head.target), *changed, *method), notes)
        onward = Judged(judged.method, target, fields, judged.websocket)
        return Passage(self, origin, head, onward, notes, list(names), rules, intent, judged.target, signing)


@dataclass
class Passage:
    """One request that may leave, and its response. Feed it the bodies; what it returns goes on."""

    customs: Customs
    origin: Origin
    asked: RequestHead
    judged: Judged
    notes: list[str]
    secrets: list[str]  # the names of those that were put in
    rules: NetworkRules  # in force when it was admitted
    intent: str  # that the request declared for itself
    written: bytes  # the target as the program wrote it, as a path with its query
    signing: Signing | None = None
    lapsed: str = ""  # why the intent that it declared holds no more
    still: Callable[[], Awaitable[str]] | None = None  # says why the request may not go on, where its approval can be taken back
    _scrubber: Scrubber | None = field(init=False)
    _answered: set[str] = field(init=False, default_factory=set)
    _whole: bytearray | None = field(init=False, default=None)  # a body that is held to its end, for a secret or for its digest
    _hashed: bytes = field(init=False, default=b"")  # the body that is signed

    def __post_init__(self) -> None:
        broker = self.customs.broker
        coding = b", ".join(self.asked.values(b"content-encoding"))
        inspection = self.customs.inspection
        self._searched: Inspected | None = None
        if self.asked.length != 0:
            self._searched = inspection.stream(self.notes) if self._streams else inspection.body(coding, self.notes)
        self._scrubber = broker.scrubber(self.origin.name) if broker.secrets else None
        self._most = HELD
        self._sample = bytearray()  # of the body: all of a short one, the beginning and the end of a long one
        self._joins = self.asked.length != 0 and inspection.joins and coding.strip().lower() in (b"", b"identity")
        if self.origin.tls and self.asked.length != 0 and broker.secrets and broker.in_body(self.origin.name):
            self._whole = bytearray()
        elif self.signing is not None and self.signing.payload is None and self.asked.length != 0:
            self._whole, self._most = bytearray(), MOST_HASHED

    def check_rules(self, rules: NetworkRules) -> None:
        """Raise `FlowRefused` if the request may no longer be sent: its intent is over, or rules that came into force since forbid it."""
        if self.lapsed:
            raise FlowRefused(403, self.lapsed)
        if rules is not self.rules:
            judge_request(rules_for(rules, self.intent), self.origin, self.asked)
            self.rules = rules

    def objection(self, rules: NetworkRules) -> str:
        """Return why the request may no longer be sent under these rules; empty if it may be."""
        try:
            self.check_rules(rules)
        except FlowRefused as error:
            return str(error)
        return ""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the request's body, and return what may go on. Raises `FlowRefused`."""
        self.check_rules(self.customs.rules)
        if self._joins:
            self._sample += piece
            del self._sample[MOST_TEXT : max(MOST_TEXT, len(self._sample) - MOST_TEXT)]
        if self._whole is not None:
            self._whole += piece
            if len(self._whole) > self._most:
                raise FlowRefused(413, f"a body of more than {self._most} bytes is not held for a secret that may go into it")
            return b""
        return self._searched.feed(piece) if self._searched is not None else piece

    def finish(self) -> bytes:
        """Return the rest of the request's body. Raises `FlowRefused`."""
        self.check_rules(self.customs.rules)
        if self._joins:
            kind = b", ".join(self.asked.values(b"content-type"))
            self.customs.inspection.join(self.origin.name, texts_of_body(kind, bytes(self._sample)), self.notes)
        if self._whole is not None:
            kind = b", ".join(self.asked.values(b"content-type"))
            body, searched, names = self.customs.broker.place_in_body(self.origin.name, kind, bytes(self._whole))
            seen = (self._searched.feed(searched) + self._searched.finish()) if self._searched is not None else searched
            if names and seen != searched:
                raise FlowRefused(403, "the body holds a secret, and data that would have to be replaced")
            self.secrets += names
            self._hashed = body if names else seen
            return self._hashed
        return self._searched.finish() if self._searched is not None else b""

    def onward(self, length: int | None) -> bytes:
        """Return the head of the request in HTTP/1.1, for a body of this length (None: in chunks)."""
        return write_request(self.judged.method, self.judged.target, self.onward_fields(length))

    def onward_fields(self, length: int | None) -> Fields:
        """Return the fields of the request in HTTP/1.1, for a body of this length (None: in chunks)."""
        fields = self.judged.fields
        if self._scrubber is not None:  # a packed response could not be looked through, nor a part of one, where the value was sent
            dropped = (b"accept-encoding",) if self.signing is not None else (b"accept-encoding", b"range")
            fields = (*(each for each in fields if each[0] not in dropped), _IDENTITY)
        if self.signing is not None:
            fields = self.signing.signed(self.judged.method, self.judged.target, fields, self._hashed)
        if self.judged.websocket:
            fields = tuple(each for each in fields if not each[0].startswith(b"sec-websocket-") or each[0] in _WEBSOCKET)
            return (*fields, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
        if length is None:
            return (*fields, (b"transfer-encoding", b"chunked"))
        if length or self.asked.length != 0 or self.asked.values(b"content-length"):
            return (*fields, (b"content-length", b"%d" % length))
        return fields

    def response(self, head: ResponseHead) -> ResponseHead:
        """Return a response as it goes back, without the fields of framing. Its length is None if it may change. Raises `FlowRefused`."""
        named = {token.strip().lower() for value in head.values(b"connection") for token in value.split(b",")}
        fields = tuple(each for each in head.fields if each[0] not in _NOT_BACK and each[0] not in named)
        length, reason = head.length, head.reason
        if self._scrubber is not None:
            coding = b", ".join(head.values(b"content-encoding")).strip().lower()
            if coding not in (b"", b"identity") and length != 0:
                raise FlowRefused(
                    502, f"{self.origin} answered in a coding that was not asked for, and the secrets in it cannot be taken out"
                )
            fields = self._scrubber.fields(fields)
            reason = self._scrubber.clean(reason)
            length = length if length == 0 else None
        if length == 0 and (told := head.values(b"content-length")) and self._scrubber is None:
            fields = (*fields, (b"content-length", told[0]))  # of the body that HEAD or 304 does not have
        return ResponseHead(head.status, fields, length, head.minor, reason)

    def receive(self, piece: bytes) -> bytes:
        """Take a piece of the response's body, and return what goes back."""
        return self._scrubber.feed(piece) if self._scrubber is not None else piece

    def questions(self) -> list[str]:
        """Return the findings so far that a person is to be asked about, each once: the rule and the place."""
        asked = [note for note in self.notes if note.startswith(f"{ASK}: ") and note not in self._answered]
        self._answered.update(asked)
        return [note.removeprefix(f"{ASK}: ") for note in asked]

    @property
    def flows(self) -> bool:
        """Whether both bodies flow at the same time, so that the request's cannot be held: so it is with gRPC."""
        return self._whole is None and self._streams

    @property
    def _streams(self) -> bool:
        """Whether the request is a call of gRPC: it gives no length, and compresses messages, not the whole body."""
        coded = any(value.strip().lower() not in (b"", b"identity") for value in self.asked.values(b"content-encoding"))
        return self.asked.length is None and _is_grpc(self.asked) and not coded

    def trailers(self, fields: Fields) -> Fields:
        """Return the trailers of a response as they go back."""
        kept = tuple(each for each in fields if each[0] not in _NOT_BACK)
        return self._scrubber.fields(kept) if self._scrubber is not None else kept

    def received(self) -> bytes:
        """Return the rest of the response's body."""
        return self._scrubber.finish() if self._scrubber is not None else b""


def _is_grpc(head: RequestHead) -> bool:
    return any(value.lower().startswith(b"application/grpc") for value in head.values(b"content-type"))


def refusal_response(status: int, why: str) -> tuple[ResponseHead, bytes]:
    """Return the response that tells a client why its request was refused or failed."""
    word = "refused" if status in (400, 403, 405, 413, 421, 429, 431) else "failed"
    text = f"{word} by the sandbox: {why}\n".encode("utf-8", "backslashreplace")
    fields = ((b"content-type", b"text/plain; charset=utf-8"), (b"x-agent-sandbox", word.encode()))
    return ResponseHead(status, fields, len(text), reason=reason_of(status)), text
