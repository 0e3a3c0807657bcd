"""Resolve Python expressions: the dotted names they may stand for (`Resolver`), and their values if they are constant (`fold`).

After `import subprocess as sp`, `sp` stands for `subprocess`; `"ev" + "al"` and `b64decode("ZXZhbA==")` have the value `eval`. None of the
program is run. Only a short list of operations and functions is evaluated, each pure and with bounded output; anything else makes the value
unknown. The number of steps is limited.
"""

from __future__ import annotations

import _ast as ast  # only the classes; `ast` itself is slow to import
from itertools import product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    Value = str | bytes | int | tuple["Value", ...]
    Values = tuple[Value, ...]  # the possible values of an expression; None stands for "not all known"
    Local = Mapping[str, Value]

DEPTH = 12
MOST = 16  # possible values of one expression
_LONGEST = 1 << 16  # length of one value
_LARGEST = 1 << 64  # magnitude of an integer
_OPERANDS = 1024  # operands of one chain of additions, or elements of one list
_NOTHING: Local = {}
_BINDINGS = 16  # remembered for one name
_BUDGET = 200_000  # steps of name resolution and constant folding
BUILTINS = frozenset(
    {
        *("__import__", "eval", "exec", "compile", "open", "getattr", "globals", "locals", "vars", "range", "map", "reversed"),
        *("bytearray", "bytes", "str", "int", "chr", "ord", "list", "tuple", "breakpoint"),
    }
)
_LOOKUPS = frozenset({"get", "pop", "__getitem__", "setdefault"})  # dictionary methods that look up a key
# Modules that others expose as attributes. Not `signal`, which is also a part of scipy.
_EXPOSED = frozenset({"os", "sys", "subprocess", "socket", "threading"})
IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
NAMESPACES = frozenset({"builtins.globals", "builtins.locals", "builtins.vars"})

# Whether an answer is complete, or was cut short by a name that leads back to itself, or by the depth or step limit.
_COMPLETE, _CUT_BY_CYCLE, _CUT_BY_LIMIT = range(3)

Texts = frozenset[str]
_NO_NAMES: frozenset[str] = frozenset()


def own_name(name: str) -> str:
    """Return the canonical form of a dotted name: `os.fork` for `posix.fork`, and for `shutil.os.fork`, because `shutil` exposes `os`."""
    parts = name.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].lstrip("_") in _EXPOSED:
            return ".".join((parts[index].lstrip("_"), *parts[index + 1 :]))
    return f"os{name[5:]}" if parts[0] == "posix" else name


