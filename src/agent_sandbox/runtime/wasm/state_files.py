"""The files of a durable checkpoint, inside the guest: read from the view when it is saved, written to the view when it is resumed.

A checkpoint may come from anybody, and this process is the wall around its program. So files are written below the program's root alone,
and no link on the way is followed: through a link to /proc the program could rewrite this process. What the view does not let a program
write cannot be written here either.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.wire import SCRIPTS
from agent_sandbox.runtime.guest_rpc.transfer import LARGEST_PIECE
from agent_sandbox.runtime.wasm.state_stream import StateWriter
from agent_sandbox.runtime.wasm.wasi.descriptors import NotKept

_BENEATH = sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_NO_MAGICLINKS
_MOST = 1_000_000  # entries
_MODE = 0o777


class SessionFiles:
    """The files below `root`, the program's root in this process. A context manager."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._links: dict[tuple[int, int], str] = {}
        self._directories: list[tuple[str, dict[str, Any]]] = []  # that were restored
        self._count = 0

    def __enter__(self) -> SessionFiles:
        return self

    def __exit__(self, *ended: object) -> None:
        os.close(self._root)

    def save(self, scratch: Iterable[str], changed: Iterable[str], writer: StateWriter) -> None:
        """Write everything in the `scratch` directories, and the `changed` paths elsewhere. Raises `NotKept` and OSError."""
        for path in scratch:
            self._save_tree(path, writer)
        for path in changed:
            with self._parent(path) as (parent, name):
                self._save_entry(path, parent, name, writer)

    def _save_tree(self, top: str, writer: StateWriter) -> None:
        """Write what is in a directory, parents first. Directories that lie on another mount are left out: they are not scratch."""
        device, waiting = None, [top]
        while waiting:
            path = waiting.pop()
            fd = sc.openat2(self._root, path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY, resolve=_BENEATH)
            try:
                own = os.fstat(fd).st_dev
                if own != (device := device or own):
                    continue
                for name in sorted(os.listdir(fd)):
                    inner = f"{path}/{name}"
                    if inner == SCRIPTS or os.stat(name, dir_fd=fd, follow_symlinks=False).st_dev != device:
                        continue
                    if self._save_entry(inner, fd, name, writer):
                        waiting.append(inner)
            finally:
                os.close(fd)

    def _save_entry(self, path: str, parent: int, name: str, writer: StateWriter) -> bool:
        """Write one entry, and return whether it is a directory."""
        self._count += 1
        if self._count > _MOST:
            raise NotKept(f"it has more than {_MOST} files")
        entry: dict[str, Any] = {"path": os.fsencode(path).hex()}
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            writer.file({**entry, "is": "absent"})
            return False
        entry |= {"time": status.st_mtime_ns, "mode": stat.S_IMODE(status.st_mode) & _MODE}
        if stat.S_ISDIR(status.st_mode):
            writer.file({**entry, "is": "directory"})
            return True
        if stat.S_ISLNK(status.st_mode):
            writer.file({**entry, "is": "symlink", "to": os.fsencode(os.readlink(name, dir_fd=parent)).hex()})
            return False
        if not stat.S_ISREG(status.st_mode):
            raise NotKept(f"{path!r} is neither a file nor a directory")
        first = self._links.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            writer.file({**entry, "is": "link", "to": os.fsencode(first).hex()})
            return False
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            writer.file({**entry, "is": "file"}, status.st_size, iter(lambda: os.read(fd, LARGEST_PIECE), b""))
        finally:
            os.close(fd)
        return False

    def restore(self, entry: dict[str, Any], size: int, content: Callable[[int], bytes]) -> None:
        """Write one entry as it was saved. Raises `NotKept` if the view does not let it be written."""
        path = _path(entry["path"])
        with self._explained(path), self._parent(path) as (parent, name):
            self._write(entry, parent, name, size, content)
            if entry["is"] == "directory":
                self._directories.append((path, entry))
            elif entry["is"] != "absent":
                os.utime(name, ns=_time(entry), dir_fd=parent, follow_symlinks=False)

    def finish(self) -> None:
        """Give the restored directories their modes and times, once everything is in them. Raises `NotKept`."""
        for path, entry in reversed(self._directories):
            with self._explained(path), self._parent(path) as (parent, name):
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                try:
                    _set_mode(fd, entry)
                    os.utime(fd, ns=_time(entry))
                finally:
                    os.close(fd)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotKept(f"it has {path!r}, which cannot be written here: {error.strerror}") from None

    def _write(self, entry: dict[str, Any], parent: int, name: str, size: int, content: Callable[[int], bytes]) -> None:
        kind = entry["is"]
        with suppress(FileNotFoundError):
            there = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if not (stat.S_ISDIR(there) and kind == "directory") and not (stat.S_ISREG(there) and kind == "file"):
                _remove(parent, name)
        match kind:
            case "absent":
                pass
            case "directory":
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=parent)
            case "symlink":
                os.symlink(os.fsdecode(bytes.fromhex(entry["to"])), name, dir_fd=parent)
            case "link":
                with self._parent(_path(entry["to"])) as (other, first):
                    os.link(first, name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
            case "file":
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(name, flags, 0o666, dir_fd=parent), "wb", buffering=0) as file:
                    while size:
                        size -= file.write(content(min(size, LARGEST_PIECE)))
                    _set_mode(file.fileno(), entry)
            case _:
                raise NotKept("it has an entry of an unknown kind")

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        directory, _, name = path.rpartition("/")
        fd = sc.openat2(self._root, directory.lstrip("/") or ".", os.O_PATH | os.O_DIRECTORY, resolve=_BENEATH)
        try:
            yield fd, name
        finally:
            os.close(fd)


def _path(text: str) -> str:
    """Return the path that an entry names. Raises `NotKept` if it is not one below the root."""
    path = os.fsdecode(bytes.fromhex(text))
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise NotKept("it has an entry that is not below its root")
    return path


def _time(entry: dict[str, Any]) -> tuple[int, int]:
    return int(entry["time"]), int(entry["time"])


def _set_mode(fd: int, entry: dict[str, Any]) -> None:
    """Set a mode that differs. A program inside can set none, but it may have moved a file that had another."""
    mode = int(entry["mode"]) & _MODE
    if stat.S_IMODE(os.fstat(fd).st_mode) & _MODE != mode:
        os.fchmod(fd, mode)


def _remove(parent: int, name: str) -> None:
    """Remove an entry with everything below it. Links are not followed."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for inner in os.listdir(fd):
            _remove(fd, inner)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
