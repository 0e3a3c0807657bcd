"""Encode entries as lines, and decode them.

Each event is exactly one line, whatever it contains. Decoding returns the same value, with sequences as lists.

A line is JSON in ASCII, so control characters, newlines, escape sequences and bidirectional marks cannot affect a terminal that prints it.
The last two fields are the SHA-256 of the line without them, over the exact bytes stored, and the ledger's seal on that hash. Anyone can
check the hash; only holders of the key can make the seal. A value that JSON cannot carry is wrapped in an object with one `$` key. Names of
facts never start with `$`, so the wrapping cannot be forged. Long values are cut, keeping their length and digest.

A command is recorded by its words, and people put secrets there: passwords in options and addresses, tokens of known shapes, private keys.
Text that looks like a secret is replaced before it is written, so it appears in no file, export or screen made from the ledger. The digest
of an action is computed from the original words.

Only shapes and names are recognised. A secret that looks like an ordinary word, in a place not called password, token or the like, is not
recognised. Pass secrets through the environment instead: only the names of its variables are recorded.
"""

from __future__ import annotations

import math
import sys
from _collections_abc import Mapping, Sequence  # and not `collections.abc`, which loads `collections`
from itertools import pairwise

from agent_sandbox._fast.encoding import Seal, as_json, quoted, sha256
from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.ledger.event import KINDS, LONGEST_TEXT, Cut, Entry, Event, cut, fits

if TYPE_CHECKING:
    from hashlib import _Hash as HASH
    from re import Match, Pattern
    from typing import Any

REMOVED = "[secret removed]"
_BEYOND = 1024  # characters; no token of a known shape is longer

# Every text that a pattern below matches contains one of these, in lower case. Most texts contain none.
_HINTS = (
    *("pass", "pwd", "secret", "token", "credential", "cookie", "bearer", "basic ", "auth", "key", "-user", "://"),
    *("sk-", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "pat_", "glpat", "xox", "akia", "asia", "aiza", "ya29", "npm_", "pypi-", "hf_", "eyj"),
    *("sg.", "cap1.", "sig=", "signature", "pw=", "hooks", "mysql", "mariadb", "mongo", "redis-cli", "openssl", "docker", "podman"),
)
_NAME = r"(?:passw(?:or)?d|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|cookie)[\w.-]{0,40}"
# The text before a secret is kept; the group `secret` is replaced. Repetitions are bounded: the text may be crafted to be slow.
_IN_TEXT = (
    r"(?P<secret>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z))",
    r"://[^\s/:@]{0,200}:(?P<secret>[^\s/@]{1,500})@",
    r"(?i:\b(?:bearer|basic)\s{1,3})(?P<secret>[\w.~+/=-]{8,})",
    r"https?://(?P<secret>[^\s/:@]{1,500})@",
    r"(?i:\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[a-z]{2,12}\s{1,3})?)(?P<secret>[^\s\"']{4,})",
    r"(?i:\bx-[\w-]{0,40}(?:auth|key|token|secret)[\w-]{0,40}\s{0,3}:\s{0,3})(?P<secret>[^\s\"']+)",
    rf"(?i:{_NAME}[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?)(?P<secret>[^\s\"'&;,]+)",
    r"(?i:(?:\b|_)(?:pass|pw|account_?key|shared_?access_?key|auth)[\"']?[=:]\s{0,3}[\"']?)(?P<secret>[^\s\"'&;,]+)",
    r"(?i:[?&](?:key|sig|signature|code)=)(?P<secret>[^\s\"'&#]+)",
    r"(?i:\b(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)(?P<secret>[^\s\"']+)",
    # For a command line in one word: options followed by their value.
    rf"(?i:(?:^|\s)(?:--?[\w.-]{{0,40}}?{_NAME}|--auth|--pass|--oauth2-bearer)\s{{1,3}}[\"']?)(?P<secret>[^\s\"'-][^\s\"']*)",
    r"(?:^|\s)(?:-u|--(?:proxy-)?user)[\s=]{0,3}[\"']?[^\s:/@\"']{1,100}:(?P<secret>[^\s\"']+)",
    r"\b(?:sshpass|mysql\w{0,10}|mariadb\w{0,10}|mongo\w{0,10}|(?:docker|podman)\s+login)\b[^\n;|&]{0,200}?\s-p\s?[\"']?(?P<secret>[^\s\"'-][^\s\"']*)",
    r"\b(?:redis-cli\b[^\n;|&]{0,200}?\s-a|openssl\b[^\n;|&]{0,200}?\s-k)\s{1,3}[\"']?(?P<secret>[^\s\"'-][^\s\"']*)",
    r"(?P<secret>\b(?:sk-[\w-]{16,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}|npm_\w{30,}|pypi-[\w-]{16,}|hf_\w{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|dckr_pat_[\w-]{20,}|shpat_[0-9a-f]{32}|cap1\.[\w-]{16,}(?:\.[\w-]{1,4000}){1,40}))",
)
# Options whose value is the next word.
_BEFORE = rf"(?i:--?[\w.-]{{0,40}}?{_NAME}|--auth|--pass|--oauth2-bearer|[\w/:.-]{{0,80}}(?:_authtoken|_password|secret_access_key))"
_USER = ("-u", "--user", "--proxy-user")
# Programs with a short option for a secret, in the next word or in the same one.
_SHORT = {
    **dict.fromkeys(("sshpass", "mysql", "mysqldump", "mysqladmin", "mariadb", "mongo", "mongosh"), "-p"),
    **{"redis-cli": "-a", "openssl": "-k"},
}

