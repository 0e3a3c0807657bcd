"""Tests of a value that a rule's pattern has matched: check digits, plausible ranges, and whether a value can be a secret at all.

A pattern finds what looks right; a check tells it from the many things that only look so. Every check takes the value as text and returns
whether it holds. Checks are pure, and linear in the length of the value: whoever sends data chooses the values, so that patterns run in RE2
alone, which never tries a second way through a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from ipaddress import ip_address
from itertools import groupby, pairwise
from typing import Any

# In a class of characters, what Python calls letters and digits among those of Latin-1, as which values are read.
_LETTERS = r"\w" + "".join(f"\\x{{{code:x}}}" for code in range(0x80, 0x100) if chr(code).isalnum())


class _Pattern:
    """A pattern for RE2, compiled when it is first used."""

    def __init__(self, expression: str) -> None:
        self._expression = expression

    @cached_property
    def _compiled(self) -> Any:
        import re2  # the rules say what to install where it is missing

        return re2.compile(self._expression.replace(r"\w", _LETTERS))

    def fits(self, text: str) -> Any:
        """Return the match of the whole text, or None."""
        return self._compiled.fullmatch(text)

    def begins(self, text: str) -> bool:
        """Return whether the text begins with a match."""
        return self._compiled.match(text) is not None

    def occurs(self, text: str) -> bool:
        """Return whether there is a match anywhere."""
        return self._compiled.search(text) is not None

    def before(self, text: str) -> str:
        """Return the text up to the first match, or all of it."""
        found = self._compiled.search(text)
        return text if found is None else text[: found.start()]


# The length of an IBAN in each country that issues them (the IBAN registry).
_IBAN_LENGTHS = {
    **dict.fromkeys(("NO",), 15),
    **dict.fromkeys(("BE",), 16),
    **dict.fromkeys(("DK", "FI", "FO", "GL", "NL", "SD", "FK"), 18),
    **dict.fromkeys(("MK", "SI"), 19),
    **dict.fromkeys(("AT", "BA", "EE", "KZ", "LT", "LU", "XK", "MN"), 20),
    **dict.fromkeys(("HR", "LI", "LV", "CH"), 21),
    **dict.fromkeys(("BG", "BH", "CR", "DE", "GB", "GE", "IE", "ME", "RS", "VA"), 22),
    **dict.fromkeys(("AE", "GI", "IL", "IQ", "TL", "OM", "SO"), 23),
    **dict.fromkeys(("AD", "CZ", "ES", "MD", "PK", "RO", "SA", "SE", "SK", "TN", "VG", "DZ"), 24),
    **dict.fromkeys(("LY", "PT", "ST"), 25),
    **dict.fromkeys(("IS", "TR"), 26),
    **dict.fromkeys(("BI", "DJ", "FR", "GR", "IT", "MC", "MR", "SM"), 27),
    **dict.fromkeys(("AL", "AZ", "BY", "CY", "DO", "GT", "HU", "LB", "NI", "PL", "SV"), 28),
    **dict.fromkeys(("BR", "EG", "PS", "QA", "UA"), 29),
    **dict.fromkeys(("JO", "KW", "MU", "YE"), 30),
    **dict.fromkeys(("MT", "SC"), 31),
    **dict.fromkeys(("LC",), 32),
    **dict.fromkeys(("RU",), 33),
}
# The countries whose numbers of accounts have no letters.
# fmt: off
_IBAN_DIGITS = frozenset((
    "AE", "AT", "BA", "BE", "CZ", "DE", "DK", "EE", "ES", "FI", "FO", "GL", "HR", "HU", "IL", "IS", "LT", "ME", "NO", "PL", "PT", "RS",
    "SE", "SI", "SK", "TL", "TN", "XK",
))
# fmt: on
# The first digits of cards with their lengths, by the lists that the networks publish.
_CARDS = _Pattern(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|3(?:0[0-59]|[689]\d)\d{11,16}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12,15}|62\d{14,17}|35\d{14,17}|(?:2131|1800)\d{11}|(?:5[0678]|6[07]|6304|6390)\d{8,17}|220[0-4]\d{12,15}"
)
# fmt: off
_EXAMPLES = frozenset((
    "password", "passwd", "pass", "secret", "token", "key", "apikey", "changeme", "changeit", "none", "null", "nil", "true", "false",
    "undefined", "example", "test", "testing", "default", "required", "optional", "string", "text", "hidden", "redacted", "removed",
    "todo", "tbd", "fixme", "dummy", "placeholder", "yes", "no", "on", "off", "env", "prompt", "ask", "stdin", "bytes", "str", "int",
    "float", "bool", "object", "any", "unknown", "empty", "invalid", "missing", "basic", "bearer", "digest", "negotiate", "public",
    "private",
))
# fmt: on
_PLACEHOLDER = _Pattern(
    r"(?i)^(?:[x*.\-_#?•0:]{3,}|<[^>]*>|\[[^\]]*\]|\{\{?.*\}?\}|\$[({]?[\w.]+.*|%\(?[\w]+.*|@[\w]+@|your[-_ ]?.*"
    r"|my[-_ ]?(?:secret|token|key|password).*|(?:enter|insert|put|add|replace|use|see|set)[-_ ].*"
    r"|.*(?:[-_ .]|^)(?:here|goes|placeholder|redacted|xxx+)(?:[-_ .]|$).*|\.\.\..*|#\{.*|&[a-z]+;)$"
)
# Texts that are filled in later, and lines of the user database, which hold no password.
_FORMATTED = _Pattern(r":[x*]:\d+:\d+:|\{[0-9a-z_.!:]{0,24}\}|\$\{|%\([\w]+\)s")
_CODE = _Pattern(r"^[A-Za-z_$][\w$]*(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*|\[[^\]]*\]|\([^)]*\)?)*[.(\[]?$")
_WORDS = _Pattern(r"^[A-Za-z]{1,30}(?:[-_. ][A-Za-z]{1,30})*$")
# Versions and ranges of them, colours, numbers of programs, the names of their constants, and of their fields for secrets.
_LITERAL = _Pattern(
    r"^(?:(?:[~^v]|[<>=]=?)?\d+(?:\.(?:\d+|[x*]))+(?:[-+.][0-9A-Za-z.]{0,24})?|#[0-9A-Fa-f]{3,8}|0x[0-9A-Fa-f]{1,8}|\d+[uUlL]{1,3}"
    r"|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|_?[a-z]+(?:_[a-z0-9]+){2,}|[A-Za-z]+(?:Password|Passwd|Secret|Token|Key))$"
)
_BREAK = _Pattern(r"\\+[nrt]")
_ESCAPES = _Pattern(r"^[\"'`\\]*(?:\\+u[0-9A-Fa-f]{4})+[\"'`\\]*$")  # of one character, such as an emoji
_ARGUMENT = _Pattern(r"^[A-Za-z_][\w]*[,;)]$")  # a variable of a program; a value that ends so has quotes
_PATH = _Pattern(
    r"^(?:~|\.{0,2}/|[A-Za-z]:\\|[A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*$)|^https?://|\.(?:pem|key|crt|json|ya?ml|toml|txt|py|js|ts|md|html)$"
)
# National numbers with letters.
_SPANISH = _Pattern(r"([XYZ]?)(\d{7,8})([A-Z])")
_BRITISH = _Pattern(r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]\d{6}[A-D]")
_ITALIAN = _Pattern(r"[A-Z]{6}[0-9LMNP-V]{2}[ABCDEHLMPRST][0-9LMNP-V]{2}[A-Z][0-9LMNP-V]{3}[A-Z]")
_FINNISH = _Pattern(r"(\d{6})A?(\d{3})([0-9A-FHJ-NPR-Y])")
_CORSICAN = _Pattern(r"(\d{5}2[AB]\d{6})(\d{2})")
_MEXICAN = _Pattern(r"[A-Z]{4}\d{6}[HM][A-Z]{5}[0-9A-Z]\d")
_NO_HOSTS = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".css", ".js", ".py", ".service", ".target", ".so")
_HEX = _Pattern(r"[0-9a-f]+|[0-9A-F]+")
_LONGEST_CAPITALS, _LONGEST_NUMBER = 5, 4  # in a name of a program
_VERHOEFF = (
    "0123456789",
    "1234067895",
    "2340178956",
    "3401289567",
    "4012395678",
    "5987604321",
    "6598710432",
    "7659821043",
    "8765932104",
    "9876543210",
)
_TURNS = ("0123456789", "1576283094", "5803796142", "8916043527", "9453126870", "4286573901", "2793806415", "7046913258")


def entropy(text: str) -> float:
    """Return the entropy of the characters of a text, in bits a character."""
    length = len(text)
    counts = {each: text.count(each) for each in set(text)}
    return -sum(count / length * math.log2(count / length) for count in counts.values()) if length else 0.0


def holds(names: tuple[str, ...], value: str) -> bool:
    """Return whether all named checks hold for a value."""
    return all(CHECKS[name](value) for name in names)


def _digits(value: str) -> str:
    return "".join(each for each in value if each in "0123456789")


def _without(value: str, characters: str) -> str:
    return value.translate(dict.fromkeys(map(ord, characters)))


def _luhn(digits: str) -> bool:
    doubled = [int(each) if place % 2 == 0 else (2 * int(each)) // 10 + (2 * int(each)) % 10 for place, each in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _card(value: str) -> bool:
    digits = _without(value, " -")
    varied = len(set(digits)) > 1 if len(digits) == 16 else len(set(digits[:12])) > 3
    if not varied or "00000000" in digits or "99999999" in digits:
        return False  # a number that somebody made up, or counted to
    return _CARDS.fits(digits) is not None and _luhn(digits)


def _iban(value: str) -> bool:
    if not value.isupper() and not value.islower():
        return False  # nobody writes it so; base64 does
    text = _without(value, " -").upper()
    if _IBAN_LENGTHS.get(text[:2]) != len(text) or (text[:2] in _IBAN_DIGITS and not text[2:].isdigit()):
        return False
    return int("".join(str(int(each, 36)) for each in text[4:] + text[:4])) % 97 == 1


def _us_ssn(value: str) -> bool:
    digits = _digits(value)
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    published = digits in ("078051120", "219099999", "123456789", "987654321", "111223333")
    return len(digits) == 9 and area not in ("000", "666") and area < "900" and group != "00" and serial != "0000" and not published


def _weighted(digits: str, weights: tuple[int, ...]) -> int:
    return sum(int(each) * weight for each, weight in zip(digits, weights, strict=False))


def _national_number(value: str) -> bool:
    """Return whether the check digits of one of the national schemes hold. The pattern has found the scheme's name before the value."""
    text = _without(value, " .-/+").upper()
    if not text.isdigit():
        return _lettered(text)
    if len(set(text)) == 1:
        return False
    remainders = {
        8: lambda: _weighted("0" + text, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0,
        9: lambda: _weighted(text, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 or _luhn(text),
        10: lambda: _luhn(text) or (11 - _weighted(text[:9], (10, 9, 8, 7, 6, 5, 4, 3, 2)) % 11) % 11 == int(text[9]) or _egn(text),
        11: lambda: _eleven(text),
        12: lambda: _verhoeff(text) or _luhn(text[2:]),
        13: lambda: _thirteen(text),
        15: lambda: 97 - int(text[:13]) % 97 == int(text[13:]),
    }
    return remainders.get(len(text), lambda: False)()


def _egn(text: str) -> bool:
    return _weighted(text, (2, 4, 8, 5, 10, 9, 7, 3, 6)) % 11 % 10 == int(text[9])


def _eleven(text: str) -> bool:
    pesel = -_weighted(text, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3)) % 10 == int(text[10])
    return pesel or _cpf(text) or _mod_11_10(text) or _norwegian(text)


def _cpf(text: str) -> bool:
    first = _weighted(text, tuple(range(10, 1, -1))) * 10 % 11 % 10
    second = _weighted(text, tuple(range(11, 1, -1))) * 10 % 11 % 10
    return (first, second) == (int(text[9]), int(text[10]))


def _mod_11_10(text: str) -> bool:
    """Return whether the last digit is that of ISO 7064, mod 11, 10: the tax numbers of Germany and Croatia."""
    product = 10
    for each in text[:-1]:
        product = ((int(each) + product) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(text[-1])


def _norwegian(text: str) -> bool:
    return _weighted(text, (3, 7, 6, 1, 8, 9, 4, 5, 2, 1)) % 11 == 0 and _weighted(text, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1)) % 11 == 0


def _thirteen(text: str) -> bool:
    romanian = _weighted(text, (2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9)) % 11 % 10 == int(text[12])
    yugoslav = -_weighted(text, (7, 6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11 == int(text[12])
    return romanian or yugoslav


def _verhoeff(text: str) -> bool:
    check = 0
    for place, each in enumerate(reversed(text)):
        check = int(_VERHOEFF[check][int(_TURNS[place % 8][int(each)])])
    return check == 0


def _lettered(text: str) -> bool:
    """Return whether a number with letters is one of Spain, Britain, Italy, Finland, France (Corsica) or Mexico."""
    if found := _SPANISH.fits(text):
        digits = {"": "", "X": "0", "Y": "1", "Z": "2"}[found[1]] + found[2]
        return len(digits) == 8 and "TRWAGMYFPDXBNJZSQVHLCKE"[int(digits) % 23] == found[3]
    if _BRITISH.fits(text):
        return text[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")
    if _ITALIAN.fits(text):
        return _italian(text)
    if found := _FINNISH.fits(text):
        return bool("0123456789ABCDEFHJKLMNPRSTUVWXY"[int(found[1] + found[2]) % 31] == found[3])
    if found := _CORSICAN.fits(text):
        return 97 - int(found[1].replace("2A", "19").replace("2B", "18")) % 97 == int(found[2])
    return _MEXICAN.fits(text) is not None


def _italian(text: str) -> bool:
    odd = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23)
    values = [int(each) if each.isdigit() else ord(each) - 65 for each in text[:15]]
    return sum(odd[value] if place % 2 == 0 else value for place, value in enumerate(values)) % 26 == ord(text[15]) - 65


def _email(value: str) -> bool:
    local, _, domain = value.rpartition("@")
    return ".." not in local and not local.endswith(".") and not domain.lower().endswith(_NO_HOSTS)


def _phone(value: str) -> bool:
    digits = _digits(value.partition("x")[0])
    return 9 <= len(digits) <= 15 and len(set(digits)) > 2


def _short_phone(value: str) -> bool:
    """Return whether a value behind a word for it can be a number within a country or a town."""
    digits = _digits(value)
    return 7 <= len(digits) <= 15 and len(set(digits)) > 2


def _ip_address(value: str) -> bool:
    try:
        address = ip_address(value)
    except ValueError:
        return False
    if address.version == 6 and len([group for group in value.split(":") if group]) < 2:
        return False  # "::2" is a slice of a program far more often than an address
    return not (address.is_unspecified or address.is_loopback or (address.version == 4 and value.startswith("0.")))


def _not_placeholder(value: str) -> bool:
    text = _bare(value)
    if len(text) >= 24 and len(set(text)) >= 20 and any(map(str.isdigit, text)):
        return True  # a key of any characters, among them those of templates
    return bool(text) and not _PLACEHOLDER.begins(text) and text.lower() not in _EXAMPLES - {"password", "passwd", "pass", "secret"}


def _not_example(value: str) -> bool:
    text = _bare(value)
    return text.lower() not in _EXAMPLES and not (len(text) < 6 and text.isalpha())


def _assigned(value: str) -> bool:
    """Return whether a value that is assigned to a name for secrets can be one: no code and no example."""
    quoted = value[:1] in "\"'`\\"
    if not quoted:
        value = _BREAK.before(value)  # a line of a program, written as JSON
    elif (_BREAK.occurs(value) and " " in value) or _ESCAPES.begins(value):
        return False
    text = _bare(value)
    if len(text) < 4 or _PLACEHOLDER.begins(text) or _PATH.occurs(text) or _FORMATTED.occurs(value) or not text.strip("0123456789."):
        return False
    if _LITERAL.begins(text) or _ARGUMENT.begins(value) or (text.startswith(":") and not quoted):
        return False
    if text.lower() in _EXAMPLES:
        return quoted and text == "password"
    if text.startswith("base64:") or _strong(text):
        return True
    if quoted:
        if text.isalpha() and (text.islower() or text.isupper()) and len(text) < 8:
            return False  # 'include', "name": the names of fields and keys in programs
        return " " not in text and not (_WORDS.begins(text) and _CODE.begins(text) and ("." in text or text.isupper()))
    return (
        not text.isdigit()
        and not text.endswith((":", "\\", "("))
        and (any(map(str.isdigit, text)) or text.endswith("_pass"))
        and not _is_code(text)
    )


def _is_code(text: str) -> bool:
    return _CODE.begins(text) and any(each in text for each in ".([->")


def _after_word(value: str) -> bool:
    text = _bare(value)
    if value.startswith('"'):
        return len(text) >= 3
    return not _PLACEHOLDER.begins(text) and any(map(str.isdigit, text))


def _strong(value: str) -> bool:
    """Return whether a value is too irregular to be a word: a secret of a person, or a key."""
    text = _bare(value)
    kinds = sum((any(map(str.islower, text)), any(map(str.isupper, text)), any(map(str.isdigit, text)), not text.isalnum()))
    if len(text) < 6 or kinds < 2 or _WORDS.begins(text) or _PLACEHOLDER.begins(text) or _PATH.occurs(text) or _is_code(text):
        return False
    return any(map(str.isdigit, text)) and entropy(text) >= (2.5 if len(text) < 16 else 3.0)


def _mixed(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isupper, value)) and any(map(str.islower, value)) and entropy(value) > 3.5


def _not_padded(value: str) -> bool:
    """Return whether a value of base64 is not mostly zeros, like the numbers of a program are."""
    return value.count("A") * 4 < len(value)


def _random(value: str) -> bool:
    """Return whether a long value looks drawn at random: no words, no numbers alone, no path, no version."""
    text = _bare(value)
    if not any(map(str.isdigit, text)) or not any(map(str.isalpha, text)) or _PATH.occurs(text) or _is_code(text):
        return False
    if text[:1].isupper() and _is_name(text):
        return False
    if _HEX.fits(text):
        return len(text) >= 32 and entropy(text) > 3.0
    return entropy(text) >= 3.6 and _changes(text) >= len(text) // 5


def _sort(character: str) -> str:
    """Return the sort of a character: "A", "a", "0", or itself."""
    if not character.isascii() or not character.isalnum():
        return character
    return "0" if character.isdigit() else "A" if character.isupper() else "a"


def _changes(text: str) -> int:
    """Return how often a capital, a small letter or a digit is followed by another sort of these."""
    return sum(one != other and one in "Aa0" and other in "Aa0" for one, other in pairwise(map(_sort, text)))


def _is_name(text: str) -> bool:
    """Return whether a text is words and numbers put together, as programs name their types."""
    runs = [(sort, len(list(run))) for sort, run in groupby(text, _sort)]
    for place, (sort, length) in enumerate(runs):
        small_next = place + 1 < len(runs) and runs[place + 1][0] == "a"
        fits = {
            "A": (1 if small_next else 2) <= length <= _LONGEST_CAPITALS,
            "a": length >= 2,
            "0": length <= _LONGEST_NUMBER,
            "_": length == 1,
        }
        if not fits.get(sort, False):
            return False
    return True


def _bare(value: str) -> str:
    return value.strip(" \t\r\n\"'`\\,;&<>(){}[]")


CHECKS: dict[str, Callable[[str], bool]] = {
    "card": _card,
    "iban": _iban,
    "us-ssn": _us_ssn,
    "national-number": _national_number,
    "email": _email,
    "phone": _phone,
    "short-phone": _short_phone,
    "ip-address": _ip_address,
    "not-placeholder": _not_placeholder,
    "not-example": _not_example,
    "assigned": _assigned,
    "after-word": _after_word,
    "strong": _strong,
    "mixed": _mixed,
    "not-padded": _not_padded,
    "random": _random,
}
