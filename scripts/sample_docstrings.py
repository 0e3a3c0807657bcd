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
    """A docstring, and the module, class or function that it belongs to."""

    path: Path
    line: int
    name: str
    text: str


def docstrings(top: Path) -> Iterator[Docstring]:
    """Return every docstring below a directory, in the order of files and lines."""
    for path in sorted(top.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                name = "module" if isinstance(node, ast.Module) else node.name
                found.append(Docstring(path, node.body[0].lineno, name, text))
        yield from sorted(found)


def main() -> None:
    """Draw them and print them, numbered, each below its place."""
    parser = argparse.ArgumentParser(description="print docstrings drawn at random")
    parser.add_argument("--number", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="for the draw (default: 0)")
    arguments = parser.parse_args()
    every = [*docstrings(CHECKOUT / SOURCE)]
    drawn = random.Random(arguments.seed).sample(every, min(arguments.number, len(every)))
    for number, each in enumerate(drawn, start=1):
        print(f"{number}. {each.path.relative_to(CHECKOUT)}:{each.line} {each.name}")
        print("".join(f"    {line}".rstrip() + "\n" for line in each.text.splitlines()))


if __name__ == "__main__":
    main()
