"""Published cases of request smuggling, as a table: each is a message that some pair of real programs understood in two ways.

Sources, by the names they were published under:

- *The HTTP Garden* (Narf Industries): the list of bugs that were found with it in servers and proxies, by target and number;
- *smuggler* (Evan Custodio): the exhaustive list of ways to write the transfer coding, by its names;
- *HTTP Desync Attacks: Request Smuggling Reborn* (James Kettle): the combinations of length and coding.

A case says what our reader is to do: refuse it, or read exactly these requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
SECOND = b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n"


@dataclass(frozen=True)
class Case:
    """A message. `bodies` are those of the requests that are read from it; None: it is refused."""

    source: str
    data: bytes
    bodies: tuple[bytes, ...] | None = None


def _garden() -> Iterator[Case]:
    def case(name: str, data: bytes, *bodies: bytes) -> Case:
        return Case(f"HTTP Garden: {name}", data, bodies or None)

    yield case("AIOHTTP 1, a chunk size with _", HEAD + CHUNKED + b"0_2e\r\n\r\n" + SECOND + END)
    yield case("AIOHTTP 2, NUL, CR and LF in a value", b"GET / HTTP/1.1\r\nHost: a\r\nHeader: v\n\x00\ralue\r\n\r\n")
    yield case("AIOHTTP 3, a space after a name", HEAD + b"Content-Length : %d\r\n\r\n" % len(SECOND) + SECOND)
    yield case("AIOHTTP 4, a tab before the first name", b"GET / HTTP/1.1\r\n\tContent-Length: 1\r\n\r\nX")
    yield case("AIOHTTP 5, a version with more digits", b"GET /test HTTP/1.32\r\nHost: a\r\n\r\n")
    yield case("AIOHTTP 6, separators in a method", b'G=":<>(e),[T];?" /get HTTP/1.1\r\nHost: a\r\n\r\n')
    yield case("AIOHTTP 8, a byte beyond ASCII in a name", b"GET / HTTP/1.1\r\n\xffoo: bar\r\n\r\n")
    yield case("AIOHTTP 9, LF in the first line", b"GET /\nHTTP/1.1\r\nHost: a\r\n\r\n")
    yield case("Akamai 1, a length with 0x", HEAD + b"Content-Length: 0x10\r\n\r\nZ")
    yield case("Akamai 2, chunk sizes that are no numbers", HEAD + CHUNKED + b"Z\r\nZZ\r\nZZZ\r\n\r\n")
    yield case("Akamai 3, CR before an extension", HEAD + CHUNKED + b"2\r\r;a\r\n02\r\n41\r\n" + END + SECOND)
    yield case("Apache Traffic Server 2, an empty length", HEAD + b"content-length: \r\n\r\n")
    yield case("Apache Traffic Server 3, a name with \\x85", HEAD + b"Header\x85: value\r\n\r\n")
    yield from (
        case(f"Apache Traffic Server 3, a name with {chr(each)}", HEAD + b"Head%cer: v\r\n\r\n" % each) for each in b'"(),/;<=>?@[\\]{}'
    )
    yield case("Apache Traffic Server 4, CR CR before an extension", HEAD + CHUNKED + b"1\r\r;name\r\nZ\r\n" + END)
    yield case("Apache Traffic Server 5, text after a chunk size", HEAD + CHUNKED + b"1these-bytes-are-not-looked-at\r\nZ\r\n" + END)
    yield case(
        "Apache Traffic Server 6, a length that is no number beside chunks",
        HEAD + b"Content-Length: blah\r\n" + CHUNKED + b"1\r\nZ\r\n" + END,
    )
    yield case("Azure 1, ,chunked", HEAD + b"Transfer-Encoding: ,chunked\r\n\r\n" + END)
    yield case("CPython 1, a length with + and _", HEAD + b"Content-Length: +1_0\r\n\r\n0123456789")
    yield case("CPython 2, CR as the end of a field", b"GET / HTTP/1.1\r\nHost: a\r\nVisible: :/\rSmuggled: :)\r\n\r\n")
    yield case("Go 2, an empty chunk size", HEAD + CHUNKED + b"\r\n\r\n")
    yield case("Go 3, an empty name", b"GET / HTTP/1.1\r\n: ignored\r\nHost: a\r\n\r\n")
    yield case("Google 1, CR in a value", HEAD + b"Header: this\rvalue\ris\rinvalid\r\n\r\n")
    yield case("Gunicorn 2, LF LF in a value", b"GET / HTTP/1.1\r\nHost: a\r\nUseless:\n\nGET / HTTP/1.1\r\n\r\n")
    yield case("Gunicorn 3, \\xa0 after a name", HEAD + b"Content-Length\xa0: 10\r\n\r\n0123456789")
    yield case("Gunicorn 4, a chunk size with 0x and _", HEAD + CHUNKED + b"0x2_e\r\n\r\n" + SECOND + END)
    yield case("Gunicorn 5, LF CR NUL in a value", HEAD + b"Test: x\n\r\x00\r\n\r\n")
    yield case("Gunicorn 6, ,chunked and a length", HEAD + b"Transfer-Encoding: ,chunked\r\nContent-Length: 5\r\n\r\n" + END)
    yield case("H2O 4, two lengths", HEAD + b"Content-Length: 1\r\nContent-Length: 0\r\n\r\nZ")
    yield case("HAProxy 1, an empty length and another", HEAD + b"content-length: \r\ncontent-length: %d\r\n\r\n" % len(SECOND) + SECOND)
    yield case("HAProxy 2, NUL in the host", b"GET / HTTP/1.1\r\nHost: a\x00.b\r\n\r\n")
    yield case("HAProxy 3, LF after a chunk", HEAD + CHUNKED + b"a\r\n0123456789\n" + END)
    yield case("Hyper 1, an empty chunk size before a request", HEAD + CHUNKED + b"\r\n\r\n" + SECOND)
    yield case("Libevent 1, a version of many digits", b"GET / HTTP/4294967295.255\r\nHost: a\r\n\r\n")
    yield from (
        case(f"Libevent 2, a chunk size with {each!r}", HEAD + CHUNKED + each + b"1\r\nZ\r\n" + END) for each in (b"0x", b"+", b"-", b" ")
    )
    yield case("Mongoose 1, a negative length", HEAD + b"Content-Length: -48\r\n\r\n")
    yield case("Mongoose 2, a field without a name", b"GET / HTTP/1.1\r\n:\r\nI: am chopped off\r\nHost: a\r\n\r\n")
    yield case("Mongoose 3, CR before a length", HEAD + b"Whatever: whatever\rContent-Length: 10\r\n\r\n0123456789")
    yield case("Mongoose 4, a field without a colon", HEAD + b"Content-Length 10\r\n\r\n0123456789")
    yield case("Mongoose 5, text after a length", HEAD + b"Content-Length: 1Z\r\n\r\nZ")
    yield case("Mongoose 6, empty lines in the place of the last chunk", HEAD + CHUNKED + b"1\r\nZ\r\n\r\n\r\n" + SECOND)
    yield case("Node.js 1, CR at the beginning of a line", b"GET / HTTP/1.1\r\nHost: a\r\n\rZGET /evil: HTTP/1.1\r\nHost: a\r\n\r\n")
    yield case("Node.js 2, CR in the line before a chunk", HEAD + CHUNKED + b"5\r\r;ABCD\r\n34\r\nE\r\n" + END + SECOND)
    yield case("OpenLiteSpeed 3, a length with a leading 0", HEAD + b"Content-Length: 010\r\n\r\n0123456789", b"0123456789")
    yield case("OpenLiteSpeed 5, NUL in a name", HEAD + b"Hea\x00der: value\r\n\r\n")
    yield case("OpenLiteSpeed 10, a line without a colon", HEAD + b"Test\r\nConnection: close\r\n\r\n")
    yield case("OpenLiteSpeed 12, LF in a name", HEAD + b"Te\nst: test\r\n\r\n")
    yield case("OpenLiteSpeed 14, LF as the end of lines", b"GET / HTTP/1.1\nHost: a\nConnection: close\n\n")
    yield case("OpenLiteSpeed 15, CR LF before the last chunk", HEAD + CHUNKED + b"17\r\n" + END + b"GET / HTTP/1.1\r\n\r\n\r\n\r\n" + END)
    yield case("OpenBSD httpd 1, a byte after the last chunk", HEAD + CHUNKED + END + b"\x00")
    yield case("relayd 3, a chunk size of -0x0", HEAD + CHUNKED + b"-0x0\r\n\r\n")
    yield case("relayd 5, NUL in a name without a colon", b"GET / HTTP/1.1\r\nHost: a\r\na:b\r\nc\x00\r\n\r\n")
    yield case("relayd 6, GET with a body", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n1234567890", b"1234567890")
    yield case("relayd 8, a length and a coding", HEAD + b"Content-Length: 5\r\n" + CHUNKED + END)
    yield case("relayd 9, spaces before a chunk size", HEAD + CHUNKED + b"           0\r\n\r\n")
    yield case("Passenger 2, a name over two lines", HEAD + b"Transfer-\r\nEncoding: chunked\r\nContent-Length: 5\r\n\r\n" + END)
    yield case("Pound 1, a coding twice", HEAD + b"Transfer-Encoding: chunked\r\n" + CHUNKED + END)
    yield case("Pound 3, a tab before a chunk size", HEAD + CHUNKED + b"\t0\r\n\r\n")
    yield case("Puma 1, an empty length before a request", HEAD + b"Content-Length: \r\n\r\n" + SECOND)
    yield case("Puma 2, a trailer that looks like a request", HEAD + CHUNKED + b"0\r\nX:POST / HTTP/1.1\r\n\r\n", b"")


# How smuggler writes the coding, where that is the coding for every reader, whatever else stands beside it.
_PLAIN = {"tabprefix1", "valueprefix1", "sarcasm", "yelling", "tabsuffix", "midspace-09", "endspace-09"}


def _smuggler() -> Iterator[Case]:
    ways = {
        **{
            "nameprefix1": b" Transfer-Encoding: chunked",
            "tabprefix1": b"Transfer-Encoding:\tchunked",
            "0dsuffix": b"Transfer-Encoding: chunked\r",
        },
        **{
            "tabprefix2": b"Transfer-Encoding\t:\tchunked",
            "spacejoin1": b"Transfer Encoding: chunked",
            "smashed": b"Transfer Encoding:chunked",
        },
        **{
            "underjoin1": b"Transfer_Encoding: chunked",
            "space1": b"Transfer-Encoding : chunked",
            "valueprefix1": b"Transfer-Encoding:  chunked",
        },
        **{
            "vertprefix1": b"Transfer-Encoding:\x0bchunked",
            "commaCow": b"Transfer-Encoding: chunked, cow",
            "quoted": b'Transfer-Encoding: "chunked"',
        },
        **{
            "cowComma": b"Transfer-Encoding: cow, chunked",
            "linewrapped1": b"Transfer-Encoding:\n chunked",
            "aposed": b"Transfer-Encoding: 'chunked'",
        },
        **{"lazygrep": b"Transfer-Encoding: chunk", "sarcasm": b"TrAnSFer-EnCODinG: cHuNkeD", "yelling": b"TRANSFER-ENCODING: CHUNKED"},
        **{"tabsuffix": b"Transfer-Encoding: chunked\t", "revdualchunk": b"Transfer-Encoding: cow\r\nTransfer-Encoding: chunked"},
        **{
            "0dspam": b"Transfer\r-Encoding: chunked",
            "nested": b"Transfer-Encoding: cow chunked bar",
            "spaceFF": b"Transfer-Encoding:\xffchunked",
        },
        **{"accentCH": b"Transfer-Encoding: ch\x96nked", "accentTE": b"Transf\x82r-Encoding: chunked"},
        **{"x-rout": b"X:X\rTransfer-Encoding: chunked", "x-nout": b"X:X\nTransfer-Encoding: chunked"},
    }
    for byte in (*range(1, 0x20), *range(0x7F, 0x100)):
        ways[f"midspace-{byte:02x}"] = b"Transfer-Encoding:%cchunked" % byte
        ways[f"postspace-{byte:02x}"] = b"Transfer-Encoding%c: chunked" % byte
        ways[f"prespace-{byte:02x}"] = b"%cTransfer-Encoding: chunked" % byte
        ways[f"endspace-{byte:02x}"] = b"Transfer-Encoding: chunked%c" % byte
    for name, way in ways.items():
        yield Case(f"smuggler: {name}, with a length", HEAD + way + b"\r\nContent-Length: 5\r\n\r\n" + END)
        yield Case(f"smuggler: {name}, alone", HEAD + way + b"\r\n\r\n" + END, (b"",) if name in _PLAIN else None)


def _kettle() -> Iterator[Case]:
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
    hidden = b"GET /404 HTTP/1.1\r\nFoo: x"
    yield Case("Kettle: CL.TE", HEAD + both % len(END + hidden) + END + hidden)
    yield Case("Kettle: TE.CL", HEAD + both % 4 + b"%x\r\n" % len(SECOND) + SECOND + b"\r\n" + END)
    yield Case(
        "Kettle: TE.TE, the second unknown",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\nContent-length: 4\r\n\r\n5c\r\n",
    )
    yield Case("Kettle: CL.CL", HEAD + b"Content-Length: 6\r\nContent-Length: 5\r\n\r\n12345G")
    yield Case("Kettle: two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")


CASES = (*_garden(), *_smuggler(), *_kettle())
