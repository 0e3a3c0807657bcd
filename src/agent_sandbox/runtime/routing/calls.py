"""What a call in a Python program needs, beyond the name that is called: what its arguments say."""

from __future__ import annotations

import _ast as ast

from agent_sandbox.readers.python import children
from agent_sandbox.runtime.routing.features import IMPLIES_OF_METHOD
from agent_sandbox.runtime.routing.model import Feature
from agent_sandbox.runtime.routing.numpy_integers import by_its_width, default_integer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_sandbox.runtime.routing.walk import Walk

_LONG_LOOP = 20_000_000  # rounds; native code is some times faster, which then outweighs a slower start
_MUCH_MEMORY = 1 << 28  # elements or bytes; a 32-bit memory is full soon after
_RUN_TEXT = frozenset({"builtins.exec", "builtins.eval", "builtins.compile"})
_MAY_RUN_TEXT = frozenset({"timeit.timeit", "timeit.repeat", "timeit.Timer", "cProfile.run", "profile.run", "pdb.run"})
_IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
_FILLED = frozenset(
    {"numpy.zeros", "numpy.ones", "numpy.empty", "numpy.full", "numpy.random.rand", "numpy.random.randn", "numpy.random.random"}
)
_NATIVE_WIDTH = frozenset("lLnNP")


def enter(walk: Walk, node: ast.Call) -> list[ast.AST]:
    """Note a call; the nodes to go on with, the last first."""
    for name in sorted(walk.names.origins(node.func)):
        if not name.startswith("builtins."):
            walk.use(name, node.lineno)
        _named(walk, node, name)
    for name in sorted(walk.names.origins(node)):  # what it gives: a module, an attribute
        walk.use(name, node.lineno)
    _method(walk, node)
    if by_its_width(node, ""):
        walk.need(Feature.WIDE_INTEGERS, "the type int", node.lineno)
    followed = isinstance(node.func, ast.Name)
    return [each for each in children(node) if not (followed and each is node.func)]


def _named(walk: Walk, node: ast.Call, name: str) -> None:
    """A call of what may have this dotted name."""
    first = node.args[0] if node.args else next((each.value for each in node.keywords if each.arg in ("name", "source", "stmt")), None)
    if name in _IMPORTERS:
        _import(walk, node, first)
    elif name in _RUN_TEXT or name in _MAY_RUN_TEXT:
        _run_text(walk, node, first, certain=name in _RUN_TEXT)
    elif name == "builtins.getattr":
        if len(node.args) > 1 and walk.names.texts(node.args[1]) is None:
            walk.computed_attribute = walk.computed_attribute or node.lineno
    elif name == "builtins.range":
        if max((_number(each) for each in node.args), default=0) >= _LONG_LOOP:
            walk.need(Feature.LONG_LOOPS, "range", node.lineno)
    elif name in ("builtins.bytes", "builtins.bytearray") or name in _FILLED:
        if _elements(node.args) >= _MUCH_MEMORY:
            walk.need(Feature.MUCH_MEMORY, name.removeprefix("builtins."), node.lineno)
    elif name.startswith("pandas.read_"):
        if first is not None and any("://" in text for text in walk.names.texts(first) or ()):
            walk.need(Feature.SOCKETS, f"{name} of an address", node.lineno)
    elif (name.startswith("struct.") or name == "array.array") and _by_native_width(walk, first):
        walk.need(Feature.WIDE_INTEGERS, name, node.lineno)
    if name.startswith("numpy.") and by_its_width(node, name):
        walk.need(Feature.WIDE_INTEGERS, name, node.lineno)


def _import(walk: Walk, node: ast.Call, first: ast.expr | None) -> None:
    names = None if first is None else walk.names.texts(first)
    for name in sorted(names or ()):
        if name.startswith("."):
            walk.miss("imports from a package of its own", node.lineno)
        else:
            walk.module(name, node.lineno)
    if names is None:
        walk.miss("imports a module by a computed name", node.lineno)


def _run_text(walk: Walk, node: ast.Call, first: ast.expr | None, *, certain: bool) -> None:
    texts = None if first is None else walk.names.texts(first)
    if texts is not None:
        walk.code |= texts
    elif certain and not (isinstance(first, ast.Call) and walk.names.origins(first.func) & _RUN_TEXT):
        walk.miss("runs text that it computes", node.lineno)


def _method(walk: Walk, node: ast.Call) -> None:
    """A method of something unknown: told by its name alone, where a module that has such methods is imported."""
    if not isinstance(node.func, ast.Attribute):
        return
    imported = {name.partition(".")[0] for name in walk.modules}
    method = node.func.attr
    if "pandas" in imported and method in IMPLIES_OF_METHOD:
        walk.modules.setdefault(IMPLIES_OF_METHOD[method], node.lineno)
    if "numpy" in imported and method in ("randint", "permutation"):  # `integers` of a Generator has 64 bits everywhere
        walk.need(Feature.WIDE_INTEGERS, f".{method}()", node.lineno)
    if imported & {"numpy", "pandas"} and method in ("astype", "view") and any(default_integer(each) for each in node.args):
        walk.need(Feature.WIDE_INTEGERS, f".{method}(int)", node.lineno)
    if "pathlib" in imported and method in ("chmod", "lchmod", "owner"):
        walk.need(Feature.POSIX, f".{method}()", node.lineno)


def _by_native_width(walk: Walk, first: ast.expr | None) -> bool:
    texts = (walk.names.texts(first) if first is not None else None) or ()
    return any(_NATIVE_WIDTH & set(text) and not text.startswith(("<", ">", "=", "!")) for text in texts)


def size_of(walk: Walk, node: ast.BinOp) -> None:
    """A sequence repeated very often is seen before it is made."""
    if isinstance(node.op, ast.Mult):
        sequences = (ast.List, ast.Tuple, ast.JoinedStr)
        for each, other in ((node.left, node.right), (node.right, node.left)):
            text = isinstance(each, ast.Constant) and isinstance(each.value, (str, bytes))
            if (text or isinstance(each, sequences)) and _number(other) >= _MUCH_MEMORY:
                walk.need(Feature.MUCH_MEMORY, "a sequence repeated", node.lineno)


def _elements(shape: list[ast.expr]) -> int:
    if len(shape) == 1 and isinstance(shape[0], (ast.Tuple, ast.List)):
        shape = shape[0].elts
    product = 1
    for each in shape[:8]:
        product *= max(1, _number(each))
    return product if shape else 0


def _number(node: ast.expr, depth: int = 6) -> int:
    """The integer that an expression of constants is, up to what matters; 0 where the text does not tell."""
    if isinstance(node, ast.Constant):
        return min(node.value, 1 << 64) if type(node.value) is int else 0
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name) and node.func.id == "int":
        value = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return int(min(value, 1e18)) if isinstance(value, float) and value > 0 else 0
    if isinstance(node, ast.BinOp) and depth:
        left, right = _number(node.left, depth - 1), _number(node.right, depth - 1)
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
