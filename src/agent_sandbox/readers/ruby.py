"""Ruby as words: comments and text set apart, without a tree. What is written into text as `#{…}` is read as code, too."""

from __future__ import annotations

import re
from collections.abc import Iterator

Token = tuple[str, str, int]  # kind (word, text, symbol, shell, number, mark), its text, its line

_DEEPEST = 6  # code in text in code
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_TOKEN = re.compile(
    r"""(?P<space>[^\S\n]+|\\\n|\#[^\n]*|^=begin\b.*?(?:^=end\b[^\n]*|\Z)|^__END__\s*$.*)
    |(?P<line>\n)
    |(?P<heredoc><<[~-]?(?:"(?P<quoted>\w+)"|'(?P<plain>\w+)'|`(?P<run>\w+)`|(?P<bare>[A-Z_]\w*)))
    |(?P<percent>%(?P<sort>[qQwWiIxr]?)(?P<open>[^\w\s=]))
    |(?P<text>'(?:[^'\\]|\\.)*'?|"(?:[^"\\#]|\\.|\#(?!\{)|\#\{(?:[^{}"]|"[^"]*"|\{[^{}]*\}){0,2000}\})*"?)
    |(?P<shell>`(?:[^`\\]|\\.)*`?)
    |(?P<symbol>:(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[A-Za-z_]\w*[?!=]?))
    |(?P<word>@{0,2}\$?[^\W\d]\w*[?!]?)
    |(?P<number>\d[\w.]*)
    |(?P<mark>::|&\.|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_REGEX = re.compile(r"/(?:[^/\\\n]|\\.){1,1000}/\w*")
_BEFORE_VALUE = frozenset({"", "if", "unless", "when", "and", "or", "not", "return", "while", "until", "puts", "p"})


def tokens_of(source: str, *, line: int = 1, depth: int = 0) -> Iterator[Token]:
    """The words, texts and marks with their lines."""
    at, before, bodies = 0, "", list[tuple[str, str]]()
    while at < len(source):
        found = _TOKEN.match(source, at)
        assert found is not None  # the last alternative takes any character
        kind, text = found.lastgroup or "mark", found.group()
        start = line
        if text == "/" and (before in _BEFORE_VALUE or before[-1] in "(,=:[!&|?{};~"):
            regex = _REGEX.match(source, at)
            kind, text = ("space", regex.group()) if regex is not None else (kind, text)
        apart = not before[-1:].isalnum() or source[at - 1] in " \t("  # `puts <<X` and `puts %w[…]`, not `1<<X` and `10%w`
        if found["heredoc"] is not None and before[-1:] not in (")", "]") and (apart or found["bare"] is None):
            name = found["quoted"] or found["plain"] or found["run"] or found["bare"]
            bodies.append((name, "shell" if found["run"] else "plain" if found["plain"] else "text"))
            kind = "space"
        elif found["percent"] is not None and (found["sort"] or found["open"] in _CLOSING) and apart:
            text += _delimited(source, at + len(text), found["open"])
            kind = "shell" if found["sort"] == "x" else "space" if found["sort"] == "r" else "text"
        elif found["heredoc"] is not None or found["percent"] is not None:
            kind, text = "mark", text[0]
        at += len(text)
        line += text.count("\n")
        if kind == "line" and bodies:
            for name, sort in bodies:
                body = _body(source, at, name)
                yield from _told(sort, body, line, depth)
                at += len(body)
                line += body.count("\n")
            bodies = []
        if kind not in ("space", "line"):
            yield from _told(kind, text, start, depth)
            before = text
        elif kind == "line":
            yield "line", "\n", start
            before = ""


def _told(kind: str, text: str, line: int, depth: int) -> Iterator[Token]:
    """A token, and behind a text the code that is written into it."""
    yield ("text" if kind == "plain" else kind), text, line
    if kind in ("text", "shell") and "#{" in text and not text.startswith("'") and depth < _DEEPEST:
        for inside in re.finditer(r"#\{((?:[^{}]|\{[^{}]{0,500}\}){0,2000})\}", text):
            yield from tokens_of(inside[1], line=line + text.count("\n", 0, inside.start()), depth=depth + 1)


def _delimited(source: str, at: int, opening: str) -> str:
    closing, level, end = _CLOSING.get(opening, opening), 1, at
    while end < len(source) and level:
        character = source[end]
        end += 2 if character == "\\" else 1
        level += -1 if character == closing else character == opening
    return source[at:end]


def _body(source: str, at: int, name: str) -> str:
    """A heredoc from its first line through the one that ends it, or all that is left."""
    end = re.compile(rf"^[^\S\n]*{re.escape(name)}[^\S\n]*$", re.MULTILINE).search(source, at)
    return source[at : end.end() if end else len(source)]
