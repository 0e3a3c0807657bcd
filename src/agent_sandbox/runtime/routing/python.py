"""Read Python source: what it imports and uses, without running or importing any of it.

Text that is too large, not Python for this interpreter, or too intricate is not read at all, and goes where it need not be understood.
"""

from __future__ import annotations

import _ast as ast  # the classes alone; `ast` itself is slow to load
import warnings

from agent_sandbox.runtime.routing.measure import too_much
from agent_sandbox.runtime.routing.model import Reading
from agent_sandbox.runtime.routing.names import Names, nodes_of
from agent_sandbox.runtime.routing.walk import Walk

_ROUNDS = 3  # of code in strings in code in strings
_FILE = "<code to be routed>"
# The parser warns of what it reads (an invalid escape in a string) by the filters of the whole process. This one speaks of our file alone,
# and stays: putting the filters back would race with other threads that do the same.
_QUIET = ("ignore", None, Warning, _FILE, 0)


def read_python(source: str) -> Reading:
    """What the text shows. Never raises, whatever the text."""
    if why := too_much(source):
        return Reading(unreadable=why)
    if _names_an_encoding(source):
        return Reading(unreadable="it names an encoding of its own")
    tree = _parse(source)
    if isinstance(tree, str):
        return Reading(unreadable=tree)
    names, trees, known, unparsed = Names(), [tree], {source}, False
    for node in nodes_of(tree):
        names.add(node)
    for _ in range(_ROUNDS):
        walk = Walk(names)
        for each in trees:
            walk.through(each)
        if names.exhausted:
            return Reading(unreadable="it is too intricate to follow")
        if not (fresh := sorted(walk.code - known)):
            return walk.reading(*(("it runs text that is not Python",) if unparsed else ()))
        known |= walk.code
        if why := too_much("".join(known)):
            return Reading(unreadable=f"with the text it runs, {why}")
        for text in fresh:
            inner = _parse(text.strip())
            unparsed = unparsed or isinstance(inner, str)
            if not isinstance(inner, str):
                trees.append(inner)
                for node in nodes_of(inner):
                    names.add(node)
    return Reading(unreadable="it runs text within text too deep to follow")


def _parse(source: str) -> ast.AST | str:
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


def _names_an_encoding(source: str) -> bool:
    """Whether the first two lines say that the text is to be read as something else than it looks like."""
    for line in source.split("\n", 2)[:2]:
        if "#" in line and "coding" in line:
            named = line.partition("coding")[2].lstrip(":= \t").lower()
            if not named.startswith(("utf-8", "utf8", "utf_8")):
                return True
    return False
