"""Read Python source into a tree and resolve its names: `sp` stands for `subprocess`, `run` for `os.system`.

Pure: nothing of the text is ever run or imported.
"""

from __future__ import annotations

import _ast as ast  # the classes alone; `ast` itself is slow to load
import warnings

from agent_sandbox.readers.constants import DEPTH, MOST, fold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

_BINDINGS = 16  # of one name
_BUDGET = 200_000
BUILTINS = frozenset(
    {
        *("__import__", "eval", "exec", "compile", "open", "getattr", "globals", "locals", "vars", "range", "map", "reversed"),
        *("bytearray", "bytes", "str", "int", "chr", "ord", "list", "tuple", "breakpoint"),
    }
)
_LOOKUPS = frozenset({"get", "pop", "__getitem__", "setdefault"})  # methods of a dictionary
_HELD = frozenset({"os", "sys", "subprocess", "socket", "threading"})  # not `signal`, which is a part of scipy
_IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
_NAMESPACES = frozenset({"builtins.globals", "builtins.locals", "builtins.vars"})

# Whether an answer was cut short: a name led back to itself, or the way was too long.
_WHOLE, _BY_CIRCLE, _BY_DEPTH = range(3)

Texts = frozenset[str]
_NOTHING: frozenset[str] = frozenset()
# Fields that hold names, numbers, operators and contexts: nothing to go further into.
_NO_NODES = frozenset(
    {
        *("ctx", "op", "ops", "id", "attr", "arg", "name", "names", "asname", "module", "level", "kind", "conversion", "simple"),
        *("type_comment", "type_ignores", "lineno", "kwd_attrs", "rest", "is_async"),
    }
)


class Names:
    """The bindings of all trees that were added, and what expressions stand for under them."""

    def __init__(self) -> None:
        self._imported: dict[str, set[str]] = {}
        self._bound: dict[str, list[ast.expr | None]] = {}  # None: to something unknown
        self._stars: list[str] = []
        self._steps = 0
        self._known: dict[str, frozenset[str]] = {}
        self._open: set[str] = set()  # names being followed just now
        self._cut = _WHOLE

    @property
    def exhausted(self) -> bool:
        """Whether something was given up."""
        return self._steps > _BUDGET

    def step(self) -> bool:
        """Count one step; whether there are more to go."""
        self._steps += 1
        return self._steps <= _BUDGET

    def add(self, node: ast.AST) -> None:
        """Note what one node binds."""
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
        """What is assigned to a name, None for what the text does not tell; nothing for one that is imported or never assigned."""
        return () if name in self._imported else self._bound.get(name, ())

    def imported(self) -> frozenset[str]:
        """The names that imports give."""
        return frozenset(self._imported)

    @property
    def takes_all(self) -> bool:
        """Whether it says `from … import *` somewhere."""
        return bool(self._stars)

    def is_bound(self, name: str) -> bool:
        """Whether the program gives the name a meaning of its own somewhere."""
        return name in self._bound or name in self._imported

    def is_plain_false(self, name: str, origin: str) -> bool:
        """Whether a name is this imported one and never anything else."""
        return self._imported.get(name) == {origin} and name not in self._bound

    def origins(self, node: ast.expr, depth: int = DEPTH) -> frozenset[str]:
        """The dotted names that an expression may stand for; nothing where the text does not tell."""
        if depth <= 0 or not self.step():
            self._cut = _BY_DEPTH
            return _NOTHING
        match node:
            case ast.Name(id=name):
                return self._followed(name, depth)
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

    def _followed(self, name: str, depth: int) -> frozenset[str]:
        """What a name stands for, remembered where the answer was whole: one that met a name on the way to itself is so for the first."""
        if name in self._known:
            return self._known[name]
        if name in self._open:
            self._cut = max(self._cut, _BY_CIRCLE)
            return _NOTHING
        self._open.add(name)
        before, self._cut = self._cut, _WHOLE
        found = self._of_name(name, depth)
        self._open.discard(name)
        if self._cut == _WHOLE or (self._cut == _BY_CIRCLE and not self._open):
            self._known[name] = found
        self._cut = max(before, self._cut) if self._open else _WHOLE
        return found

    def _of_name(self, name: str, depth: int) -> frozenset[str]:
        if name == "__builtins__":
            return frozenset({"builtins"})
        found = set(self._imported.get(name, ()))
        for value in self._bound.get(name, ()):
            found |= self.origins(value, depth - 1) if value is not None else _NOTHING
        if not found and name not in self._bound:
            found = {f"{module}.{name}" for module in self._stars[:MOST]}
            found |= {f"builtins.{name}"} if name in BUILTINS else _NOTHING
        return frozenset(found)

    def _of_call(self, functions: frozenset[str], args: list[ast.expr], depth: int) -> frozenset[str]:
        found: set[str] = set()
        for function in functions:
            if function in _IMPORTERS and args:
                for name in self.texts(args[0], depth) or ():
                    found |= {name, name.partition(".")[0]} if function != "importlib.import_module" else {name}
            elif function == "builtins.getattr" and len(args) >= 2:
                attributes = self.texts(args[1], depth) or ()
                found |= {f"{base}.{attribute}" for base in self.origins(args[0], depth) for attribute in attributes}
            elif function == "functools.partial" and args:
                found |= self.origins(args[0], depth)
            elif function == "pathlib.Path":
                found.add(function)  # what is made is told by what makes it
            elif function == "builtins.vars" and args:
                found |= {f"{base}.__dict__" for base in self.origins(args[0], depth)}
        return frozenset(found)

    def _of_method(self, func: ast.expr, args: list[ast.expr], depth: int) -> frozenset[str]:
        """`vars(os).get("system")`, `os.__getattribute__("system")`, `attrgetter("system")(os)`."""
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
        found: set[str] = set()
        bases = self.origins(value, depth)
        of_a_namespace = isinstance(value, ast.Call) and self.origins(value.func, depth) & _NAMESPACES
        keys = (self.texts(key, depth) or _NOTHING) if bases or of_a_namespace else _NOTHING
        for base in bases:
            if base == "sys.modules":
                found |= keys
            elif base.endswith(".__dict__") or base == "builtins":
                found |= {f"{base.removesuffix('.__dict__')}.{each}" for each in keys}
        if of_a_namespace:
            found |= {origin for each in keys for origin in self._followed(each, depth)}
        if isinstance(value, (ast.List, ast.Tuple)):
            found |= {origin for each in value.elts[:MOST] for origin in self.origins(each, depth - 1)} if depth else _NOTHING
        return frozenset(found)

    def texts(self, node: ast.expr, depth: int = DEPTH) -> Texts | None:
        """The strings that an expression may be, or None where the text does not tell all of them."""
        values = fold(self, node, depth)
        return None if values is None else frozenset(each for each in values if isinstance(each, str)) or None


