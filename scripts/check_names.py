"""Check the names in src/agent_sandbox: modules are nouns, a public class has a name of its own, and public code is used.

Three rules, one line for each finding:

- `gerund`: the name of a module or package ends in "ing". Real nouns are in `NOUNS`, each with its reason.
- `twice`: two public classes have the same name, wherever they are defined.
- `unused`: a public function or class of a module is used by nothing in src, bin, scripts or bench, and is not part of the public API.
  A use by tests does not count, nor does a use by code that is itself unused, nor a mere re-export.

References are followed through the syntax tree: local scopes, imports at any level, re-exports and attributes of modules. Not followed:
`import *`, and names that are computed. Methods are not checked: a class is used as a whole.

Usage: python -m scripts.check_names [DIRECTORY]   a checkout; without it, this one. Exits with 1 if there are findings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = "agent_sandbox"
PUBLIC_PACKAGES = (PACKAGE, "agentbox")  # the names in their `__all__` are the public API
PUBLIC_MODULES = frozenset(
    f"{PACKAGE}.{name}"
    for name in (
        *("sandbox", "workspaces", "experiments", "session", "timelines", "aio", "config", "result", "permissions"),
        *("isolation", "executor", "audit", "replays", "errors", "testing", "live", "tasks"),
        *("adapters.deepagents", "adapters.inspect_ai", "adapters.langchain", "adapters.openai_agents"),
        *("adapters.pydantic_ai", "adapters.smolagents"),
    )
)
USERS = ("bin", "scripts", "bench")  # beside src: programs that may use anything public
DOCUMENTS = ("*.md", "docs/**/*.md")

NOUNS: Mapping[str, str] = {
    "encoding": "the form in which values are written",
    "listing": "the list of a directory's entries",
    "read_tracking": "the tracking of the files that a run opens",
    "staging": "the area where new files wait until they are exchanged",
    "testing": "public, and the usual name for helpers of other people's tests (numpy.testing)",
}
SAME_NAME_ALLOWED: Mapping[str, str] = {
    "ToolError": "one on each side of the wall: a guest cannot import ours, and programs on both sides know it by this name",
}

# Modules whose text is sent into a sandbox: their functions are called by name, in strings of ours.
SENT_AS_TEXT = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "selftest.attempts",
        "runtime.guest.command_server",
        "runtime.guest.file_operations",
        "runtime.guest.script_runner",
        "runtime.guest_rpc.",
    )
)
# Decorators that only change a function or class. Any other may register it, and is taken for a use.
PLAIN_DECORATORS = frozenset(
    {"cache", "contextmanager", "dataclass", "final", "lru_cache", "overload", "runtime_checkable", "unique", "wraps"}
)

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"[A-Za-z_]\w*")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Key = tuple[str, str]  # a module and a name that it defines; the empty name is the module's own body
Imports = dict[str, set[str]]  # the dotted names that a name may stand for


class Finding(NamedTuple):
    """A violation of one rule, and where it is."""

    path: Path
    line: int
    rule: str
    text: str


@dataclass(frozen=True)
class Module:
    """A parsed source file: its definitions and the names that it imports at module level."""

    name: str
    path: Path
    tree: ast.Module
    definitions: dict[str, list[Definition]] = field(default_factory=dict)
    imports: Imports = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that a relative import starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def parse(name: str, path: Path, text: str) -> Module:
    """Parse one source file. Raises SyntaxError."""
    module = Module(name, path, ast.parse(text, str(path)))
    for node in _of_scope(module.tree.body):
        if isinstance(node, Definition):
            module.definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _bind_imports(module.imports, node, module.package)
    return module


def load(top: Path) -> dict[str, Module]:
    """Return the modules below a source directory, by their dotted names."""
    modules = {}
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = parse(name, path, path.read_text(encoding="utf-8"))
    return modules


def gerunds(modules: Iterable[Module], nouns: Mapping[str, str] = NOUNS) -> Iterator[Finding]:
    """Find modules and packages whose names end in "ing" and are not allowed."""
    for module in modules:
        last = module.name.rpartition(".")[2]
        if last.endswith("ing") and last not in nouns:
            yield Finding(module.path, 1, "gerund", f"module {last!r} is named by a gerund; use a noun")


def same_names(modules: Iterable[Module], allowed: Mapping[str, str] = SAME_NAME_ALLOWED) -> Iterator[Finding]:
    """Find public classes that share their name with another one. Each of them is reported."""
    places: dict[str, list[tuple[Module, int]]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and _is_public(node.name) and node.name not in allowed:
                places.setdefault(node.name, []).append((module, node.lineno))
    for name, found in places.items():
        for index, (module, line) in enumerate(found if len(found) > 1 else ()):
            others = ", ".join(other.name for other, _ in found[:index] + found[index + 1 :])
            yield Finding(module.path, line, "twice", f"class {name} is also in {others}")


def unused(modules: Mapping[str, Module], users: Iterable[Module] = (), documents: Iterable[str] = ()) -> Iterator[Finding]:
    """Find public functions and classes of the package that no root reaches.

    Roots are the bodies of modules, the users, the public API, and what documents name.
    """
    graph = _Graph(modules)
    waiting = [*_roots(graph, users, documents)]
    reached = set(waiting)
    while waiting:
        fresh = graph.uses(waiting.pop()) - reached
        reached |= fresh
        waiting += fresh
    for module in modules.values():
        if not _is_inside(module.name, PACKAGE) or module.name in PUBLIC_MODULES:
            continue
        for name, nodes in module.definitions.items():
            if _is_public(name) and (module.name, name) not in reached:
                kind = "class" if isinstance(nodes[0], ast.ClassDef) else "function"
                yield Finding(module.path, nodes[0].lineno, "unused", f"{kind} {name} is not used outside tests")


def _roots(graph: _Graph, users: Iterable[Module], documents: Iterable[str]) -> Iterator[Key]:
    modules = graph.modules
    for module in modules.values():
        yield module.name, ""
        public = module.name in PUBLIC_MODULES or not _is_inside(module.name, PACKAGE)
        yield from ((module.name, name) for name, nodes in module.definitions.items() if public or any(map(_may_register, nodes)))
    for user in users:
        yield from graph.references(user, user.tree.body)
    for package in PUBLIC_PACKAGES:
        for name in _exported(modules[package]) if package in modules else ():
            yield from graph.resolve(f"{package}.{name}")
    texts = {text for module in modules.values() for text in _strings(module.tree)}
    words = {word for text in texts for word in _WORD.findall(text)}
    for module in modules.values():
        if module.name in texts and "main" in module.definitions:
            yield module.name, "main"  # a program of ours is started by the name of its module
        if module.name.startswith(SENT_AS_TEXT):
            yield from ((module.name, name) for name in module.definitions if name in words)
    for document in documents:
        yield from _documented(graph, document)


def _documented(graph: _Graph, document: str) -> Iterator[Key]:
    """Return the definitions that a document names: in Python examples, or with their module in inline code (`policy.decide.decide`)."""
    for fence in _FENCE.finditer(document):
        if fence["language"] == "python":
            with suppress(SyntaxError):  # an excerpt
                example = parse("", Path(), fence["code"])
                yield from graph.references(example, example.tree.body)
    for code in _INLINE.findall(_FENCE.sub("", document)):
        dotted = code.partition("(")[0]
        if "." in dotted and all(part.isidentifier() for part in dotted.split(".")):
            yield from graph.resolve(dotted if _is_inside(dotted, PACKAGE) else f"{PACKAGE}.{dotted}")


class _Graph:
    """Which definitions the body of a definition refers to."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules

    def uses(self, key: Key) -> set[Key]:
        """Return the definitions to which this one refers."""
        module = self.modules[key[0]]
        if key[1]:
            return self.references(module, module.definitions[key[1]])
        return self.references(module, module.tree.body, without=[each for nodes in module.definitions.values() for each in nodes])

    def references(self, module: Module, nodes: Iterable[ast.AST], *, without: Iterable[ast.AST] = ()) -> set[Key]:
        """Return the definitions to which these nodes of a module refer. The nodes in `without` are passed over."""
        visitor = _Visitor(module, frozenset(without))
        for node in nodes:
            visitor.visit(node)
        return {key for dotted in visitor.dotted for key in self.resolve(dotted)}

    def resolve(self, dotted: str, seen: frozenset[str] = frozenset()) -> Iterator[Key]:
        """Return the definitions that a dotted name stands for, through re-exports. Of `module.Class.method`, the class.

        `seen` are the names that led here: two modules may import from each other.
        """
        first, *rest = dotted.split(".")
        module = None if dotted in seen else self.modules.get(first)
        for index, part in enumerate(rest, start=1):
            if module is None:
                return
            below = self.modules.get(f"{module.name}.{part}")
            if below is None or index == len(rest):  # the last part may be both a module and a name from it
                if part in module.definitions:
                    yield module.name, part
                for target in module.imports.get(part, ()):
                    yield from self.resolve(".".join((target, *rest[index:])), seen | {dotted})
            module = below


