"""Validate code before it runs: match the patterns of its language against the names and calls that its reader finds.

In Python, aliases are followed and constant expressions evaluated. The matcher errs on the side of more matches, with three exceptions that
ordinary programs need: a method of an unknown object is not the function of the same name (`re.compile`, `image.open`), a name that the
program defines at top level is its own, and a parameter named like a function matches only where it is called. JavaScript and Ruby are
matched by tokens.
"""

from __future__ import annotations

import _ast as ast  # only the node classes; `ast` itself is slow to load
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.code.patterns import (
    COMPUTED,
    DEFAULT,
    INTRICATE,
    PYTHON_REFLECTION,
    REFLECTION,
    CodeGrant,
    Findings,
    Matcher,
    Rule,
    Validation,
)
from agent_sandbox.policy.hosts import canonical_host, is_local
from agent_sandbox.readers.python import PythonSource
from agent_sandbox.readers.python import read as read_python
from agent_sandbox.readers.python_values import BUILTINS, NAMESPACES, own_name
from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.effects import Effect, EffectKind, Use
from agent_sandbox.readers.shell.parser import parse
from agent_sandbox.readers.shell.syntax import FunctionDefinition, Pipeline, Program, Simple, Text
from agent_sandbox.readers.shell.wrappers import SHELLS

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.readers.javascript import JavaScriptSource
    from agent_sandbox.readers.ruby import RubySource

