"""Fold constant expressions: `"ev" + "al"`, `bytes([111, 115]).decode()`, `b64decode("b3M=")`.

None of the program is run. Only a short list of operations and functions is evaluated, each pure and with bounded output; anything else
makes the value unknown. Every step counts against the budget of `Names`.
"""

from __future__ import annotations

import _ast as ast  # only the classes; `ast` itself is slow to import
from itertools import product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from agent_sandbox.readers.python import Names

    Value = str | bytes | int | tuple["Value", ...]
    Values = tuple[Value, ...]  # the possible values of an expression; None stands for "not all known"
    Local = Mapping[str, Value]

DEPTH = 12
MOST = 16  # possible values of one expression
_LONGEST = 1 << 16  # length of one value
_LARGEST = 1 << 64  # magnitude of an integer
_OPERANDS = 1024  # operands of one chain of additions, or elements of one list
_NOTHING: Local = {}


def fold(names: Names, node: ast.expr, depth: int = DEPTH, local: Local = _NOTHING) -> Values | None:
    """Return the values that an expression may have, or None if not all of them are known."""
    folder = _FOLDERS.get(type(node))
    return folder(names, node, depth - 1, local) if folder is not None and names.step() and depth > 0 else None


def _constant(names: Names, node: ast.Constant, depth: int, local: Local) -> Values | None:
    return (node.value,) if isinstance(node.value, str | bytes | int) and _bounded(node.value) else None


def _name(names: Names, node: ast.Name, depth: int, local: Local) -> Values | None:
    if node.id in local:
        return (local[node.id],)
    return _union(names, names.bindings(node.id), depth, local)


def _choice(names: Names, node: ast.IfExp, depth: int, local: Local) -> Values | None:
    return _union(names, [node.body, node.orelse], depth, local)


def _union(names: Names, nodes: Sequence[ast.expr | None], depth: int, local: Local) -> Values | None:
    union: dict[Value, None] = {}
    for node in nodes:
        values = None if node is None else fold(names, node, depth, local)
        if values is None or len(union) > MOST:
            return None
        union |= dict.fromkeys(values)
    return tuple(union) or None


def _operation(names: Names, node: ast.BinOp, depth: int, local: Local) -> Values | None:
    if not isinstance(node.op, ast.Add):
        operator = _OPERATORS.get(type(node.op))
        return None if operator is None else _applied(names, operator, [node.left, node.right], depth, local)
    operands, left = [node.right], node.left  # a long sum is a deep tree: descend its left side without recursion
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add):
        operands.append(left.right)
        left = left.left
        if len(operands) > _OPERANDS:
            return None
    return _applied(names, _sum, [left, *reversed(operands)], depth, local)


def _joined(names: Names, node: ast.JoinedStr, depth: int, local: Local) -> Values | None:
    return _applied(names, _sum, node.values or [ast.Constant("")], depth, local)


def _formatted(names: Names, node: ast.FormattedValue, depth: int, local: Local) -> Values | None:
    return _applied(names, str, [node.value], depth, local) if node.format_spec is None and node.conversion == -1 else None


def _sequence(names: Names, node: ast.List | ast.Tuple, depth: int, local: Local) -> Values | None:
    return _applied(names, lambda *items: items, node.elts, depth, local)


def _comprehension(names: Names, node: ast.ListComp | ast.GeneratorExp, depth: int, local: Local) -> Values | None:
    loop = node.generators[0]
    if len(node.generators) > 1 or loop.ifs or loop.is_async or not isinstance(loop.target, ast.Name):
        return None
    items = _only(fold(names, loop.iter, depth, local))
    if isinstance(items, int | None) or len(items) > _OPERANDS:
        return None
    results = [_only(fold(names, node.elt, depth, {**local, loop.target.id: item})) for item in items]
    return None if None in results else (tuple(each for each in results if each is not None),)


