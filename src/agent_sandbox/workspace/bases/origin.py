"""Which real directory an overlay looked into when it copied it up: it notes that on its own directory, by the handle of the filesystem."""

from __future__ import annotations

import os
import struct

from agent_sandbox.kernel.syscalls import born_ns, name_to_handle_at
from agent_sandbox.workspace.beneath import open_beneath

_ORIGIN = struct.Struct("=BBBBB16s")  # struct ovl_fb: version, magic, length, flags, the kind of handle, the filesystem; then the handle


def looked_into(upper: int, path: str, prefix: str, real: int, *, since_ns: int) -> bool | None:
    """Whether the directory at `path` of a layer was copied since then from the real one of the same name in `real`.

    One that was copied in an earlier run says what was real there in that run; another one may have been there meanwhile. None where
    overlays do not note it: for a user who is not root, over a filesystem that has no handles, and on the way to what is hidden, where the
    directory that was copied is one of ours that hides it, on a filesystem of another kind.
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
    if (kind, len(handle)) != (noted[0], len(noted[1])):
        return None
    return (kind, handle) == noted and _born_since(upper, path, since_ns)


def _born_since(upper: int, path: str, since_ns: int) -> bool:
    try:
        handle = open_beneath(upper, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        born = born_ns(handle)
    finally:
        os.close(handle)
    return born is not None and born >= since_ns


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
