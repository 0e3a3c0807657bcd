"""Match patterns in Ruby, by tokens. A symbol or string that names a method is read as that method."""

from __future__ import annotations

from itertools import pairwise

from agent_sandbox.policy.code.patterns import INTRICATE, Findings, Matcher, Rule
from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.ruby import Token, tokens_of

_OPEN_RECEIVERS = frozenset({"Kernel", "Process", "Object", "self", "binding"})  # through them a bare function can still be called
_BY_NAME = frozenset({"send", "__send__", "public_send", "method", "const_get", "instance_method", "define_method"})
_TAKES_CODE = frozenset({"instance_eval", "class_eval", "module_eval"})  # ordinary with a block, not with a string
_DOTS = frozenset({".", "&.", "::"})


def look(source: str, wanted: Matcher, found: Findings) -> None:
    """Add a finding for each pattern in the source. Never raises, whatever the text."""
    if too_much(source):
        found.add(INTRICATE, 1)
        return
    _Look(list(tokens_of(source)), wanted, found).through()


class _Look:
    def __init__(self, tokens: list[Token], wanted: Matcher, found: Findings) -> None:
        self._tokens = [*tokens, ("end", "", 0), ("end", "", 0), ("end", "", 0)]
        self._match = wanted
        self._found = found
        self._own = {after[1] for before, after in pairwise(tokens) if before[1] == "def"}

    def through(self) -> None:
        """Check every token."""
        for at, (kind, text, line) in enumerate(self._tokens):
            if kind == "shell":
                self._add(self._match.name("`"), line)
            elif kind == "word":
                self._word(at, text, line)

    def _word(self, at: int, word: str, line: int) -> None:
        before = self._tokens[at - 1][1] if at else ""
        after_kind, after, _ = self._tokens[at + 1]
        if word in _BY_NAME:
            self._by_name(at + 1, word, line)
        elif before in _DOTS and self._tokens[at - 2][1] not in _OPEN_RECEIVERS:
            if word in _TAKES_CODE and (after_kind == "text" or (after == "(" and self._tokens[at + 2][1] != ")")):
                self._add(self._match.function(word), line)
        elif word in ("require", "load", "autoload", "require_relative"):
            self._required(at + 1, line)
        elif word[0].isupper():
            self._add(self._match.name(self._dotted(at)), line)
        elif before != "def" and word not in self._own and after not in ("=", ":", ".", ",", ")") and word not in _TAKES_CODE:
            self._add(self._match.function(word), line)
        if word == "binding" and after == ".":
            self._add(self._match.name(f"binding.{self._tokens[at + 2][1]}"), line)

    def _dotted(self, at: int) -> str:
        """Return `Net::HTTP.get` as `Net.HTTP.get`."""
        parts = [self._tokens[at][1]]
        while self._tokens[at + 1][1] in _DOTS and self._tokens[at + 2][0] == "word":
            at += 2
            parts.append(self._tokens[at][1])
        return ".".join(parts)

    def _by_name(self, at: int, word: str, line: int) -> None:
        """Check `send(:system, …)`: a method by its name. A computed name could be any method."""
        at += self._tokens[at][1] == "("
        kind, text, _ = self._tokens[at]
        name = text.strip(":'\"")
        if kind in ("symbol", "text") and "#{" not in text and self._tokens[at + 1][1] != "+":
            self._add(self._match.function(name) or self._match.name(name), line)
        elif kind not in ("end", "line") and text not in ("=", ",", ".", ")", "=>", ":"):
            self._add(self._match.function(word), line)

    def _required(self, at: int, line: int) -> None:
        at += self._tokens[at][1] == "("
        if self._tokens[at][0] == "text":
            self._add(self._match.name(self._tokens[at][1].strip("'\"")), line)

    def _add(self, rule: Rule | None, line: int) -> None:
        if rule is not None:
            self._found.add(rule, line)
