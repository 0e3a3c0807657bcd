"""Names of shared libraries: the loader asks for `libz.so.1`, and /proc shows `libz.so.1.2.13`."""

from __future__ import annotations

import os
from collections.abc import Iterable

from agent_sandbox.kernel import elf


def mapped_by(pid: int | str) -> set[str]:
    """Return the files that a process has mapped as code."""
    files = set()
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            words = line.rstrip("\n").split(None, 5)
            if len(words) == 6 and "x" in words[1] and os.path.isfile(words[5]):
                files.add(words[5])
    return files


def names_of(files: Iterable[str], program: str) -> dict[str, str]:
    """Return every name under which the loader may ask for these files, mapped to the file. `program` names the loader itself."""
    wanted = set(files)
    names = {file: file for file in wanted}
    for directory in {os.path.dirname(file) for file in wanted}:
        for entry in os.scandir(directory):
            if entry.is_symlink() and (file := os.path.realpath(entry.path)) in wanted:
                names[entry.path] = file
    for loader in elf.loader_of(program):
        names[loader] = os.path.realpath(loader)
    if os.path.isfile(elf.CACHE):
        names[elf.CACHE] = elf.CACHE
    return names
