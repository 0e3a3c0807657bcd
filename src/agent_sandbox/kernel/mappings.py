"""The memory that a process shares with others for writing.

A list of all mappings takes the kernel half a millisecond for a program with many libraries. Since Linux 6.11 it can be asked for the next
mapping of a kind instead (`PROCMAP_QUERY`); the list is read only if there is one, or if the kernel cannot be asked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_QUERY = 0xC0686611  # PROCMAP_QUERY
_ASKED = struct.Struct("=3Q80x")  # struct procmap_query: its size, flags, where to begin; the rest is the answer
_WRITABLE, _SHARED, _NEXT = 0x02, 0x08, 0x10


def shared_for_writing(process: str) -> list[str]:
    """Return what each shared and writable mapping of a process leads to, given its directory below /proc. Raises OSError."""
    with open(f"{process}/maps", "rb", buffering=0) as maps:
        try:
            fcntl.ioctl(maps, _QUERY, bytearray(_ASKED.pack(_ASKED.size, _WRITABLE | _SHARED | _NEXT, 0)))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):  # there is none, or the process has ended
                return []
        content = b"".join(iter(lambda: maps.read(1 << 16), b""))
    rows = (line.split(maxsplit=5) for line in content.splitlines())
    return [os.fsdecode(row[5].strip()) if len(row) > 5 else "" for row in rows if row[1][1:2] == b"w" and row[1].endswith(b"s")]
