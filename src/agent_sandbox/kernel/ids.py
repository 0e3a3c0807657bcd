"""The ids of a guest that root started, and the map of a user namespace. Without ctypes: the supervisor needs it at every start."""

from __future__ import annotations

import os

IDS = 65536  # how many ids a guest started by root has

# Where they begin: above every range that distributions and systemd hand out, below what overflows a signed 32-bit id. The same for all
# guests: layers on disk carry these ids, and guests cannot see one another's processes or files anyway.
FIRST_ID = 0x70000000


def write_maps(pid: int | str, *, uid_map: str, gid_map: str, deny_setgroups: bool) -> None:
    """Write the id maps of a new user namespace."""
    if deny_setgroups:
        # The kernel accepts gid_map from an unprivileged writer only after setgroups is denied (user_namespaces(7)).
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", uid_map)
    _write(f"/proc/{pid}/gid_map", gid_map)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
