"""Python source into a tree, or into the reason why there is none. Never raises, whatever the text."""

from __future__ import annotations

import _ast as ast  # the classes alone; `ast` itself is slow to load
import warnings

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
