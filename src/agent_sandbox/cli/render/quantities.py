"""Sizes, times and counts as people write and read them. What cannot be understood is refused, with an example of what can."""

from __future__ import annotations

from agent_sandbox.errors import PolicyError

_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600}
NONE = "none"


def size(option: str, text: str) -> int | None:
    """Bytes in `512M`, `2GiB` or `1000`; None for `none`."""
    lowered = text.strip().lower()
    if lowered == NONE:
        return None
    body = lowered.removesuffix("ib") if lowered.endswith("ib") else lowered
    body = body.removesuffix("b") if body[-2:-1] in ("k", "m", "g", "t") else body
    return int(_scaled(option, text, body, _SIZES, "a size such as 512M, 2G or none"))


def seconds(option: str, text: str) -> float | None:
    """Seconds in `30`, `1.5`, `5m` or `1h`; None for `none`."""
    lowered = text.strip().lower()
    return None if lowered == NONE else _scaled(option, text, lowered, _TIMES, "a time such as 30, 5m, 1h or none")


def count(option: str, text: str) -> int | None:
    """A whole number; None for `none`."""
    lowered = text.strip().lower()
    if lowered == NONE:
        return None
    if not (lowered.isascii() and lowered.isdigit()) or len(lowered) > 18 or int(lowered) == 0:
        raise PolicyError(f"{option} takes a whole number above 0, not {text!r}", hint=f"for example {option} 64, or {option} none")
    return int(lowered)


def _scaled(option: str, text: str, body: str, units: dict[str, int], example: str) -> float:
    number, unit = (body[:-1], body[-1]) if body and body[-1].isalpha() else (body, "")
    try:
        value = float(number) if number.isascii() and number.strip("-+.0123456789") == "" else None
    except ValueError:
        value = None
    if value is None or unit not in units:
        raise PolicyError(f"{option} takes {example}, not {text!r}", hint=f"write {option} {example.split(' such as ')[1].split(',')[0]}")
    if not 0 < value * units[unit] <= 1 << 60 or (units is _SIZES and value * units[unit] < 1):
        raise PolicyError(f"{option} must be above 0 and within reason, not {text!r}", hint=f"{option} takes {example}")
    return value * units[unit]


def human_size(amount: int) -> str:
    """As people read it.

    >>> human_size(1536), human_size(12)
    ('1.5 KiB', '12 bytes')
    """
    if amount < 1024:
        return f"{amount} bytes"
    power = min((amount.bit_length() - 1) // 10, 4)
    return f"{amount / (1 << 10 * power):.1f} {' KMGT'[power]}iB".replace(".0 ", " ")


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number and its noun.

    >>> counted(1, "change"), counted(2, "entry", "entries")
    ('1 change', '2 entries')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
