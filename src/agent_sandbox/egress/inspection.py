"""The inspection of what leaves: secrets, personal data, and placeholders at a wrong place.

A search's rules say what is done: `block` refuses, `redact` replaces the found text by as many asterisks, `alert` only records. `ask` is
noted, and the request waits for an answer (`exchange`); what cannot be held is refused: a name, a message of WebSocket, an opaque stream.
So is `redact` of something encoded. A body is held until it has been
searched to its end, or, if it is longer than `HELD`, goes on behind the search: what has gone on is incomplete when something is found
then, and never becomes complete. What cannot be looked through is refused. Findings are recorded by rule and place, without the value.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from agent_sandbox.egress.dlp.compression import Allowance, Carver, Overfull
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.scanner import DEEPEST, Finding, Scanner, Search
from agent_sandbox.egress.fragments import Fragments
from agent_sandbox.egress.http1 import BodyReader, Fields, MalformedHttp, ReaderMark
from agent_sandbox.egress.rules import FlowRefused
from agent_sandbox.policy.search_rules import ASK, BLOCK, REDACT

HELD = 256 << 10  # bytes of a body that are searched before the first of them goes on
MOST_COMPRESSED, MOST_DECOMPRESSED = 1 << 20, 8 << 20  # of a body that says it is compressed
_FEW_BYTES = 64  # that are unpacked in one step, where a step has no bound of its own
_STREAM_TAIL = 8 << 10  # bytes of an opaque stream that are searched again with what follows them
_CLEAN_TEXTS = 512  # that are remembered as clean
_PLACEHOLDER = "placeholder of "
USUAL_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))


class Inspection:
    """The search of one run, and its secrets. `placeholders` are the names and placeholders of the secrets that the broker holds."""

    def __init__(self, search: Search | None, placeholders: Iterable[tuple[str, str]], key: bytes) -> None:
        held = tuple(placeholders)
        misplaced = Search.of((), OwnSecrets.of((_PLACEHOLDER + name, placeholder) for name, placeholder in held), key) if held else None
        self._searches = tuple(each for each in (misplaced, search) if each is not None)
        self._fragments = Fragments(search.own) if search is not None else None
        self._clean: OrderedDict[bytes, None] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether nothing is searched for."""
        return not self._searches

    def head(self, target: bytes, fields: Fields, notes: list[str]) -> tuple[bytes, Fields]:
        """Return the target and the fields of a request, redacted. Raises `FlowRefused`.

        Clients send the same fields again and again; those that were found clean are not searched twice.
        """
        if not self._searches:
            return target, fields
        target = self._searched(target, "the address of the request", notes)
        text = b"\n".join([b"%b: %b" % each for each in fields])
        if text in self._clean:
            self._clean.move_to_end(text)
            return target, fields
        before = len(notes)
        searched = self._searched(text, "the head of the request", notes)
        if searched != text:
            fields = _split(searched, fields)
        elif len(notes) == before:
            self._clean[text] = None
            if len(self._clean) > _CLEAN_TEXTS:
                self._clean.popitem(last=False)
        return target, fields

    def method(self, method: bytes, notes: list[str]) -> None:
        """Search the method of a request, which may be any word. Raises `FlowRefused`."""
        if method not in USUAL_METHODS and self.message(method, "the method of the request", notes) != method:
            raise FlowRefused(403, "the method of the request holds data that must not leave", withheld=True)

    def clears(self, *texts: bytes) -> bool:
        """Return whether texts of a request that was refused unsearched may be recorded: nothing in them would be refused or replaced."""
        try:
            return all(self._searched(text, "the record", [], held=False) == text for text in texts)
        except Exception:  # what cannot be searched is not cleared
            return False

    def name(self, name: str, notes: list[str]) -> None:
        """Search a name that is about to be resolved: its labels, and the text they make together. Raises `FlowRefused`."""
        text = f"{name}\n{name.replace('.', '')}".encode()
        if not self._searches or text in self._clean:
            return
        lowered = self._fragments.in_name(text) if self._fragments is not None else ""
        if lowered or self._searched(text, "the name of the host", notes, held=False) != text:
            raise FlowRefused(403, "the name of the host holds data that must not leave", withheld=True)
        self._clean[text] = None
        if len(self._clean) > _CLEAN_TEXTS:
            self._clean.popitem(last=False)

    @property
    def joins(self) -> bool:
        """Whether pieces of secrets are looked for over several requests."""
        return self._fragments is not None and not self._fragments.idle

    def join(self, host: str, texts: Iterable[tuple[str, bytes]], notes: list[str]) -> None:
        """Look for a secret that these texts, each with its place, make up with what this host was sent before. Raises `FlowRefused`."""
        if self._fragments is None or not (rule := self._fragments.completed(host, texts)):
            return
        note = f"block: {rule} in several pieces"
        notes.append(note)
        why = f"the request holds the last piece of data that must not leave: {rule.removeprefix('own-secret:')} (secret)"
        raise FlowRefused(403, why, withheld=True, findings=(note,))

    def _searched(self, text: bytes, place: str, notes: list[str], *, held: bool = True) -> bytes:
        findings = [finding for search in self._searches for finding in _all(search, text)]
        for value in {text[start:end] for start, end in judge(findings, place, notes, held=held)} if findings else ():
            text = text.replace(value, b"*" * len(value))
        return text

    def body(self, coding: bytes, notes: list[str]) -> BodyInspection | CompressedInspection | ChunkedInspection | None:
        """Return the inspection of a body with this content coding; None if nothing is searched for."""
        if not self._searches:
            return None
        if coding.strip().lower() == b"aws-chunked":
            return ChunkedInspection(self._searches, notes)
        if coding.strip().lower() in (b"", b"identity"):
            return BodyInspection(self._searches, notes)
        return CompressedInspection(self._searches, coding.strip().lower(), notes)

    def message(self, text: bytes, place: str, notes: list[str]) -> bytes:
        """Return a whole message, redacted. Raises `FlowRefused`."""
        return self._searched(text, place, notes, held=False) if self._searches else text

    def stream(self, notes: list[str]) -> StreamInspection | None:
        """Return the inspection of an opaque stream; None if nothing is searched for."""
        return StreamInspection(self._searches, notes) if self._searches else None