# A host in a URL, or one in quotes that a port follows.
_HOST = re.compile(r"""\b[a-z][a-z0-9+]{1,9}://(?:[^\s/"'@]*@)?([A-Za-z0-9.-]+)|["']([A-Za-z0-9.-]+)["']\s*,\s*\d{1,5}\b""")
BY_HAND = "is on the list of patterns that this sandbox was given"
_WHOLE_MACHINE = frozenset(
    {"/", "/*", "/.", "~", "~/*", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/root", "/sbin", "/usr", "/var"}
)
# Words in the reasons of `readers.shell` why a command is not understood, and the default pattern that each belongs to.
_UNKNOWN = (
    *(("whose name it computes", "$command"), ("runs a command line", "| sh"), ("runs a text", "| sh"), ("runs what it is fed", "| sh")),
    *(("with the commands in it", "eval"), ("has a command in it", "eval")),
    ("gives a variable another name", ""),  # matters to an approver of a command; scripts do it all the time
)

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
_GLOBAL = frozenset({"globalThis", "global", "window", "self", "this", "process", "module"})
_LOADS = frozenset({"require", "import", "from", "createRequire", "getBuiltinModule"})
_OPEN_RECEIVERS = frozenset({"Kernel", "Process", "Object", "self", "binding"})  # through them a bare function can still be called
_BY_NAME = frozenset({"send", "__send__", "public_send", "method", "const_get", "instance_method", "define_method"})
_DOTS = frozenset({".", "&.", "::"})
_TAKES_CODE = frozenset({"instance_eval", "class_eval", "module_eval"})  # ordinary with a block, not with a string


def validate(
    source: str,
    language: str = "python",
    *,
    grants: Iterable[CodeGrant] = (),
    rules: Iterable[Rule | str] | None = None,
    more: Iterable[str] = (),
) -> Validation:
    """Return the issues in the code that the grants do not lift. Pure, and never raises for any text.

    Time is bounded by the length of the text. `rules` replace the default rules; a string among them names a default rule, or is itself a
    pattern. `more` are additional patterns that no grant lifts. Raises `PolicyError` for an unknown language or an invalid pattern.
    """
    name = canonical_language(language)
    if name not in LANGUAGES:
        raise PolicyError(f"unknown language {language!r}", hint=f"use one of {', '.join(LANGUAGES)}")
    findings = Findings()
    wanted = _wanted(name, frozenset(grants), None if rules is None else tuple(rules), tuple(more))
    _LOOKS[name](source, wanted, findings)
    return findings.result()


@lru_cache(maxsize=64)  # otherwise most of the cost for a short text, and few sandboxes differ in it
def _wanted(language: str, held: frozenset[CodeGrant], rules: tuple[Rule | str, ...] | None, more: tuple[str, ...]) -> Matcher:
    wanted = tuple(rule for rule in rules_of(language, rules) if not rule.granted_by or not rule.granted_by <= held)
    # `more` comes last: of two rules for one name, the later wins.
    wanted += tuple(replace(rule, granted_by=frozenset()) for rule in rules_of(language, more))
    return Matcher(wanted, PYTHON_REFLECTION if language == "python" else ())


def barred_hosts(source: str, network: NetworkRules) -> tuple[str, ...]:
    """Return the hosts that the text names and that may not be reached: in URLs, and in quotes before a port, `("example.com", 80)`."""
    hosts: dict[str, None] = {}
    for found in _HOST.finditer(source):
        try:
            name = canonical_host(found[1] or found[2])
        except PolicyError:
            continue
        if not is_local(name) and network.refusal(name):
            hosts[name] = None
    return tuple(hosts)


def rules_of(language: str, rules: Iterable[Rule | str] | None) -> tuple[Rule, ...]:
    """Return the given rules, with each string turned into a rule; for None, the default rules of the language."""
    if rules is None:
        return DEFAULT[language]
    defaults = {rule.pattern: rule for rule in DEFAULT[language]}
    return tuple(rule if isinstance(rule, Rule) else defaults.get(rule) or Rule(rule, BY_HAND) for rule in rules)


def _look_at_python(source: str, wanted: Matcher, findings: Findings) -> None:
    program = read_python(source)
    if program.too_large:
        findings.add(INTRICATE, 1)
    elif program.unreadable:  # not Python, or not for this interpreter: match its words instead
        _match_words(source, wanted.rules, findings)
    else:
        _PythonMatcher(program, wanted, findings).match()
        if program.names.exhausted:
            findings.add(INTRICATE, 1)


class _PythonMatcher:
    def __init__(self, source: PythonSource, wanted: Matcher, findings: Findings) -> None:
        self._source = source
        self._names = source.names
        self._match = wanted
        self._findings = findings
        self._defined = source.definitions()
        self._modules = source.names.imported() | {"__builtins__"}
        self._of_name: dict[str, tuple[Rule, ...]] = {}
        self._scratch = self._scratch_calls()
        self._loose: dict[str, int] = {}  # modules passed on as values, which are not traced further
        self._attributes: dict[tuple[str, bool], int] = {}  # with the last line of each; True for those of calls that stay below /tmp
        self._keys: dict[str, int] = {}  # attributes that are looked up by a string

    def match(self) -> None:
        """Check every node of the program."""
        for kind, look in _PYTHON.items():
            for node in self._source.kinds[kind]:
                look(self, node)
        for module, line in self._loose.items():
            for attribute, last in self._keys.items():
                self._check(f"{module}.{attribute}", max(line, last))
            for (attribute, scratch), last in self._attributes.items():
                self._check(f"{module}.{attribute}", max(line, last), scratch=scratch)

    def _scratch_calls(self) -> frozenset[int]:
        """Return the nodes of calls that stay below /tmp, unless no rule about files is in force."""
        if not any(CodeGrant.FILES in rule.granted_by for rule in self._match.rules):
            return frozenset()
        from agent_sandbox.policy.code.scratch import ScratchCalls

        return ScratchCalls(self._source).found()

    def _check(self, dotted: str, line: int, *, scratch: bool = False) -> None:
        name = own_name(dotted)
        self._add(self._match.name(name), line, self._match.spelling(name), scratch=scratch)

    def _add(self, rule: Rule | None, line: int, tried: str, *, scratch: bool) -> None:
        """Record a match. A rule about files does not match a call that stays below /tmp."""
        if rule is not None and not (scratch and CodeGrant.FILES in rule.granted_by):
            self._findings.add(rule, line, tried)

    def _note(self, rule: Rule, line: int) -> None:
        if rule.pattern in self._match.patterns:
            self._findings.add(rule, line)

    def import_(self, node: ast.Import) -> None:
        """Check `import a.b`. A rule about `a` or `a.b` matches here; a rule about a name inside `a.b` matches where the name is used."""
        for each in node.names:
            self._check(each.name, node.lineno)

    def import_from(self, node: ast.ImportFrom) -> None:
        """Check `from a import b` as if it were `a.b`."""
        for each in node.names if node.module and not node.level else ():
            self._check(node.module or "" if each.name == "*" else f"{node.module}.{each.name}", node.lineno)

    def attribute(self, node: ast.Attribute) -> None:
        """Check `a.b`, where `a` may be any expression that stands for a module."""
        attribute = node.attr
        if attribute in _INNARDS:
            self._note(REFLECTION, node.lineno)
        scratch = id(node) in self._scratch
        self._attributes[attribute, scratch] = node.lineno
        if attribute in self._match.words:
            for name in self._names.origins(node):
                self._check(name, node.lineno, scratch=scratch)

    def name(self, node: ast.Name) -> None:
        """Check a bare name. The name of a module before a dot is skipped, because `a.b` is checked as a whole."""
        known = self._of_name.get(node.id)
        if known is None:
            known = self._of_name[node.id] = self._rules_of(node)
        own = self._defined.get(node.id, node.lineno) < node.lineno
        before_a_dot, scratch = self._source.is_before_a_dot(node), id(node) in self._scratch
        for rule in () if own or (before_a_dot and node.id in self._modules) else known:  # then `a.b` says more than `a`
            self._add(rule, node.lineno, "", scratch=scratch)
        if not before_a_dot and not own:
            if self._source.is_called(node):  # even if it is bound elsewhere: that binding may never run
                self._add(self._match.function(node.id), node.lineno, "", scratch=scratch)
            for module in self._names.origins(node) if node.id in self._modules else ():
                self._loose[module] = node.lineno

    def _rules_of(self, node: ast.Name) -> tuple[Rule, ...]:
        known = node.id in BUILTINS or node.id == "__builtins__" or self._names.is_bound(node.id)
        origins = self._names.origins(node) if known or self._names.takes_all else ()
        matched = {rule.pattern: rule for name in origins if (rule := self._match.name(own_name(name))) is not None}
        if not origins and not self._names.is_bound(node.id) and (rule := self._match.function(node.id)) is not None:
            matched[rule.pattern] = rule  # a built-in that the tables of names do not know
        return tuple(matched.values())

    def call(self, node: ast.Call) -> None:
        """Check the function of a call, and its result: `getattr(os, "system")`, `__import__("os")`, `vars(os).get("system")`."""
        functions, scratch = self._names.origins(node.func), id(node) in self._scratch
        if functions or isinstance(node.func, ast.Attribute | ast.Call):
            for name in self._names.origins(node):
                self._check(name, node.lineno, scratch=scratch)
        for name in functions:
            self._add(self._match.function(own_name(name)), node.lineno, own_name(name), scratch=scratch)
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
                    self._keys[part] = node.lineno

    def subscript(self, node: ast.Subscript) -> None:
        """Check an item of a namespace: `vars(os)["system"]`, `sys.modules["os"]`, `__builtins__["eval"]`."""
        for name in self._names.origins(node):
            self._check(name, node.lineno)
        bases = self._names.origins(node.value)
        namespace = isinstance(node.value, ast.Call) and self._names.origins(node.value.func) & NAMESPACES
        if (bases or namespace) and isinstance(node.ctx, ast.Load):
            modules = {own_name(base.removesuffix(".__dict__")) for base in bases if base == "builtins" or base.endswith(".__dict__")}
            used = self._source.is_called(node) or self._source.is_before_a_dot(node)  # `globals()[name]` alone occurs in ordinary programs
            open_ended = any(map(self._match.within, modules)) or (used and (namespace or "sys.modules" in bases))
            if open_ended and self._names.texts(node.slice) is None:
                self._note(COMPUTED, node.lineno)

    def constant(self, node: ast.Constant) -> None:
        """Check a string that may be a key into a namespace, such as `"__globals__"`, which ordinary programs do not contain."""
        if type(node.value) is str and node.value in _INNARDS and node.value.startswith("__"):
            self._note(REFLECTION, node.lineno)


_PYTHON: dict[type, Callable[[_PythonMatcher, Any], None]] = {
    ast.Import: _PythonMatcher.import_,
    ast.ImportFrom: _PythonMatcher.import_from,
    ast.Attribute: _PythonMatcher.attribute,
    ast.Name: _PythonMatcher.name,
    ast.Call: _PythonMatcher.call,
    ast.Subscript: _PythonMatcher.subscript,
    ast.Constant: _PythonMatcher.constant,
}


def _look_at_javascript(source: str, wanted: Matcher, findings: Findings) -> None:
    from agent_sandbox.readers.javascript import read

    program = read(source, unescape=True)
    if program.unreadable or (program.tokens[0][0] == "end" and source.strip()):
        findings.add(INTRICATE, 1)
    else:
        _JavaScriptMatcher(program, wanted, findings).match()


class _JavaScriptMatcher:
    def __init__(self, source: JavaScriptSource, wanted: Matcher, findings: Findings) -> None:
        self._source = source
        self._tokens = source.tokens
        self._match = wanted
        self._findings = findings
        self._own = source.declared - {"eval", "Function"}

    def match(self) -> None:
        """Check every token."""
        for at, (kind, text, line) in enumerate(self._tokens):
            if kind == "word":
                self._word(at, text, line)
            elif text == "[":
                self._member(at, line)

    def _word(self, at: int, word: str, line: int) -> None:
        before, after = self._source.word(at - 1), self._tokens[at + 1]
        if word in _LOADS and before != ".":
            self._load(at, line)
        if word == "constructor":
            if before == ".":
                self._constructor(at + 1, line)
            return
        if (self._tokens[at - 2][1] not in _GLOBAL) if before == "." else word in self._own:
            return
        called = after[1] in ("(", "`") or before == "new"
        handed_on = word in ("eval", "Function") and after[1] != ":" and before not in ("function", "class")
        function = self._match.function(word) if word not in ("require", "import") else None
        if function is not None and (called or handed_on) and (before == "." or not self._source.is_definition(at + 1)):
            self._findings.add(function, line)
        if after[1] == "." and self._tokens[at + 2][0] == "word":
            self._findings.add(self._match.name(f"{word}.{self._tokens[at + 2][1]}") if word not in self._own else None, line)

    def _member(self, at: int, line: int) -> None:
        """Check a member that is looked up by a string: `base["na" + "me"]`."""
        text, end = self._source.string(at + 1)
        if text is None or self._tokens[end][1] != "]":
            return
        base = self._source.word(at - 1)
        if text == "constructor":
            self._constructor(end + 1, line)
        elif base in _GLOBAL:
            self._findings.add(self._match.function(text) or self._match.name(f"{base}.{text}"), line)

    def _constructor(self, at: int, line: int) -> None:
        """Check `….constructor`. It makes code if another `constructor` follows, or if it is called with a string."""
        text = self._tokens[at][1]
        following = self._tokens[at + 1]
        again = (text == "." and following[1] == "constructor") or (text == "[" and self._source.string(at + 1)[0] == "constructor")
        if again or (text == "(" and following[0] == "text"):
            self._findings.add(self._match.name("constructor"), line)

    def _load(self, at: int, line: int) -> None:
        """Check `require("x")`, `import("x")`, `import "x"`, `… from "x"`: match the module, or report a computed name."""
        called = self._tokens[at + 1][1] == "("
        text, end = self._source.string(at + 1 + called)
        if text is not None and (not called or self._tokens[end][1] in (")", ",")):
            name = text.removeprefix("node:")
            self._findings.add(self._match.name(name) or self._match.name(name.partition("/")[0]), line)
        elif called and self._tokens[at + 1 + called][1] != ")":
            self._findings.add(self._match.function(self._tokens[at][1]), line)


def _look_at_ruby(source: str, wanted: Matcher, findings: Findings) -> None:
    from agent_sandbox.readers.ruby import read

    program = read(source)
    if program.unreadable:
        findings.add(INTRICATE, 1)
    else:
        _RubyMatcher(program, wanted, findings).match()


class _RubyMatcher:
    def __init__(self, source: RubySource, wanted: Matcher, findings: Findings) -> None:
        self._source = source
        self._tokens = source.tokens
        self._match = wanted
        self._findings = findings
        self._own = source.methods

    def match(self) -> None:
        """Check every token."""
        for at, (kind, text, line) in enumerate(self._tokens):
            if kind == "shell":
                self._findings.add(self._match.name("`"), line)
            elif kind == "word":
                self._word(at, text, line)

    def _word(self, at: int, word: str, line: int) -> None:
        before = self._source.word(at - 1)
        after_kind, after, _ = self._tokens[at + 1]
        if word in _BY_NAME:
            self._by_name(at + 1, word, line)
        elif before in _DOTS and self._tokens[at - 2][1] not in _OPEN_RECEIVERS:
            if word in _TAKES_CODE and (after_kind == "text" or (after == "(" and self._tokens[at + 2][1] != ")")):
                self._findings.add(self._match.function(word), line)
        elif word in ("require", "load", "autoload", "require_relative"):
            self._required(at + 1, line)
        elif word[0].isupper():
            self._findings.add(self._match.name(self._source.dotted(at)), line)
        elif before != "def" and word not in self._own and after not in ("=", ":", ".", ",", ")") and word not in _TAKES_CODE:
            self._findings.add(self._match.function(word), line)
        if word == "binding" and after == ".":
            self._findings.add(self._match.name(f"binding.{self._tokens[at + 2][1]}"), line)

    def _by_name(self, at: int, word: str, line: int) -> None:
        """Check a method called by its name, as in `send(:system, …)`. A computed name matches, because it could be any method."""
        at = self._source.argument(at)
        kind, text, _ = self._tokens[at]
        name = text.strip(":'\"")
        if kind in ("symbol", "text") and "#{" not in text and self._tokens[at + 1][1] != "+":
            self._findings.add(self._match.function(name) or self._match.name(name), line)
        elif kind not in ("end", "line") and text not in ("=", ",", ".", ")", "=>", ":"):
            self._findings.add(self._match.function(word), line)

    def _required(self, at: int, line: int) -> None:
        at = self._source.argument(at)
        if self._tokens[at][0] == "text":
            self._findings.add(self._match.name(self._tokens[at][1].strip("'\"")), line)


def _look_at_bash(source: str, wanted: Matcher, findings: Findings) -> None:
    known = understand(source)
    if known.unreadable:
        findings.add(INTRICATE, 1)
        return
    patterns = {_pattern(use, each): use.tool for use in known.uses for each in use.effects}
    for use in known.uses:
        patterns.setdefault(use.tool, use.tool)  # a rule may name the tool itself
    for unknown in known.unknown:
        patterns.setdefault(next((pattern for words, pattern in _UNKNOWN if words in unknown), INTRICATE.pattern), "$")
    if _calls_itself_twice(parse(source)):
        patterns[":(){ :|:& };:"] = ""
    for rule in wanted.rules:
        for name in rule.spelt:
            if name in patterns:
                at = source.find(patterns[name]) if patterns[name] else 0
                findings.add(rule, source.count("\n", 0, max(at, 0)) + 1)


def _pattern(use: Use, effect: Effect) -> str:
    """Return the default pattern that an effect of a shell command matches; empty if it matches none."""
    kind, what = effect.kind, effect.what
    if use.tool == "eval":
        return "eval"
    if kind is EffectKind.NETWORK:
        return "network"
    if kind is EffectKind.RUNS_CODE and use.tool in SHELLS and what == "standard input":
        return "| sh"
    if kind is EffectKind.DESTROYS and what and ((what.rstrip("/") or "/") in _WHOLE_MACHINE or what.startswith("/dev/")):
        return "rm -rf /"
    return ""


def _calls_itself_twice(program: Program) -> bool:
    waiting, defined = list(program), list[tuple[str, Pipeline]]()
    for pipeline in waiting:
        for command in pipeline.commands:
            if isinstance(command, FunctionDefinition):
                defined += [(command.name, inner) for inner in _pipelines(command.body)]
    return any(sum(_named(command, name) for command in inner.commands) > 1 for name, inner in defined)


def _pipelines(program: Program) -> list[Pipeline]:
    pipelines, waiting = list[Pipeline](), list(program)
    while waiting:
        pipeline = waiting.pop()
        pipelines.append(pipeline)
        for command in pipeline.commands:
            waiting += [inner for body in getattr(command, "bodies", ()) for inner in body]
    return pipelines


def _named(command: object, name: str) -> bool:
    return isinstance(command, Simple) and command.words[:1] == ((Text(name),),)


def _match_words(source: str, rules: tuple[Rule, ...], findings: Findings) -> None:
    """Match text that the Python parser rejects. Every occurrence of a pattern counts, also in comments and strings."""
    for rule in rules:
        for name in rule.spelt:
            if not name.startswith("!") and (first := re.search(_spelling(name), source)) is not None:
                findings.add(rule, source.count("\n", 0, first.start()) + 1)


def _spelling(name: str) -> str:
    """Return a regular expression for a name, with spaces allowed between its parts: `os . system`, `eval (`."""
    parts = (re.escape(part) for part in name.removesuffix("(").split("."))
    return r"(?<![\w.])" + r"\s*\.\s*".join(parts) + (r"\s*\(" if name.endswith("(") else r"(?!\w)")


# Add a finding for each pattern in the source. None of them raises, whatever the text.
_LOOKS: dict[str, Callable[[str, Matcher, Findings], None]] = {
    "python": _look_at_python,
    "javascript": _look_at_javascript,
    "ruby": _look_at_ruby,
    "bash": _look_at_bash,
}
