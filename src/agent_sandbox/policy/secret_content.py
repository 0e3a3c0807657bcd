"""Recognise private keys and tokens in the first bytes of a file. Pure: bytes go in, the kind of secret comes out.

A value counts as a secret if it has a known format, or if it looks random and follows a name such as PASSWORD. Placeholders, references
(`${TOKEN}`) and short words do not count, so that a tracked file with the defaults of a development database stays visible.
"""

from __future__ import annotations

from agent_sandbox._fast.functions import cache
from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from re import Pattern

PRIVATE_KEY, A_TOKEN = "a private key", "a token or password"
# Without one of these no pattern can match, and `re` need not be loaded.
_HINTS = (
    *(b"akia", b"asia", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat", b"glpat-", b"xox", b"sk-", b"_live_", b"aiza", b"npm_"),
    *(b"/t/", b"pypi-", b"sg.", b"hf_", b"dop_v1", b"hvs.", b"eyj", b"@", b"auth", b"secret", b"token", b"passw", b"pwd", b"key", b"cred"),
)
_SHAPES = (
    rb"\b(?:AKIA|ASIA)(?![0-9A-Z]{9}EXAMPLE)[0-9A-Z]{16}\b",
    rb"\bgh[pousr]_[A-Za-z0-9]{30,}",
    rb"\bgithub_pat_[A-Za-z0-9_]{30,}",
    rb"\bglpat-[\w-]{18,}",
    rb"\bxox[abeoprs]-[\w-]{10,}",
    rb"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{20,}",
    rb"\b[rs]k_live_[A-Za-z0-9]{16,}",
    rb"\bAIza[\w-]{35}",
    rb"\bnpm_[A-Za-z0-9]{30,}",
    rb"\bpypi-[\w-]{40,}",
    rb"\bSG\.[\w-]{16,}\.[\w-]{16,}",
    rb"\bhf_[A-Za-z0-9]{30,}",
    rb"\bdop_v1_[a-f0-9]{40,}",
    rb"\bhvs\.[\w-]{20,}",
    rb"(?i)\bauthorization:\s*(?:basic|bearer|token)\s+[\w+/=.-]{16,}",
    rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
)
_ASSIGNED = (
    rb"(?im)(?:secret|token|passw(?:or)?d|passwd|pwd|pass|api_?key|access_?key|private_?key|account_?key|signing_?key|secret_?key"
    rb"|encryption_?key|_auth|authtoken|auth_?key|credential)[\w.-]{0,24}[\"']?\s*[:=]\s*[\"']?([^\s\"'#,;<>{}]{12,512})"
)
_IN_URLS = rb"\b[a-z][a-z0-9+.-]{1,15}://[^\s/:@\"'<>]*:([^\s/@\"'<>]{6,256})@"
# The user may be the token, with a password that says nothing (`https://TOKEN:@host`) or without one; conda has it in the path.
_TOKENS_IN_URLS = (
    rb"\b[a-z][a-z0-9+.-]{1,15}://([^\s/:@\"'<>]{16,256})(?::[^\s/@\"'<>]{0,16})?@",
    rb"\bhttps?://[^\s/\"'<>]+/t/((?:[a-z]{2}-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[A-Za-z0-9]{32,128})/",
)
_PLACEHOLDERS = (
    *(b"example", b"changeme", b"change_me", b"change-me", b"your", b"xxxx", b"****", b"dummy", b"placeholder", b"insert", b"replace"),
    *(b"todo", b"sample", b"${", b"$(", b"{{", b"%(", b"env.", b"process.env", b"os.environ", b"secrets.", b"/run/", b"file:", b"12345678"),
)
# A link without a password in it, a call (`hasher.encode_md5(`), an element (`settings["x1"`), or a name in words (`module.name_2`).
_WORDS = rb"[A-Za-z]+[0-9]{0,2}(?:_+[A-Za-z]+[0-9]{0,2})*"
_CODE_OR_LINK = rb"https?://[^@]*$|_*" + _WORDS + rb"(?:\." + _WORDS + rb")*[(\[]|_*" + _WORDS + rb"(?:\." + _WORDS + rb")+$"
_LEAST_BITS = 3.3  # of a character of a value that was drawn at random; words and sentences have less variety over this length
_IN_URL_WORDS = frozenset(
    {b"password", b"postgres", b"secret", b"passwd", b"redis", b"guest", b"admin123", b"rootroot", b"mongodb", b"mypassword"}
)


def private_key_in(content: bytes, *, named_so: bool) -> bool:
    """Return whether a private key is in these bytes. `named_so` says that the file has the extension of a key.

    In any other file, a header such as BEGIN PRIVATE KEY counts only with key data after it, because documents quote headers.
    """
    plain = content.replace(b"\0", b"")  # a key that an editor saved as UTF-16
    if any(mark in plain for mark in (b"PuTTY-User-Key-File-", b"AGE-SECRET-KEY-", b"SSH PRIVATE KEY FILE FORMAT", b"-secret: type0")):
        return True
    if b"PRIVATE KEY" in plain or b"OpenVPN Static key" in plain:
        return (
            named_so
            or _pattern(
                rb"(?:PRIVATE KEY(?: BLOCK)?|OpenVPN Static key V1) ?-----?[\s\S]{0,600}?(?:[A-Za-z0-9+/=]{32}|[0-9a-f]{32})"
            ).search(plain)
            is not None
        )
    if b'"kty"' in plain and b'"d"' in plain:
        return True
    if b"untrusted comment:" in plain and b"secret key" in plain:
        return True
    return named_so and _is_binary_key(content)


def _is_binary_key(content: bytes) -> bool:
    """Return whether the bytes begin like a private key in DER, or like a secret-key packet of OpenPGP."""
    if content[:1] in (b"\x94", b"\x95", b"\x96", b"\xc5"):
        return True
    # SEQUENCE, its length, then the version: an INTEGER of at most 3. A certificate and a public key go on with a SEQUENCE.
    start = {0x81: 3, 0x82: 4}.get(content[1], 2) if len(content) > 8 and content[:1] == b"\x30" else 0
    return bool(start) and content[start : start + 2] == b"\x02\x01" and content[start + 2] <= 3 and start + 3 < len(content)


def is_public(content: bytes) -> bool:
    """Return whether the content of a file named like a key is public (such as a certificate or a public key) or empty."""
    marks = (b"BEGIN CERTIFICATE", b"PUBLIC KEY", b"BEGIN X509 CRL", b"BEGIN DH PARAMETERS", b"BEGIN EC PARAMETERS", b"BEGIN PGP SIGNATURE")
    return any(mark in content for mark in marks) or content.startswith((b"PK\x03\x04", b"ssh-", b"ecdsa-")) or not content.strip()


def token_in(content: bytes) -> bool:
    """Return whether a token, or a password that looks random, is in these bytes."""
    lowered = content.lower()
    if not any(hint in lowered for hint in _HINTS):
        return False
    if any(_pattern(shape).search(content) for shape in _SHAPES):
        return True
    if any(looks_random(match[1]) for match in _pattern(_ASSIGNED).finditer(content)):
        return True
    if any(looks_random(match[1]) for shape in _TOKENS_IN_URLS for match in _pattern(shape).finditer(content)):
        return True
    values = (match[1].lower() for match in _pattern(_IN_URLS).finditer(content))
    return any(value not in _IN_URL_WORDS and not _is_placeholder(value) for value in values)


def secret_in(content: bytes, *, named_so: bool = False, tokens: bool = True) -> str:
    """Return the kind of secret in these bytes; empty if none is recognised. Without `tokens`, only private keys count.

    `named_so` says that the file has the extension of a key.
    """
    if private_key_in(content, named_so=named_so):
        return PRIVATE_KEY
    return A_TOKEN if tokens and token_in(content) else ""


def _is_placeholder(lowered: bytes) -> bool:
    return any(word in lowered for word in _PLACEHOLDERS) or lowered.startswith((b"$", b"%", b"<", b"/", b"./", b"~"))


def looks_random(value: bytes) -> bool:
    """Return whether a value looks as if it was drawn at random: letters and digits, and no placeholder, code or link."""
    if _is_placeholder(value.lower()) or len(set(value)) < 8 or _pattern(_CODE_OR_LINK).match(value):
        return False
    digits, letters = sum(48 <= each <= 57 for each in value), sum(chr(each).isalpha() for each in value)
    if not digits or not letters:
        return False
    from math import log2  # few files come so far

    counts = [value.count(each) for each in set(value)]
    return -sum(count / len(value) * log2(count / len(value)) for count in counts) >= min(_LEAST_BITS, log2(len(value)) * 0.85)


@cache
def _pattern(source: bytes) -> Pattern[bytes]:
    import re  # slow to load, and most files hold no hint

    return re.compile(source)
