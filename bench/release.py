"""Find the last release before this commit: `python -m bench.release` prints its tag, or its commit where it has none.

A release is a tag such as v0.1.0; where nothing is tagged, the newest commit whose CHANGELOG.md begins with a version that is not called
unreleased. Exits with 1, and says why, where there is neither.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CHANGES = "CHANGELOG.md"
UNRELEASED = "unreleased"


def last_release(checkout: Path) -> str:
    """Return the name of the last release below the commit that is checked out; empty if there is none, or no git."""
    return _git(checkout, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^") or next(
        (commit for commit in _git(checkout, "log", "--format=%H", "HEAD^", "--", CHANGES).split() if _names_a_release(checkout, commit)),
        "",
    )


def _names_a_release(checkout: Path, commit: str) -> bool:
    headings = [line for line in _git(checkout, "show", f"{commit}:{CHANGES}").splitlines() if line.startswith("## ")]
    return bool(headings) and UNRELEASED not in headings[0].lower()


def _git(checkout: Path, *words: str) -> str:
    """Return what git says; nothing where it fails or is not installed. Somebody else's checkout is read all the same."""
    try:
        done = subprocess.run(["git", "-c", "safe.directory=*", *words], cwd=checkout, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """The program."""
    name = last_release(CHECKOUT)
    if not name:
        print(f"bench: no release has a tag (v…), or a version in {CHANGES} that is not called {UNRELEASED}", file=sys.stderr)
        return 1
    print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
