"""Directory listings: read whole when a program begins to list, and handed out in pieces from there.

The engine itself reads all of a directory, and asks about everything in it, for each piece it hands out: thousands of names took minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.runtime.wasm.wasi.abi import DIRENT, OK, WORD, unsigned
from agent_sandbox.runtime.wasm.wasi.guest_memory import GuestMemory
from agent_sandbox.runtime.wasm.wasi.shim import OWN_BYTES, Call
from agent_sandbox.values import dataclass

_USED = 0  # where the engine puts how much it wrote, in memory of our own
_ENTRIES = 8  # and where it writes


@dataclass(frozen=True)
class Entry:
    """One name in a directory."""

    name: bytes
    number: int
    type: int


class Listings:
    """One for each descriptor that was listed, as it was when the listing began."""

    def __init__(self, fd_readdir: Call, memory: GuestMemory) -> None:
        """The engine's own, over memory that is not the program's."""
        self._fd_readdir, self._memory = fd_readdir, memory
        self._kept: dict[int, Sequence[Entry]] = {}

    def read(self, fd: int) -> list[Entry] | int:
        """All that is in a directory, in the engine's order; or an error number."""
        found: list[Entry] = []
        cookie = 0
        while True:
            error = self._fd_readdir(fd, _ENTRIES, OWN_BYTES - _ENTRIES, cookie, _USED)
            if error:
                return error
            used = WORD.unpack(self._memory.read(_USED, WORD.size))[0]
            cookie = _parse(self._memory.read(_ENTRIES, used), found) or cookie
            if used < OWN_BYTES - _ENTRIES:  # the last piece: any other is filled to the brim
                return found

    def keep(self, fd: int, entries: Sequence[Entry]) -> None:
        """What a program that lists this descriptor gets from here on."""
        self._kept[fd] = entries

    def kept(self, fd: int) -> Sequence[Entry] | None:
        """What it gets; None when it has not begun."""
        return self._kept.get(fd)

    def forget(self, fd: int) -> None:
        """The descriptor is gone."""
        self._kept.pop(fd, None)


def hand_out(memory: GuestMemory, entries: Sequence[Entry], address: int, length: int, cookie: int, used: int) -> int:
    """Write entries from `cookie` on, the last one cut where there is no more room, as a listing is to be written."""
    room = unsigned(length)
    written = bytearray()
    for index in range(max(0, cookie), len(entries)):
        entry = entries[index]
        written += DIRENT.pack(index + 1, entry.number, len(entry.name), entry.type) + entry.name
        if len(written) >= room:
            break
    memory.write(address, bytes(written[:room]))
    memory.write_word(used, min(len(written), room))
    return OK


def _parse(data: bytes, found: list[Entry]) -> int:
    """Add the whole entries in a piece; returns the cookie of what follows them, 0 when there was none."""
    position = after = 0
    while position + DIRENT.size <= len(data):
        following, number, length, kind = DIRENT.unpack_from(data, position)
        end = position + DIRENT.size + length
        if end > len(data):
            break
        found.append(Entry(data[position + DIRENT.size : end], number, kind))
        position, after = end, following
    return after
