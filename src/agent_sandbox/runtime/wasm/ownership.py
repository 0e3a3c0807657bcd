"""Tell whether only root and this user can decide what a path leads to.

Compiled code is executed as it is found. So its directory must be one in which no other user can put, replace or rename anything: neither
in the directory itself nor in any directory on the way to it.
"""

from __future__ import annotations

import os
import stat

_MOST_LINKS = 40  # symbolic links on the way, as in the kernel
_OTHERS, _GROUP = stat.S_IWOTH, stat.S_IWGRP


def distrust(path: str) -> str:
    """Return why somebody else could replace what lies at `path`; "" if only root and this user can.

    Every directory and symbolic link on the way is looked at. A path that does not exist is judged by its existing part. Raises OSError for
    a part that cannot be looked at.
    """
    waiting, done, links = _parts(os.path.abspath(path)), "/", 0
    if why := _problem(done, last=False):
        return why
    while waiting:
        part = waiting.pop(0)
        if part == "..":
            done = os.path.dirname(done)
            continue
        here = os.path.join(done, part)
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return ""
        if why := _problem(here, last=not waiting):
            return why
        if not stat.S_ISLNK(status.st_mode):
            done = here
            continue
        links += 1
        if links > _MOST_LINKS:
            return f"{path} has too many symbolic links"
        target = os.readlink(here)
        waiting = [*_parts(target), *waiting]
        done = "/" if target.startswith("/") else done
    return ""


def distrust_file(status: os.stat_result, path: str) -> str:
    """Return why somebody else could change this open file or directory; "" if only root and this user can."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to somebody else (user {status.st_uid})"
    if status.st_mode & _OTHERS or (status.st_mode & _GROUP and not _is_own_group(status)):
        return f"{path} can be written by others (chmod go-w {path})"
    return ""


def _problem(path: str, *, last: bool) -> str:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):  # its mode means nothing; only its owner and those who can write to its directory can replace it
        return "" if status.st_uid in (0, os.geteuid()) else distrust_file(status, path)
    if not last and status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.geteuid()):
        return ""  # such as /tmp: others can add names, and cannot replace ours
    if not last and _is_unmapped_root(status):
        return ""
    return distrust_file(status, path)


def _is_own_group(status: os.stat_result) -> bool:
    """Whether the group has this user as its only member, as on systems that give each user a group and the umask 002."""
    import grp  # only for a directory that a group can write
    import pwd  # the same; neither is on every system

    if os.geteuid() == 0 or status.st_uid != os.geteuid():
        return False
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return user.pw_gid == status.st_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _is_unmapped_root(status: os.stat_result) -> bool:
    """Whether this may be a directory of root's, seen from a user namespace that has no root. Nobody else may write to it."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            unmapped = int(file.read())
        with open("/proc/self/uid_map", encoding="ascii") as file:
            outside = [line.split() for line in file]
    except (OSError, ValueError):
        return False
    whole = any(int(count) == (1 << 32) - 1 for _, _, count in outside)
    return not whole and status.st_uid == unmapped and not status.st_mode & (_OTHERS | _GROUP)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
