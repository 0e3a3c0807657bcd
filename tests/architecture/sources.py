"""The source tree as these tests read it: every module under src, parsed once, when somebody wants to know what it says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "agent_sandbox"

# Folders whose modules may look at the environment and speak to people; so may the SDK modules, which lie directly in the package.
TOP_FLOOR = "cli"

# Run inside the sandbox in the place of a fresh interpreter: the environment and the streams that it sees are the guest's own.
INSIDE = tuple(f"src/agent_sandbox/runtime/guest/{name}.py" for name in ("entry", "script_runner", "shell"))

# Attempts of the self-test: sent into sandboxes as text, and never part of a process of ours.
SENT = "src/agent_sandbox/selftest/attempts/"


@dataclass(frozen=True)
class Module:
    """One source file: where it is, its text and its syntax tree."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """Its path in the checkout, as an editor wants it."""
        return str(self.path.relative_to(ROOT))

    @property
    def folder(self) -> str:
        """The top-level folder of `agent_sandbox` it lies in; empty for the modules of the package itself and for `agentbox`."""
        inside = self.path.relative_to(PACKAGE).parts[:-1] if self.path.is_relative_to(PACKAGE) else ()
        return inside[0] if inside else ""

    @property
    def is_sdk(self) -> bool:
        """Whether users import it by its own name: it lies directly in a package. `errors` does too, and is the lowest floor."""
        return not self.folder and self.path.name != "errors.py"

    def where(self, node: ast.stmt | ast.expr) -> str:
        """File and line of a finding."""
        return f"{self.name}:{node.lineno}"

    def imports(self) -> Iterator[tuple[str, ast.stmt]]:
        """Each name that it imports, in full (`os`, `os.environ` for `from os import environ`), wherever the statement stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((f"{node.module or ''}.{alias.name}", node) for alias in node.names)


@cache
def modules() -> tuple[Module, ...]:
    """Every Python file under src."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return tuple(Module(path, path.read_text(encoding="utf-8")) for path in files)
