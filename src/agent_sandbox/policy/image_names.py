"""Names of container images, as values that can be compared."""

from __future__ import annotations

from agent_sandbox.errors import PolicyError

LONGEST_NAME = 255
_OF_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:@")


def canonical_image(name: str) -> str:
    """Return the name of an image with its tag, `latest` if it has none. Raises `PolicyError` for text that is no name.

    >>> canonical_image("python")
    'python:latest'
    """
    bare = name.strip()
    if not bare or len(bare) > LONGEST_NAME or not set(bare) <= _OF_NAMES or bare[0] in "-/.:@" or bare[-1] in "/:@":
        raise PolicyError(f"not the name of an image: {name[:80]!r}", hint="write NAME or NAME:TAG, as in python:3.11-slim")
    return bare if ":" in bare.rpartition("/")[2] or "@" in bare else f"{bare}:latest"
