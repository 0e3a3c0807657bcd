"""The clone inventory: the names of all entries of a project when its clone was made. `drift` uses it to find new and removed entries.

Only directories are listed; no entry is opened or examined. 200,000 names take a fraction of a second and a file of a few megabytes, so the
inventory is made in the background of the first run. Names may change during the listing, so the inventory may differ from the state at the
clone; in doubt `drift` goes by the times of entries. Until the file is complete, removed and new entries cannot be detected; `NoInventory`
says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.durable import write_atomically

LIMIT = 2_000_000  # names; a larger inventory is left unfinished
_FIRST = '{"names":1,'


@dataclass(frozen=True)
class Inventory:
    """The names in each directory of a project. A key of `records` is a path relative to the project, "" for the project itself.

    In a record, a letter before each name gives its type: d for a directory, f for a file, l for a link, o for others. `unlisted` are
    directories that were not entered, because they are on another filesystem or cannot be read.
    """

    began_ns: int
    finished_ns: int
    unlisted: frozenset[str] = frozenset()
    records: dict[str, bytes] = field(default_factory=dict, repr=False)

    def in_directory(self, path: str) -> dict[str, str] | None:
        """Return the names in a directory, each with its type letter; None if the directory did not exist or was not entered."""
        record = self.records.get(path)
        if record is None:
            return None
        return {os.fsdecode(each[1:]): chr(each[0]) for each in record.split(b"\0") if each}

    def __len__(self) -> int:
        return sum(record.count(b"\0") + 1 for record in self.records.values() if record)


@dataclass(frozen=True)
class NoInventory:
    """Stands for a missing inventory; `why` is the reason. Without an inventory, removed entries cannot be detected."""

    why: str


def remember(
    project: str,
    file: str,
    *,
    cloned_ns: int | None = None,
    skip: Collection[str] = (),
    limit: int = LIMIT,
    now_ns: Callable[[], int] = time.time_ns,
) -> Inventory | NoInventory:
    """List a project and write the inventory to `file`, completely or not at all. Paths in `skip` (absolute) are not entered.

    `cloned_ns` is when the clone was made, by default now. On a busy machine the listing may begin long after the clone.

    Raises OSError when the file cannot be written. The file is not synced: an inventory lost in a crash counts as unfinished.
    """
    began = now_ns() if cloned_ns is None else cloned_ns
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
            return _write(file, NoInventory(f"the project has more than {limit:,} entries"))
    return _write(file, Inventory(began, now_ns(), frozenset(unlisted), records))


def _directories(project: str, skip: frozenset[str]) -> Iterator[tuple[str, bytes | None]]:
    """Yield the path of each directory with its record (see `Inventory`). The record is None if the directory was not entered."""
    root = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    pending = [""]
    try:
        while pending:
            path = pending.pop()
            entries: list[str] | None = None
            with suppress(OSError):
                fd = open_inside(root, path)
                try:
                    entries = _listed(fd, path, pending, project, skip)
                finally:
                    os.close(fd)
            yield path, os.fsencode("\0".join(entries)) if entries is not None else None
    finally:
        os.close(root)


def open_inside(root: int, path: str) -> int:
    """Open a directory of the project for listing; "" is the project itself. Raises OSError on a link or another filesystem."""
    if path:
        return beneath.open_directory(root, path)
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)


def _listed(fd: int, path: str, pending: list[str], project: str, skip: frozenset[str]) -> list[str]:
    records: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                inner = f"{path}/{name}" if path else name
                if not skip or f"{project.rstrip('/')}/{inner}" not in skip:
                    pending.append(inner)
                records.append("d" + name)
            else:
                records.append(("f" if entry.is_file(follow_symlinks=False) else "l" if entry.is_symlink() else "o") + name)
    return records


def _write(file: str, names: Inventory | NoInventory) -> Inventory | NoInventory:
    import zlib  # imported here: needed only in the background of a first run

    head: dict[str, object] = {}
    body = b""
    if isinstance(names, NoInventory):
        head = {"unfinished": names.why}
    else:
        unlisted = [os.fsencode(path).hex() for path in sorted(names.unlisted)]
        head = {"began": names.began_ns, "finished": names.finished_ns, "unlisted": unlisted, "directories": len(names.records)}
        # A name is never empty and has no NUL, so two NULs end a directory.
        each = (os.fsencode(f"/{path}") + (b"\0" + record if record else b"") for path, record in names.records.items())
        body = zlib.compress(b"\0\0".join(each), 1)
    write_atomically(file, f"{_FIRST}{as_json(head)[1:]}\n".encode() + body, sync=False)
    return names


def recall(file: str) -> Inventory | NoInventory:
    """Read the inventory, or return why there is none. Raises nothing: a damaged inventory counts as unfinished."""
    import zlib  # only needed to look for drift
    from json import loads

    try:
        with open(file, "rb") as opened:
            first, body = opened.readline(), opened.read()
    except FileNotFoundError:
        return NoInventory("the names of the project were not listed to the end when the clone was made")
    except OSError as error:
        return NoInventory(f"the list of names cannot be read: {error.strerror}")
    try:
        head = loads(first)
        if not first.startswith(_FIRST.encode()):
            raise ValueError("another format")
        if "unfinished" in head:
            return NoInventory(str(head["unfinished"]))
        records: dict[str, bytes] = {}
        for each in zlib.decompress(body).split(b"\0\0"):
            path, _, record = each.partition(b"\0")
            records[os.fsdecode(path[1:])] = record
        if len(records) != head["directories"]:
            raise ValueError("not all of it is there")
        unlisted = frozenset(os.fsdecode(bytes.fromhex(path)) for path in head["unlisted"])
        return Inventory(int(head["began"]), int(head["finished"]), unlisted, records)
    except (ValueError, KeyError, TypeError, zlib.error):
        return NoInventory("the list of names is damaged")
