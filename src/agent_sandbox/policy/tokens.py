"""Capability tokens: they allow certain actions in one sandbox, for a time, and can only be narrowed.

A token is an identity, a list of caveats, and a signature: HMAC over the identity with a key that only the supervisor has, then over each
caveat with the previous signature as key. The holder of a token can add a caveat without asking anyone, and pass on the narrower token.
Nobody can remove a caveat: that would need the signature from before it was added. Every caveat restricts, so more caveats never allow
more, and one that is not understood allows nothing.

Pure: whether a token is genuine, and what it says about an action, follows from the arguments. `engine.grants` keeps count, and checks that
a token was not revoked or used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

from agent_sandbox._fast.encoding import Seal, as_json, same, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action, CallTool, Connect, OpenNetwork, Promote, RunCode, RunCommand, Undo, UseFile
from agent_sandbox.policy.hosts import covers as covers_host
from agent_sandbox.policy.network import WEB_PORTS, canonical_entry, split_port

if TYPE_CHECKING:
    from typing import Any

VERSION = b"capability 1\n"
MOST_CAVEATS, LONGEST = 32, 16 << 10  # caveats of a token, and their bytes: each costs time to check, and nobody needs more
NETWORK = "network"  # the first word of a pattern of hosts
_IDENTITY_BYTES = 16
_LINE_READERS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh")
_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=@%+,- "  # no character here is special to a shell

Pattern = tuple[str, ...]


@dataclass(frozen=True)
class ForSandbox:
    """A caveat: only in this sandbox. Every token has it from the start, so a stolen token is useless elsewhere."""

    sandbox: str


@dataclass(frozen=True)
class Until:
    """A caveat: only before this time, in seconds since the epoch."""

    time: float


@dataclass(frozen=True)
class Times:
    """A caveat: only this many uses. All tokens derived from the token that first had the caveat share one count."""

    limit: int


@dataclass(frozen=True)
class Only:
    """A caveat: only actions that one of these patterns covers, word by word: `run git log **`, `promote /home/u/project`, `run make *`.

    A word that ends with `*` covers every word with that prefix. `**` in last place covers any number of words, including none. Nothing
    else is special, but hosts: `network *.example.com GET,HEAD` covers requests with these methods to names below `example.com`, at ports
    80 and 443, and `network db.example.com:5432` everything with that host at that port.
    """

    patterns: tuple[Pattern, ...]


Caveat = ForSandbox | Until | Times | Only


@dataclass(frozen=True)
class Token:
    """A capability token. It is a secret: anyone who has it may use it in its sandbox."""

    identity: bytes
    caveats: tuple[bytes, ...]  # encoded, as they are signed
    signature: bytes

    def attenuate(self, *caveats: Caveat) -> Token:
        """Return a narrower token to pass on: `token.attenuate(Times(1), Only((("run", "git", "push"),)))`."""
        return attenuate(self, *caveats)

    def __str__(self) -> str:
        return spell(self)

    def __repr__(self) -> str:
        return f"Token(identity={self.identity.hex()!r}, {len(self.caveats)} caveats)"


@dataclass(frozen=True)
class Genuine:
    """The contents of a token with a valid signature.

    `names` are the names of the token and of the tokens it was derived from; each can be revoked by name. `counts` are the limits on its
    use, each with the name it is counted under. `until` is the earliest expiry.
    """

    names: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    until: float


@dataclass(frozen=True)
class RefusedToken:
    """The refusal of a token, with the reason."""

    why: str


def mint(key: Seal, identity: bytes, caveats: tuple[Caveat, ...]) -> Token:
    """Make a new token. `identity` is 16 random bytes, never used before.

    Raises `ValueError` if no caveat names the sandbox, or if a caveat is invalid.
    """
    if len(identity) != _IDENTITY_BYTES or not any(isinstance(caveat, ForSandbox) for caveat in caveats):
        raise ValueError("a capability has an identity of 16 bytes and names its sandbox")
    return attenuate(Token(identity, (), key.on(VERSION + identity)), *caveats)


def attenuate(token: Token, *caveats: Caveat) -> Token:
    """Return a narrower token, with these caveats added. Needs no key. Raises ValueError if one is invalid, or if there are too many."""
    for caveat in caveats:
        text = _spelt(caveat)
        token = Token(token.identity, (*token.caveats, text), Seal(token.signature).on(text))
    if len(token.caveats) > MOST_CAVEATS or sum(map(len, token.caveats)) > LONGEST:
        raise ValueError("too many caveats for one capability")
    return token


def check(key: Seal, token: Token, action: Action, *, sandbox: str, now: float) -> Genuine | RefusedToken:
    """Check whether the token allows an action in this sandbox at this time. Anything not understood is refused; nothing raises."""
    result = genuine(key, token)
    if isinstance(result, RefusedToken):
        return result
    spellings = spellings_of(action)
    for text in token.caveats:
        if refusal := _objection(_read(text), spellings, sandbox, now):
            return RefusedToken(refusal)
    return result


def _objection(caveat: Caveat | None, spellings: tuple[Pattern, ...], sandbox: str, now: float) -> str:
    """Return the reason why this caveat refuses the action; empty if it allows it."""
    if isinstance(caveat, ForSandbox):
        return "" if caveat.sandbox == sandbox else "the capability is for another sandbox"
    if isinstance(caveat, Until):
        return "" if now < caveat.time else "the capability has expired"
    if isinstance(caveat, Only):
        covered = any(covers(pattern, words) for pattern in caveat.patterns for words in spellings)
        return "" if covered else f"the capability does not cover {' '.join(spellings[0][:4])!r}"
    # `engine.grants` counts uses.
    return "" if isinstance(caveat, Times) else "the capability has a restriction that is not understood"


def speaks_of(key: Seal, token: Token, action: Action, *, sandbox: str) -> bool:
    """Return whether a genuine token of this sandbox covers an action, whether or not it still counts."""
    if isinstance(genuine(key, token), RefusedToken):
        return False
    spellings = spellings_of(action)
    caveats = [caveat for caveat in caveats_of(token) if not isinstance(caveat, Until)]
    return not any(_objection(caveat, spellings, sandbox, 0.0) for caveat in caveats)


def genuine(key: Seal, token: Token) -> Genuine | RefusedToken:
    """Check that a token was made with this key and has exactly the caveats that were signed. Compares in constant time."""
    if len(token.caveats) > MOST_CAVEATS or len(token.identity) != _IDENTITY_BYTES:
        return RefusedToken("this is no capability of ours")
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
        return RefusedToken("this is no capability of ours")
    return Genuine(tuple(names), tuple(counts), until)


def words_of(action: Action) -> Pattern:
    """Return an action as words, to be compared with patterns."""
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
        case UseFile():
            return ("file", action.operation, action.path)
        case OpenNetwork():
            # Not `network`: what a proposal opened outlives a revoked capability, for as long as the first word after it says.
            return ("propose", f"{action.seconds:g}", *action.hosts, *action.requests)
        case Connect():
            return ("send", action.data, action.target, action.method) if action.data else (NETWORK, action.target, action.method)
        case _:
            assert_never(action)


def spellings_of(action: Action) -> tuple[Pattern, ...]:
    """Return an action as words, in all equivalent forms, simplest first: `git push` comes before `bash -c "git push"`.

    Only a command line of plain words for the machine's own shell has a second form.
    """
    words = words_of(action)
    if isinstance(action, RunCommand) and len(action.argv) == 3 and action.argv[0] in _LINE_READERS and action.argv[1] == "-c":
        line = action.argv[2]
        if line.isascii() and not line.strip(_PLAIN) and line.strip() and "=" not in line.split()[0] and "\n" not in line:
            return ("run", *line.split()), words
    return (words,)


def covers(pattern: Pattern, words: Pattern) -> bool:
    """Return whether a pattern covers the words of an action."""
    if pattern[:1] == words[:1] == (NETWORK,):
        return len(words) == 3 and _covers_host(pattern[1:], *words[1:])
    if pattern and pattern[-1] == "**":
        pattern, words = pattern[:-1], words[: len(pattern) - 1]
    if len(pattern) != len(words):
        return False
    return all(word.startswith(each[:-1]) if each.endswith("*") else word == each for each, word in zip(pattern, words, strict=True))


def _covers_host(pattern: Pattern, target: str, method: str) -> bool:
    """Return whether a host, or a host and methods, cover a request; without a method, a connection whose bytes are not read."""
    try:
        entry = canonical_entry(pattern[0])
    except (PolicyError, IndexError):
        return False
    (host, port), (name, at) = split_port(entry), split_port(target)
    if len(pattern) > 2 or not covers_host((host,), name) or not (at == port if port else at in WEB_PORTS):
        return False
    return len(pattern) == 1 or method in pattern[1].split(",")


def hosts_of(token: Token) -> tuple[str, ...]:
    """Return the hosts, with or without a port, that the patterns of a token name. Its other caveats may allow less."""
    only = [caveat.patterns for caveat in caveats_of(token) if isinstance(caveat, Only)]
    hosts = []
    for pattern in only[0] if only else ():
        with suppress(PolicyError):
            hosts += [canonical_entry(pattern[1])] if pattern[0] == NETWORK and len(pattern) in (2, 3) else []
    return tuple(hosts)


def spell(token: Token) -> str:
    """Return the token as text, for an environment variable or a file."""
    from base64 import urlsafe_b64encode  # only needed to pass a token on

    parts = (token.identity, *token.caveats, token.signature)
    return "cap1." + ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def parse(text: str) -> Token | None:
    """Parse a token; None if the text is not exactly what `spell` returns for a token."""
    from base64 import urlsafe_b64decode  # only needed to take a token

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
    """Return the caveats of a token; None for a caveat not understood. The signature is not checked: anyone may have written them."""
    return tuple(_read(text) for text in token.caveats)


def _name(signature: bytes) -> str:
    """Return the public name of a token, made from its signature. The signature cannot be derived from the name."""
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


@lru_cache(maxsize=1024)  # the same few recur; a caveat is no secret
def _read(text: bytes) -> Caveat | None:
    """Parse a caveat; None for anything that `_spelt` would not have written."""
    from json import loads  # tokens are used after start-up

    try:
        document = loads(text)
        ((name, value),) = document.items()
    except (ValueError, AttributeError, RecursionError):
        return None
    caveat = _caveat_of(name, value)
    canonical = caveat is not None and as_json(document).encode("ascii") == text
    return caveat if canonical else None


def _caveat_of(name: str, value: Any) -> Caveat | None:
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