_compiled: list[Any] = []
LONGEST_FIELD = 64 << 10  # bytes of one event field; above it, the field's JSON is kept as one cut text

_SEQUENCE_FIELD, _HASH_FIELD, _SEAL_FIELD, _END = b'{"seq":', b',"$hash":"', b'","$seal":"', b'"}'
_SEAL_BYTES = 16  # truncated from the 32 of HMAC-SHA256, as its specification permits
# Offsets of the parts at the end of a line, counted from its end.
_SEAL_AT = -len(_END) - 2 * _SEAL_BYTES
_HASH_AT = _SEAL_AT - len(_SEAL_FIELD) - 64
_TAIL_AT = _HASH_AT - len(_HASH_FIELD)
_HEXADECIMAL = frozenset(b"0123456789abcdef")
_BIGGEST = 1 << 63
_MOST_DIGITS = 18  # a number of so many digits is certainly smaller than _BIGGEST


@lru_cache(maxsize=1024)  # words, names and directories recur
def is_suspicious(text: str) -> bool:
    """Return whether a text may contain a secret, or may be an option whose value is a secret. May be True for a harmless text."""
    if len(text) == 64 and not text.strip("0123456789abcdef"):
        return False  # a digest: always new to the cache, and it contains no hint
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        return True
    # `-u` only at the start of a word: every path below the home of a user called Ubuntu contains it.
    return "-u" in lowered and any(word.startswith("-u") for word in lowered.split())


