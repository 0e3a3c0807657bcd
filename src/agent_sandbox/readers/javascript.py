"""A JavaScript tokenizer: separates comments, strings and regular expressions from code. Builds no syntax tree.

Every rule consumes the text it inspects, so the time grows only with the length of the text.
"""

from __future__ import annotations

import re
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

Token = tuple[str, str, int]  # kind (word, text, number, mark), text, line


def tokens_of(source: str) -> Iterator[Token]:
    """Yield words, strings, numbers and marks with their lines. Raises ValueError, with the reason, for text it cannot follow."""
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
                raise ValueError("its slashes cannot be followed")
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
        raise ValueError("a template does not end, or they are nested too deep")
    if opening and end == "${":
        templates.append(0)
    elif not opening and end == "`":
        templates.pop()
    return text


def _regex_may_follow(before: str) -> bool:
    return not before or before in _BEFORE_REGEX or before[-1] in "(,=:[!&|?{};+-*%<>~^"
