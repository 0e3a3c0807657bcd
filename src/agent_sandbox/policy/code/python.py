"""Match patterns in Python, on the syntax tree, following aliases and evaluating constant expressions.

Errs on the side of more matches, with three exceptions that ordinary programs need: a method of an unknown object is not the function of
the same name (`re.compile`, `image.open`), a name that the program defines at top level is its own, and the name of a parameter means
nothing.
"""

from __future__ import annotations

import _ast as ast  # only the node classes; `ast` itself is slow to load

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.policy.code.patterns import COMPUTED, INTRICATE, REFLECTION, Findings, Matcher, Rule
from agent_sandbox.policy.code.validate import python_words
from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.python import BINDING, BUILTINS, Names, by_kind, own_name, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# With these, a program reaches objects that it never names. `__class__`, `__bases__`, `__dict__` and `__mro__` alone occur in ordinary
# programs.
_INNARDS = frozenset(
    {
        *("__subclasses__", "__globals__", "__builtins__", "__code__", "__closure__", "__reduce_ex__"),
        *("f_globals", "f_builtins", "f_locals", "f_back", "gi_frame", "gi_code", "cr_frame", "ag_frame", "tb_frame", "func_globals"),
        *("_getframe", "__loader__", "__getattribute__"),
    }
)
_GETTERS = frozenset({"builtins.getattr", "operator.attrgetter", "operator.methodcaller", "inspect.getattr_static"})
_NAMESPACES = frozenset({"builtins.globals", "builtins.locals", "builtins.vars"})


def look(source: str, wanted: Matcher, found: Findings) -> None:
    """Add a finding for each pattern in the source. Never raises, whatever the text."""
    if too_much(source):
        found.add(INTRICATE, 1)
        return
    tree = parse(source)
    if isinstance(tree, str):  # not Python, or not for this interpreter: match its words instead
        python_words(source, wanted.rules, found)
        return
    names, nodes = Names(), by_kind(tree)
    for kind in BINDING:
        for node in nodes.get(kind, ()):
            names.add(node)
    _Walk(names, wanted, found, _defined(tree, nodes)).through(nodes)
    if names.exhausted:
        found.add(INTRICATE, 1)


def _defined(tree: Any, nodes: dict[type, list[Any]]) -> dict[str, int]:
    """Return the functions and classes that the program defines at top level and never deletes, with their lines."""
    deleted = {target.id for node in nodes.get(ast.Delete, ()) for target in node.targets if isinstance(target, ast.Name)}
    definitions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return {node.name: node.lineno for node in definitions if node.name not in deleted}


