"""Capabilities: tokens that allow certain actions in one sandbox, for a time, and can only ever be narrowed.

A token is an identity and a list of caveats, and a signature: HMAC over the identity with a key that only the supervisor has, then over
each caveat with the signature so far as key. Who holds a token can add a caveat without asking anybody, and hand on the narrower token;
nobody can take one away, because that would need the signature from before it was added. Every caveat restricts, so more of them never
allow more, and one that is not understood allows nothing.

Pure: whether a token is genuine, and what it says about an action, follows from the arguments. That it was not revoked or used up is for
`engine.grants`, which keeps count.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from agent_sandbox._fast.encoding import Seal, as_json, same, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass
from agent_sandbox.policy.action import Action, CallTool, Promote, RunCode, RunCommand, Undo

if TYPE_CHECKING:
    from typing import Any

VERSION = b"capability 1\n"
MOST_CAVEATS, LONGEST = 32, 16 << 10  # of a token: each costs time to check, and nobody needs so many
_IDENTITY_BYTES = 16
_LINE_READERS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh")
_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=@%+,- "  # nothing here means anything to a shell

Pattern = tuple[str, ...]


@dataclass(frozen=True)
class ForSandbox:
    """Only in this sandbox. Every token has it from the beginning: one that is stolen is of no use elsewhere."""

    sandbox: str


@dataclass(frozen=True)
class Until:
    """Only before this moment, in seconds since the epoch."""

    time: float


@dataclass(frozen=True)
class Times:
    """Only so often. Counted where it was added: what is derived from this token counts together with it."""

    limit: int


@dataclass(frozen=True)
class Only:
    """Only actions that one of these patterns covers, word by word: `run git log **`, `promote /home/u/project`, `run make *`.

    A word that ends with `*` covers every word that begins so; `**` in last place covers any number of words, also none. Nothing else is
    special.
    """

    patterns: tuple[Pattern, ...]


Caveat = ForSandbox | Until | Times | Only


@dataclass(frozen=True)
class Token:
    """What is handed out. It is a secret: who has it, in its sandbox, may use it."""

    identity: bytes
    caveats: tuple[bytes, ...]  # as they are signed
    signature: bytes

    def attenuate(self, *caveats: Caveat) -> Token:
        """The same with less in it, to hand on: `token.attenuate(Times(1), Only((("run", "git", "push"),)))`."""
        return attenuate(self, *caveats)

    def __str__(self) -> str:
        return spell(self)

    def __repr__(self) -> str:
        return f"Token(identity={self.identity.hex()!r}, {len(self.caveats)} caveats)"


@dataclass(frozen=True)
class Genuine:
    """The token is one of ours. `names` are its own and those of the tokens it was derived from, by which each can be revoked; `counts` are
    the limits on its use, each with the name that it is counted under; `until` is the earliest end."""

    names: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    until: float


@dataclass(frozen=True)
class Refused:
    """The token allows nothing here, and why."""

    why: str


def mint(key: Seal, identity: bytes, caveats: tuple[Caveat, ...]) -> Token:
    """A new token. `identity` is 16 random bytes, never used before. Raises `ValueError` without a sandbox or for what cannot be said."""
    if len(identity) != _IDENTITY_BYTES or not any(isinstance(caveat, ForSandbox) for caveat in caveats):
        raise ValueError("a capability has an identity of 16 bytes and names its sandbox")
    return attenuate(Token(identity, (), key.on(VERSION + identity)), *caveats)


def attenuate(token: Token, *caveats: Caveat) -> Token:
    """The token with more caveats, for who needs less. No key is needed. Raises `ValueError` for caveats that cannot be."""
    for caveat in caveats:
        text = _spelt(caveat)
        token = Token(token.identity, (*token.caveats, text), Seal(token.signature).on(text))
    if len(token.caveats) > MOST_CAVEATS or sum(map(len, token.caveats)) > LONGEST:
        raise ValueError("too many caveats for one capability")
    return token


def check(key: Seal, token: Token, action: Action, *, sandbox: str, now: float) -> Genuine | Refused:
    """What the token says about an action in a sandbox at a moment. Total: whatever is not understood is refused."""
    found = genuine(key, token)
    if isinstance(found, Refused):
        return found
    spellings = spellings_of(action)
    for text in token.caveats:
        if refusal := _objection(_read(text), spellings, sandbox, now):
            return Refused(refusal)
    return found


def _objection(caveat: Caveat | None, spellings: tuple[Pattern, ...], sandbox: str, now: float) -> str:
    """Why this restriction does not let it pass; empty when it does."""
    if isinstance(caveat, ForSandbox):
        return "" if caveat.sandbox == sandbox else "the capability is for another sandbox"
    if isinstance(caveat, Until):
        return "" if now < caveat.time else "the capability has expired"
    if isinstance(caveat, Only):
        covered = any(covers(pattern, words) for pattern in caveat.patterns for words in spellings)
        return "" if covered else f"the capability does not cover {' '.join(spellings[0][:4])!r}"
    # A limit is for who keeps count.
    return "" if isinstance(caveat, Times) else "the capability has a restriction that is not understood"


def genuine(key: Seal, token: Token) -> Genuine | Refused:
    """Whether the token was made with this key and narrowed as it says. The signature is compared in the same time whatever it is."""
    if len(token.caveats) > MOST_CAVEATS or len(token.identity) != _IDENTITY_BYTES:
        return Refused("this is no capability of ours")
    signature = key.on(VERSION + token.identity)
    counts: list[tuple[str, int]] = []
    names, until, bound = [_name(signature)], float("inf"), False
    for text in token.caveats:
        signature = Seal(signature).on(text)
        names.append(_name(signature))
        caveat = _read(text)
        if isinstance(caveat, Times):
            counts.append((names[-1], caveat.limit))
        elif isinstance(caveat, Until):
            until = min(until, caveat.time)
        elif isinstance(caveat, ForSandbox):
            bound = True
    if not same(signature, token.signature) or not bound:
        return Refused("this is no capability of ours")
    return Genuine(tuple(names), tuple(counts), until)


def words_of(action: Action) -> Pattern:
    """An action as the words that patterns cover."""
    match action:
        case RunCommand():
            return ("run", *action.argv)
        case RunCode():
            return ("code", action.language, action.source_sha256)
        case Promote():
            return ("promote", action.root, action.changes_sha256)
        case Undo():
            return ("undo", action.root, action.promotion)
        case CallTool():
            return ("call", action.tool, action.words_sha256)
        case _:
            assert_never(action)


def spellings_of(action: Action) -> tuple[Pattern, ...]:
    """All words that an action goes by, the simplest first: `bash -c "git push"` does what `git push` does, and no more.

    Only where that is plain: a line of nothing but words, for the machine's own shell.
    """
    words = words_of(action)
    if isinstance(action, RunCommand) and len(action.argv) == 3 and action.argv[0] in _LINE_READERS and action.argv[1] == "-c":
        line = action.argv[2]
        if line.isascii() and not line.strip(_PLAIN) and line.strip() and "=" not in line.split()[0] and "\n" not in line:
            return ("run", *line.split()), words
    return (words,)


def covers(pattern: Pattern, words: Pattern) -> bool:
    """Whether a pattern covers an action."""
    if pattern and pattern[-1] == "**":
        pattern, words = pattern[:-1], words[: len(pattern) - 1]
    if len(pattern) != len(words):
        return False
    return all(word.startswith(each[:-1]) if each.endswith("*") else word == each for each, word in zip(pattern, words, strict=True))


def spell(token: Token) -> str:
    """The token as text, for a variable or a file."""
    from base64 import urlsafe_b64encode  # only who hands a token on spells it

    parts = (token.identity, *token.caveats, token.signature)
    return "cap1." + ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def parse(text: str) -> Token | None:
    """The token in a text; None when it is none. One text stands for one token only."""
    from base64 import urlsafe_b64decode

    start, *parts = text.split(".")
    if start != "cap1" or len(parts) < 2 or len(text) > 2 * LONGEST or not text.isascii():
        return None
    try:
        identity, *caveats, signature = (urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts)
    except ValueError:
        return None
    token = Token(identity, tuple(caveats), signature)
    return token if spell(token) == text else None


def caveats_of(token: Token) -> tuple[Caveat | None, ...]:
    """What the token says of itself; None for what is not understood. Not checked: anybody can write that."""
    return tuple(_read(text) for text in token.caveats)


def _name(signature: bytes) -> str:
    """A signature's name: it can be told to anybody, and the signature cannot be had from it."""
    return sha256(b"name of " + signature).hexdigest()[:32]


