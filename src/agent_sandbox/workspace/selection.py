"""Choose what to copy where a view cannot hide by name: patterns such as `/config/*.json`, and hidden files.

An overlay can hide a name it knows. "Everything that ends in .key, also what appears later" it cannot, so such a directory is replaced by
a copy of what the rules let through, made as the run starts. That is exact and fails closed; it is bounded, and beyond the bound the
policy is refused.
"""

from __future__ import annotations

import os

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import FileRules

MOST_ENTRIES = 10_000
MOST_BYTES = 64 << 20


def select(rules: FileRules, directory: str, shown_as: str) -> tuple[str, ...]:
    """Relative paths below `directory` that the rules let through, parents first. Links are taken as links and never followed.

    Raises PolicyError when that is more than a copy at every start should be.
    """
    chosen: dict[str, None] = {}
    total = 0
    pending = [""]
    seen = 0
    while pending:
        inner = pending.pop()
        try:
            entries = sorted(os.scandir(f"{directory}/{inner}" if inner else directory), key=lambda entry: entry.name)
        except OSError:
            continue  # unreadable for us, so for the guest
        for entry in entries:
            seen += 1
            relative = f"{inner}/{entry.name}" if inner else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory:
                pending.append(relative)
            if rules.reaches(f"{shown_as.rstrip('/')}/{relative}"):
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
                elif not is_directory and not entry.is_symlink():
                    continue
                _add_with_parents(chosen, relative)
            if seen > MOST_ENTRIES or total > MOST_BYTES:
                raise PolicyError(
                    f"the rules for {shown_as} would copy more than {MOST_ENTRIES} entries or {MOST_BYTES >> 20} MiB at every start",
                    hint="name whole directories (DIR/*), set allow_hidden=True, or narrow the pattern",
                )
    return tuple(sorted(chosen, key=lambda path: path.split("/")))


def _add_with_parents(chosen: dict[str, None], relative: str) -> None:
    parts = relative.split("/")
    for depth in range(1, len(parts) + 1):
        chosen["/".join(parts[:depth])] = None
