"""Parse Python source and resolve its names: `sp` stands for `subprocess`, `run` for `os.system`.

Pure: never runs or imports any of the text.
"""

from __future__ import annotations

import _ast as ast  # only the classes; `ast` itself is slow to import
import warnings

from agent_sandbox.readers.constants import DEPTH, MOST, fold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

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
_IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
_NAMESPACES = frozenset({"builtins.globals", "builtins.locals", "builtins.vars"})

# Whether an answer is complete, or was cut short by a name that leads back to itself, or by the depth or step limit.
_COMPLETE, _CUT_BY_CYCLE, _CUT_BY_LIMIT = range(3)

Texts = frozenset[str]
_NOTHING: frozenset[str] = frozenset()
# Node fields that hold names, numbers, operators and contexts, and need no visit.
_NO_NODES = frozenset(
    {
        *("ctx", "op", "ops", "id", "attr", "arg", "name", "names", "asname", "module", "level", "kind", "conversion", "simple"),
        *("type_comment", "type_ignores", "lineno", "kwd_attrs", "rest", "is_async"),
    }
)
_CHILD_FIELDS: dict[type, tuple[str, ...]] = {}  # by node class; filled on demand
_FILE = "<code to be read>"
# The parser warns (of an invalid escape in a string, say) through the filters of the whole process. This filter matches only our file name.
# It stays installed: restoring the filters would race with other threads that do the same.
_QUIET = ("ignore", None, Warning, _FILE, 0)


class Names:
    """The name bindings of all added trees, and the resolution of expressions under them."""

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
        """Whether the step budget is used up, so that answers may be incomplete."""
        return self._steps > _BUDGET

    def step(self) -> bool:
        """Count one step. Returns False once the budget is used up."""
        self._steps += 1
        return self._steps <= _BUDGET

    def add(self, node: ast.AST) -> None:
        """Record the names that one node binds."""
        binder = _BINDERS.get(type(node))
        if binder is not None:
            self._known.clear()
            binder(self, node)

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
        """Return the expressions assigned to a name, None for an unknown one. Empty for a name that is imported or never assigned."""
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
        """Whether the only binding of a name is the import of `origin`."""
        return self._imported.get(name) == {origin} and name not in self._bound

    def origins(self, node: ast.expr, depth: int = DEPTH) -> frozenset[str]:
        """Return the dotted names that an expression may stand for; empty where the text does not tell."""
        if depth <= 0 or not self.step():
            self._cut = _CUT_BY_LIMIT
            return _NOTHING
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
        return _NOTHING

    def _resolve_name(self, name: str, depth: int) -> frozenset[str]:
        """Resolve a name, and cache a complete answer. One cut short by a cycle is complete only for the name that started the search."""
        if name in self._known:
            return self._known[name]
        if name in self._open:
            self._cut = max(self._cut, _CUT_BY_CYCLE)
            return _NOTHING
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
            origins |= self.origins(value, depth - 1) if value is not None else _NOTHING
        if not origins and name not in self._bound:
            origins = {f"{module}.{name}" for module in self._stars[:MOST]}
            origins |= {f"builtins.{name}"} if name in BUILTINS else _NOTHING
        return frozenset(origins)

    def _of_call(self, functions: frozenset[str], args: list[ast.expr], depth: int) -> frozenset[str]:
        origins: set[str] = set()
        for function in functions:
            if function in _IMPORTERS and args:
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
        """Resolve `vars(os).get("system")`, `os.__getattribute__("system")`, `attrgetter("system")(os)`."""
        if isinstance(func, ast.Attribute) and args:
            if func.attr in _LOOKUPS:
                return self._of_item(func.value, args[0], depth)
            if func.attr in ("__getattribute__", "__getattr__"):
                return self._members(func.value, args[-1], depth)
        if isinstance(func, ast.Call) and args and func.args and "operator.attrgetter" in self.origins(func.func, depth):
            return self._members(args[0], func.args[0], depth)
        return _NOTHING

    def _members(self, value: ast.expr, attribute: ast.expr, depth: int) -> frozenset[str]:
        texts = self.texts(attribute, depth) or ()
        return frozenset(f"{base}.{text}" for base in self.origins(value, depth) for text in texts)

    def _of_item(self, value: ast.expr, key: ast.expr, depth: int) -> frozenset[str]:
        origins: set[str] = set()
        bases = self.origins(value, depth)
        of_a_namespace = isinstance(value, ast.Call) and self.origins(value.func, depth) & _NAMESPACES
        keys = (self.texts(key, depth) or _NOTHING) if bases or of_a_namespace else _NOTHING
        for base in bases:
            if base == "sys.modules":
                origins |= keys
            elif base.endswith(".__dict__") or base == "builtins":
                origins |= {f"{base.removesuffix('.__dict__')}.{each}" for each in keys}
        if of_a_namespace:
            origins |= {origin for each in keys for origin in self._resolve_name(each, depth)}
        if isinstance(value, (ast.List, ast.Tuple)):
            origins |= {origin for each in value.elts[:MOST] for origin in self.origins(each, depth - 1)} if depth else _NOTHING
        return frozenset(origins)

    def texts(self, node: ast.expr, depth: int = DEPTH) -> Texts | None:
        """Return the strings that an expression may evaluate to, or None if not all of them are known."""
        values = fold(self, node, depth)
        return None if values is None else frozenset(each for each in values if isinstance(each, str)) or None