def _subscript(names: Names, node: ast.Subscript, depth: int, local: Local) -> Values | None:
    if not isinstance(node.slice, ast.Slice):
        return _applied(names, lambda value, key: value[key], [node.value, node.slice], depth, local)
    bounds = [node.slice.lower, node.slice.upper, node.slice.step]
    given = [each for each in bounds if each is not None]

    def cut(value: Any, *numbers: int) -> Any:
        rest = iter(numbers)
        return value[slice(*(None if each is None else next(rest) for each in bounds))]

    return _applied(names, cut, [node.value, *given], depth, local)


def _negated(names: Names, node: ast.UnaryOp, depth: int, local: Local) -> Values | None:
    return _applied(names, lambda value: -value, [node.operand], depth, local) if isinstance(node.op, ast.USub) else None


def _walrus(names: Names, node: ast.NamedExpr, depth: int, local: Local) -> Values | None:
    return fold(names, node.value, depth, local)


def _call(names: Names, node: ast.Call, depth: int, local: Local) -> Values | None:
    arguments = [*node.args, *(each.value for each in node.keywords)]
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        result = _applied(names, _METHODS[node.func.attr], [node.func.value, *arguments], depth, local)
        if result is not None:
            return result
    origins = names.origins(node.func, depth)
    if origins == {"builtins.map"} and len(arguments) == 2:
        mapped = _FUNCTIONS.get(_only(tuple(names.origins(arguments[0], depth))) or "")
        return None if mapped is None else _applied(names, lambda items: tuple(map(mapped, items)), arguments[1:], depth, local)
    function = _FUNCTIONS.get(_only(tuple(origins)) or "")
    return None if function is None else _applied(names, function, arguments, depth, local)


def _applied(names: Names, function: Callable[..., Any], nodes: Sequence[ast.expr], depth: int, local: Local) -> Values | None:
    """Apply the function to every combination of operand values; None if an operand is unknown or there are too many."""
    columns: list[Values] = []
    count = 1
    for node in nodes:
        values = fold(names, node, depth, local) if len(columns) < _OPERANDS else None
        count *= len(values or ())
        if values is None or count > MOST:
            return None
        columns.append(values)
    results: dict[Value, None] = {}
    for choice in product(*columns):
        try:
            value = function(*choice)
        except Exception:  # "a" + 1, chr(-1), invalid base64: the program would fail here, too
            return None
        if not _bounded(value):
            return None
        results[bytes(value) if isinstance(value, bytearray) else value] = None
    return tuple(results) or None


def _bounded(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | bytes | bytearray | int | tuple):
        return False
    return abs(value) <= _LARGEST if isinstance(value, int) else len(value) <= _LONGEST


def _only(values: Iterable[Any] | None) -> Any:
    """Return the value if there is exactly one, else None."""
    items = tuple(values or ())
    return items[0] if len(items) == 1 else None


def _small(*lengths: int) -> None:
    """Raise ValueError if the product of these lengths is too large, before a result of that size is built."""
    total = 1
    for each in lengths:
        total *= max(1, each)
    if total > _LONGEST * 4:
        raise ValueError("too large")


def _sum(first: Any, *rest: Any) -> Any:
    if isinstance(first, str | bytes):
        return _join(type(first)(), (first, *rest))
    for each in rest:
        first = first + each
    return first


