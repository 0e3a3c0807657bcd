"""How git spells things in a patch: names, modes, and content that is no text."""

from __future__ import annotations

import zlib
from base64 import b85encode
from collections.abc import Iterator
from hashlib import sha1

from agent_sandbox.workspace.confusable import components
from agent_sandbox.workspace.nodes import EntryType, Node

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+/=@,%^~")
_SPELT = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}


def git_mode(node: Node) -> int:
    """The mode that git keeps of an entry."""
    if node.type is EntryType.SYMLINK:
        return 0o120000
    return 0o040000 if node.type is EntryType.DIRECTORY else 0o100755 if node.mode & 0o100 else 0o100644


def blob_name(content: bytes, node: Node | None) -> bytes:
    """The name that git gives to content: without it a binary patch is refused."""
    if node is None:
        return b"0" * 40
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest().encode()


def literal(content: bytes) -> Iterator[bytes]:
    """Content as git packs it: lines of at most 52 bytes, each led by a letter that tells how many."""
    yield b"literal %d\n" % len(content)
    packed = zlib.compress(content)
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        count = len(piece)
        yield bytes((64 + count if count <= 26 else 70 + count,)) + b85encode(piece, pad=True) + b"\n"
    yield b"\n"


def quoted(name: bytes) -> bytes:
    """A name as git spells it. Plain names are left alone; any other is quoted, which git always understands."""
    if all(byte in _PLAIN for byte in name):
        return name
    spelt = (_SPELT.get(byte) or (bytes((byte,)) if 0x20 <= byte < 0x7F else b"\\%03o" % byte) for byte in name)
    return b'"%s"' % b"".join(spelt)


def is_gits(path: str) -> bool:
    """Whether a part of a path is, to some filesystem, git's own directory: such a patch is refused as a whole."""
    return ".git" in components(path)
