"""The id range of a guest started by root, and the id maps of a user namespace. Free of ctypes: the supervisor loads it at every start."""

from __future__ import annotations

import os

IDS = 65536  # size of the id range of a guest started by root

# Start of the range: above every range that distributions and systemd hand out, below the overflow of a signed 32-bit id. All guests share
# it: layers on disk carry these ids, and guests cannot see one another's processes or files anyway.
FIRST_ID = 0x70000000
EGRESS_ID = FIRST_ID + IDS  # of an egress process started by root: no user and no guest has it


def write_maps(pid: int | str, *, uid_map: str, gid_map: str, deny_setgroups: bool) -> None:
    """Write the id maps of a new user namespace. Raises OSError."""
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