class _Walk:
    def __init__(self, names: Names, wanted: Matcher, found: Findings, defined: dict[str, int]) -> None:
        self._names = names
        self._match = wanted
        self._found = found
        self._defined = defined
        self._modules = names.imported() | {"__builtins__"}
        self._of_name: dict[str, tuple[Rule, ...]] = {}
        self._looked_into: set[int] = set()  # names right before a dot
        self._called: set[int] = set()
        self._loose: dict[str, int] = {}  # modules passed on as values, which are not traced further
        self._attributes: dict[str, int] = {}

    def through(self, nodes: dict[type, list[Any]]) -> None:
        """Check every node, in any order."""
        self._looked_into = {id(node.value) for node in nodes.get(ast.Attribute, ())}
        self._called = {id(node.func) for node in nodes.get(ast.Call, ())}
        for kind, look in _LOOKS.items():
            for node in nodes.get(kind, ()):
                look(self, node)
        for module, line in self._loose.items():
            for attribute in self._attributes:
                self._check(f"{module}.{attribute}", max(line, self._attributes[attribute]))

    def _check(self, dotted: str, line: int) -> None:
        rule = self._match.name(own_name(dotted))
        if rule is not None:
            self._found.add(rule, line)

    def _note(self, rule: Rule, line: int) -> None:
        if rule.pattern in self._match.patterns:
            self._found.add(rule, line)

    def import_(self, node: ast.Import) -> None:
        """Check `import a.b`: a rule for all of `a` matches now; a rule for names in it may match later."""
        for each in node.names:
            self._check(each.name, node.lineno)

    def import_from(self, node: ast.ImportFrom) -> None:
        """Check `from a import b`, as `a.b`."""
        for each in node.names if node.module and not node.level else ():
            self._check(node.module or "" if each.name == "*" else f"{node.module}.{each.name}", node.lineno)

    def attribute(self, node: ast.Attribute) -> None:
        """Check `a.b`, where `a` may be any expression for a module."""
        attribute = node.attr
        if attribute in _INNARDS:
            self._note(REFLECTION, node.lineno)
        self._attributes.setdefault(attribute, node.lineno)
        if attribute in self._match.words:
            for name in self._names.origins(node):
                self._check(name, node.lineno)

    def name(self, node: ast.Name) -> None:
        """Check a bare name: called, passed on, or the start of a longer expression that is checked as a whole."""
        known = self._of_name.get(node.id)
        if known is None:
            known = self._of_name[node.id] = self._rules_of(node)
        own = self._defined.get(node.id, node.lineno) < node.lineno
        before_a_dot = id(node) in self._looked_into
        for rule in () if own or (before_a_dot and node.id in self._modules) else known:  # then `a.b` says more than `a`
            self._found.add(rule, node.lineno)
        if not before_a_dot and not own:
            function = self._match.function(node.id) if id(node) in self._called else None
            if function is not None:  # even if it is bound elsewhere: that binding may never run
                self._found.add(function, node.lineno)
            for module in self._names.origins(node) if node.id in self._modules else ():
                self._loose.setdefault(module, node.lineno)

    def _rules_of(self, node: ast.Name) -> tuple[Rule, ...]:
        known = node.id in BUILTINS or node.id == "__builtins__" or self._names.is_bound(node.id)
        origins = self._names.origins(node) if known or self._names.takes_all else ()
        matched = {rule.pattern: rule for name in origins if (rule := self._match.name(own_name(name))) is not None}
        if not origins and not self._names.is_bound(node.id) and (rule := self._match.function(node.id)) is not None:
            matched[rule.pattern] = rule  # a built-in that the tables of names do not know
        return tuple(matched.values())

    def call(self, node: ast.Call) -> None:
        """Check the result of a call: `getattr(os, "system")`, `__import__("os")`, `vars(os).get("system")`."""
        functions = self._names.origins(node.func)
        if functions or isinstance(node.func, ast.Attribute | ast.Call):
            for name in self._names.origins(node):
                self._check(name, node.lineno)
        for name in functions:
            if (rule := self._match.function(own_name(name))) is not None:
                self._found.add(rule, node.lineno)
        if functions & _GETTERS and node.args:
            self._getter(node)

    def _getter(self, node: ast.Call) -> None:
        key = node.args[min(1, len(node.args) - 1)]
        texts = self._names.texts(key)
        if texts is None:
            if any(self._match.within(own_name(base)) for base in self._names.origins(node.args[0])):
                self._note(COMPUTED, node.lineno)
        elif any(part in _INNARDS for text in texts for part in text.split(".")):
            self._note(REFLECTION, node.lineno)
        else:
            for text in texts:
                for part in text.split("."):
                    self._attributes.setdefault(part, node.lineno)

    def subscript(self, node: ast.Subscript) -> None:
        """Check `vars(os)["system"]`, `sys.modules["os"]`, `__builtins__["eval"]`."""
        for name in self._names.origins(node):
            self._check(name, node.lineno)
        bases = self._names.origins(node.value)
        namespace = isinstance(node.value, ast.Call) and self._names.origins(node.value.func) & _NAMESPACES
        if (bases or namespace) and isinstance(node.ctx, ast.Load):
            modules = {own_name(base.removesuffix(".__dict__")) for base in bases if base == "builtins" or base.endswith(".__dict__")}
            used = id(node) in self._called or id(node) in self._looked_into  # `globals()[name]` alone occurs in ordinary programs
            open_ended = any(map(self._match.within, modules)) or (used and (namespace or "sys.modules" in bases))
            if open_ended and self._names.texts(node.slice) is None:
                self._note(COMPUTED, node.lineno)

    def constant(self, node: ast.Constant) -> None:
        """Check a string that may be a key into a namespace: `"__globals__"` does not occur in ordinary programs."""
        if type(node.value) is str and node.value in _INNARDS and node.value.startswith("__"):
            self._note(REFLECTION, node.lineno)


_LOOKS: dict[type, Callable[[_Walk, Any], None]] = {
    ast.Import: _Walk.import_,
    ast.ImportFrom: _Walk.import_from,
    ast.Attribute: _Walk.attribute,
    ast.Name: _Walk.name,
    ast.Call: _Walk.call,
    ast.Subscript: _Walk.subscript,
    ast.Constant: _Walk.constant,
}