class BodyInspection:
    """The inspection of one body. What it returns has been searched."""

    def __init__(self, searches: tuple[Search, ...], notes: list[str]) -> None:
        self._scanners = [Scanner(each) for each in searches]
        self._notes = notes
        self._held = bytearray()  # what has not gone on
        self._gone = 0
        self._redacted: set[bytes] = set()

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body, and return what may go on. Raises `FlowRefused`."""
        self._held += piece
        self._judge([finding for scanner in self._scanners for finding in scanner.feed(piece)])
        if self._gone == 0 and len(self._held) <= HELD:
            return b""
        cut = max(map(len, self._redacted), default=1) - 1  # what is replaced once is replaced wherever it stands
        return self._release(min(scanner.cleared for scanner in self._scanners) - cut)

    def finish(self) -> bytes:
        """Return the rest of the body. Raises `FlowRefused`."""
        self._judge([finding for scanner in self._scanners for finding in scanner.finish()])
        return self._release(self._gone + len(self._held))

    def _judge(self, findings: list[Finding]) -> None:
        for start, end in judge(findings, "the body", self._notes) if findings else ():
            if start < self._gone:
                raise FlowRefused(403, "the body holds data that must not leave, and that could not be replaced in time")
            self._redacted.add(bytes(self._held[start - self._gone : end - self._gone]))

    def _release(self, until: int) -> bytes:
        for value in self._redacted:
            self._held = self._held.replace(value, b"*" * len(value))
        count = max(0, until - self._gone)
        piece = bytes(self._held[:count])
        del self._held[:count]
        self._gone += count
        return piece


class CompressedInspection:
    """The inspection of one body that says it is compressed: held whole, unpacked within bounds, and searched. It is never redacted."""

    def __init__(self, searches: tuple[Search, ...], coding: bytes, notes: list[str]) -> None:
        self._searches, self._coding, self._notes = searches, coding, notes
        self._held = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body. Nothing goes on before its end. Raises `FlowRefused`."""
        self._held += piece
        if len(self._held) > MOST_COMPRESSED:
            raise FlowRefused(413, f"a compressed body of more than {MOST_COMPRESSED} bytes cannot be searched; send it as it is")
        return b""

    def finish(self) -> bytes:
        """Return the whole body. Raises `FlowRefused`."""
        body = bytes(self._held)
        plain = unpacked(body, self._coding)
        findings = [finding for search in self._searches for finding in _all(search, plain)]
        # A packed form has room for text beside what it packs, such as the name of a file.
        findings += [finding for search in self._searches for finding in _all(search, body) if not finding.layers]
        if judge(findings, "the compressed body", self._notes):
            raise FlowRefused(403, "the compressed body holds data that must not leave, and that cannot be replaced in it")
        return body


