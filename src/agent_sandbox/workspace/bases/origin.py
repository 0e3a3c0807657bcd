"""Which real directory an overlay looked into when it copied it up: it notes that on its own directory, by the handle of the filesystem."""

from __future__ import annotations

import os
import struct

from agent_sandbox.kernel.syscalls import name_to_handle_at
from agent_sandbox.workspace.beneath import open_beneath

_ORIGIN = struct.Struct("=BBBBB16s")  # struct ovl_fb: version, magic, length, flags, the kind of handle, the filesystem; then the handle


def looked_into(upper: int, path: str, prefix: str, real: int) -> bool | None:
    """Whether the directory at `path` of a layer was copied from the real one of the same name in `real`.

    None where overlays do not note it: for a user who is not root, over a filesystem that has no handles, and on the way to what is hidden,
    where the directory that was copied is one of ours that hides it, on a filesystem of another kind.
    """
    origin = attribute(upper, path, prefix + "origin")
    if origin is None:
        return False  # the guest made this one: nothing ties it to the real one
    if len(origin) <= _ORIGIN.size:
        return None
    noted = _ORIGIN.unpack_from(origin)[4], origin[_ORIGIN.size :]
    try:
        kind, handle = name_to_handle_at(real, path.rpartition("/")[2])
    except OSError:
        return False
    return (kind, handle) == noted if (kind, len(handle)) == (noted[0], len(noted[1])) else None


def attribute(directory: int, path: str, name: str) -> bytes | None:
    """An attribute of what is at `path` below a directory of a layer; None if it has none."""
    try:
        handle = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return os.getxattr(f"/proc/self/fd/{handle}", name)
    except OSError:
        return None
    finally:
        os.close(handle)
