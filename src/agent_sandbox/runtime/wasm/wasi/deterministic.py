"""The system calls of a deterministic run. Their results depend only on the program, its input and its seed.

Calls on files go to the engine, which confines the program; their results are then made the same for every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from agent_sandbox.runtime.wasm.wasi import abi
from agent_sandbox.runtime.wasm.wasi.abi import (
    ABSOLUTE,
    BAD_FD,
    CLOCK,
    EVENT,
    INVALID,
    OK,
    SUBSCRIBED_TO,
    SUBSCRIPTION,
    TO_CLOCK,
    TO_FD,
    Call,
    GuestMemory,
    unsigned,
)
from agent_sandbox.runtime.wasm.wasi.clock import RESOLUTION_NS, Stream, VirtualClock
from agent_sandbox.runtime.wasm.wasi.listing import DirectoryEntry, FileTable, Listings, UsedFile, hand_out

_STREAMS = (0, 1, 2)
_PIECE = 1 << 16
_DIRECTORY_BYTES = 4096  # reported size of every directory
_DEVICE = 1

Watch = Callable[[str, str], None]  # called with "file" or "directory" and a path when an input is opened or listed


def poll(subscriptions: bytes, clock: VirtualClock, is_open: Callable[[int], bool]) -> list[bytes]:
    """Return the events for WASI's poll_oneoff. If there are only sleeps, advance the clock to the end of the shortest.

    There is no event only if there are no subscriptions.
    """
    ready: list[bytes] = []
    sleeps: list[tuple[int, int]] = []
    for start in range(0, len(subscriptions), SUBSCRIPTION):
        word, kind = SUBSCRIBED_TO.unpack_from(subscriptions, start)
        if kind == CLOCK:
            which, when, _, flags = TO_CLOCK.unpack_from(subscriptions, start + SUBSCRIBED_TO.size)
            left = clock.sleep(which, when, absolute=bool(flags & ABSOLUTE))
            if left is None:
                ready.append(EVENT.pack(word, INVALID, kind, 0, 0))
            else:
                sleeps.append((left, word))
        else:
            (fd,) = TO_FD.unpack_from(subscriptions, start + SUBSCRIBED_TO.size)
            ready.append(EVENT.pack(word, OK if is_open(fd) else BAD_FD, kind, 1, 0))
    if ready or not sleeps:
        return ready
    soonest = min(left for left, _ in sleeps)
    clock.pass_by(soonest)
    return [EVENT.pack(word, OK, CLOCK, 0, 0) for left, word in sleeps if left == soonest]


class Deterministic:
    """The system calls of one run. Its public methods are WASI functions, with their names and arguments."""

    def __init__(
        self, seed: int, directories: Mapping[int, str], engine: Mapping[str, Call], memory: GuestMemory, listings: Listings, watch: Watch
    ) -> None:
        """`engine` are the engine's own functions. `directories` maps the program's preopened descriptors to paths in this process."""
        self._clock = VirtualClock()
        self._random = Stream(seed)
        self._names = FileTable(self._clock)
        self._engine, self._memory, self._listings, self._watch = engine, memory, listings, watch
        for fd, path in directories.items():
            self._names.opened(fd, path)

    def save(self) -> dict[str, Any]:
        """Return the state of clock, randomness and files as JSON data."""
        return {"clock": self._clock.save(), "random": self._random.save(), "files": self._names.save()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a saved state. Raises ValueError, KeyError, IndexError or TypeError for anything else."""
        self._clock.restore(saved["clock"])
        self._random.restore(saved["random"])
        self._names.restore(saved["files"])

    # Time and randomness

    def clock_time_get(self, which: int, _precision: int, out: int) -> int:
        shows = self._clock.read(which)
        if shows is None:
            return INVALID
        self._memory.write(out, abi.LONG.pack(shows))
        return OK

    def clock_res_get(self, which: int, out: int) -> int:
        if which not in range(4):
            return INVALID
        self._memory.write(out, abi.LONG.pack(RESOLUTION_NS))
        return OK

    def random_get(self, address: int, length: int) -> int:
        address, left = unsigned(address), unsigned(length)
        while left:
            piece = self._random.take(min(left, _PIECE))
            self._memory.write(address, piece)
            address += len(piece)
            left -= len(piece)
        return OK

    def poll_oneoff(self, subscriptions: int, events: int, count: int, happened: int) -> int:
        wanted = self._memory.read(subscriptions, min(unsigned(count), 1 << 16) * abi.SUBSCRIPTION)
        answer = poll(wanted, self._clock, lambda fd: fd in _STREAMS or fd in self._names.open)
        if not answer:
            return INVALID
        self._memory.write(events, b"".join(answer))
        self._memory.write_word(happened, len(answer))
        return OK

    # Input

    def fd_read(self, fd: int, vectors: int, count: int, read: int) -> int:
        """Read the whole requested length from standard input, because the size of the pieces in which input arrives depends on timing."""
        if fd != 0:
            return self._engine["fd_read"](fd, vectors, count, read)
        total = 0
        for index in range(min(unsigned(count), 1024)):
            address, length = abi.VECTOR.unpack(self._memory.read(vectors + index * abi.VECTOR.size, abi.VECTOR.size))
            taken = _read_fully(0, length)
            self._memory.write(address, taken)
            total += len(taken)
            if len(taken) < length:
                break
        self._memory.write_word(read, total)
        return OK

    # Descriptors

    def path_open(self, fd: int, lookup: int, path: int, length: int, flags: int, rights: int, inheriting: int, mode: int, out: int) -> int:
        place = self._place(fd, path, length, follow=False)
        new = bool(flags & abi.CREATE) and place is not None and not os.path.lexists(place)
        error = self._engine["path_open"](fd, lookup, path, length, flags, rights, inheriting, mode, out)
        place = self._place(fd, path, length, follow=bool(lookup & abi.FOLLOW))
        if error or place is None:
            return error
        if new:
            self._names.made(place)
        opened = abi.WORD.unpack(self._memory.read(out, abi.WORD.size))[0]
        if not (flags & abi.TRUNCATE or self._names.file(place).ours):
            self._watch("file", place)
        self._names.opened(opened, place, writable=bool(rights & abi.RIGHT_TO_WRITE) and not os.path.isdir(place))
        return OK

    def fd_close(self, fd: int) -> int:
        error = self._engine["fd_close"](fd)
        if not error:
            self._names.closed(fd)
            self._listings.forget(fd)
        return error

    def fd_renumber(self, old: int, new: int) -> int:
        error = self._engine["fd_renumber"](old, new)
        if not error:
            self._names.renumbered(old, new)
            self._listings.forget(old)
            self._listings.forget(new)
        return error

    # File metadata and listings

    def fd_filestat_get(self, fd: int, out: int) -> int:
        error = self._engine["fd_filestat_get"](fd, out)
        if not error:
            opened = self._names.open.get(fd)
            self._tell(out, opened.file if opened else UsedFile(fd + 1), stream=opened is None)
        return error

    def path_filestat_get(self, fd: int, lookup: int, path: int, length: int, out: int) -> int:
        error = self._engine["path_filestat_get"](fd, lookup, path, length, out)
        if not error and (place := self._place(fd, path, length, follow=bool(lookup & abi.FOLLOW))) is not None:
            self._tell(out, self._names.file(place))
        return error

    def fd_filestat_set_times(self, fd: int, accessed: int, modified: int, which: int) -> int:
        error = self._engine["fd_filestat_set_times"](fd, accessed, modified, which)
        if not error and fd in self._names.open:
            self._stamp(self._names.open[fd].file, accessed, modified, which)
        return error

    def path_filestat_set_times(self, fd: int, lookup: int, path: int, length: int, accessed: int, modified: int, which: int) -> int:
        error = self._engine["path_filestat_set_times"](fd, lookup, path, length, accessed, modified, which)
        if not error and (place := self._place(fd, path, length, follow=bool(lookup & abi.FOLLOW))) is not None:
            self._stamp(self._names.file(place), accessed, modified, which)
        return error

    def fd_readdir(self, fd: int, address: int, length: int, cookie: int, used: int) -> int:
        entries = self._listings.kept(fd) if cookie else None
        if entries is None:
            opened, listing = self._names.open.get(fd), self._listings.read(fd)
            if isinstance(listing, int) or opened is None:
                return listing if isinstance(listing, int) else BAD_FD
            entries = [self._numbered(opened.path, entry) for entry in sorted(listing, key=lambda entry: entry.name)]
            self._listings.keep(fd, entries)
            if not opened.file.ours:
                self._watch("directory", opened.path)
        return hand_out(self._memory, entries, address, length, cookie, used)

    # Changes of files

    def path_create_directory(self, fd: int, path: int, length: int) -> int:
        return self._then(self._engine["path_create_directory"](fd, path, length), self._names.made, (fd, path, length))

    def path_unlink_file(self, fd: int, path: int, length: int) -> int:
        return self._then(self._engine["path_unlink_file"](fd, path, length), self._names.removed, (fd, path, length))

    def path_remove_directory(self, fd: int, path: int, length: int) -> int:
        return self._then(self._engine["path_remove_directory"](fd, path, length), self._names.removed, (fd, path, length))

    def path_symlink(self, target: int, target_length: int, fd: int, path: int, length: int) -> int:
        return self._then(self._engine["path_symlink"](target, target_length, fd, path, length), self._names.made, (fd, path, length))

    def path_rename(self, fd: int, old: int, old_length: int, new_fd: int, new: int, new_length: int) -> int:
        error = self._engine["path_rename"](fd, old, old_length, new_fd, new, new_length)
        return self._then(error, self._names.renamed, (fd, old, old_length), (new_fd, new, new_length))

    def path_link(self, fd: int, lookup: int, old: int, old_length: int, new_fd: int, new: int, new_length: int) -> int:
        error = self._engine["path_link"](fd, lookup, old, old_length, new_fd, new, new_length)
        return self._then(error, self._names.linked, (fd, old, old_length), (new_fd, new, new_length))

    def _then(self, error: int, note: Callable[..., None], *at: tuple[int, int, int]) -> int:
        if not error:
            places = [self._place(*each, follow=False) for each in at]
            if all(place is not None for place in places):
                note(*places)
        return error

    def _place(self, fd: int, path: int, length: int, *, follow: bool) -> str | None:
        """Return the absolute path that the guest names, free of symbolic links, to look it up in tables. It is never opened."""
        opened = self._names.open.get(fd)
        if opened is None or b"\0" in (name := self._memory.read(path, length)):
            return None
        named = os.path.join(opened.path, os.fsdecode(name).rstrip("/"))
        parent, last = os.path.split(named)
        return os.path.realpath(named) if follow or last in ("", ".", "..") else os.path.join(os.path.realpath(parent), last)

    def _numbered(self, directory: str, entry: DirectoryEntry) -> DirectoryEntry:
        path = {b".": directory, b"..": os.path.dirname(directory)}.get(entry.name) or os.path.join(directory, os.fsdecode(entry.name))
        return DirectoryEntry(entry.name, self._names.file(path).number, entry.type)

    def _tell(self, out: int, file: UsedFile, *, stream: bool = False) -> None:
        _, _, kind, links, size, *_ = abi.FILESTAT.unpack(self._memory.read(out, abi.FILESTAT.size))
        if stream:
            links, size = 1, 0
        elif kind == abi.DIRECTORY:
            links, size = 1, _DIRECTORY_BYTES  # both depend on the filesystem
        status = abi.FILESTAT.pack(_DEVICE, file.number, kind, links, size, file.accessed, file.modified, file.changed)
        self._memory.write(out, status)

    def _stamp(self, file: UsedFile, accessed: int, modified: int, which: int) -> None:
        now, whole = self._clock.stamp(), (1 << 64) - 1
        if which & (abi.ACCESSED | abi.ACCESSED_NOW):
            file.accessed = now if which & abi.ACCESSED_NOW else accessed & whole
        if which & (abi.MODIFIED | abi.MODIFIED_NOW):
            file.modified = now if which & abi.MODIFIED_NOW else modified & whole
        file.changed = now


FUNCTIONS = tuple(name for name in abi.SIGNATURES if hasattr(Deterministic, name))
PASSED_ON = tuple(name for name in FUNCTIONS if name.startswith(("fd_", "path_")) and name != "fd_readdir")


def _read_fully(fd: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(fd, min(length, _PIECE))
        if not part:
            break
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
