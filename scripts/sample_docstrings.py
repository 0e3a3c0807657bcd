"""Print docstrings of src/agent_sandbox that were drawn at random, for a person to read.

Usage: python -m scripts.sample_docstrings [--number N] [--seed SEED]   the same seed draws the same ones from the same source
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCE = "src/agent_sandbox"


class Docstring(NamedTuple):
    """A docstring, and the lines that a reader of the source sees with it: the signature, or the fields of a class."""

    path: Path
    line: int
    shown: str
    text: str


def docstrings(top: Path) -> Iterator[Docstring]:
    """Return every docstring below a directory, in the order of files and lines."""
    for path in sorted(top.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        yield from sorted(_in(tree, path, ""))


def _in(node: ast.AST, path: Path, owner: str) -> Iterator[Docstring]:
    """Return the docstring of a node and those below it. `owner` is the class that it is in."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield Docstring(path, node.body[0].lineno, _shown(node, owner), text)
        owner = f"{owner}{node.name}." if isinstance(node, ast.ClassDef) else owner
    for child in ast.iter_child_nodes(node):
        yield from _in(child, path, owner)


def _shown(node: ast.AST, owner: str) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{owner}{node.name}({ast.unparse(node.args)}){returned}"
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        return f"class {owner}{node.name}{bases}" + "".join(f"; {field}" for field in fields)
    return "module"


def main() -> None:
    """Draw them and print them, numbered, each below its place."""
    parser = argparse.ArgumentParser(description="print docstrings drawn at random")
    parser.add_argument("--number", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="for the draw (default: 0)")
    arguments = parser.parse_args()
    every = [*docstrings(CHECKOUT / SOURCE)]
    drawn = random.Random(arguments.seed).sample(every, min(arguments.number, len(every)))
    for number, each in enumerate(drawn, start=1):
        print(f"{number}. {each.path.relative_to(CHECKOUT)}:{each.line} {each.shown}")
        print("".join(f"    {line}".rstrip() + "\n" for line in each.text.splitlines()))


if __name__ == "__main__":
    main()
