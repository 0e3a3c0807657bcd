"""Frozen upper layers of a run with checkpoints: list what one changed, merge two into one, and compare a file in two states.

A guest has written everything in them, and a process of it that still stands in one can change it meanwhile. So every directory is opened
from the one above it, no link is followed, and nothing outside a layer is reached.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress

from agent_sandbox.kernel import syscalls as sc

_BENEATH = sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20
_LARGEST = 64 << 20  # bytes of a file that are compared; a larger one with the same size and times counts as the same
_DEEPEST = 200  # levels of directories


def layer_entries(layer: str) -> Iterator[str]:
    """Yield the paths of all entries of a layer, relative to it. Nothing if there is no layer."""
    with suppress(OSError):
        top = os.open(layer, _DIRECTORY)
        try:
            yield from _entries(top, "", 0)
        finally:
            os.close(top)


def _entries(directory: int, path: str, depth: int) -> Iterator[str]:
    with os.scandir(directory) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    if path:
        yield path
    for name, inner in entries:
        if not inner or depth == _DEEPEST:
            yield os.path.join(path, name)
            continue
        with suppress(OSError):  # it has gone, or is another
            fd = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                yield from _entries(fd, os.path.join(path, name), depth + 1)
            finally:
                os.close(fd)


def hiding_entries(layer: str, names: Iterable[str], opaque: str) -> Iterator[str]:
    """Yield those of the entries of a layer that hide a directory of the layers below: whiteouts, files, and opaque directories."""
    with ExitStack() as opened, suppress(OSError):
        top = _opened(layer, opened)
        for name in names:
            with ExitStack() as each, suppress(OSError):
                fd = sc.openat2(top, name, os.O_PATH | os.O_NOFOLLOW, resolve=_BENEATH)
                each.callback(os.close, fd)
                if not stat.S_ISDIR(os.fstat(fd).st_mode) or os.getxattr(f"/proc/self/fd/{fd}", opaque) == b"y":
                    yield name


def entries_of_both(before: int, after: int, name: str) -> set[str]:
    """Return the paths of all entries of a directory below two others, in either of them. Nothing unless both have it."""
    with ExitStack() as opened, suppress(OSError):
        places = []
        for place in (before, after):
            places.append(sc.openat2(place, name, _DIRECTORY, resolve=_BENEATH))
            opened.callback(os.close, places[-1])
        return {entry for place in places for entry in _entries(place, name, name.count("/") + 1)} - {name}
    return set()


def merge_layers(newer: str, older: str, merged: str, opaque: str) -> None:
    """Make the layer `merged`, which shows what `newer` over `older` shows. Files are hard links. Raises OSError."""
    os.mkdir(merged, 0o700)
    with ExitStack() as opened:
        place = _opened(merged, opened)
        layers = [_opened(each, opened) for each in (newer, older) if os.path.isdir(each)]
        if layers:
            _imitate(layers[0], place)
            _merge(layers, place, opaque, 0)


def _opened(path: str, opened: ExitStack, directory: int | None = None) -> int:
    fd = os.open(path, _DIRECTORY, dir_fd=directory)
    opened.callback(os.close, fd)
    return fd


def _merge(layers: Sequence[int], place: int, opaque: str, depth: int) -> None:
    """Merge directories, the newest first, into the directory `place`."""
    if depth > _DEEPEST:
        raise OSError(40, "directories are too deep to be merged")
    inner: dict[str, list[int]] = {}  # directories to merge, each with the layers that have it
    closed: set[str] = set()  # names of which older layers show nothing
    for layer in layers:
        with os.scandir(layer) as found:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        for name, is_directory in entries:
            if name in closed:
                continue
            if is_directory:
                inner.setdefault(name, []).append(layer)
                continue
            closed.add(name)
            if name not in inner:
                os.link(name, name, src_dir_fd=layer, dst_dir_fd=place, follow_symlinks=False)
        closed |= {name for name, holders in inner.items() if holders[-1] == layer and _is_opaque(layer, name, opaque)}
    for name, holders in inner.items():
        with ExitStack() as opened:
            parts = [_opened(name, opened, holder) for holder in holders]
            os.mkdir(name, 0o700, dir_fd=place)
            made = _opened(name, opened, place)
            _imitate(parts[0], made)
            _merge(parts, made, opaque, depth + 1)


def _imitate(source: int, place: int) -> None:
    """Give a directory the owner, mode and attributes of another, both by descriptor."""
    status = os.fstat(source)
    with suppress(OSError):  # rootless, all of them have one owner
        os.fchown(place, status.st_uid, status.st_gid)
    os.fchmod(place, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        os.setxattr(place, name, os.getxattr(source, name))


def _is_opaque(layer: int, name: str, opaque: str) -> bool:
    with ExitStack() as opened, suppress(OSError):
        return os.getxattr(_opened(name, opened, layer), opaque) == b"y"
    return False


def compare_entry(before: int, after: int, name: str) -> str:
    """Return how an entry differs below two directories: "new", "changed", "gone", or "" if it does not."""
    old, new = _look(before, name), _look(after, name)
    if old is None or new is None:
        return "" if old is new else "new" if old is None else "gone"
    if (old.st_mode, old.st_uid, old.st_gid) != (new.st_mode, new.st_uid, new.st_gid):
        return "changed"
    if stat.S_ISDIR(old.st_mode):
        return ""
    if old.st_size != new.st_size:
        return "changed"
    if stat.S_ISLNK(old.st_mode):
        return "changed" if _target(before, name) != _target(after, name) else ""
    if not stat.S_ISREG(old.st_mode) or old.st_size > _LARGEST:
        return "changed" if old.st_mtime_ns != new.st_mtime_ns else ""
    return "" if _content(before, name) == _content(after, name) else "changed"


def _look(directory: int, name: str) -> os.stat_result | None:
    try:
        fd = sc.openat2(directory, name, os.O_PATH | os.O_NOFOLLOW, resolve=_BENEATH)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _target(directory: int, name: str) -> str | None:
    try:
        fd = sc.openat2(directory, name, os.O_PATH | os.O_NOFOLLOW, resolve=_BENEATH)
    except OSError:
        return None
    try:
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _content(directory: int, name: str) -> bytes | None:
    try:
        fd = sc.openat2(directory, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, resolve=_BENEATH)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(fd, _PIECE):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)
