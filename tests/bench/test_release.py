"""Which commit is the last release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.release import last_release


class Repository:
    """A repository with a list of changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "-c", "safe.directory=*")
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(["git", *identity, *words], cwd=self.path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, heading: str) -> str:
        """Commit a list of changes that begins with this heading; return the commit."""
        (self.path / "CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", heading)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_it_is_the_newest_tag_of_a_version_below_this_commit(repository: Repository) -> None:
    for number in (1, 2):
        repository.commit(f"0.{number}.0, 2026-11-0{number}")
        repository.git("tag", f"v0.{number}.0")
    repository.git("tag", "very-old")
    assert last_release(repository.path) == "v0.1.0", "the one that is checked out is not compared with itself"
    repository.commit("0.3.0, unreleased")
    assert last_release(repository.path) == "v0.2.0"


def test_without_a_tag_it_is_the_newest_commit_that_names_a_release(repository: Repository) -> None:
    repository.commit("0.1.0, unreleased")
    released = repository.commit("0.1.0, 2026-11-20")
    repository.commit("0.2.0, unreleased")
    repository.commit("0.2.0, Unreleased")
    assert last_release(repository.path) == released


def test_there_may_be_none(repository: Repository, tmp_path: Path) -> None:
    repository.commit("0.1.0, unreleased")
    assert last_release(repository.path) == "", "a first commit"
    repository.commit("0.1.0, unreleased, more")
    assert last_release(repository.path) == ""


def test_a_checkout_without_git_has_none(tmp_path: Path) -> None:
    assert last_release(tmp_path) == ""
