"""JavaScript as words: comments, strings and regular expressions set apart, without a tree.

Every rule consumes what it looks at, so the time grows with the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_DEEPEST = 200  # templates within templates
_MISREAD = 20  # beginnings of a regular expression that were none

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

Token = tuple[str, str, int]


def tokens_of(source: str) -> Iterator[Token]:
    """Words, strings, numbers and marks with their lines. Raises ValueError, with the reason, when the text cannot be followed."""
    at, line, before, misread = 0, 1, "", 0
    templates: list[int] = []  # for each template that is open, the braces open in its current expression
    while at < len(source):
        found = _TOKEN.match(source, at)
        assert found is not None  # the last alternative takes any character
        kind, text = found.lastgroup or "mark", found.group()
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
    found = _TEMPLATE.match(source, at)
    text, end = (found.group(), found.group(1)) if found else ("", None)
    if end is None or len(templates) > _DEEPEST:
        raise ValueError("a template does not end, or they are nested too deep")
    if opening and end == "${":
        templates.append(0)
    elif not opening and end == "`":
        templates.pop()
    return text


def _regex_may_follow(before: str) -> bool:
    return not before or before in _BEFORE_REGEX or before[-1] in "(,=:[!&|?{};+-*%<>~^"
