"""The Python packages of the extra `network`. Without those in `NEEDED` no run can have a network."""

from __future__ import annotations

# By the names that pip knows them by: the modules that are imported.
NEEDED = {"brotli": "brotli", "cryptography": "cryptography", "google-re2": "re2", "h2": "h2", "zstandard": "zstandard"}
FASTER = {"hyperscan": "hyperscan"}  # the search is slower without it; some platforms have none


def missing(packages: dict[str, str]) -> tuple[str, ...]:
    """Return the names of those packages that are not installed."""
    from importlib.util import find_spec  # only runs with a network need it

    return tuple(name for name, module in packages.items() if find_spec(module) is None)
