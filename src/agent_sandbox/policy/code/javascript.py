"""Match patterns in JavaScript, by tokens. Concatenated strings are joined, and `a["b"]` is read as `a.b`."""

from __future__ import annotations

import re
from itertools import pairwise

from agent_sandbox.policy.code.patterns import INTRICATE, Findings, Matcher, Rule
from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.javascript import Token, tokens_of

_GLOBAL = frozenset({"globalThis", "global", "window", "self", "this", "process", "module"})
_DECLARES = frozenset({"function", "class", "const", "let", "var"})
_LOADS = frozenset({"require", "import", "from", "createRequire", "getBuiltinModule"})
_LONGEST_PARAMETERS = 100  # tokens
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|u\{0*([0-9a-fA-F]{1,5})\}|x([0-9a-fA-F]{2}))")


def look(source: str, wanted: Matcher, found: Findings) -> None:
    """Add a finding for each pattern in the source. Never raises, whatever the text."""
    try:
        tokens = [] if too_much(source) else list(tokens_of(_unescaped(source)))
    except ValueError:
        tokens = []
    if not tokens and source.strip():
        found.add(INTRICATE, 1)
        return
    _Look(tokens, wanted, found).through()


def _unescaped(source: str) -> str:
    """Decode escapes such as `\\u0065`, which JavaScript accepts in names as well as in strings."""

    def letter(match: re.Match[str]) -> str:
        character = chr(int(match[1] or match[2] or match[3], 16))
        return character if character.isalnum() or character in "_$" else match[0]

    return _ESCAPE.sub(letter, source) if "\\" in source else source


class _Look:
    def __init__(self, tokens: list[Token], wanted: Matcher, found: Findings) -> None:
        self._tokens = [*tokens, ("end", "", 0), ("end", "", 0), ("end", "", 0)]
        self._match = wanted
        self._found = found
        words = pairwise(tokens)
        self._own = {after[1] for before, after in words if before[0] == "word" and before[1] in _DECLARES} - {"eval", "Function"}

    def through(self) -> None:
        """Check every token."""
        for at, (kind, text, line) in enumerate(self._tokens):
            if kind == "word":
                self._word(at, text, line)
            elif text == "[":
                self._member(at, line)

    def _word(self, at: int, word: str, line: int) -> None:
        before, after = self._tokens[at - 1][1] if at else "", self._tokens[at + 1]
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
        if function is not None and (called or handed_on) and (before == "." or not self._defines(at + 1)):
            self._found.add(function, line)
        if after[1] == "." and self._tokens[at + 2][0] == "word":
            self._add(self._match.name(f"{word}.{self._tokens[at + 2][1]}") if word not in self._own else None, line)

    def _defines(self, at: int) -> bool:
        """Return whether a name is followed by parameters and a body: a method of an object or class."""
        level = 0
        for position in range(at, min(at + _LONGEST_PARAMETERS, len(self._tokens) - 1)):
            text = self._tokens[position][1]
            level += (text == "(") - (text == ")")
            if level <= 0:
                return text == ")" and self._tokens[position + 1][1] == "{"
        return False

    def _member(self, at: int, line: int) -> None:
        """Check `base["na" + "me"]`."""
        text, end = self._text(at + 1)
        if text is None or self._tokens[end][1] != "]":
            return
        base = self._tokens[at - 1][1] if at else ""
        if text == "constructor":
            self._constructor(end + 1, line)
        elif base in _GLOBAL:
            self._add(self._match.function(text) or self._match.name(f"{base}.{text}"), line)

    def _constructor(self, at: int, line: int) -> None:
        """Check a constructor: one of a constructor, or one that is given a string, makes code."""
        text = self._tokens[at][1]
        following = self._tokens[at + 1]
        again = (text == "." and following[1] == "constructor") or (text == "[" and self._text(at + 1)[0] == "constructor")
        if again or (text == "(" and following[0] == "text"):
            self._add(self._match.name("constructor"), line)

    def _load(self, at: int, line: int) -> None:
        """Check `require("x")`, `import("x")`, `import "x"`, `… from "x"`: the module, or that its name is computed."""
        called = self._tokens[at + 1][1] == "("
        text, end = self._text(at + 1 + called)
        if text is not None and (not called or self._tokens[end][1] in (")", ",")):
            name = text.removeprefix("node:")
            self._add(self._match.name(name) or self._match.name(name.partition("/")[0]), line)
        elif called and self._tokens[at + 1 + called][1] != ")":
            self._add(self._match.function(self._tokens[at][1]), line)

    def _text(self, at: int) -> tuple[str | None, int]:
        """Join the string parts at a position: return the string and where it ends; None if a part is not a string."""
        joined = ""
        while self._tokens[at][0] == "text":
            part = self._tokens[at][1]
            if part.endswith("${"):
                return None, at
            joined += part[:-1] if part[-1] == "`" else part[1:-1]
            if self._tokens[at + 1][1] != "+":
                return joined, at + 1
            at += 2
        return None, at

    def _add(self, rule: Rule | None, line: int) -> None:
        if rule is not None:
            self._found.add(rule, line)
