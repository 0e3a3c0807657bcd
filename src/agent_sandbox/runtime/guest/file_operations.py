"""One operation on a file, as it is done inside a sandbox. The host sends this text there, so nothing here may import anything of ours.

The operation has the powers of a program in the sandbox, and no others: the view decides what is there, the kernel what may be done, and a
link leads to where it leads inside. Whoever runs here before may have changed the interpreter, so the host takes the answer for the word of
a hostile program.

An answer is a status, one line of ASCII, and content. The status is "done", "done NUMBER", "error NAME" with the name of an errno, "kind
KIND" for a file that is not a regular one, or "large SIZE" for a file that is larger than asked for.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

_PIECE = 1 << 20  # bytes in memory at once
_MOST_IN_TURN = 8 << 20  # bytes of content; a message to the host has a limit
_KINDS = {
    0o010000: "fifo",
    0o020000: "device",
    0o040000: "directory",
    0o060000: "device",
    0o100000: "file",
    0o120000: "link",
    0o140000: "socket",
}
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CAREFULLY = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


class Unusual(Exception):
    """The operation cannot be done with this file. The argument is the status to answer."""


def perform(request: dict[str, Any], given: BinaryIO, write: Callable[[bytes], object]) -> str:
    """Do the operation, write its content piece by piece, and return its status."""
    before = _on_too_large_a_file(1)  # ignore the signal that would end the program; the write fails in any case
    try:
        return _OPERATIONS[request["operation"]](request, os.fsencode(request["path"]), given, write)
    except Unusual as unusual:
        return str(unusual)
    except OSError as error:
        return f"error {errno.errorcode.get(error.errno or errno.EIO, 'EIO')}"  # by name: not every system has the same numbers
    finally:
        _on_too_large_a_file(before)


def _on_too_large_a_file(handler: Any) -> Any:
    """Set what happens at SIGXFSZ, and return what happened before; None where there is no such signal."""
    if handler is None or sys.platform == "wasi":
        return None
    from _signal import SIGXFSZ, signal  # type: ignore[import-not-found]  # built into the interpreter, unlike `signal`

    return signal(SIGXFSZ, handler)


def perform_as_program(request: dict[str, Any]) -> None:
    """Do the operation as a program of its own: content comes and goes by the standard streams, the status by standard error."""
    status = perform(request, sys.stdin.buffer, sys.stdout.buffer.write)
    sys.stdout.buffer.flush()
    os.write(2, status.encode())


def perform_in_turn(request: dict[str, Any]) -> dict[str, Any]:
    """Do the operation in a turn of a session: content comes by standard input, and the answer is the value of the turn."""
    pieces: list[bytes] = []
    status = perform(request, sys.stdin.buffer, pieces.append)
    content = b"".join(pieces)
    return {"status": f"large {len(content)}", "content": b""} if len(content) > _MOST_IN_TURN else {"status": status, "content": content}


def _opened(path: bytes, flags: int) -> tuple[int, os.stat_result]:
    """Open a regular file. Never waits for the other end of a FIFO, never takes a terminal."""
    fd = os.open(path, flags | _CAREFULLY, 0o666)
    status = os.fstat(fd)
    kind = _kind(status)
    if kind != "file":
        os.close(fd)
        raise Unusual("error EISDIR" if kind == "directory" else f"kind {kind}")
    return fd, status


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(status.st_mode & 0o170000, "unknown")


def _read(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    """Read at most `count` bytes from `offset` on. A file of more than `limit` bytes is not read."""
    fd, status = _opened(path, os.O_RDONLY)
    try:
        if status.st_size > request["limit"]:
            raise Unusual(f"large {status.st_size}")
        os.lseek(fd, request["offset"], os.SEEK_SET)
        left = request["count"]
        while left and (piece := os.read(fd, min(left, _PIECE))):
            write(piece)
            left -= len(piece)
    finally:
        os.close(fd)
    return "done"


def _write(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    """Write what is given from `offset` on. At the beginning the file and the directories above it are made, and it is emptied."""
    new = request["offset"] == 0
    if new:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, _ = _opened(path, os.O_WRONLY | os.O_CREAT if new else os.O_WRONLY)
    try:
        os.ftruncate(fd, request["offset"])
        os.lseek(fd, request["offset"], os.SEEK_SET)
        while piece := given.read(_PIECE):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)
    return "done"


def _list(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    names = []
    with os.scandir(path) as found:
        for entry in found:
            names.append(os.fsencode(entry.name))
            if len(names) > request["limit"]:
                raise Unusual(f"large {len(names)}")
    for name in sorted(names):
        try:
            write(_described(os.path.join(path, name), name))
        except FileNotFoundError:  # removed meanwhile
            continue
    return "done"


def _stat(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    write(_described(path, os.path.basename(path), follow=request["follow"]))
    return "done"


def _described(path: bytes, name: bytes, *, follow: bool = False) -> bytes:
    """Return a line about an entry: its kind, size, mode and time of change in nanoseconds; its name and its target in hexadecimal."""
    status = os.stat(path) if follow else os.lstat(path)
    kind, target = _kind(status), b""
    if kind == "link":
        target = os.fsencode(os.readlink(path))
    return f"{kind} {status.st_size} {status.st_mode & 0o7777} {status.st_mtime_ns} {name.hex()}. {target.hex()}.\n".encode()


def _exists(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return "done 0"
    return "done 1"


def _mkdir(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    os.makedirs(path, exist_ok=True)
    return "done"


def _remove(request: dict[str, Any], path: bytes, given: BinaryIO, write: Callable[[bytes], object]) -> str:
    """Remove a file, a link itself, or a directory; with `recursive` also what a directory holds."""
    if _kind(os.lstat(path)) != "directory":
        os.unlink(path)
    elif not request["recursive"]:
        os.rmdir(path)
    else:
        for each in _inside_out(path):
            os.rmdir(each)
    return "done"


def _inside_out(path: bytes) -> Iterator[bytes]:
    """Unlink what is no directory, and yield directories, each after those in it."""
    waiting = [(path, False)]
    while waiting:
        place, emptied = waiting.pop()
        if emptied:
            yield place
            continue
        waiting.append((place, True))
        with os.scandir(place) as found:
            entries = [(os.fsencode(entry.path), entry.is_dir(follow_symlinks=False)) for entry in found]
        for each, is_directory in entries:
            if is_directory:
                waiting.append((each, False))
            else:
                os.unlink(each)


_OPERATIONS = {"read": _read, "write": _write, "list": _list, "stat": _stat, "exists": _exists, "mkdir": _mkdir, "remove": _remove}