class ChunkedInspection:
    """The inspection of a body that is cut into chunks once more, as S3 has it: searched with what frames the chunks, and without it.

    Nothing is replaced: what would be is refused.
    """

    def __init__(self, searches: tuple[Search, ...], notes: list[str]) -> None:
        self._framed, self._plain = ([Scanner(each) for each in searches] for _ in range(2))
        self._notes = notes
        self._reader, self._unread = BodyReader(None), bytearray()
        self._held = bytearray()
        self._gone = self._taken = self._read = 0  # bytes that went on, that came, and that the chunks held
        self._marks: deque[tuple[int, int]] = deque()  # how much had come when the chunks had held how much
        self._cleared = 0
        self._ended = False

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body, and return what may go on. Raises `FlowRefused`."""
        self._held += piece
        self._taken += len(piece)
        findings = [finding for scanner in self._framed for finding in scanner.feed(piece)]
        self._unread += piece
        for data in self._chunks(ended=False):
            self._read += len(data)
            findings += [finding for scanner in self._plain for finding in scanner.feed(data)]
        self._marks.append((self._read, self._taken - len(self._unread)))
        self._judge(findings)
        if self._gone == 0 and len(self._held) <= HELD:
            return b""
        plain = min(scanner.cleared for scanner in self._plain)
        while self._marks and self._marks[0][0] <= plain:
            self._cleared = self._marks.popleft()[1]
        return self._release(min(self._cleared, *(scanner.cleared for scanner in self._framed)))

    def finish(self) -> bytes:
        """Return the rest of the body. Raises `FlowRefused`."""
        findings = [finding for data in self._chunks(ended=True) for scanner in self._plain for finding in scanner.feed(data)]
        self._judge([*findings, *(finding for scanner in (*self._framed, *self._plain) for finding in scanner.finish())])
        if not self._ended or self._unread:
            raise FlowRefused(403, "the body is not cut into chunks as it says, so it cannot be searched")
        return self._release(self._gone + len(self._held))

    def _chunks(self, *, ended: bool) -> Iterator[bytes]:
        try:
            while not self._ended and (event := self._reader.take(self._unread, ended)) is not ReaderMark.MORE:
                if isinstance(event, bytes):
                    yield event
                else:
                    self._ended = True
        except MalformedHttp as error:
            raise FlowRefused(403, f"the body is not cut into chunks as it says, so it cannot be searched: {error}") from None

    def _judge(self, findings: list[Finding]) -> None:
        if findings and judge(findings, "the body", self._notes):
            raise FlowRefused(403, "the body holds data that must not leave, and that cannot be replaced in it")

    def _release(self, until: int) -> bytes:
        count = max(0, until - self._gone)
        piece = bytes(self._held[:count])
        del self._held[:count]
        self._gone += count
        return piece


class StreamInspection:
    """The inspection of an opaque stream, which cannot be held: each piece goes on once it has been searched with what came before it.

    A secret in two pieces is found with the second, and the first has gone on by then. Nothing is replaced: what would be is refused.
    What is compressed in it is decompressed as it arrives, however many pieces it comes in.
    """

    def __init__(self, searches: tuple[Search, ...], notes: list[str]) -> None:
        self._searches, self._notes = searches, notes
        self._allowance = Allowance()
        self._carvers = [Carver(self._allowance) for _ in range(DEEPEST)]  # of the stream, of what is compressed in it, and so on
        self._tails = [b""] * (DEEPEST + 1)

    def feed(self, piece: bytes) -> bytes:
        """Return the piece. Raises `FlowRefused`."""
        self._allowance.earn(len(piece))
        self._look(0, piece)
        text = piece
        for depth, carver in enumerate(self._carvers, 1):
            try:
                text = b"".join(carver.feed(text))
            except Overfull:
                raise FlowRefused(403, "the stream holds compressed data that cannot be searched", withheld=True) from None
            if not text:
                break
            self._look(depth, text)
        return piece

    def _look(self, depth: int, piece: bytes) -> None:
        text = self._tails[depth] + piece
        if judge([finding for search in self._searches for finding in _all(search, text)], "the stream", self._notes, held=False):
            raise FlowRefused(403, "the stream holds data that must not leave")
        self._tails[depth] = text[-_STREAM_TAIL:]

    def finish(self) -> bytes:
        """Return nothing: everything has gone on."""
        return b""


Inspected = BodyInspection | CompressedInspection | ChunkedInspection | StreamInspection


def judge(findings: Iterable[Finding], place: str, notes: list[str], *, held: bool = True) -> list[tuple[int, int]]:
    """Note findings, and return the spans to be replaced. Raises `FlowRefused` where one refuses, or is encoded and to be replaced.

    What a person is asked about is only noted if it is `held` until the answer, and else refused.
    """
    spans = []
    for finding in findings:
        note = f"{finding.action}: {finding.rule} in {place}"
        if note not in notes:
            notes.append(note)
        own = finding.rule.removeprefix("own-secret:")
        if own.startswith(_PLACEHOLDER):
            raise FlowRefused(
                403,
                f"{place} holds the placeholder of the secret {own.removeprefix(_PLACEHOLDER)}, which is not bound to it",
                withheld=True,
                findings=(note,),
            )
        refuses = finding.action == BLOCK or (finding.action == ASK and not held)
        if refuses or (finding.action == REDACT and finding.layers):
            raise FlowRefused(403, f"{place} holds data that must not leave: {own} ({finding.kind})", withheld=True, findings=(note,))
        if finding.action == REDACT:
            spans.append((finding.start, finding.end))
    return spans


def unpacked(body: bytes, coding: bytes) -> bytes:
    """Return what a content coding has packed. Raises `FlowRefused` where it is unknown, malformed, or more than is looked through."""
    try:
        whole, plain = _decompress(body, coding)
    except Exception:  # each decompressor has errors of its own, and what breaks one has not been searched
        raise FlowRefused(403, "the compressed body cannot be unpacked, so it cannot be searched") from None
    if not whole:
        raise FlowRefused(403, f"the compressed body is cut off, or unpacks to more than {MOST_DECOMPRESSED} bytes, and cannot be searched")
    return plain


def _decompress(body: bytes, coding: bytes) -> tuple[bool, bytes]:
    """Return whether everything was unpacked within the bound, and what it is."""
    if coding == b"br":
        import brotli  # rarely needed

        packed: Any = brotli.Decompressor()
        plain: bytes = packed.process(body, output_buffer_limit=MOST_DECOMPRESSED)
        return bool(packed.is_finished()) and len(plain) <= MOST_DECOMPRESSED, plain
    if coding == b"zstd":
        import zstandard  # rarely needed

        plain, rest = b"", body
        while rest:
            unpacking = zstandard.ZstdDecompressor(max_window_size=MOST_DECOMPRESSED).decompressobj()
            while rest and not unpacking.eof:
                plain += unpacking.decompress(rest[:_FEW_BYTES])
                rest = rest[_FEW_BYTES:]
                if len(plain) > MOST_DECOMPRESSED:
                    return False, plain
            if not unpacking.eof:
                return False, plain
            rest = unpacking.unused_data + rest
        return True, plain
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise FlowRefused(403, "an unknown coding")
    wrapped = zlib.MAX_WBITS | 32 if coding != b"deflate" or body[:1] == b"x" else -zlib.MAX_WBITS
    plain, rest = b"", body
    while rest:
        unpacker = zlib.decompressobj(wrapped)
        plain += unpacker.decompress(rest, MOST_DECOMPRESSED + 1 - len(plain))
        if not unpacker.eof or len(plain) > MOST_DECOMPRESSED:
            return False, plain
        rest = unpacker.unused_data
    return True, plain


def _all(search: Search, text: bytes) -> list[Finding]:
    scanner = Scanner(search)
    return scanner.feed(text) + scanner.finish()


def _split(text: bytes, fields: Fields) -> Fields:
    """Return fields from their redacted text. Raises `FlowRefused` if a name or a border between two has been replaced."""
    lines = [line.split(b": ", 1) for line in text.split(b"\n")]
    if [line[0] for line in lines] != [key for key, _ in fields] or any(len(line) != 2 for line in lines):
        raise FlowRefused(403, "the head of the request holds data that must not leave, and that cannot be replaced in it")
    return tuple((line[0], line[1]) for line in lines)
