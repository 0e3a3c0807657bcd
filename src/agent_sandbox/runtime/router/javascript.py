"""Read JavaScript as tokens: does it use anything that only Node.js has, and not the language itself?

There is no syntax tree. The words outside comments, strings and regular expressions are compared with a list. The text of strings counts
as well if code can be made from it. Every rule consumes the text it inspects, so the time grows only with the length of the text.
"""

from __future__ import annotations

import re

from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.javascript import Token, tokens_of
from agent_sandbox.runtime.router.model import Feature, Reading

_WORD = re.compile(r"[^\W\d][\w$]*")

_NODE_NAMES = """
    require module exports process Buffer global __dirname __filename setImmediate clearImmediate fetch URL URLSearchParams TextEncoder
    TextDecoder AbortController AbortSignal Event EventTarget performance crypto structuredClone WebAssembly Worker MessageChannel
    BroadcastChannel Blob File FormData Headers Request Response WebSocket EventSource ReadableStream WritableStream TransformStream
    Intl SharedArrayBuffer Atomics navigator document window localStorage XMLHttpRequest Deno Bun
"""
_NODE = frozenset(_NODE_NAMES.split())
_NODE_METHODS = frozenset({"toLocaleString", "toLocaleDateString", "toLocaleTimeString", "localeCompare"})  # correct only with Intl
_DECLARES = frozenset({"const", "let", "var", "function", "class"})
_MAKES_CODE = frozenset({"eval", "Function", "constructor", "GeneratorFunction", "AsyncFunction"})


def read_javascript(source: str) -> Reading:
    """Return what the tokens show. Never raises, whatever the text."""
    if why := too_much(source):
        return Reading(unreadable=why)
    try:
        tokens = list(tokens_of(source))
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


def _imported(tokens: list[Token], at: int, features: dict[Feature, str], unseen: dict[str, None]) -> None:
    """Record the module of an `import`: the next string of the statement."""
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
