"""Read JavaScript as words: does it use what the language itself does not have, and only Node.js brings?

There is no tree here. Comments, strings and regular expressions are set apart, the words between them are compared with a list, and the
text of strings counts as well where code can be made of it. Every rule consumes what it looks at, so the time grows with the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent_sandbox.runtime.routing.measure import too_much
from agent_sandbox.runtime.routing.model import Feature, Reading

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
_WORD = re.compile(r"[^\W\d][\w$]*")

_NODE_NAMES = """
    require module exports process Buffer global __dirname __filename setImmediate clearImmediate fetch URL URLSearchParams TextEncoder
    TextDecoder AbortController AbortSignal Event EventTarget performance crypto structuredClone WebAssembly Worker MessageChannel
    BroadcastChannel Blob File FormData Headers Request Response WebSocket EventSource ReadableStream WritableStream TransformStream
    Intl SharedArrayBuffer Atomics navigator document window localStorage XMLHttpRequest Deno Bun
"""
_NODE = frozenset(_NODE_NAMES.split())
_NODE_METHODS = frozenset({"toLocaleString", "toLocaleDateString", "toLocaleTimeString", "localeCompare"})  # they need Intl to be right
_DECLARES = frozenset({"const", "let", "var", "function", "class"})
_MAKES_CODE = frozenset({"eval", "Function", "constructor", "GeneratorFunction", "AsyncFunction"})
_BEFORE_REGEX = frozenset({"return", "typeof", "case", "in", "of", "delete", "void", "throw", "new", "else", "do", "yield", "await"})

_Token = tuple[str, str, int]


def read_javascript(source: str) -> Reading:
    """What the words show. Never raises, whatever the text."""
    if why := too_much(source):
        return Reading(unreadable=why)
    try:
        tokens = list(_tokens(source))
    except ValueError as error:
        return Reading(unreadable=str(error))
    declared = {tokens[at + 1][1] for at in range(len(tokens) - 1) if tokens[at][1] in _DECLARES and tokens[at][0] == "word"}
    names = _NODE - (declared - {"require"})
    features: dict[Feature, str] = {}
    unseen: dict[str, None] = {}
    makes_code = any(kind == "word" and text in _MAKES_CODE for kind, text, _ in tokens)
    for at, (kind, text, line) in enumerate(tokens):
        after_dot = at > 0 and tokens[at - 1][1] == "."
        if kind == "word" and (text in _NODE_METHODS if after_dot else text in names):
            features.setdefault(Feature.NODE, f"{text} (line {line})")
        elif kind == "word" and text == "import" and not after_dot:
            _imported(tokens, at, features, unseen)
        elif kind == "word" and text in ("globalThis", "eval", "Function") and not after_dot:
            unseen.setdefault(f"it uses {text}, which reaches what its text does not name (line {line})")
        elif kind == "text" and makes_code and (hidden := names.intersection(_WORD.findall(text))):
            features.setdefault(Feature.NODE, f"{min(hidden)} in a string (line {line})")
        elif kind == "mark" and text == "\\":
            unseen.setdefault(f"it spells a name with escapes (line {line})")
    return Reading(features=features, unseen=tuple(unseen)[:8])


def _imported(tokens: list[_Token], at: int, features: dict[Feature, str], unseen: dict[str, None]) -> None:
    """After the word `import`: the module is the next string of the statement."""
    line = tokens[at][2]
    for kind, text, _ in tokens[at + 1 : at + 200]:
        if kind == "text":
            if text[1:2] in (".", "/"):
                unseen.setdefault(f"the module {text[1:-1][:80]} lies beside the code and was not read (line {line})")
            else:
                features.setdefault(Feature.NODE, f"the module {text[1:-1][:80]} (line {line})")
            return
        if text in (";", ")", "="):
            break
    unseen.setdefault(f"it imports a module by a computed name (line {line})")


def _tokens(source: str) -> Iterator[_Token]:
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
