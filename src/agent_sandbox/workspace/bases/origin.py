"""Which real directory an overlay looked into when it copied it up: it notes that on its own directory, by the handle of the filesystem."""

from __future__ import annotations

import os
import struct

from agent_sandbox.kernel.syscalls import name_to_handle_at
from agent_sandbox.workspace.beneath import Entry

_ORIGIN = struct.Struct("=BBBBB16s")  # struct ovl_fb: version, magic, length, flags, the kind of handle, the filesystem; then the handle


def looked_into(entry: Entry, prefix: str, real: int | None) -> bool | None:
    """Whether the real directory of the same name in `real` is the one that this directory of a layer was copied from.

    None where overlays do not note it: for a user who is not root, over a filesystem that has no handles, and on the way to what is hidden,
    where the directory that was copied is one of ours that hides it, on a filesystem of another kind.
    """
    origin = attribute(entry, prefix + "origin")
    if origin is None or real is None:
        return False  # the guest made this one: nothing ties it to the real one
    if len(origin) <= _ORIGIN.size:
        return None
    noted = _ORIGIN.unpack_from(origin)[4], origin[_ORIGIN.size :]
    try:
        kind, handle = name_to_handle_at(real, entry.name)
    except OSError:
        return False
    return (kind, handle) == noted if (kind, len(handle)) == (noted[0], len(noted[1])) else None


def attribute(entry: Entry, name: str) -> bytes | None:
    """An attribute of a directory that a walk is in; None if it has none."""
    try:
        return os.getxattr(entry.own, name) if entry.own is not None else None
    except OSError:
        return None
