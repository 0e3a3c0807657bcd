"""The mount plan in the making, and its inputs: the machine's mounts, and what an interpreter needs of it."""

from __future__ import annotations

import os
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mount_plan import (
    Overlay,
    Step,
)
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.policy.model import FileRules

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Needs:
    """What of the machine a language needs: `trees` and `files` stay whatever the rules, read-only; `links` and `contents` are made.

    `tools` are shown with them, but what the rules deny of those is not there.
    """

    trees: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Host:
    """What planning has to know of this machine."""

    mounts: tuple[Mount, ...]  # visible ones
    privileged: bool

    @classmethod
    def look(cls) -> Host:
        """This machine, now."""
        with open("/proc/self/mountinfo", "rb") as file:
            return cls(_visible_mounts(file.read()), os.geteuid() == 0)


@lru_cache(maxsize=4)  # the table hardly ever changes, and reading it tells whether it has
def _visible_mounts(table: bytes) -> tuple[Mount, ...]:
    return mountinfo.visible(mountinfo.parse(table))


@dataclass
class Draft:
    """A plan in the making."""

    host: Host
    rules: FileRules
    scratch: int
    steps: list[Step] = field(default_factory=list)
    overlays: list[Overlay] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def contains(directory: str, path: str | None) -> bool:
    """Whether a path is a directory or lies beneath it."""
    return path is not None and (path == directory or directory == "/" or path.startswith(directory + "/"))