# What binds names, in the order in which it is noted.
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
    """`os.fork` for `shutil.os.fork` and `posix.fork`: many modules hold others under their names."""
    parts = name.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].lstrip("_") in _HELD:
            return ".".join((parts[index].lstrip("_"), *parts[index + 1 :]))
    return f"os{name[5:]}" if parts[0] == "posix" else name


def by_kind(tree: ast.AST) -> dict[type, list[Any]]:
    """Every node below and including this one, by its class, in no order; without what holds only names and operators."""
    found: dict[type, list[Any]] = {}
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        kind = node.__class__
        group = found.get(kind)
        if group is None:
            group = found[kind] = []
        group.append(node)
        for name in _below(kind):
            value = getattr(node, name)
            if value.__class__ is list:
                waiting += value
            elif value is not None:
                waiting.append(value)
    return found


_BELOW: dict[type, tuple[str, ...]] = {}


def _below(kind: type) -> tuple[str, ...]:
    fields = _BELOW.get(kind)
    if fields is None:
        fields = _BELOW[kind] = tuple(name for name in getattr(kind, "_fields", ()) if name not in _NO_NODES)
    return fields


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below and including this one, without recursion."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below one, the last first: a stack then gives them in the order of the text."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [each for each in value if isinstance(each, ast.AST)]
    found.reverse()
    return found


_FILE = "<code to be read>"
# The parser warns of what it reads (an invalid escape in a string) by the filters of the whole process. This one speaks of our file alone,
# and stays: putting the filters back would race with other threads that do the same.
_QUIET = ("ignore", None, Warning, _FILE, 0)


def parse(source: str) -> ast.AST | str:
    """The tree, or why there is none."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    if filters[:1] != [_QUIET]:
        if _QUIET in filters[1:]:  # somebody has put another before it
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
    """Whether the first two lines say that the text is to be read as something else than it looks like."""
    for line in source.split("\n", 2)[:2]:
        if "#" in line and "coding" in line:
            named = line.partition("coding")[2].lstrip(":= \t").lower()
            if not named.startswith(("utf-8", "utf8", "utf_8")):
                return True
    return False
