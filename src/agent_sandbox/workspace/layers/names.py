"""Names of a sandbox's layers on disk: `<layers>/<key>/{upper,work}`, one key per overlay."""

from __future__ import annotations

import os

from agent_sandbox._fast.encoding import sha256

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")

_LONGEST_NAME = 255

_DIGEST = "~"  # prefix of a digest; a quoted path begins with %2F instead


def quote_target(target: str) -> str:
    """Return the file name for an absolute path. Raises ValueError for any other path.

    >>> quote_target("/home/a b")
    '%2Fhome%2Fa%20b'
    """
    raw = os.fsencode(target)
    if not raw.startswith(b"/"):
        raise ValueError(f"not an absolute path: {target!r}")
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    return quoted if len(quoted) <= _LONGEST_NAME else _DIGEST + sha256(raw).hexdigest()


def layer_targets(layers: int) -> tuple[str, ...]:
    """Return the targets that have layers, sorted. A directory with an unknown target is skipped, never removed."""
    targets = (_target_of(layers, key) for key in os.listdir(layers))
    return tuple(sorted(target for target in targets if target is not None))


def _target_of(layers: int, key: str) -> str | None:
    try:
        if key.startswith(_DIGEST):
            with open(os.open(f"{key}/target", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=layers), "rb") as file:
                target = os.fsdecode(file.read())
        else:
            head, *rest = key.split("%")
            target = os.fsdecode(head.encode() + b"".join(bytes((int(part[:2], 16),)) + part[2:].encode() for part in rest))
        return target if quote_target(target) == key else None
    except (OSError, ValueError):
        return None
