"""Read Python source: its syntax nodes in the order of the text, and the names that each expression may stand for.

`read` returns a `PythonSource`. Callers go through its nodes and ask it about them; they need not walk a syntax tree. Pure: the text is
never run or imported.
"""

from __future__ import annotations

import _ast as ast  # only the classes; `ast` itself is slow to import
import warnings

from agent_sandbox.readers import too_much
from agent_sandbox.readers.python_values import BINDING, Resolver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

# The node classes that consumers look at, besides those that bind names.
_KINDS = (*(ast.Attribute, ast.Name, ast.Call, ast.Subscript, ast.Constant, ast.BinOp), *(ast.While, ast.If, ast.Try, ast.Delete))
# Node fields that hold names, numbers, operators and contexts, and need no visit.
_NO_NODES = frozenset(
    {
        *("ctx", "op", "ops", "id", "attr", "arg", "name", "names", "asname", "module", "level", "kind", "conversion", "simple"),
        *("type_comment", "type_ignores", "lineno", "kwd_attrs", "rest", "is_async"),
    }
)
_CHILD_FIELDS: dict[type, tuple[str, ...]] = {ast.Constant: ()}  # by node class, last field first; filled on demand
_CATCHES = frozenset({"ImportError", "ModuleNotFoundError"})
_LEAVES = 4096  # numbers of one literal that are inspected
_FILE = "<code to be read>"
# The parser warns (of an invalid escape in a string, say) through the filters of the whole process. This filter matches only our file name.
# It stays installed: restoring the filters would race with other threads that do the same.
_QUIET = ("ignore", None, Warning, _FILE, 0)


class ImportChoice:
    """A `try … except ImportError` that imports the first module available: its alternatives, and the syntax nodes it stands for."""

    def __init__(self, node: ast.Try) -> None:
        self.lineno = node.lineno
        self.alternatives: list[tuple[str, ...]] = []
        self.replaced: list[ast.AST] = []
        self.inner: list[ast.Try] = []
        level: ast.Try | None = node
        while level is not None:
            modules = _imported_by(level.body)
            if not modules or len(level.handlers) != 1 or not _catches_imports(level.handlers[0]):
                self.alternatives = []
                return
            self.alternatives.append(modules)
            instead = level.handlers[0].body
            self.replaced += level.body
            self.replaced += [level.handlers[0].type] if level.handlers[0].type else []
            level = instead[0] if len(instead) == 1 and isinstance(instead[0], ast.Try) else None
            if level is not None:
                self.inner.append(level)
                continue
            imports = [each for each in instead if isinstance(each, ast.Import | ast.ImportFrom)]
            self.replaced += imports
            last = _imported_by(imports)
            self.alternatives = [*self.alternatives, last] if last else []


class PythonSource:
    """The syntax nodes of a Python program, in the order of the text and also grouped by class, and the resolver of its names.

    `unreadable` is the reason why the program could not be read; empty if it was read. `too_large` is whether that reason is its size.
    """

    def __init__(self, *, unreadable: str = "", too_large: bool = False) -> None:
        self.unreadable = unreadable
        self.too_large = too_large
        self.names = Resolver()
        self.kinds: dict[type, list[Any]] = {kind: [] for kind in (*BINDING, *_KINDS)}
        self._nodes: list[Any] = []
        self._top: list[ast.stmt] = []
        self._called: set[int] = set()
        self._before_a_dot: set[int] = set()

    def add(self, text: str) -> str:
        """Parse a text and add its nodes. Returns the reason if the text cannot be parsed, otherwise an empty string."""
        tree = _parse(text)
        if isinstance(tree, str):
            return tree
        self._top += tree.body
        kinds, nodes = self.kinds, self._nodes
        first = len(nodes)
        waiting: list[Any] = [tree]
        while waiting:
            node = waiting.pop()
            kind = node.__class__
            if kind in kinds:
                kinds[kind].append(node)
                nodes.append(node)
            fields = _CHILD_FIELDS.get(kind)
            for name in _child_fields(kind) if fields is None else fields:
                value = getattr(node, name)
                if value.__class__ is list:
                    waiting += value[::-1]
                elif value is not None:
                    waiting.append(value)
        for node in nodes[first:]:
            if type(node) in BINDING:
                self.names.add(node)
        self._called = {id(node.func) for node in kinds[ast.Call]}
        self._before_a_dot = {id(node.value) for node in kinds[ast.Attribute]}
        return ""

    def is_called(self, node: ast.expr) -> bool:
        """Whether the expression is called, as `f` is in `f(x)`."""
        return id(node) in self._called

    def is_before_a_dot(self, node: ast.expr) -> bool:
        """Whether an attribute of the expression is accessed, as of `a` in `a.b`."""
        return id(node) in self._before_a_dot

    def definitions(self) -> dict[str, int]:
        """Return the functions and classes that the program defines at top level and never deletes, with their lines."""
        deleted = {target.id for node in self.kinds[ast.Delete] for target in node.targets if isinstance(target, ast.Name)}
        defined = (node for node in self._top if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
        return {node.name: node.lineno for node in defined if node.name not in deleted}

    def executed(self) -> Iterator[Any]:
        """Yield the nodes in the order of the text, except those in branches that never run.

        A `try` that only chooses between imports is yielded as one `ImportChoice` in place of these imports. A `Name` node is yielded only
        if its value is passed on: not if it is called, stands before a dot, or is only assigned to another name.
        """
        choices = self._choices()
        skipped = {id(node) for choice in choices.values() for each in choice.replaced for node in _below(each)}
        for branch in self.kinds[ast.If]:
            if id(branch) not in skipped and self._is_never(branch.test):  # inside another such branch, everything is skipped already
                skipped |= {id(node) for each in (branch.test, *branch.body) for node in _below(each)}
        renamed = self._called | self._before_a_dot
        renamed |= {id(node.value) for node in self.kinds[ast.Assign] if all(isinstance(each, ast.Name) for each in node.targets)}
        for node in self._nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load) and id(node) not in renamed:
                    yield node
            else:
                yield choices.get(id(node), node)

    def _choices(self) -> dict[int, ImportChoice]:
        """Return the choices between imports, by the id of their `try`. A `try` in the handler of a choice belongs to that choice."""
        choices: dict[int, ImportChoice] = {}
        inner: set[int] = set()
        for node in self.kinds[ast.Try]:
            if id(node) not in inner and (choice := ImportChoice(node)).alternatives:
                choices[id(node)] = choice
                inner |= set(map(id, choice.inner))
        return choices

    def _is_never(self, test: ast.expr) -> bool:
        if isinstance(test, ast.Constant):
            return not test.value
        if isinstance(test, ast.Attribute):
            return self.names.origins(test) == {"typing.TYPE_CHECKING"} and isinstance(test.value, ast.Name)
        return isinstance(test, ast.Name) and self.names.is_plain_false(test.id, "typing.TYPE_CHECKING")