class Resolver:
    """Finds the dotted names and constant strings that expressions may stand for, from the names that a program binds."""

    def __init__(self) -> None:
        self._imported: dict[str, set[str]] = {}
        self._bound: dict[str, list[ast.expr | None]] = {}  # None: bound to an unknown value
        self._stars: list[str] = []
        self._steps = 0
        self._known: dict[str, frozenset[str]] = {}
        self._open: set[str] = set()  # names being resolved right now
        self._cut = _COMPLETE

    @property
    def exhausted(self) -> bool:
        """Whether the limit of steps is reached, so that answers may be incomplete."""
        return self._steps > _BUDGET

    def step(self) -> bool:
        """Count one step. Returns False once the limit of steps is exceeded."""
        self._steps += 1
        return self._steps <= _BUDGET

    def add(self, node: ast.AST) -> None:
        """Record the names that a node binds. The class of the node must be in `BINDING`."""
        self._known.clear()
        _BINDERS[type(node)](self, node)

    def _import(self, node: ast.Import) -> None:
        for each in node.names:
            top = each.name.partition(".")[0]
            self._imported.setdefault(each.asname or top, set()).add(each.name if each.asname else top)

    def _import_from(self, node: ast.ImportFrom) -> None:
        for each in node.names if node.module and not node.level else ():
            if each.name == "*":
                self._stars.append(node.module or "")
            else:
                self._imported.setdefault(each.asname or each.name, set()).add(f"{node.module}.{each.name}")

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)

    def _assign_one(self, node: ast.AnnAssign | ast.NamedExpr) -> None:
        self._bind(node.target, node.value)

    def _augment(self, node: ast.AugAssign) -> None:
        self._bind(node.target, None)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        elements = node.iter.elts if isinstance(node.iter, (ast.List, ast.Tuple, ast.Set)) else [None]
        for element in elements[: _BINDINGS + 1]:
            self._bind(node.target, element)

    def _with(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._bind(node.optional_vars, None)

    def _parameters(self, node: ast.arguments) -> None:
        plain = [*node.posonlyargs, *node.args]
        defaults = [None] * (len(plain) - len(node.defaults)) + list(node.defaults)
        for argument, default in (*zip(plain, defaults, strict=False), *zip(node.kwonlyargs, node.kw_defaults, strict=False)):
            bound = self._bound.setdefault(argument.arg, [])
            bound += [None] if default is None else [None, default]

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            bound = self._bound.setdefault(target.id, [])
            if len(bound) <= _BINDINGS:
                bound.append(value if len(bound) < _BINDINGS else None)
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else ()
            for index, each in enumerate(target.elts):
                if isinstance(each, ast.Name):
                    self._bind(each, values[index] if values else None)

    def bindings(self, name: str) -> Sequence[ast.expr | None]:
        """Return the expressions assigned to a name, None for each unknown value. Empty if the name is imported or never assigned."""
        return () if name in self._imported else self._bound.get(name, ())

    def imported(self) -> frozenset[str]:
        """Return the names that imports bind."""
        return frozenset(self._imported)

    @property
    def takes_all(self) -> bool:
        """Whether the source has a `from … import *`."""
        return bool(self._stars)

    def is_bound(self, name: str) -> bool:
        """Whether the program binds the name anywhere."""
        return name in self._bound or name in self._imported

    def is_plain_false(self, name: str, origin: str) -> bool:
        """Whether a name is bound only by the import of `origin`, a constant that is False at run time (`typing.TYPE_CHECKING`)."""
        return self._imported.get(name) == {origin} and name not in self._bound

    def origins(self, node: ast.expr, depth: int = DEPTH) -> frozenset[str]:
        """Return the dotted names that an expression may stand for; empty if the text does not reveal them."""
        if depth <= 0 or not self.step():
            self._cut = _CUT_BY_LIMIT
            return _NO_NAMES
        match node:
            case ast.Name(id=name):
                return self._resolve_name(name, depth)
            case ast.Attribute(value=value, attr=attr):
                return frozenset(f"{base}.{attr}" for base in self.origins(value, depth - 1))
            case ast.Call(func=func, args=args):
                return self._of_call(self.origins(func, depth - 1), args, depth - 1) | self._of_method(func, args, depth - 1)
            case ast.Subscript(value=value, slice=key):
                return self._of_item(value, key, depth - 1)
            case ast.IfExp(body=body, orelse=other):
                return self.origins(body, depth - 1) | self.origins(other, depth - 1)
            case ast.BoolOp(values=values):
                return frozenset(name for each in values[:MOST] for name in self.origins(each, depth - 1))
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.origins(value, depth - 1)
        return _NO_NAMES

    def _resolve_name(self, name: str, depth: int) -> frozenset[str]:
        """Return the dotted names that a name may stand for, and cache them if the answer is complete.

        If names refer to each other in a cycle, only the answer for the name that the search began with is complete.
        """
        if name in self._known:
            return self._known[name]
        if name in self._open:
            self._cut = max(self._cut, _CUT_BY_CYCLE)
            return _NO_NAMES
        self._open.add(name)
        before, self._cut = self._cut, _COMPLETE
        origins = self._of_name(name, depth)
        self._open.discard(name)
        if self._cut == _COMPLETE or (self._cut == _CUT_BY_CYCLE and not self._open):
            self._known[name] = origins
        self._cut = max(before, self._cut) if self._open else _COMPLETE
        return origins

    def _of_name(self, name: str, depth: int) -> frozenset[str]:
        if name == "__builtins__":
            return frozenset({"builtins"})
        origins = set(self._imported.get(name, ()))
        for value in self._bound.get(name, ()):
            origins |= self.origins(value, depth - 1) if value is not None else _NO_NAMES
        if not origins and name not in self._bound:
            origins = {f"{module}.{name}" for module in self._stars[:MOST]}
            origins |= {f"builtins.{name}"} if name in BUILTINS else _NO_NAMES
        return frozenset(origins)

    def _of_call(self, functions: frozenset[str], args: list[ast.expr], depth: int) -> frozenset[str]:
        origins: set[str] = set()
        for function in functions:
            if function in IMPORTERS and args:
                for name in self.texts(args[0], depth) or ():
                    origins |= {name, name.partition(".")[0]} if function != "importlib.import_module" else {name}
            elif function == "builtins.getattr" and len(args) >= 2:
                attributes = self.texts(args[1], depth) or ()
                origins |= {f"{base}.{attribute}" for base in self.origins(args[0], depth) for attribute in attributes}
            elif function == "functools.partial" and args:
                origins |= self.origins(args[0], depth)
            elif function == "pathlib.Path":
                origins.add(function)  # its class stands for the instance
            elif function == "builtins.vars" and args:
                origins |= {f"{base}.__dict__" for base in self.origins(args[0], depth)}
        return frozenset(origins)

    def _of_method(self, func: ast.expr, args: list[ast.expr], depth: int) -> frozenset[str]:
        """Return the dotted names that a call such as `vars(os).get("system")` or `attrgetter("system")(os)` may stand for."""
        if isinstance(func, ast.Attribute) and args:
            if func.attr in _LOOKUPS:
                return self._of_item(func.value, args[0], depth)
            if func.attr in ("__getattribute__", "__getattr__"):
                return self._members(func.value, args[-1], depth)
        if isinstance(func, ast.Call) and args and func.args and "operator.attrgetter" in self.origins(func.func, depth):
            return self._members(args[0], func.args[0], depth)
        return _NO_NAMES

    def _members(self, value: ast.expr, attribute: ast.expr, depth: int) -> frozenset[str]:
        texts = self.texts(attribute, depth) or ()
        return frozenset(f"{base}.{text}" for base in self.origins(value, depth) for text in texts)

    def _of_item(self, value: ast.expr, key: ast.expr, depth: int) -> frozenset[str]:
        origins: set[str] = set()
        bases = self.origins(value, depth)
        of_a_namespace = isinstance(value, ast.Call) and self.origins(value.func, depth) & NAMESPACES
        keys = (self.texts(key, depth) or _NO_NAMES) if bases or of_a_namespace else _NO_NAMES
        for base in bases:
            if base == "sys.modules":
                origins |= keys
            elif base.endswith(".__dict__") or base == "builtins":
                origins |= {f"{base.removesuffix('.__dict__')}.{each}" for each in keys}
        if of_a_namespace:
            origins |= {origin for each in keys for origin in self._resolve_name(each, depth)}
        if isinstance(value, (ast.List, ast.Tuple)):
            origins |= {origin for each in value.elts[:MOST] for origin in self.origins(each, depth - 1)} if depth else _NO_NAMES
        return frozenset(origins)

    def texts(self, node: ast.expr, depth: int = DEPTH) -> Texts | None:
        """Return the strings that an expression may evaluate to; None if a value is unknown, or if no value is a string."""
        values = fold(self, node, depth)
        return None if values is None else frozenset(each for each in values if isinstance(each, str)) or None


# The node classes that bind names.
_BINDERS: dict[type, Callable[[Resolver, Any], None]] = {
    ast.Import: Resolver._import,
    ast.ImportFrom: Resolver._import_from,
    ast.Assign: Resolver._assign,
    ast.AnnAssign: Resolver._assign_one,
    ast.NamedExpr: Resolver._assign_one,
    ast.AugAssign: Resolver._augment,
    ast.For: Resolver._loop,
    ast.AsyncFor: Resolver._loop,
    ast.comprehension: Resolver._loop,
    ast.withitem: Resolver._with,
    ast.arguments: Resolver._parameters,
}
BINDING = frozenset(_BINDERS)


def fold(names: Resolver, node: ast.expr, depth: int = DEPTH, local: Local = _NOTHING) -> Values | None:
    """Return the values that an expression may have, or None if not all of them are known."""
    folder = _FOLDERS.get(type(node))
    return folder(names, node, depth - 1, local) if folder is not None and names.step() and depth > 0 else None


def _constant(names: Resolver, node: ast.Constant, depth: int, local: Local) -> Values | None:
    return (node.value,) if isinstance(node.value, str | bytes | int) and _bounded(node.value) else None


def _name(names: Resolver, node: ast.Name, depth: int, local: Local) -> Values | None:
    if node.id in local:
        return (local[node.id],)
    return _union(names, names.bindings(node.id), depth, local)


def _choice(names: Resolver, node: ast.IfExp, depth: int, local: Local) -> Values | None:
    return _union(names, [node.body, node.orelse], depth, local)


def _union(names: Resolver, nodes: Sequence[ast.expr | None], depth: int, local: Local) -> Values | None:
    union: dict[Value, None] = {}
    for node in nodes:
        values = None if node is None else fold(names, node, depth, local)
        if values is None or len(union) > MOST:
            return None
        union |= dict.fromkeys(values)
    return tuple(union) or None


def _operation(names: Resolver, node: ast.BinOp, depth: int, local: Local) -> Values | None:
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


def _joined(names: Resolver, node: ast.JoinedStr, depth: int, local: Local) -> Values | None:
    return _applied(names, _sum, node.values or [ast.Constant("")], depth, local)


def _formatted(names: Resolver, node: ast.FormattedValue, depth: int, local: Local) -> Values | None:
    return _applied(names, str, [node.value], depth, local) if node.format_spec is None and node.conversion == -1 else None


def _sequence(names: Resolver, node: ast.List | ast.Tuple, depth: int, local: Local) -> Values | None:
    return _applied(names, lambda *items: items, node.elts, depth, local)


def _comprehension(names: Resolver, node: ast.ListComp | ast.GeneratorExp, depth: int, local: Local) -> Values | None:
    loop = node.generators[0]
    if len(node.generators) > 1 or loop.ifs or loop.is_async or not isinstance(loop.target, ast.Name):
        return None
    items = _only(fold(names, loop.iter, depth, local))
    if isinstance(items, int | None) or len(items) > _OPERANDS:
        return None
    results = [_only(fold(names, node.elt, depth, {**local, loop.target.id: item})) for item in items]
    return None if None in results else (tuple(each for each in results if each is not None),)


def _subscript(names: Resolver, node: ast.Subscript, depth: int, local: Local) -> Values | None:
    if not isinstance(node.slice, ast.Slice):
        return _applied(names, lambda value, key: value[key], [node.value, node.slice], depth, local)
    bounds = [node.slice.lower, node.slice.upper, node.slice.step]
    given = [each for each in bounds if each is not None]

    def cut(value: Any, *numbers: int) -> Any:
        rest = iter(numbers)
        return value[slice(*(None if each is None else next(rest) for each in bounds))]

    return _applied(names, cut, [node.value, *given], depth, local)


def _negated(names: Resolver, node: ast.UnaryOp, depth: int, local: Local) -> Values | None:
    return _applied(names, lambda value: -value, [node.operand], depth, local) if isinstance(node.op, ast.USub) else None


def _walrus(names: Resolver, node: ast.NamedExpr, depth: int, local: Local) -> Values | None:
    return fold(names, node.value, depth, local)


def _call(names: Resolver, node: ast.Call, depth: int, local: Local) -> Values | None:
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


def _applied(names: Resolver, function: Callable[..., Any], nodes: Sequence[ast.expr], depth: int, local: Local) -> Values | None:
    """Apply the function to every combination of operand values; None if an operand is unknown or there are too many combinations."""
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
    """Return the only value; None if there is no value or more than one."""
    items = tuple(values or ())
    return items[0] if len(items) == 1 else None


def _small(*lengths: int) -> None:
    """Raise ValueError if the product of these lengths is larger than any result may be."""
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
    """Return `left % right`. Raises ValueError for a format with digits or `*`: a width can produce any amount of text."""
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
    """Decode as `codecs.decode` does. Raises ValueError unless the codec is one whose output cannot be much larger than its input."""
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
_FOLDERS: dict[type, Callable[[Resolver, Any, int, Local], Values | None]] = {
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