def _times(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if not isinstance(value, int) and isinstance(count, int):
            _small(len(value), count)
    return left * right


def _percent(left: Any, right: Any) -> Any:
    """Format with `%`. Raises ValueError for widths, which produce as much text as they name."""
    if isinstance(left, str) and any(character in "0123456789*" for character in left):
        raise ValueError("widths")
    return left % right


def _shift(left: Any, right: Any) -> Any:
    _small(1 << min(right, 64))
    return left << right


def _format(text: str, *arguments: Any) -> str:
    if any(character in ":!.[" for character in text):
        raise ValueError("widths")
    _small(text.count("{"), *(len(str(each)) for each in arguments))
    return text.format(*arguments)


def _replace(value: Any, old: Any, new: Any) -> Any:
    _small(len(value), len(new) + 1)
    return value.replace(old, new)


def _join(glue: Any, parts: Any) -> Any:
    _small(sum(map(len, parts)) + len(glue) * len(parts))
    return glue.join(parts)


def _bytes(value: Any = b"", *encoding: str) -> bytes:
    if isinstance(value, int):
        _small(value)
    return value.encode(*encoding) if isinstance(value, str) else bytes(value)


def _items(value: Any = ()) -> tuple[Any, ...]:
    _small(len(value))
    return tuple(value)


def _decode(value: Any, encoding: str = "utf-8", *_: str) -> Any:
    """Do `codecs.decode` and `.decode()` for codecs that cannot turn little input into much output. Raises ValueError for others."""
    import codecs

    if codecs.lookup(encoding).name not in ("utf-8", "ascii", "iso8859-1", "rot-13", "hex", "base64", "utf-16", "utf-16-le", "utf-16-be"):
        raise ValueError("another codec")
    return codecs.decode(value, encoding)


def _base64(kind: str) -> Callable[..., bytes]:
    def decoded(value: str | bytes, *_: object) -> bytes:
        import base64

        data: bytes = getattr(base64, kind)(value)
        return data

    return decoded


def _hexadecimal(value: str | bytes) -> bytes:
    return bytes.fromhex(value if isinstance(value, str) else value.decode("ascii"))


def _inflate(value: bytes) -> bytes:
    import zlib

    return zlib.decompressobj().decompress(value, _LONGEST)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Mult: _times,
    ast.Mod: _percent,
    ast.Sub: lambda left, right: left - right,
    ast.BitXor: lambda left, right: left ^ right,
    ast.BitOr: lambda left, right: left | right,
    ast.BitAnd: lambda left, right: left & right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.LShift: _shift,
    ast.RShift: lambda left, right: left >> right,
}


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *arguments: getattr(value, name)(*arguments)


_PLAIN_METHODS = ("lower", "upper", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "title", "swapcase", "capitalize", "hex")
_METHODS: dict[str, Callable[..., Any]] = {name: _method(name) for name in (*_PLAIN_METHODS, "encode")} | {
    "replace": _replace,
    "join": _join,
    "format": _format,
    "decode": lambda value, *how: _decode(value, *how) if isinstance(value, bytes) else value.decode(),
    "split": lambda value, *how: _items(value.split(*how)),
}
_DECODERS = ("b64decode", "standard_b64decode", "urlsafe_b64decode", "b32decode", "b16decode", "a85decode", "b85decode")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "builtins.chr": chr,
    "builtins.ord": ord,
    "builtins.str": lambda value="", *how: _decode(value, *how) if how else str(value) if not isinstance(value, tuple) else None,
    "builtins.int": int,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.list": _items,
    "builtins.tuple": _items,
    "builtins.reversed": lambda value: _items(value)[::-1],
    "builtins.bytes.fromhex": _hexadecimal,
    "builtins.bytearray.fromhex": _hexadecimal,
    "codecs.decode": _decode,
    "zlib.decompress": _inflate,
    **{f"base64.{name}": _base64(name) for name in _DECODERS},
    **{f"binascii.{name}": _hexadecimal for name in ("unhexlify", "a2b_hex")},
    "binascii.a2b_base64": _base64("b64decode"),
}
_FOLDERS: dict[type, Callable[[Names, Any, int, Local], Values | None]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.IfExp: _choice,
    ast.BinOp: _operation,
    ast.JoinedStr: _joined,
    ast.FormattedValue: _formatted,
    ast.List: _sequence,
    ast.Tuple: _sequence,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.Subscript: _subscript,
    ast.UnaryOp: _negated,
    ast.NamedExpr: _walrus,
    ast.Call: _call,
}
