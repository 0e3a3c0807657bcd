"""The draft of a mount plan, and its inputs: the machine's mounts, and the files that an interpreter needs."""

from __future__ import annotations

import os
from functools import lru_cache

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mount_plan import (
    Overlay,
    Step,
)
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.policy.model import FileRules


@dataclass(frozen=True)
class Needs:
    """The files of the machine that a language needs. `links` and `contents` are created.

    `trees` and `files` are shown read-only, whatever the rules say. `tools` are shown with them, except for what the rules deny.
    """

    trees: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Host:
    """The facts about this machine that planning needs."""

    mounts: tuple[Mount, ...]  # visible mounts only
    privileged: bool

    @classmethod
    def look(cls) -> Host:
        """Return the present facts about this machine."""
        with open("/proc/self/mountinfo", "rb") as file:
            return cls(_visible_mounts(file.read()), os.geteuid() == 0)


@lru_cache(maxsize=4)  # the table hardly ever changes, and its text is the key
def _visible_mounts(table: bytes) -> tuple[Mount, ...]:
    return mountinfo.visible(mountinfo.parse(table))


@dataclass
class Draft:
    """A mount plan in the making."""

    host: Host
    rules: FileRules
    scratch: int
    steps: list[Step] = field(default_factory=list)
    overlays: list[Overlay] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def contains(directory: str, path: str | None) -> bool:
    """Return whether a path is at or below `directory`."""
    return path is not None and (path == directory or directory == "/" or path.startswith(directory + "/"))
