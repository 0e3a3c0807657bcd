"""The names of all entries of a project when its clone was made: what tells later that something has appeared or gone.

Only directories are listed, nothing in them is looked at: some 200,000 names take a fraction of a second and are a file of a few megabytes,
so it can be done in the background of the first run. Names change under us meanwhile; which were there *exactly* when the clone was made
is not promised, and times decide in doubt. Until the file is complete, "gone" and "appeared" cannot be told, and that is a value, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.workspace import beneath

LIMIT = 2_000_000  # names; beyond it the list is not finished
_FIRST = '{"names":1,'


@dataclass(frozen=True)
class Names:
    """What was in each directory, by its path relative to the project, "" being itself: names, each after a letter for its type.

    The letters: d for a directory, f for a file, l for a link, o for others. `unlisted` are directories that were not entered: on another
    filesystem, or not ours to read.
    """

    began_ns: int
    finished_ns: int
    unlisted: frozenset[str] = frozenset()
    records: dict[str, bytes] = field(default_factory=dict, repr=False)

    def in_directory(self, path: str) -> dict[str, str] | None:
        """Names and the letters of their types; None for a directory that was not there or not entered."""
        record = self.records.get(path)
        if record is None:
            return None
        return {os.fsdecode(each[1:]): chr(each[0]) for each in record.split(b"\0") if each}

    def __len__(self) -> int:
        return sum(record.count(b"\0") + 1 for record in self.records.values() if record)


@dataclass(frozen=True)
class Unfinished:
    """There is no list, and why: then nobody can tell what has gone."""

    why: str


def remember(
    project: str,
    file: str,
    *,
    skip: Collection[str] = (),
    limit: int = LIMIT,
    now_ns: Callable[[], int] = time.time_ns,
) -> Names | Unfinished:
    """List a project and write that to `file`, whole or not at all. `skip` are absolute paths that are not entered.

    Raises OSError when the file cannot be written. Not synced: a list that a crash took is an unfinished one.
    """
    began = now_ns()
    records: dict[str, bytes] = {}
    unlisted: set[str] = set()
    left = limit
    for path, record in _directories(project, frozenset(skip)):
        if record is None:
            unlisted.add(path)
            continue
        records[path] = record
        left -= record.count(b"\0") + 1
        if left < 0:
            return _write(file, Unfinished(f"the project has more than {limit:,} entries"))
    return _write(file, Names(began, now_ns(), frozenset(unlisted), records))


def _directories(project: str, skip: frozenset[str]) -> Iterator[tuple[str, bytes | None]]:
    """Each directory with what is in it, or None for one that is not entered."""
    root = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    pending = [""]
    try:
        while pending:
            path = pending.pop()
            found: list[str] | None = None
            with suppress(OSError):
                fd = open_inside(root, path)
                try:
                    found = _listed(fd, path, pending, project, skip)
                finally:
                    os.close(fd)
            yield path, os.fsencode("\0".join(found)) if found is not None else None
    finally:
        os.close(root)


def open_inside(root: int, path: str) -> int:
    """A directory of the project to list, "" being itself: no link on the way, and none on another filesystem. Raises OSError."""
    if path:
        return beneath.open_directory(root, path)
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)


def _listed(fd: int, path: str, pending: list[str], project: str, skip: frozenset[str]) -> list[str]:
    found: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                inner = f"{path}/{name}" if path else name
                if not skip or f"{project.rstrip('/')}/{inner}" not in skip:
                    pending.append(inner)
                found.append("d" + name)
            else:
                found.append(("f" if entry.is_file(follow_symlinks=False) else "l" if entry.is_symlink() else "o") + name)
    return found


def _write(file: str, names: Names | Unfinished) -> Names | Unfinished:
    import zlib  # in the background, or never

    head: dict[str, object] = {}
    body = b""
    if isinstance(names, Unfinished):
        head = {"unfinished": names.why}
    else:
        unlisted = [os.fsencode(path).hex() for path in sorted(names.unlisted)]
        head = {"began": names.began_ns, "finished": names.finished_ns, "unlisted": unlisted, "directories": len(names.records)}
        # A name has neither a NUL nor no character in it, so two NULs end a directory.
        each = (os.fsencode(f"/{path}") + (b"\0" + record if record else b"") for path, record in names.records.items())
        body = zlib.compress(b"\0\0".join(each), 1)
    new = file + ".new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as opened:
        opened.write(f"{_FIRST}{as_json(head)[1:]}\n".encode() + body)
    os.rename(new, file)
    return names


def recall(file: str) -> Names | Unfinished:
    """The list as it was written, or why there is none. Raises nothing: a damaged list is an unfinished one."""
    import zlib
    from json import loads

    try:
        with open(file, "rb") as opened:
            first, body = opened.readline(), opened.read()
    except FileNotFoundError:
        return Unfinished("the names of the project were not listed to the end when the clone was made")
    except OSError as error:
        return Unfinished(f"the list of names cannot be read: {error.strerror}")
    try:
        head = loads(first)
        if not first.startswith(_FIRST.encode()):
            raise ValueError("another format")
        if "unfinished" in head:
            return Unfinished(str(head["unfinished"]))
        records: dict[str, bytes] = {}
        for each in zlib.decompress(body).split(b"\0\0"):
            path, _, record = each.partition(b"\0")
            records[os.fsdecode(path[1:])] = record
        if len(records) != head["directories"]:
            raise ValueError("not all of it is there")
        unlisted = frozenset(os.fsdecode(bytes.fromhex(path)) for path in head["unlisted"])
        return Names(int(head["began"]), int(head["finished"]), unlisted, records)
    except (ValueError, KeyError, TypeError, zlib.error):
        return Unfinished("the list of names is damaged")