def read(text: str) -> PythonSource:
    """Read a program. Never raises, whatever the text."""
    if why := too_much(text):
        return PythonSource(unreadable=why, too_large=True)
    source = PythonSource()
    source.unreadable = source.add(text)
    return source


def _child_fields(kind: type) -> tuple[str, ...]:
    _CHILD_FIELDS[kind] = tuple(name for name in reversed(getattr(kind, "_fields", ())) if name not in _NO_NODES)
    return _CHILD_FIELDS[kind]


def _below(top: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and every node below it, without recursion."""
    waiting: list[Any] = [top]
    while waiting:
        node = waiting.pop()
        yield node
        for name in _child_fields(node.__class__):
            value = getattr(node, name)
            waiting += value if isinstance(value, list) else [value]


def _imported_by(body: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Return the modules that these statements import; empty if one of them is anything but an absolute import."""
    names: list[str] = []
    for each in body:
        if isinstance(each, ast.Import):
            names += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            names.append(each.module)
        else:
            return ()
    return tuple(names)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(isinstance(each, ast.Name) and each.id in _CATCHES for each in caught)


def _parse(source: str) -> Any:
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
        return "Python does not accept its characters or numbers"
    except (RecursionError, MemoryError):
        return "it is nested too deep"
    return tree


def names_an_encoding(source: str) -> bool:
    """Whether the first two lines declare an encoding other than UTF-8, in which Python would read a different text."""
    for line in source.split("\n", 2)[:2]:
        if "#" in line and "coding" in line:
            named = line.partition("coding")[2].lstrip(":= \t").lower()
            if not named.startswith(("utf-8", "utf8", "utf_8")):
                return True
    return False


def is_int_type(node: ast.expr) -> bool:
    """Whether an expression is an integer type: `int`, `"int"` or `"uint"`."""
    return (isinstance(node, ast.Name) and node.id == "int") or (isinstance(node, ast.Constant) and node.value in ("int", "uint"))


def has_only_integers(node: ast.expr, *, unknown: bool) -> bool:
    """Whether a literal contains integers and no other numbers. Returns `unknown` if it is not a literal, or is too large."""
    waiting, integers = [node], False
    for _ in range(_LEAVES):
        if not waiting:
            return integers
        each = waiting.pop()
        if isinstance(each, (ast.List, ast.Tuple, ast.Set)):
            waiting += each.elts
        elif isinstance(each, ast.UnaryOp):
            waiting.append(each.operand)
        elif not isinstance(each, ast.Constant):
            return unknown
        elif isinstance(each.value, (float, complex)):
            return False
        else:
            integers = integers or type(each.value) is int
    return unknown


def repetitions(node: ast.BinOp) -> int:
    """Return how often a sequence is repeated (`[0] * n`); 0 for any other expression, or if the number is unknown."""
    most = 0
    if isinstance(node.op, ast.Mult):
        sequences = (ast.List, ast.Tuple, ast.JoinedStr)
        for each, other in ((node.left, node.right), (node.right, node.left)):
            text = isinstance(each, ast.Constant) and isinstance(each.value, (str, bytes))
            if text or isinstance(each, sequences):
                most = max(most, number(other))
    return most


def elements(shape: list[ast.expr]) -> int:
    """Return the number of elements of an array with this shape. An unknown dimension counts as 1; without dimensions, returns 0."""
    if len(shape) == 1 and isinstance(shape[0], (ast.Tuple, ast.List)):
        shape = shape[0].elts
    product = 1
    for each in shape[:8]:
        product *= max(1, number(each))
    return product if shape else 0


def number(node: ast.expr, depth: int = 6) -> int:
    """Return the integer value of a constant expression, at most 2**64; 0 if it is unknown."""
    if isinstance(node, ast.Constant):
        return min(node.value, 1 << 64) if type(node.value) is int else 0
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name) and node.func.id == "int":
        value = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return int(min(value, 1e18)) if isinstance(value, float) and value > 0 else 0
    if isinstance(node, ast.BinOp) and depth:
        left, right = number(node.left, depth - 1), number(node.right, depth - 1)
        match node.op:
            case ast.Mult():
                return min(left * right, 1 << 64)
            case ast.Add():
                return min(left + right, 1 << 64)
            case ast.Pow() if 0 <= right <= 64:
                return min(int(left**right), 1 << 64)
            case ast.LShift() if 0 <= right <= 64:
                return min(left << right, 1 << 64)
    return 0
