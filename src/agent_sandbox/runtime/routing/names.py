"""What the names of a Python program stand for, as far as its text shows: `sp` for `subprocess`, `run` for `os.system`.

No order of statements and no scopes: a name stands for everything that is bound to it anywhere, so that what is said of it errs on the side
of more. Every step is counted, and what is not understood within the budget is given up, and said so.
"""

from __future__ import annotations

import _ast as ast  # the classes alone; `ast` itself is slow to load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 12
_BINDINGS = 16  # of one name
_TEXTS = 16
_LONGEST_TEXT = 1 << 16
_BUDGET = 200_000
BUILTINS = frozenset(
    {"__import__", "eval", "exec", "compile", "getattr", "globals", "locals", "vars", "range", "bytearray", "bytes", "chr"}
)
_IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
_NAMESPACES = frozenset({"builtins.globals", "builtins.locals", "builtins.vars"})

# Whether an answer was cut short: a name led back to itself, or the way was too long.
_WHOLE, _BY_CIRCLE, _BY_DEPTH = range(3)

Texts = frozenset[str]
_NOTHING: frozenset[str] = frozenset()


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

    def add(self, node: ast.AST) -> None:
        """Note what one node binds."""
        self._known.clear()
        match node:
            case ast.Import(names=names):
                for each in names:
                    top = each.name.partition(".")[0]
                    self._imported.setdefault(each.asname or top, set()).add(each.name if each.asname else top)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for each in names:
                    if each.name == "*":
                        self._stars.append(module)
                    else:
                        self._imported.setdefault(each.asname or each.name, set()).add(f"{module}.{each.name}")
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.AugAssign(target=target):
                self._bind(target, None)
            case (
                ast.For(target=target, iter=source)
                | ast.AsyncFor(target=target, iter=source)
                | ast.comprehension(target=target, iter=source)
            ):
                elements = source.elts if isinstance(source, (ast.List, ast.Tuple, ast.Set)) else [None]
                for element in elements[: _BINDINGS + 1]:
                    self._bind(target, element)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, None)
            case ast.arguments():
                self._parameters(node)

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

    def is_plain_false(self, name: str, origin: str) -> bool:
        """Whether a name is this imported one and never anything else."""
        return self._imported.get(name) == {origin} and name not in self._bound

    def origins(self, node: ast.expr, depth: int = _DEPTH) -> frozenset[str]:
        """The dotted names that an expression may stand for; nothing where the text does not tell."""
        self._steps += 1
        if depth <= 0 or self.exhausted:
            self._cut = _BY_DEPTH
            return _NOTHING
        match node:
            case ast.Name(id=name):
                return self._followed(name, depth)
            case ast.Attribute(value=value, attr=attr):
                return frozenset(f"{base}.{attr}" for base in self.origins(value, depth - 1))
            case ast.Call(func=func, args=args):
                return self._of_call(self.origins(func, depth - 1), args, depth - 1)
            case ast.Subscript(value=value, slice=key):
                return self._of_item(value, key, depth - 1)
            case ast.IfExp(body=body, orelse=other):
                return self.origins(body, depth - 1) | self.origins(other, depth - 1)
            case ast.BoolOp(values=values):
                return frozenset(name for each in values[:_TEXTS] for name in self.origins(each, depth - 1))
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
            found = {f"{module}.{name}" for module in self._stars[:_TEXTS]}
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
            elif function == "builtins.vars" and args:
                found |= {f"{base}.__dict__" for base in self.origins(args[0], depth)}
        return frozenset(found)

    def _of_item(self, value: ast.expr, key: ast.expr, depth: int) -> frozenset[str]:
        keys = self.texts(key, depth) or _NOTHING
        found: set[str] = set()
        for base in self.origins(value, depth):
            if base == "sys.modules":
                found |= keys
            elif base.endswith(".__dict__") or base == "builtins":
                found |= {f"{base.removesuffix('.__dict__')}.{each}" for each in keys}
        if isinstance(value, ast.Call) and self.origins(value.func, depth) & _NAMESPACES:
            found |= {origin for each in keys for origin in self._followed(each, depth)}
        if isinstance(value, (ast.List, ast.Tuple)):
            found |= {origin for each in value.elts[:_TEXTS] for origin in self.origins(each, depth - 1)} if depth else _NOTHING
        return frozenset(found)

    def texts(self, node: ast.expr, depth: int = _DEPTH) -> Texts | None:
        """The strings that an expression may be, or None where the text does not tell all of them."""
        self._steps += 1
        if depth <= 0 or self.exhausted:
            return None
        match node:
            case ast.Constant(value=str(text)):
                return frozenset({text})
            case ast.Name(id=name):
                values = self._bound.get(name)
                return None if not values or name in self._imported else self._union(values, depth - 1)
            case ast.IfExp(body=body, orelse=other):
                return self._union([body, other], depth - 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined("", [left, right], depth - 1)
            case ast.JoinedStr(values=values):
                return self._joined("", values, depth - 1)
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self.texts(value, depth - 1)
            case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=None, step=ast.UnaryOp(operand=ast.Constant(value=1)))):
                turned = self.texts(value, depth - 1)
                return None if turned is None else frozenset(text[::-1] for text in turned)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=bytes(data)), attr="decode"), args=[]):
                return frozenset({data.decode("utf-8", "replace")})
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(glue)), attr="join"), args=[ast.List() | ast.Tuple() as parts]):
                return self._joined(glue, parts.elts, depth - 1)
            case ast.Call(func=ast.Name(id="chr"), args=[ast.Constant(value=int(number))]) if 0 <= number < 0x110000:
                return frozenset({chr(number)})
        return None

    def _union(self, values: list[ast.expr | None] | list[ast.expr], depth: int) -> Texts | None:
        found: set[str] = set()
        for value in values:
            texts = None if value is None else self.texts(value, depth)
            if texts is None or len(found) > _TEXTS:
                return None
            found |= texts
        return frozenset(found)

    def _joined(self, glue: str, parts: list[ast.expr], depth: int) -> Texts | None:
        if len(parts) > 256:
            return None
        found = {""}
        for index, part in enumerate(parts):
            texts = self.texts(part, depth)
            if texts is None or len(texts) * len(found) > _TEXTS:
                return None
            found = {before + (glue if index else "") + text for before in found for text in texts}
            if any(len(text) > _LONGEST_TEXT for text in found):
                return None
        return frozenset(found)


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
