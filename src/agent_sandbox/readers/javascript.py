"""Split JavaScript source into tokens, so that comments, strings and regular expressions are not taken for code. Builds no syntax tree.

`read` returns a `JavaScriptSource`. The time is proportional to the length of the text.
"""

from __future__ import annotations

import re

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.readers import too_much

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEEPEST = 200  # nested templates
_MISREAD = 20  # slashes that could start a regular expression and do not

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?(?:\*/|\Z)|\A\#![^\n]*)
    |(?P<word>[^\W\d][\w$]*|\$[\w$]*)
    |(?P<text>'(?:[^'\\\n]|\\.)*'?|"(?:[^"\\\n]|\\.)*"?)
    |(?P<number>\.?\d[\w.]*)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_REGEX = re.compile(r"/(?![*/])(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.){0,200}\]){1,1000}/\w*")
_TEMPLATE = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(`|\$\{)?", re.DOTALL)
_BEFORE_REGEX = frozenset({"return", "typeof", "case", "in", "of", "delete", "void", "throw", "new", "else", "do", "yield", "await"})

_DECLARES = frozenset({"function", "class", "const", "let", "var"})
_LONGEST_PARAMETERS = 100  # tokens
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|u\{0*([0-9a-fA-F]{1,5})\}|x([0-9a-fA-F]{2}))")

Token = tuple[str, str, int]  # kind (word, text, number, mark), text, line
_END: Token = ("end", "", 0)


class JavaScriptSource:
    """The tokens of a JavaScript program, followed by three `end` tokens, and the names that the program declares.

    `unreadable` is the reason why the program could not be read; empty if it was read.
    """

    def __init__(self, tokens: list[Token], unreadable: str = "") -> None:
        self.unreadable = unreadable
        self.tokens = [*tokens, _END, _END, _END]
        self.declared = {tokens[at + 1][1] for at in range(len(tokens) - 1) if tokens[at][1] in _DECLARES and tokens[at][0] == "word"}

    def word(self, at: int) -> str:
        """Return the text of the token at a position; empty if the position is negative."""
        return self.tokens[at][1] if at >= 0 else ""

    def string(self, at: int) -> tuple[str | None, int]:
        """Return the string that begins at a position, and the position after it. String literals joined by `+` are one string.

        The string is None if a part of it is not a string literal.
        """
        joined = ""
        while self.tokens[at][0] == "text":
            part = self.tokens[at][1]
            if part.endswith("${"):
                return None, at
            joined += part[:-1] if part[-1] == "`" else part[1:-1]
            if self.tokens[at + 1][1] != "+":
                return joined, at + 1
            at += 2
        return None, at

    def is_definition(self, at: int) -> bool:
        """Whether a parameter list and an opening brace stand at a position, as in the definition of a method."""
        level = 0
        for position in range(at, min(at + _LONGEST_PARAMETERS, len(self.tokens) - 1)):
            text = self.tokens[position][1]
            level += (text == "(") - (text == ")")
            if level <= 0:
                return text == ")" and self.tokens[position + 1][1] == "{"
        return False


def read(text: str, *, unescape: bool) -> JavaScriptSource:
    """Read a program. `unescape` decodes escaped letters in names and strings first. Never raises, whatever the text."""
    if why := too_much(text):
        return JavaScriptSource([], why)
    try:
        return JavaScriptSource(list(_tokens(_unescaped(text) if unescape else text)))
    except ValueError as error:
        return JavaScriptSource([], str(error))


def _unescaped(source: str) -> str:
    r"""Decode escaped letters such as `\u0065`, which JavaScript accepts in names as well as in strings."""

    def letter(match: re.Match[str]) -> str:
        character = chr(int(match[1] or match[2] or match[3], 16))
        return character if character.isalnum() or character in "_$" else match[0]

    return _ESCAPE.sub(letter, source) if "\\" in source else source


def _tokens(source: str) -> Iterator[Token]:
    """Yield words, strings, numbers and marks with their line numbers. Raises ValueError, with the reason, for text it cannot split."""
    at, line, before, misread = 0, 1, "", 0
    templates: list[int] = []  # per open template, the number of open braces in its current expression
    while at < len(source):
        token = _TOKEN.match(source, at)
        assert token is not None  # the last alternative matches any character
        kind, text = token.lastgroup or "mark", token.group()
        if text == "/" and _regex_may_follow(before):
            regex = _REGEX.match(source, at)
            misread += regex is None
            if misread > _MISREAD:
                raise ValueError("divisions and regular expressions in it cannot be told apart")
            if regex is not None:
                kind, text = "regex", regex.group()
        at += len(text)
        if text == "`" or (text == "}" and templates and templates[-1] == 0):
            text = _template(source, at, templates, opening=text == "`")
            at += len(text)
            kind, before = "template", "`"
        elif templates and text in "{}":
            templates[-1] += 1 if text == "{" else -1
        if kind == "text" and (len(text) < 2 or text[-1] != text[0]):
            raise ValueError(f"a string does not end (line {line})")
        if kind not in ("space", "template", "regex"):
            yield kind, text, line
        elif kind == "template":
            yield "text", text, line
        before = text if kind not in ("space", "template") else before
        line += text.count("\n")


def _template(source: str, at: int, templates: list[int], *, opening: bool) -> str:
    piece = _TEMPLATE.match(source, at)
    text, end = (piece.group(), piece.group(1)) if piece else ("", None)
    if end is None or len(templates) > _DEEPEST:
        raise ValueError("a template does not end, or templates are nested too deep")
    if opening and end == "${":
        templates.append(0)
    elif not opening and end == "`":
        templates.pop()
    return text


def _regex_may_follow(before: str) -> bool:
    return not before or before in _BEFORE_REGEX or before[-1] in "(,=:[!&|?{};+-*%<>~^"
