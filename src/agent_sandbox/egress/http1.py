"""HTTP/1.1 without sockets: bytes in, messages out, and messages written afresh (RFC 9112).

The reader is strict: it takes no message that two readers could understand differently. A line ends in CR LF and in nothing else, a field
has no space before its colon and does not continue on a second line, and a body has one length. Whatever it takes, `h11` takes too, with
the same meaning; the tests say so of any bytes. What goes on is written from the parsed values, never copied from the bytes that came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from http import HTTPStatus

MOST_HEAD = 64 << 10  # bytes of a request or status line with its fields
MOST_FIELDS = 256
MOST_CHUNK_LINE = 256  # bytes of the line before a chunk
MOST_TRAILERS = 16 << 10
Fields = tuple[tuple[bytes, bytes], ...]

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
_SPELLINGS = {b"etag": b"ETag", b"www-authenticate": b"WWW-Authenticate", b"te": b"TE", b"dnt": b"DNT", b"content-md5": b"Content-MD5"}


class MalformedHttp(Exception):
    """Bytes that are no message, or one that could be understood in two ways. `status` is what a client is answered."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body. Names of fields are in lower case. `length` is that of the body, None for one in chunks."""

    method: bytes
    target: bytes
    fields: Fields
    length: int | None = 0
    minor: int = 1  # of the version: 0 for HTTP/1.0

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of a field, one for each line."""
        return [value for key, value in self.fields if key == name]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response without its body. `length` is None for chunks, and -1 where the body ends with the connection."""

    status: int
    fields: Fields
    length: int | None = 0
    minor: int = 1
    reason: bytes = b""

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of a field, one for each line."""
        return [value for key, value in self.fields if key == name]


class ReaderMark(Enum):
    """Events of a reader, other than heads and pieces of bodies."""

    MORE = "more bytes are needed"
    END = "the message is complete"
    CLOSED = "the connection ended between two messages"


class MessageReader:
    """Reads the messages of one side of a connection. Give it bytes with `receive`, then call `next` until it returns `ReaderMark.MORE`."""

    def __init__(self, *, responses: bool = False) -> None:
        self._responses = responses
        self._buffer = bytearray()
        self._ended = False
        self._body: BodyReader | None = None
        self.answers = b""  # the method of the request that the next response answers

    def receive(self, data: bytes) -> None:
        """Take bytes; none mean that the connection has ended."""
        if data:
            self._buffer += data
        else:
            self._ended = True

    @property
    def rest(self) -> bytes:
        """The bytes that belong to no message yet."""
        return bytes(self._buffer)

    def next(self) -> RequestHead | ResponseHead | bytes | ReaderMark:
        """Return the next head, piece of a body, or mark. Raises `MalformedHttp`."""
        if self._body is not None:
            piece = self._body.take(self._buffer, self._ended)
            if piece is ReaderMark.END:
                self._body = None
            return piece
        place = self._buffer.find(b"\r\n\r\n")
        if place < 0 or place > MOST_HEAD:
            return self._wait()
        lines = bytes(self._buffer[:place]).split(b"\r\n")
        del self._buffer[: place + 4]
        head = read_response_head(lines, self.answers) if self._responses else read_request_head(lines)
        self._body = BodyReader(head.length)
        return head

    def _wait(self) -> ReaderMark:
        if len(self._buffer) > MOST_HEAD:
            raise MalformedHttp(f"its head is longer than {MOST_HEAD} bytes", 431)
        if _BARE.search(self._buffer):
            raise MalformedHttp("a line ends in something else than CR LF")
        if not self._ended:
            return ReaderMark.MORE
        if self._buffer:
            raise MalformedHttp("it ends in the middle of a head")
        return ReaderMark.CLOSED


class BodyReader:
    """Reads the body of one message, of this length or in chunks (None), out of a buffer."""

    def __init__(self, length: int | None) -> None:
        self._chunked = length is None
        self._left = length or 0  # of the body, or of the chunk; -1: until the connection ends
        self._within = False  # a chunk, whose end has not been read
        self._last = False  # the last chunk has been read, and trailers may follow

    def take(self, buffer: bytearray, ended: bool) -> bytes | ReaderMark:
        """Take the next piece from the buffer, and return it or a mark. Raises `MalformedHttp`."""
        if self._chunked and not (self._within and self._left):
            return self._between(buffer, ended)
        if self._left == 0:
            return ReaderMark.END
        if not buffer:
            if not ended:
                return ReaderMark.MORE
            if self._left < 0:
                return ReaderMark.END
            raise MalformedHttp("it ends in the middle of a body")
        piece = bytes(buffer) if self._left < 0 or len(buffer) <= self._left else bytes(buffer[: self._left])
        del buffer[: len(piece)]
        if self._left > 0:
            self._left -= len(piece)
        return piece

    def _between(self, buffer: bytearray, ended: bool) -> bytes | ReaderMark:
        """Read what stands between two chunks, and after the last."""
        if self._last:
            return self._trailers(buffer, ended)
        if self._within:
            if len(buffer) < 2:
                return self._more(ended)
            if buffer[:2] != b"\r\n":
                raise MalformedHttp("a chunk is longer than it says")
            del buffer[:2]
            self._within = False
        place = buffer.find(b"\r\n", 0, MOST_CHUNK_LINE + 2)
        if place < 0:
            if len(buffer) > MOST_CHUNK_LINE or _BARE.search(buffer):
                raise MalformedHttp("the line before a chunk is malformed")
            return self._more(ended)
        line = _CHUNK_LINE.fullmatch(buffer, 0, place)
        if line is None:
            raise MalformedHttp("the line before a chunk is malformed")
        self._left = int(line[1], 16)
        del line
        del buffer[: place + 2]
        if self._left == 0:
            self._last = True
            return self._trailers(buffer, ended)
        self._within = True
        return self.take(buffer, ended)

    def _trailers(self, buffer: bytearray, ended: bool) -> ReaderMark:
        """Read the fields after the last chunk. They are checked, and not passed on."""
        if buffer[:2] == b"\r\n":
            del buffer[:2]
            return self._end()
        place = buffer.find(b"\r\n\r\n")
        if place < 0 or place > MOST_TRAILERS:
            if len(buffer) > MOST_TRAILERS or _BARE.search(buffer):
                raise MalformedHttp("what follows the last chunk is malformed")
            return self._more(ended)
        read_fields(bytes(buffer[:place]).split(b"\r\n"))
        del buffer[: place + 4]
        return self._end()

    def _end(self) -> ReaderMark:
        self._chunked, self._left = False, 0
        return ReaderMark.END

    def _more(self, ended: bool) -> ReaderMark:
        if ended:
            raise MalformedHttp("it ends in the middle of a body")
        return ReaderMark.MORE


def read_request_head(lines: list[bytes]) -> RequestHead:
    """Return the head that these lines are. Raises `MalformedHttp`."""
    line = _REQUEST_LINE.fullmatch(lines[0])
    if line is None:
        raise MalformedHttp("its first line is no request of HTTP/1.1")
    method, target, minor = line.groups()
    fields = read_fields(lines[1:])
    length = _request_length(fields, minor)
    return RequestHead(method, target, fields, length, int(minor))


def read_response_head(lines: list[bytes], method: bytes) -> ResponseHead:
    """Return the head that these lines are, as the answer to a request with this method. Raises `MalformedHttp`."""
    line = _STATUS_LINE.fullmatch(lines[0])
    if line is None:
        raise MalformedHttp("its first line is no answer of HTTP/1.1")
    minor, status, fields = int(line[1]), int(line[2]), read_fields(lines[1:])
    length = -1 if (framing := _framing(fields)) is None else framing[0]
    if length is None and not minor:
        raise MalformedHttp("it is HTTP/1.0 and in chunks")
    if method == b"HEAD" or status < 200 or status in (204, 304):
        length = 0
    return ResponseHead(status, fields, length, minor, line[3] or b"")


def read_fields(lines: list[bytes]) -> Fields:
    """Return the fields that these lines are. Raises `MalformedHttp`."""
    if len(lines) > MOST_FIELDS:
        raise MalformedHttp(f"it has more than {MOST_FIELDS} fields", 431)
    fields = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise MalformedHttp("a field is malformed")
        fields.append((field[1].lower(), field[2].rstrip(b" \t")))
    return tuple(fields)


def _request_length(fields: Fields, minor: bytes) -> int | None:
    framing = _framing(fields)
    if framing is None:
        return 0
    if framing[0] is None and minor == b"0":
        raise MalformedHttp("it is HTTP/1.0 and in chunks")
    return framing[0]


def _framing(fields: Fields) -> tuple[int | None] | None:
    """Return the length that the fields give the body (None inside: chunks); None if they give none. Raises `MalformedHttp`."""
    lengths = [value for key, value in fields if key == b"content-length"]
    codings = [value for key, value in fields if key == b"transfer-encoding"]
    if not codings:
        if not lengths:
            return None
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise MalformedHttp("it has more than one length, or none that is a number")
        return (int(lengths[0]),)
    if lengths:
        raise MalformedHttp("it has both a length and a transfer coding")
    if len(codings) > 1 or codings[0].lower() != b"chunked":
        raise MalformedHttp("it has another transfer coding than chunked", 501)
    return (None,)


def write_request(method: bytes, target: bytes, fields: Fields) -> bytes:
    """Return the bytes of the head of a request."""
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join([b"%b: %b\r\n" % (spelling(key), value) for key, value in fields]))


def write_response(status: int, reason: bytes, fields: Fields) -> bytes:
    """Return the bytes of the head of a response."""
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, b"".join([b"%b: %b\r\n" % (spelling(key), value) for key, value in fields]))


def write_chunk(piece: bytes) -> bytes:
    """Return a piece of a body as a chunk; nothing for an empty piece, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


LAST_CHUNK = b"0\r\n\r\n"


@lru_cache(maxsize=1024)
def spelling(name: bytes) -> bytes:
    """Return the usual spelling of a field's name: `content-type` is written `Content-Type`."""
    return _SPELLINGS.get(name) or b"-".join(part.capitalize() for part in name.split(b"-"))


def reason_of(status: int) -> bytes:
    """Return the usual words for a status."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
