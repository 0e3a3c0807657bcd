"""Source distributions of real projects, for stories that are told on them. They are the only thing that a test fetches."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SourceDistribution:
    """One version of a project, known by its digest."""

    project: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        """The name of the archive without its ending, which is also that of the directory in it."""
        return f"{self.project}-{self.version}"

    def unpack(self, cache: Path, place: Path) -> Path:
        """Unpack it, fetched by pip where it is not in the cache. Skips the test where it cannot be fetched."""
        archive = cache / f"{self.name}.tar.gz"
        if not archive.exists():
            self._fetch(cache)
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == self.sha256
        subprocess.run(["tar", "--no-same-owner", "-xzf", archive, "-C", place], check=True)
        return place / self.name

    def _fetch(self, cache: Path) -> None:
        """Ask the package index that pip uses here. pip runs the project's own set-up, which is why it checks the digest first."""
        wanted = cache / f"{self.name}.txt"
        wanted.write_text(f"{self.project}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "--timeout", "20", "download"]
        how = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--dest", str(cache), "-r", str(wanted)]
        done = subprocess.run([*pip, *how], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            pytest.skip(f"the source distribution of {self.name} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")


TOOLZ = SourceDistribution("toolz", "1.0.0", "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02")
DOTENV = SourceDistribution("python_dotenv", "1.2.4", "f0d53e69935a851c0dcc78f3ab7aaccd8cabef0b92382b576b824212902873c0")
FASTENERS = SourceDistribution("fasteners", "0.20", "55dce8792a41b56f727ba6e123fcaee77fd87e638a6863cec00007bfea84c8d8")
