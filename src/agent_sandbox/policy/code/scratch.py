"""Recognise the calls of a Python program that open a file below /tmp, which every sandbox lets a program write to.

A call counts only if its path certainly lies there: a constant without `..`, a name of `tempfile`, or one of these with constant or numeric
parts added. Anything else is unknown, and the early check goes on warning about it. Links are not followed: the sandbox itself is the wall.
"""

from __future__ import annotations

import _ast as ast  # only the node classes; `ast` itself is slow to load
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.readers.python_values import DEPTH, own_name

if TYPE_CHECKING:
    from agent_sandbox.readers.python import PythonSource

SCRATCH = "/tmp"
_OPENERS = frozenset({"builtins.open", "io.open", "_io.open", "io.FileIO", "_io.FileIO", "os.open", "codecs.open"})
_PATH_ARGUMENTS = frozenset({"file", "path", "filename", "name"})
# Not `opener` and `dir_fd`, by which the file is another one.
_OPENER_ARGUMENTS = _PATH_ARGUMENTS | {"mode", "flags", "buffering", "encoding", "errors", "newline", "closefd"}
_READS_OR_WRITES = frozenset({"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rmdir", "touch", "chmod"})
_TAKES_A_PATH = frozenset({"rename", "replace", "symlink_to", "hardlink_to"})
_PATHS = frozenset({"pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "os.path.join", "os.fspath", "builtins.str"})
_NEW_NAMES = frozenset({"tempfile.mkdtemp", "tempfile.mktemp", "tempfile.gettempdir"})
_NEW_DIRECTORY, _NEW_FILE, _NEW_PAIR = "tempfile.TemporaryDirectory", "tempfile.NamedTemporaryFile", "tempfile.mkstemp"
_NUMBERS = frozenset({"len", "int", "round", "abs", "sum"})


class ScratchCalls:
    """Finds the calls of a program that certainly open a file below /tmp."""

    def __init__(self, source: PythonSource) -> None:
        self._names = source.names
        self._calls: list[ast.Call] = source.kinds[ast.Call]
        self._given: dict[str, list[bool]] = {}  # names that the resolver has no expression for: whether each is such a path
        self._entered: dict[str, list[ast.expr]] = {}  # names that `with … as NAME` binds
        self._counted: dict[str, int] = {}  # names that run over range() or count an enumeration
        for item in source.kinds[ast.withitem]:
            if isinstance(item.optional_vars, ast.Name):
                self._entered.setdefault(item.optional_vars.id, []).append(item.context_expr)
        for assigned in source.kinds[ast.Assign]:
            for target in assigned.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[1], ast.Name):
                    self._given.setdefault(target.elts[1].id, []).append(self._makes(assigned.value, {_NEW_PAIR}))
        for kind in (ast.For, ast.comprehension):
            for loop in source.kinds[kind]:
                self._count(loop.target, loop.iter)

    def found(self) -> frozenset[int]:
        """Return the ids of the call nodes, and of the nodes that name their functions."""
        calls = [call for call in self._calls if self._opens(call)]
        return frozenset(id(node) for call in calls for node in (call, call.func))

    def _count(self, target: ast.expr, over: ast.expr) -> None:
        function = over.func if isinstance(over, ast.Call) else None
        name = function.id if isinstance(function, ast.Name) else ""
        if name == "enumerate" and isinstance(target, ast.Tuple) and target.elts:
            target, name = target.elts[0], "range"
        if name == "range" and isinstance(target, ast.Name) and not self._names.is_bound("range"):
            self._counted[target.id] = self._counted.get(target.id, 0) + 1

    def _opens(self, call: ast.Call) -> bool:
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return False
        named = {each.arg: each.value for each in call.keywords}
        origins = frozenset(map(own_name, self._names.origins(call.func)))
        if origins and origins <= _OPENERS:
            paths = [*call.args[:1], *(value for name, value in named.items() if name in _PATH_ARGUMENTS)]
            return named.keys() <= _OPENER_ARGUMENTS and len(paths) == 1 and self._below(paths[0])
        if isinstance(call.func, ast.Attribute) and all(name == f"pathlib.Path.{call.func.attr}" for name in origins):
            method = call.func.attr
            if method in _TAKES_A_PATH and not (len(call.args) == 1 and not named and self._below(call.args[0])):
                return False
            return method in _READS_OR_WRITES | _TAKES_A_PATH and self._below(call.func.value)
        return False

    def _below(self, node: ast.expr, depth: int = DEPTH) -> bool:
        """Return whether an expression is certainly a path below /tmp, or /tmp itself."""
        if depth <= 0 or not self._names.step():
            return False
        if (texts := self._names.texts(node)) is not None:
            return all(text == SCRATCH or _is_below(text) for text in texts)
        match node:
            case ast.Name(id=name):
                return self._is_bound_below(name, depth - 1)
            case ast.Call(func=ast.Attribute(value=value, attr="joinpath"), args=args, keywords=[]) if self._below(value, depth - 1):
                return self._parts(args)
            case ast.Call(func=func, args=[first, *rest], keywords=[]) if self._names.origins(func) and self._names.origins(func) <= _PATHS:
                return self._below(first, depth - 1) and self._parts(rest)
            case ast.Call():
                return self._makes(node, _NEW_NAMES)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._below(left, depth - 1) and self._parts([right])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._begins_below(left, depth - 1) and self._is_piece(right)
            case ast.JoinedStr(values=[ast.Constant(value=str() as first), *rest]):
                return _is_below(first) and all(map(self._is_piece, rest))
            case ast.JoinedStr(values=[ast.FormattedValue(value=value, conversion=-1), ast.Constant(value=str() as first), *rest]):
                return first.startswith("/") and ".." not in first and self._below(value, depth - 1) and all(map(self._is_piece, rest))
            case ast.IfExp(body=body, orelse=other):
                return self._below(body, depth - 1) and self._below(other, depth - 1)
            case ast.Attribute(value=ast.Name(id=name), attr="name"):
                made = [*(each for each in self._names.bindings(name) if each is not None), *self._entered.get(name, ())]
                known = len(self._names.bindings(name)) == len(made)
                return known and bool(made) and all(self._makes(each, {_NEW_DIRECTORY, _NEW_FILE}) for each in made)
        return False

    def _is_bound_below(self, name: str, depth: int) -> bool:
        bindings = self._names.bindings(name)
        entered, given = self._entered.get(name, []), self._given.get(name, [])
        if not bindings or sum(each is None for each in bindings) != len(entered) + len(given):
            return False  # bound in another way, too: a parameter, a loop
        known = all(self._below(each, depth) for each in bindings if each is not None)
        return known and all(given) and all(self._makes(each, {_NEW_DIRECTORY}) for each in entered)

    def _makes(self, node: ast.expr, functions: frozenset[str] | set[str]) -> bool:
        """Return whether an expression is a call of these functions of `tempfile`, in the directory that they choose themselves."""
        if not isinstance(node, ast.Call) or any(each.arg in (None, "dir") for each in node.keywords):
            return False
        origins = self._names.origins(node.func)
        plain = len(node.args) < 3 and not any(isinstance(each, ast.Starred) for each in node.args)
        texts = [
            self._names.texts(each) for each in (*node.args, *(each.value for each in node.keywords if each.arg in ("suffix", "prefix")))
        ]
        return (
            plain
            and bool(origins)
            and origins <= functions
            and all(text is None or not any("/" in each for each in text) for text in texts)
        )

    def _begins_below(self, node: ast.expr, depth: int) -> bool:
        texts = self._names.texts(node)
        if texts is not None:
            return all(_is_below(text) for text in texts)  # not /tmp alone: /tmp and "x" is /tmpx
        return self._below(node, depth)

    def _parts(self, nodes: Sequence[ast.expr]) -> bool:
        """Return whether each is a relative path that leads nowhere above."""
        for node in nodes:
            texts = self._names.texts(node)
            if texts is None:
                if not (isinstance(node, ast.JoinedStr) and all(map(self._is_piece, node.values)) and not _is_absolute(node)):
                    return False
            elif any(text.startswith("/") or ".." in text for text in texts):
                return False
        return True

    def _is_piece(self, node: ast.expr) -> bool:
        """Return whether a part of a text is a constant without `..`, or a number."""
        value = node.value if isinstance(node, ast.FormattedValue) else node
        texts = self._names.texts(value)
        if texts is not None:
            return not any(".." in text or text in ("", ".") for text in texts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and len(node.args) == 1:
            value = node.args[0]
        return self._is_number(value)

    def _is_number(self, node: ast.expr, depth: int = DEPTH) -> bool:
        match node:
            case ast.Constant(value=int()):
                return True
            case ast.Name(id=name):
                bindings = self._names.bindings(name)
                return 0 < len(bindings) == self._counted.get(name) and all(each is None for each in bindings)
            case ast.Call(func=ast.Name(id=name)):
                return name in _NUMBERS and not self._names.is_bound(name)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right) if depth > 0:
                return self._is_number(left, depth - 1) and self._is_number(right, depth - 1)
        return False


def _is_below(text: str) -> bool:
    return text.startswith(f"{SCRATCH}/") and ".." not in text.split("/") and "\0" not in text


def _is_absolute(node: ast.JoinedStr) -> bool:
    first = node.values[0] if node.values else None
    return not isinstance(first, ast.Constant | ast.FormattedValue) or (
        isinstance(first, ast.Constant) and str(first.value).startswith("/")
    )