def without_secrets(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the facts in which everything that looks like a secret is replaced."""
    return {name: _clean(value) for name, value in facts.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        if not is_suspicious(value):
            return value
        return _clean_text(value) if len(value) <= LONGEST_TEXT else cut(value, _clean_start(value))
    if isinstance(value, bytes):
        text = value[: LONGEST_TEXT + _BEYOND].decode("utf-8", "surrogateescape")
        if not is_suspicious(text):
            return value
        cleaned = _clean_text(text)
        return value if cleaned == text else cut(value, cleaned[:LONGEST_TEXT])
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, Sequence):
        return _clean_words(value)
    return value


def _clean_words(words: Sequence[Any]) -> list[Any]:
    """Replace the secrets in each word of a command, and each word after an option that takes a secret."""
    cleaned: list[Any] = []
    previous, option = "", _short_option(words)
    for word in words:
        if not isinstance(word, str):
            cleaned.append(_clean(word))
            previous = ""
            continue
        is_value = is_suspicious(previous) and not word.startswith("-") and _patterns()[1].fullmatch(previous)
        if is_value or (option and previous == option):
            cleaned.append(REMOVED)
        elif option and word.startswith(option) and word != option:
            cleaned.append(f"{option}{REMOVED}")
        elif previous in _USER and ":" in word:
            cleaned.append(f"{word.partition(':')[0]}:{REMOVED}")
        else:
            cleaned.append(_clean(word))
        previous = word
    return cleaned


def _short_option(words: Sequence[Any]) -> str:
    program = words[0].rpartition("/")[2] if words and isinstance(words[0], str) else ""
    return "-p" if program in ("docker", "podman") and "login" in words else _SHORT.get(program, "")


def _clean_start(text: str) -> str:
    """Replace the secrets in the beginning of a long text, the part that is recorded. Reads a little further: a secret may straddle it."""
    return _clean_text(text[: LONGEST_TEXT + _BEYOND])[:LONGEST_TEXT]


def _clean_text(text: str) -> str:
    for pattern in _patterns()[0]:
        text = pattern.sub(_replaced, text)
    return text


def _replaced(match: Match[str]) -> str:
    start, end = match.span("secret")
    return match.string[match.start() : start] + REMOVED + match.string[end : match.end()]


def _patterns() -> tuple[list[Pattern[str]], Pattern[str]]:
    if not _compiled:
        import re  # slow to load, and nearly no entry needs it

        _compiled[:] = [[re.compile(pattern) for pattern in _IN_TEXT], re.compile(_BEFORE)]
    return _compiled[0], _compiled[1]


class UnknownForm(ValueError):
    """A complete line whose hash is valid has a form that this version does not know."""


def encode(sequence: int, time: float, previous: str, event: Event, seal: Seal) -> tuple[bytes, str, str]:
    """Return the line of an entry, with its newline, and the entry's hash and seal. Raises as `spell` does."""
    return put_in_place(sequence, time, previous, spell(event), seal)


def spell(event: Event) -> str:
    """Return the part of an event's line that does not depend on its place in the chain: the kind and the facts.

    Raises `ValueError` for facts of an unknown type or name: our mistake, not the guest's.
    """
    facts: Mapping[str, Any] = vars(event)
    try:
        body = _plainly_spelt(facts)
    except _NotPlain:
        facts = without_secrets(facts)
        body = as_json({name: wrapped(value) for name, value in facts.items()})
    if len(body) > LONGEST_FIELD:
        body = as_json({name: _bounded(wrapped(value)) for name, value in facts.items()})
    if "\x7f" in body:  # DEL is the one control character that JSON does not escape
        body = body.replace("\x7f", "\\u007f")
    return f'"kind":"{event.kind}","event":{body}'


def put_in_place(sequence: int, time: float, previous: str, spelt: str, seal: Seal) -> tuple[bytes, str, str]:
    """Return the line of an entry at its place in the chain, with its newline, and the entry's hash and seal."""
    text = f'{{"seq":{sequence},"time":{time!r},"prev":"{previous}",{spelt}'.encode("ascii")
    digest = _hashed(text)
    digest.update(b"}")
    name, mark = digest.hexdigest(), sealed(digest.digest(), seal)
    return text + _ending(name, mark), name, mark


def _hashed(data: bytes) -> HASH:
    openssl = sys.modules.get("_hashlib")  # already loaded: OpenSSL's is faster
    return openssl.openssl_sha256(data) if openssl is not None else sha256(data)


def sealed(digest: bytes, seal: Seal) -> str:
    """Return the seal on a hash, in hexadecimal."""
    return seal.on(digest)[:_SEAL_BYTES].hex()


def decode(line: bytes) -> Entry:
    """Return the entry in a line, which is given without its newline. The seal is not checked.

    Raises `ValueError` if the line is not exactly what `encode` wrote, `UnknownForm` if another version wrote it.
    """
    digest, mark = _checked(line)
    from json import loads  # decoding is not on the path of a run

    try:
        raw = loads(line)
        sequence, time, previous = raw["seq"], raw["time"], raw["prev"]
        event = KINDS[raw["kind"]](**_unwrapped(raw["event"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise UnknownForm(f"not an entry of this version: {type(error).__name__}") from None
    # The hash is no secret: anyone can write a line with a valid hash and any content.
    timed = (type(time) is float and math.isfinite(time)) or (type(time) is int and abs(time) < _BIGGEST)
    numbered = type(sequence) is int and 0 < sequence < _BIGGEST and timed
    if not (numbered and type(previous) is str and fits(event)):
        raise UnknownForm("not an entry of this version: its fields hold something else")
    return Entry(sequence, time, previous, digest, event, mark)


def place(line: bytes) -> tuple[int, str, str]:
    """Return the number, hash and seal of the entry in a line: all that the next entry needs. Raises `ValueError` as `decode` does."""
    digest, mark = _checked(line)
    number = line.removeprefix(_SEQUENCE_FIELD).partition(b",")[0]
    if not (line.startswith(_SEQUENCE_FIELD) and number.isdigit() and len(number) <= _MOST_DIGITS):
        raise ValueError("not an entry of this version: it has no sequence number")
    return int(number), digest, mark


def last_place(tail: bytes, seal: Seal) -> tuple[int, str, str] | None:
    """Return number, hash and seal of the entry in the last line of these bytes, if it is whole and sealed with this key; else None.

    None says nothing about the line, which may begin before these bytes: `place` tells what is wrong. This checks as much, and faster.
    """
    start = tail.rfind(b"\n", 0, -1) + 1
    number = tail[start + len(_SEQUENCE_FIELD) : start + len(_SEQUENCE_FIELD) + _MOST_DIGITS + 1].partition(b",")[0]
    if not (start and tail.startswith(_SEQUENCE_FIELD, start) and number.isdigit() and len(number) <= _MOST_DIGITS):
        return None
    digest = _hashed(tail[start : _TAIL_AT - 1])
    digest.update(b"}")
    name, mark = digest.hexdigest(), sealed(digest.digest(), seal)
    return (int(number), name, mark) if tail.endswith(_ending(name, mark)) else None


def _ending(name: str, mark: str) -> bytes:
    return f',"$hash":"{name}","$seal":"{mark}"}}\n'.encode("ascii")


def looks_whole(line: bytes) -> bool:
    """Return whether a line ends like an entry. A torn write never does; a line that was changed later may."""
    return (
        len(line) >= -_TAIL_AT
        and line.endswith(_END)
        and line[_TAIL_AT:_HASH_AT] == _HASH_FIELD
        and line[_HASH_AT + 64 : _SEAL_AT] == _SEAL_FIELD
        and _HEXADECIMAL.issuperset(line[_HASH_AT : _HASH_AT + 64] + line[_SEAL_AT : -len(_END)])
    )


def _checked(line: bytes) -> tuple[str, str]:
    if not looks_whole(line):
        raise ValueError("not an entry")
    digest = line[_HASH_AT : _HASH_AT + 64].decode()
    if _hashed(line[:_TAIL_AT] + b"}").hexdigest() != digest:
        raise ValueError("the hash does not fit")
    return digest, line[_SEAL_AT : -len(_END)].decode()


class _NotPlain(Exception):
    """JSON cannot carry a value unchanged, or something in it must be wrapped, cut or replaced."""


def _plainly_spelt(value: Any) -> str:
    """Return a value as JSON if nothing in it has to be wrapped, cut or replaced, as in nearly every event; else raise `_NotPlain`.

    One pass checks and spells, with plain loops for speed: every entry passes here.
    """
    kind = type(value)
    if kind is dict:
        fields: list[str] = []
        for name, item in value.items():
            if type(name) is not str:  # before the cache, in which 1, 1.0 and True are one key
                raise _NotPlain
            kind = type(item)
            if kind is str:
                fields.append(_plain_name(name) + _plain_text(item))
            elif kind is int and -_BIGGEST < item < _BIGGEST:
                fields.append(_plain_name(name) + repr(item))
            else:
                fields.append(_plain_name(name) + _plainly_spelt(item))
        return f"{{{','.join(fields)}}}"
    if kind is list or kind is tuple:
        return f"[{','.join([_plain_text(item) if type(item) is str else _plainly_spelt(item) for item in value])}]"
    if kind is str:
        return _plain_text(value)
    if kind is bool:
        return "true" if value else "false"
    if value is None:
        return "null"
    if (kind is int and -_BIGGEST < value < _BIGGEST) or (kind is float and abs(value) < _BIGGEST):
        return repr(value)
    raise _NotPlain


@lru_cache(maxsize=1024)  # words, names and directories recur
def _plain_text(text: str) -> str:
    if len(text) > LONGEST_TEXT or not text.isascii() or is_suspicious(text):
        raise _NotPlain
    return quoted(text)


@lru_cache(maxsize=256)  # there are a few dozen names
def _plain_name(text: str) -> str:
    if not _is_name(text):
        raise _NotPlain
    return f"{quoted(text)}:"


def _bounded(value: Any) -> Any:
    text = as_json(value)
    return value if len(text) <= LONGEST_FIELD else wrapped(cut(text))


def wrapped(value: object) -> Any:
    """Return a fact as JSON types, from which it can be decoded again."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return wrapped(cut(value))
        # JSON decodes two escaped surrogates as the single character that they are in UTF-16: not the text that was written.
        return {"$text": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogate_pair(value) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()} if len(value) <= LONGEST_TEXT else wrapped(cut(value))
    if isinstance(value, Cut):
        return {"$cut": {"start": wrapped(value.start[:LONGEST_TEXT]), "length": value.length, "sha256": value.sha256}}
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str) or not _is_name(name)]:
            raise ValueError(f"not a name of a fact: {odd[0]!r}")
        return {name: wrapped(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [wrapped(item) for item in value]
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) < _BIGGEST:
        return value
    raise ValueError(f"not a fact: {value!r:.80}")


def _is_name(text: str) -> bool:
    return text.isascii() and text.replace("-", "_").isidentifier() and not text.startswith("-")


def _has_surrogate_pair(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= one <= "\udbff" and "\udc00" <= next <= "\udfff" for one, next in pairwise(text))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$text": text}:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case {"$bytes": text}:
            return bytes.fromhex(text)
        case {"$cut": {"start": start, "length": int(length), "sha256": str(sha256)}}:
            return Cut(_text(_unwrapped(start)), length, sha256)
    if any(name.startswith("$") for name in value):
        raise TypeError("wrapped in a way that is not known")
    return {name: _unwrapped(item) for name, item in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
