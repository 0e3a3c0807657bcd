"""Where a program lets numpy choose its default integer, which has the machine's width: with 32 bits sums go wrong in silence.

What is floating, named by its type or not a number at all is left alone. What the text does not show counts as integers.
"""

from __future__ import annotations

import _ast as ast

_MAKE = frozenset({"array", "asarray", "asanyarray", "matrix", "full", "full_like"})
_COMPUTES = """
    sum prod cumsum cumprod dot matmul multiply power square add outer kron append concatenate stack vstack hstack repeat tile inner vdot
"""
_COMPUTE = frozenset(_COMPUTES.split())
_LEAVES = 4096


def by_its_width(node: ast.Call, name: str) -> bool:
    """Whether a call of this dotted name gives integers of the machine's width."""
    module, _, function = name.rpartition(".")
    if types := [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]:
        return any(default_integer(each) for each in types)
    if module != "numpy" or not node.args:
        return False
    if any(default_integer(each) for each in node.args[1:]):
        return True
    if function in _MAKE:
        return _integers(node.args[-1 if function.startswith("full") else 0], unknown=True)
    return function in _COMPUTE and any(_integers(each, unknown=False) for each in node.args)


def default_integer(node: ast.expr) -> bool:
    """Whether an expression is the type `int`, by name or as text."""
    return (isinstance(node, ast.Name) and node.id == "int") or (isinstance(node, ast.Constant) and node.value in ("int", "uint"))


def _integers(node: ast.expr, *, unknown: bool) -> bool:
    """Whether numbers written here are integers throughout; `unknown` is the answer where that is not to be seen."""
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