class _Visitor(ast.NodeVisitor):
    """Collects the dotted names of imported things and of the module's own definitions, as far as no local name hides them."""

    def __init__(self, module: Module, without: frozenset[ast.AST]) -> None:
        self.dotted: set[str] = set()
        self._module = module
        self._without = without
        self._scopes: list[Imports] = []  # names bound by each enclosing function; an empty set stands for a variable

    def visit(self, node: ast.AST) -> None:
        """Any node."""
        if node not in self._without:
            super().visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A name by itself."""
        if isinstance(node.ctx, ast.Load):
            self.dotted |= self._targets(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`base.attribute…`: all of it is one dotted name if the base is a name."""
        attributes, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            attributes, base = [base.attr, *attributes], base.value
        if isinstance(base, ast.Name):
            self.dotted |= {".".join((target, *attributes)) for target in self._targets(base.id)}
        else:
            self.visit(base)

    def visit_FunctionDef(self, node: Function | ast.Lambda) -> None:
        """Decorators, defaults and annotations belong to the scope outside; the rest to one of its own."""
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
        outside: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults, *(each.annotation for each in every)]
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, node.returns]
        for each in outside:
            if each is not None:
                self.visit(each)
        scope: Imports = {each.arg: set() for each in every}
        _bind(scope, body, self._module.package)
        self._visit_in(scope, body)

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """The variables of a comprehension are its own."""
        scope: Imports = {}
        _bind(scope, [each.target for each in node.generators], self._module.package)
        self._visit_in(scope, ast.iter_child_nodes(node))

    visit_SetComp = visit_ListComp
    visit_GeneratorExp = visit_ListComp
    visit_DictComp = visit_ListComp

    def _visit_in(self, scope: Imports, nodes: Iterable[ast.AST]) -> None:
        self._scopes.append(scope)
        for node in nodes:
            self.visit(node)
        self._scopes.pop()

    def _targets(self, name: str) -> set[str]:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        own = {f"{self._module.name}.{name}"} if name in self._module.definitions else set()
        return own | self._module.imports.get(name, set())