# The node classes that bind names, in the order in which they are added.
_BINDERS: dict[type, Callable[[Names, Any], None]] = {
    ast.Import: Names._import,
    ast.ImportFrom: Names._import_from,
    ast.Assign: Names._assign,
    ast.AnnAssign: Names._assign_one,
    ast.NamedExpr: Names._assign_one,
    ast.AugAssign: Names._augment,
    ast.For: Names._loop,
    ast.AsyncFor: Names._loop,
    ast.comprehension: Names._loop,
    ast.withitem: Names._with,
    ast.arguments: Names._parameters,
}


BINDING = tuple(_BINDERS)


def own_name(name: str) -> str:
    """Return the canonical name: `os.fork` for `shutil.os.fork` and `posix.fork`. Many modules expose others as attributes."""
    parts = name.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].lstrip("_") in _EXPOSED:
            return ".".join((parts[index].lstrip("_"), *parts[index + 1 :]))
    return f"os{name[5:]}" if parts[0] == "posix" else name


def by_kind(tree: ast.AST) -> dict[type, list[Any]]:
    """Group this node and every node below it by class, in no order. Nodes that hold only names and operators are left out."""
    groups: dict[type, list[Any]] = {}
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        kind = node.__class__
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = []
        group.append(node)
        for name in _child_fields(kind):
            value = getattr(node, name)
            if value.__class__ is list:
                waiting += value
            elif value is not None:
                waiting.append(value)
    return groups


def _child_fields(kind: type) -> tuple[str, ...]:
    fields = _CHILD_FIELDS.get(kind)
    if fields is None:
        fields = _CHILD_FIELDS[kind] = tuple(name for name in getattr(kind, "_fields", ()) if name not in _NO_NODES)
    return fields


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield this node and every node below it, without recursion."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """Return the direct children of a node, last first: popping them from a stack gives the order of the text."""
    below: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            below.append(value)
        elif isinstance(value, list):
            below += [each for each in value if isinstance(each, ast.AST)]
    below.reverse()
    return below


def parse(source: str) -> ast.AST | str:
    """Return the syntax tree, or the reason why there is none."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    if filters[:1] != [_QUIET]:
        if _QUIET in filters[1:]:  # another filter was inserted before ours
            filters[:] = [each for each in filters if each != _QUIET]
        filters.insert(0, _QUIET)
    try:
        tree = compile(source, _FILE, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, OverflowError):  # NUL, lone surrogates, a number with too many digits
        return "it is no text that Python takes"
    except (RecursionError, MemoryError):
        return "it is nested too deep"
    return tree


def names_an_encoding(source: str) -> bool:
    """Whether the first two lines declare an encoding other than UTF-8: the text then means something else than it shows."""
    for line in source.split("\n", 2)[:2]:
        if "#" in line and "coding" in line:
            named = line.partition("coding")[2].lstrip(":= \t").lower()
            if not named.startswith(("utf-8", "utf8", "utf_8")):
                return True
    return False
