"""Expressions of constants are worked out, within bounds; whatever is not known stays unknown."""

from __future__ import annotations

import ast
from typing import Any

from agent_sandbox.readers.python import read
from agent_sandbox.readers.python_values import fold

HEAD = "import base64, binascii, codecs, zlib\nif n:\n    t = 'a'\nelse:\n    t = 'b'\nw = 'os'\nk = 3\n"


VALUES: list[tuple[str, object]] = [
    ("'a' + 'b' + 'c'", "abc"),
    ("b'a' + b'b'", b"ab"),
    ("1 + 2 - 4", -1),
    ("'ab' * 3", "ababab"),
    ("3 * 'ab'", "ababab"),
    ("'%s%s' % ('a', 'b')", "ab"),
    ("f'{w}{1}'", "os1"),
    ("f''", ""),
    ("w[::-1]", "so"),
    ("w[0]", "o"),
    ("'abcd'[1:3]", "bc"),
    ("'abcd'[-1]", "d"),
    ("''.join(['a', 'b'])", "ab"),
    ("'-'.join('ab')", "a-b"),
    ("''.join(reversed('ab'))", "ba"),
    ("''.join(map(chr, [97, 98]))", "ab"),
    ("''.join(chr(c) for c in (97, 98))", "ab"),
    ("''.join([chr(c ^ 1) for c in [96]])", "a"),
    ("[c for c in b'ab']", (97, 98)),
    ("bytes([97]).decode()", "a"),
    ("bytes('a', 'ascii')", b"a"),
    ("bytearray(b'a')", b"a"),
    ("bytes(2)", b"\0\0"),
    ("str(5)", "5"),
    ("str(b'a', 'utf-8')", "a"),
    ("int('12', 8)", 10),
    ("ord('a')", 97),
    ("list('ab')", ("a", "b")),
    ("bytes.fromhex('6f73').decode()", "os"),
    ("base64.b64decode('b3M=').decode()", "os"),
    ("base64.b32decode(b'N5ZQ====').decode()", "os"),
    ("binascii.unhexlify(b'6f73')", b"os"),
    ("binascii.a2b_base64('b3M=')", b"os"),
    ("codecs.decode('bf', 'rot13')", "os"),
    ("zlib.decompress(bytes.fromhex('789c2bae2c2e49cd0500097402a6'))", b"system"),
    ("'A'.lower().upper().strip()", "A"),
    ("'a.b'.replace('.', '')", "ab"),
    ("'a b'.split()", ("a", "b")),
    ("'{}{}'.format('a', 'b')", "ab"),
    ("'a'.encode()", b"a"),
    ("(x := 'a')", "a"),
    ("6 // 2 | 8 & 12 ^ 1", 11),
    ("1 << 3 >> 1", 4),
    ("7 % 4", 3),
]

UNKNOWN = [
    "n",
    "n + 'a'",
    "'a' + 1",
    "chr(-1)",
    "'a' * 10 ** 9",
    "10 ** 9 * 'a'",
    "'a' * 100000",
    "'%9s' % 'a'",
    "'{:9}'.format('a')",
    "1 << 999",
    "1.5",
    "True",
    "input()",
    "[c for c in n]",
    "[c for c in 'ab' if n]",
    "[c for c in 5]",
    "[n for c in 'ab']",
    "f'{w!r}'",
    "f'{w:>5}'",
    "not w",
    "w.nothing()",
    "map(n, 'a')",
    "codecs.decode('a', 'no-such')",
    "codecs.decode(b'a', 'zlib')",
    "base64.b64decode('a')",
    "str((1, 2))",
    "'a'[5]",
    "~k",
    "k @ k",
    " + ".join(["'a'"] * 1100),
    "[" + "1," * 1100 + "]",
    "'a'.replace('a', 'b' * 60000) * 2",
    "''.join(['a' * 60000] * 1000)",
    "bytes(10 ** 9)",
    "[t, t, t, t, t]",
]


def folded(expression: str) -> tuple[Any, ...] | None:
    source = read(f"{HEAD}folded = {expression}")
    assert not source.unreadable
    return fold(source.names, source.kinds[ast.Assign][-1].value)


def test_the_value_is_what_python_would_make_of_it() -> None:
    assert [(expression, folded(expression)) for expression, _ in VALUES] == [(expression, (value,)) for expression, value in VALUES]


def test_a_name_that_may_be_two_things_is_both() -> None:
    assert folded("t") == ("a", "b")
    assert folded("t + 'x'") == ("ax", "bx")
    assert folded("'p' if n else 'q'") == ("p", "q")


def test_what_is_not_known_or_too_large_stays_unknown() -> None:
    assert [expression for expression in UNKNOWN if folded(expression) is not None] == []
