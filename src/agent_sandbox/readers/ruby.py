"""Split Ruby source into tokens, so that comments and strings are not taken for code. Builds no syntax tree.

`read` returns a `RubySource`. The code in `#{…}` inside a string is split into tokens, too.
"""

from __future__ import annotations

import re
from itertools import pairwise

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.readers import too_much

if TYPE_CHECKING:
    from collections.abc import Iterator

Token = tuple[str, str, int]  # kind (word, text, symbol, shell, number, mark, line), text, line

_DOTS = frozenset({".", "&.", "::"})
_END: Token = ("end", "", 0)
_DEEPEST = 6  # code in strings in code
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


class RubySource:
    """The tokens of a Ruby program, followed by three `end` tokens, and the methods that the program defines.

    `unreadable` is the reason why the program could not be read; empty if it was read.
    """

    def __init__(self, tokens: list[Token], unreadable: str = "") -> None:
        self.unreadable = unreadable
        self.tokens = [*tokens, _END, _END, _END]
        self.methods = {after[1] for before, after in pairwise(tokens) if before[1] == "def"}

    def word(self, at: int) -> str:
        """Return the text of the token at a position; empty if the position is negative."""
        return self.tokens[at][1] if at >= 0 else ""

    def dotted(self, at: int) -> str:
        """Return the name at a position and the names attached to it, joined by dots: `Net.HTTP.get` for `Net::HTTP.get`."""
        parts = [self.tokens[at][1]]
        while self.tokens[at + 1][1] in _DOTS and self.tokens[at + 2][0] == "word":
            at += 2
            parts.append(self.tokens[at][1])
        return ".".join(parts)

    def argument(self, at: int) -> int:
        """Return the position of a method's first argument. `at` is the position after the method's name."""
        return at + (self.tokens[at][1] == "(")


def read(text: str) -> RubySource:
    """Read a program. Never raises, whatever the text."""
    why = too_much(text)
    return RubySource([] if why else list(_tokens(text)), why)


def _tokens(source: str, *, line: int = 1, depth: int = 0) -> Iterator[Token]:
    """Yield words, strings and marks with their line numbers. `line` is the number of the first line; `depth` is how deep strings nest."""
    at, before, bodies = 0, "", list[tuple[str, str]]()
    while at < len(source):
        token = _TOKEN.match(source, at)
        assert token is not None  # the last alternative matches any character
        kind, text = token.lastgroup or "mark", token.group()
        start = line
        if text == "/" and (before in _BEFORE_VALUE or before[-1] in "(,=:[!&|?{};~"):
            regex = _REGEX.match(source, at)
            kind, text = ("space", regex.group()) if regex is not None else (kind, text)
        apart = not before[-1:].isalnum() or source[at - 1] in " \t("  # true for `puts <<X` and `puts %w[…]`, not for `1<<X` and `10%w`
        if token["heredoc"] is not None and before[-1:] not in (")", "]") and (apart or token["bare"] is None):
            name = token["quoted"] or token["plain"] or token["run"] or token["bare"]
            bodies.append((name, "shell" if token["run"] else "plain" if token["plain"] else "text"))
            kind = "space"
        elif token["percent"] is not None and (token["sort"] or token["open"] in _CLOSING) and apart:
            text += _delimited(source, at + len(text), token["open"])
            kind = "shell" if token["sort"] == "x" else "space" if token["sort"] == "r" else "text"
        elif token["heredoc"] is not None or token["percent"] is not None:
            kind, text = "mark", text[0]
        at += len(text)
        line += text.count("\n")
        if kind == "line" and bodies:
            for name, sort in bodies:
                body = _body(source, at, name)
                yield from _with_interpolations(sort, body, line, depth)
                at += len(body)
                line += body.count("\n")
            bodies = []
        if kind not in ("space", "line"):
            yield from _with_interpolations(kind, text, start, depth)
            before = text
        elif kind == "line":
            yield "line", "\n", start
            before = ""


def _with_interpolations(kind: str, text: str, line: int, depth: int) -> Iterator[Token]:
    """Yield a token and, after a string, the tokens of the code interpolated into it."""
    yield ("text" if kind == "plain" else kind), text, line
    if kind in ("text", "shell") and "#{" in text and not text.startswith("'") and depth < _DEEPEST:
        for inside in re.finditer(r"#\{((?:[^{}]|\{[^{}]{0,500}\}){0,2000})\}", text):
            yield from _tokens(inside[1], line=line + text.count("\n", 0, inside.start()), depth=depth + 1)


def _delimited(source: str, at: int, opening: str) -> str:
    closing, level, end = _CLOSING.get(opening, opening), 1, at
    while end < len(source) and level:
        character = source[end]
        end += 2 if character == "\\" else 1
        level += -1 if character == closing else character == opening
    return source[at:end]


def _body(source: str, at: int, name: str) -> str:
    """Return the lines of a heredoc up to and including its end marker, or all remaining text if the marker is missing."""
    end = re.compile(rf"^[^\S\n]*{re.escape(name)}[^\S\n]*$", re.MULTILINE).search(source, at)
    return source[at : end.end() if end else len(source)]
