"""Find the project of a directory. Each project has its own current sandbox.

A marker in `/` or in the home directory, put there by accident or by an attacker, must not turn everything into one project. So the search
ends below these two directories. To keep changes for one of them, the user has to name it. A marker counts only if it belongs to us, to
root, or to the owner of the directory where the search began: in a shared directory anybody can put a marker above somebody else's project.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

MARKERS = ("agent-sandbox.toml", ".git")
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "ocfs2", "gfs2", "lustre", "virtiofs"})


@dataclass(frozen=True)
class Project:
    """A project directory, by its canonical path. `marker` is the file that identified it, or None.

    `remote` says that it lies on a network or FUSE filesystem (`fstype`), where overlays and locks may not work as on a local one.
    """

    path: str
    marker: str | None = None
    fstype: str = ""
    remote: Literal["network", "fuse"] | None = None


def find_project(
    cwd: str, *, home: str, explicit: bool = False, throw_away: bool = False, mounts: Iterable[mountinfo.Mount] = ()
) -> Project:
    """Return the nearest directory at or above `cwd` with a marker, else `cwd` itself.

    With `explicit`, return `cwd` itself, whatever directory it is. Otherwise raise `PolicyError` when the project would be `/`, the home
    directory, or a directory that contains the home directory, unless `throw_away` says that nothing is kept or promoted. Always raise
    `PolicyError` when `cwd` is no directory. Without `mounts`, `fstype` and `remote` are not set.
    """
    here = _canonical(cwd)
    home = os.path.realpath(home) if home else "/"
    trusted = frozenset({0, os.geteuid(), os.stat(here).st_uid})
    path, marker = (here, _marker(here, trusted)) if explicit else _nearest(here, home, trusted)
    if not (explicit or throw_away) and _too_much(path, home):
        what = "the home directory" if path == home != "/" else f"{path!r}, which contains the home directory" if path != "/" else "/"
        raise PolicyError(
            f"the project would be {what}, and its changes would be kept",
            hint="change into a project below it; or keep nothing (run --throw-away); or name it with --project",
        )
    fstype = _fstype(path, tuple(mounts))
    return Project(path, marker, fstype, _remote(fstype))


def _canonical(directory: str) -> str:
    try:
        path = os.path.realpath(directory, strict=True)
    except (OSError, ValueError) as error:
        raise PolicyError(f"there is no directory {directory!r}", hint="name one that exists and that you may enter") from error
    if not os.path.isdir(path):
        raise PolicyError(f"{directory!r} is not a directory", hint="name the directory that contains it")
    return path


def _nearest(here: str, home: str, trusted: frozenset[int]) -> tuple[str, str | None]:
    path = here
    while not _too_much(path, home):
        if marker := _marker(path, trusted):
            return path, marker
        path = os.path.dirname(path)
    return here, None


def _too_much(path: str, home: str) -> bool:
    return path == "/" or path == home or home.startswith(path + "/")


def _marker(directory: str, trusted: frozenset[int]) -> str | None:
    for marker in MARKERS:
        with suppress(OSError):
            if os.lstat(os.path.join(directory, marker)).st_uid in trusted:
                return marker
    return None


def _fstype(path: str, mounts: tuple[mountinfo.Mount, ...]) -> str:
    try:
        return mountinfo.containing(mounts, path).fstype if mounts else ""
    except LookupError:
        return ""


def _remote(fstype: str) -> Literal["network", "fuse"] | None:
    if fstype in _NETWORK:
        return "network"
    # FUSE on a block device ("fuseblk": ntfs-3g, exfat) counts too: its answers depend on a program.
    return "fuse" if fstype == "fuse" or fstype.startswith(("fuse.", "fuseblk")) else None
