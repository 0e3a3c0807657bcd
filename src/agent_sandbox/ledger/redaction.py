"""Redaction of secrets in recorded words: passwords in options and addresses, tokens of known shapes, private keys.

A command is recorded by its words, and people put secrets there. Text that looks like a secret is replaced before it is written, so it
appears in no file, export or screen made from the ledger. The digest of the action is that of the original words.

Only shapes and names are recognised. A secret that looks like an ordinary word, in a place not called password, token or the like, is not
recognised. Pass secrets through the environment instead: only the names of its variables are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.ledger.event import LONGEST_TEXT, cut

if TYPE_CHECKING:
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


@lru_cache(maxsize=1024)  # words, names and directories recur
def is_suspicious(text: str) -> bool:
    """Return whether a text may contain a secret, or be an option that one follows. Errs only on the careful side."""
    if len(text) == 64 and not text.strip("0123456789abcdef"):
        return False  # a digest: always new to the cache, and it contains no hint
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        return True
    # `-u` only at the start of a word: every path below the home of a user called Ubuntu contains it.
    return "-u" in lowered and any(word.startswith("-u") for word in lowered.split())


def without_secrets(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same facts with everything that looks like a secret replaced."""
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
    """Clean each word by itself, and replace the word after an option that takes a secret."""
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
    """Clean the beginning of a long text, the only part recorded. Reads a little further: a secret may straddle the cut."""
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
