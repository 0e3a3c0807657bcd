"""Go through the trees of a program once and note everything that a runtime may lack."""

from __future__ import annotations

import _ast as ast
from collections.abc import Sequence

from agent_sandbox.readers.python import Names, children, own_name
from agent_sandbox.runtime.routing import calls
from agent_sandbox.runtime.routing.features import FEATURE_OF, IMPLIES, MACHINE_FILES, feature_of, opaque
from agent_sandbox.runtime.routing.model import Feature, Reading

_MOST_UNSEEN = 8
_LONGEST_WORD = 40
# With these, code reaches what it never names.
_INNARDS = frozenset(
    {
        "__subclasses__",
        "__globals__",
        "__builtins__",
        "__loader__",
        "__spec__",
        "f_globals",
        "f_builtins",
        "gi_frame",
        "tb_frame",
        "__code__",
    }
)
_CATCHES = frozenset({"ImportError", "ModuleNotFoundError"})


class Walk:
    """What has been seen so far. `code` are strings that the program runs as code."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.code: set[str] = set()
        self.modules: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.computed_attribute = 0
        self._choices: list[tuple[tuple[str, ...], ...]] = []
        self._features: dict[Feature, str] = {}
        self._unseen: dict[str, None] = {}
        self._escaped: dict[str, int] = {}
        self._words: set[str] = set()
        self._open_loop = 0

    def through(self, tree: ast.AST) -> None:
        """Note what a tree holds, in the order of its text."""
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            waiting += self._enter(node)

    def reading(self, *unseen: str) -> Reading:
        """All of it, as a value."""
        for name in FEATURE_OF if self._escaped else ():
            module, _, attribute = name.rpartition(".")
            if module in self._escaped and attribute in self._words:
                self.use(name, self._escaped[module])
        if self.computed_attribute and any(name.partition(".")[0] in self._escaped for name in FEATURE_OF):
            self.miss("looks attributes of modules up by a computed name", self.computed_attribute)
        doubts = (*self._unseen, *unseen)
        return Reading(
            self.modules,
            self.used,
            tuple(self._choices),
            self._features,
            doubts[:_MOST_UNSEEN],
            loose=self._escaped,
            words=frozenset(self._words),
            open_loop=self._open_loop,
        )

    def module(self, name: str, line: int) -> None:
        """It imports this."""
        self.modules.setdefault(name, line)
        self.use(name, line)

    def use(self, name: str, line: int) -> None:
        """It uses this dotted name."""
        name = own_name(name)
        self.used.setdefault(name, line)
        if (feature := feature_of(name)) is not None:
            self.need(feature, name, line)
        if opaque(name):
            self.miss(f"uses {name[:80]}, which loads or runs what its text does not hold", line)
        if (brought := IMPLIES.get(name)) is not None:
            self.modules.setdefault(brought, line)

    def need(self, feature: Feature, what: str, line: int) -> None:
        """It needs a feature; the first sight of it is kept."""
        self._features.setdefault(feature, f"{what[:80]} (line {line})")

    def miss(self, what: str, line: int) -> None:
        """Something that the text does not tell."""
        self._unseen.setdefault(f"it {what} (line {line})")

    def _enter(self, node: ast.AST) -> Sequence[ast.AST]:
        """Note one node; the nodes to go on with, the last first."""
        match node:
            case ast.Import(names=names):
                for each in names:
                    self.module(each.name, node.lineno)
                return []
            case ast.ImportFrom():
                self._import_from(node)
                return []
            case ast.If(test=test, orelse=orelse) if self._never(test):
                return orelse[::-1]
            case ast.Try() if (alternatives := _alternatives(node)) is not None:
                return self._guarded(node, alternatives)
            case ast.Assign(targets=targets, value=ast.Name()) if all(isinstance(each, ast.Name) for each in targets):  # an alias
                return targets[::-1]
            case ast.Attribute(value=value, attr=attr):
                self._words.add(attr)
                if attr in _INNARDS:
                    self.miss(f"reaches for {attr}", node.lineno)
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
                return [] if isinstance(value, ast.Name) else [value]
            case ast.Name(ctx=ast.Load()):
                self._passed_around(node)
            case ast.Call():
                return calls.enter(self, node)
            case ast.Constant(value=str(text)):
                self._text(text, node.lineno)
            case ast.Subscript():
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
            case ast.BinOp():
                calls.size_of(self, node)
            case ast.While():
                self._open_loop = self._open_loop or node.lineno
        return children(node)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            self.miss("imports from a package of its own", node.lineno)
            return
        self.module(node.module, node.lineno)
        for each in node.names:
            if each.name != "*":
                self.use(f"{node.module}.{each.name}", node.lineno)

    def _guarded(self, node: ast.Try, alternatives: tuple[tuple[str, ...], ...]) -> list[ast.AST]:
        """An import with others in its stead: which of them will be there is the runtime's to say."""
        self._choices.append(alternatives)
        for names in alternatives:
            for name in names:
                self.use(name, node.lineno)
        rest: list[ast.AST] = []
        level: ast.Try | None = node
        while level is not None:
            instead = level.handlers[0].body
            rest += [*(each for each in instead if not isinstance(each, (ast.Import, ast.ImportFrom))), *level.orelse, *level.finalbody]
            if (level := _next_choice(instead)) is not None:
                rest.remove(level)
        return rest[::-1]

    def _never(self, test: ast.expr) -> bool:
        if isinstance(test, ast.Constant):
            return not test.value
        if isinstance(test, ast.Attribute):
            return self.names.origins(test) == {"typing.TYPE_CHECKING"} and isinstance(test.value, ast.Name)
        return isinstance(test, ast.Name) and self.names.is_plain_false(test.id, "typing.TYPE_CHECKING")

    def _passed_around(self, node: ast.Name) -> None:
        """A name that is neither called nor looked into here: what becomes of it is not followed."""
        for name in sorted(self.names.origins(node)):
            if name in ("builtins.exec", "builtins.eval", "builtins.compile", "builtins.__import__", "builtins.getattr", "builtins"):
                self.miss(f"passes {name} around", node.lineno)
            elif not name.startswith("builtins."):
                self._escaped.setdefault(name, node.lineno)
                self.use(name, node.lineno)

    def _text(self, text: str, line: int) -> None:
        if len(text) <= _LONGEST_WORD and text.isidentifier():
            self._words.add(text)
        if text.startswith(MACHINE_FILES) and text.split("/")[1] in ("proc", "sys", "dev"):
            self.need(Feature.MACHINE, text, line)


def _alternatives(node: ast.Try) -> tuple[tuple[str, ...], ...] | None:
    """The imports of which a `try … except ImportError` takes the first that is there, or None when it is something else."""
    found: list[tuple[str, ...]] = []
    current: ast.Try | None = node
    while current is not None:
        here = _imports(current.body)
        if not here or len(current.handlers) != 1 or not _catches_imports(current.handlers[0]):
            return None
        found.append(here)
        instead = current.handlers[0].body
        current = _next_choice(instead)
        if current is None:
            if not (last := _imports([each for each in instead if isinstance(each, (ast.Import, ast.ImportFrom))])):
                return None
            found.append(last)
    return tuple(found)


def _next_choice(instead: list[ast.stmt]) -> ast.Try | None:
    return instead[0] if len(instead) == 1 and isinstance(instead[0], ast.Try) else None


def _imports(body: list[ast.stmt]) -> tuple[str, ...]:
    """The modules that these statements import, if they do nothing else."""
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
