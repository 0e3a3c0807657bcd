"""Noise: by-products such as caches and scratch files that nobody wants to read one by one.

It only decides how a diff is folded. Noise is counted and shown on demand. Nothing else may depend on it: a guest chooses these names.
"""

from __future__ import annotations

from itertools import pairwise

from agent_sandbox.workspace.changes import covers

_DIRECTORIES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".npm", "_cacache"})
_PAIRS = frozenset({("node_modules", ".cache"), (".cache", "pip"), (".cache", "npm"), (".cache", "yarn"), (".cache", "uv")})
_SCRATCH = ("/tmp", "/var/tmp", "/run", "/var/run", "/var/cache", "/dev/shm")


def is_noise(path: str) -> bool:
    """Return whether an absolute path is, or lies in, a cache or a scratch directory.

    >>> is_noise("/home/a/app/__pycache__/x.pyc"), is_noise("/home/a/tmp/notes")
    (True, False)
    """
    if any(path == scratch or path.startswith(scratch + "/") for scratch in _SCRATCH):
        return True
    parts = path.split("/")
    return not _DIRECTORIES.isdisjoint(parts) or any(pair in _PAIRS for pair in pairwise(parts))


def place_of(path: str, project: str) -> str:
    """Return the group of a change: `project`, `elsewhere` or `noise`. A project below /var/tmp is not noise because of its place.

    >>> place_of("/var/tmp/app/x", "/var/tmp/app"), place_of("/var/tmp/y", "/var/tmp/app")
    ('project', 'noise')
    """
    inside = covers(project, path)
    noisy = is_noise("/project" + path[len(project.rstrip("/")) :] if inside else path)
    return "noise" if noisy else "project" if inside else "elsewhere"
