"""The encodings under which secrets are sought, as functions from bytes to bytes; by them tests and the benchmark hide values."""

from __future__ import annotations

import base64
import bz2
import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Callable
from urllib.parse import quote_from_bytes

import brotli
import zstandard


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _rot13(data: bytes) -> bytes:
    return codecs.encode(data.decode("latin-1"), "rot13").encode("latin-1")


# In a text, wherever they stand.
TEXTUAL: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "base64": base64.b64encode,
    "base64 for URLs": base64.urlsafe_b64encode,
    "base64 over lines": base64.encodebytes,
    "base32": base64.b32encode,
    "hex": lambda data: data.hex().encode(),
    "HEX": lambda data: data.hex().upper().encode(),
    "hex with colons": lambda data: data.hex(":").encode(),
    "hex with spaces": lambda data: data.hex(" ").encode(),
    "hex escapes": lambda data: b"".join(b"\\x%02x" % byte for byte in data),
    "URL": lambda data: quote_from_bytes(data, safe="").encode(),
    "URL, every byte": lambda data: b"".join(b"%%%02X" % byte for byte in data),
    "JSON": lambda data: json.dumps(data.decode("latin-1"))[1:-1].replace("/", "\\/").encode(),
    "Unicode escapes": lambda data: b"".join(b"\\u%04x" % byte for byte in data),
    "entities": lambda data: b"".join(b"&#%d;" % byte for byte in data),
    "UTF-16": lambda data: data.decode("latin-1").encode("utf-16-le"),
    "reversed": lambda data: data[::-1],
    "rot13": _rot13,
}
# Of a whole stream, known by its first bytes.
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "deflate": zlib.compress,
    "zstd": lambda data: bytes(zstandard.ZstdCompressor().compress(data)),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
# Of a whole stream, known only by what its sender says.
DECLARED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "brotli": ("br", brotli.compress),
    "deflate without header": ("deflate", _raw_deflate),
}
