"""Where the tests come from: the standard library of the interpreter that runs this. Debian has them in a package of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

# What the issue of this runtime names, and what else programs of agents live on and needs neither network nor processes.
MODULES = (
    "test_json", "test_re", "test_decimal", "test_csv", "test_statistics", "test_dataclasses", "test_itertools",
    "test_base64", "test_bisect", "test_collections", "test_copy", "test_datetime", "test_enum", "test_file", "test_fileio",
    "test_fractions", "test_functools", "test_glob", "test_hashlib", "test_heapq", "test_io", "test_math", "test_operator",
    "test_posixpath", "test_random", "test_shutil", "test_string", "test_struct", "test_tempfile", "test_textwrap", "test_unicodedata",
    "test_zipfile",
)  # fmt: skip
NEWEST = 20  # minor versions of Python 3 to look for


class Missing(Exception):
    """This machine has no tests of its own interpreter. The message says how to get them."""


class Native(NamedTuple):
    """An interpreter of this machine."""

    path: str
    version: str


def running() -> Native:
    """The interpreter of this process, without what an environment adds to it."""
    return Native(os.path.realpath(sys.executable), ".".join(map(str, sys.version_info[:3])))


def package() -> Path:
    """The directory of the `test` package that belongs to the running interpreter. Raises `Missing`."""
    directory = Path(sysconfig.get_path("stdlib"), "test")
    if not all((directory / name).exists() for name in ("support", "test_json", "test_csv.py")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Missing(f"no tests in {directory}: install libpython{version}-testsuite (Debian), or use a Python that has them")
    return directory


def newer() -> list[Native]:
    """Later interpreters of this machine, the newest first: a test that fails there as well fails for its age."""
    names = (f"python3.{minor}" for minor in range(NEWEST, sys.version_info.minor, -1))
    return [Native(path, version) for name in names if (path := shutil.which(name)) and (version := _version(path))]


def _version(path: str) -> str:
    """Empty for one that does not start."""
    asked = "import platform; print(platform.python_version())"
    return subprocess.run([path, "-I", "-c", asked], capture_output=True, text=True, check=False).stdout.strip()