def _bind(scope: Imports, nodes: Iterable[ast.AST], package: str) -> None:
    """Add the names that these nodes bind in a function's scope. `global` and `nonlocal` names are not bound."""
    elsewhere: set[str] = set()
    for node in _of_scope(nodes):
        match node:
            case ast.Import() | ast.ImportFrom():
                _bind_imports(scope, node, package)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                scope.setdefault(name, set())
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope.setdefault(name, set())
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                scope.setdefault(name, set())
            case ast.MatchMapping(rest=str(name)):
                scope.setdefault(name, set())
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                elsewhere.update(names)
    for name in elsewhere:
        scope.pop(name, None)


def _bind_imports(scope: Imports, node: ast.Import | ast.ImportFrom, package: str) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            name, target = (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        else:
            parents = package.split(".")[: -node.level + 1 or None] if node.level else []
            name, target = alias.asname or alias.name, ".".join(filter(None, (*parents, node.module, alias.name)))
        scope.setdefault(name, set()).add(target)


def _of_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Return these nodes and those below them, but nothing from inside a definition, lambda or comprehension: these are other scopes."""
    for node in nodes:
        yield node
        if not isinstance(node, Definition | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _of_scope(ast.iter_child_nodes(node))


def _may_register(node: Definition) -> bool:
    """Whether a decorator may have stored it somewhere."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    names = (each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else "" for each in called)
    return not PLAIN_DECORATORS.issuperset(names)


def _exported(module: Module) -> list[str]:
    """Return the names in the `__all__` of a module."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _strings(tree: ast.Module) -> Iterator[str]:
    """Return the string constants of a module that are not docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def check(root: Path) -> list[Finding]:
    """Return every finding in a checkout, in the order of rules, files and lines."""
    modules = load(root / "src")
    ours = [module for name, module in modules.items() if _is_inside(name, PACKAGE)]
    users = [*_users(root)]
    documents = [path.read_text(encoding="utf-8") for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    return [*sorted(gerunds(ours)), *sorted(same_names(ours)), *sorted(unused(modules, users, documents))]


def _users(root: Path) -> Iterator[Module]:
    for folder in USERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py" or (folder == "bin" and path.is_file()):
                parts = path.relative_to(root).with_suffix("").parts
                yield parse(".".join(parts), path, path.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Print the findings and return the exit code."""
    root = Path(arguments[0]).resolve() if arguments else CHECKOUT
    findings = check(root)
    for finding in findings:
        print(f"{finding.path.relative_to(root)}:{finding.line}: {finding.rule}: {finding.text}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