def _spelt(caveat: Caveat) -> bytes:
    match caveat:
        case ForSandbox(sandbox=sandbox):
            value: Any = sandbox
        case Until(time=time):
            value = float(time)
        case Times(limit=limit):
            value = limit
        case Only(patterns=patterns):
            value = [list(pattern) for pattern in patterns]
        case _:
            assert_never(caveat)
    text = as_json({_NAMES[type(caveat)]: value}).encode("ascii")
    if _read(text) != caveat:
        raise ValueError(f"not a restriction of a capability: {caveat!r}")
    return text


@lru_cache(maxsize=1024)  # the same few are checked again and again; a caveat is no secret
def _read(text: bytes) -> Caveat | None:
    """The caveat in a text; None for anything that `_spelt` would not have written."""
    from json import loads  # whoever holds a token is past the start

    try:
        found = loads(text)
        ((name, value),) = found.items()
    except (ValueError, AttributeError, RecursionError):
        return None
    made = _made(name, value)
    canonical = made is not None and as_json(found).encode("ascii") == text
    return made if canonical else None


def _made(name: str, value: Any) -> Caveat | None:
    match name, value:
        case "sandbox", str() if value:
            return ForSandbox(value)
        case "until", float() if value - value == 0:
            return Until(value)
        case "times", int() if type(value) is int and 0 < value < 1 << 32:
            return Times(value)
        case "only", list() if value and all(isinstance(each, list) and each and all(isinstance(w, str) for w in each) for each in value):
            return Only(tuple(tuple(each) for each in value))
        case _:
            return None


_NAMES: Mapping[type[Caveat], str] = {ForSandbox: "sandbox", Until: "until", Times: "times", Only: "only"}
