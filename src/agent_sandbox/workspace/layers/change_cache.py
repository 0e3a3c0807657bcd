"""The change set of a sandbox that rests, kept beside its layers: while nothing runs in it, it need not be read from them again.

What a change set is made of are the layers, the bases, and reality where a base is not known. The first two have a key: the history, and
the file of the bases, to which every run adds its beginning and its end. For the third there are *witnesses*, what was real when it was
asked; each is asked again. Where that would not be enough, nothing is kept: what hides a whole directory depends on all that is in it.
"""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps, loads
from zlib import crc32

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals.runs import file_of, unfinished

if TYPE_CHECKING:
    from typing import Any

FORMAT = 1
NAME = "changes.json"
_MOST_WITNESSES = 1000
_KEY, _CHECK = 64, 4


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: it would go through tens of thousands of new values again and again, and find no cycle in them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Witnesses:
    """What was real at the paths whose base is not known. `reliable` is False when that does not tell all that was asked of reality."""

    def __init__(self) -> None:
        self.reliable = True
        self.seen: list[list[Any]] = []

    def note(self, path: str, status: os.stat_result | None) -> None:
        """Reality was asked about one path."""
        self.seen.append([path, _looks(status)])
        if len(self.seen) > _MOST_WITNESSES:
            self.give_up()

    def give_up(self) -> None:
        """Reality was asked about more than single paths."""
        self.reliable = False


def _looks(status: os.stat_result | None) -> list[int] | None:
    """Of a directory what is compared of it; of anything else what tells whether it has changed, in whatever way."""
    if status is None:
        return None
    looks = [status.st_mode, status.st_uid, status.st_gid]
    return looks if stat.S_ISDIR(status.st_mode) else [*looks, status.st_dev, status.st_ino, status.st_ctime_ns]


def key_of(sandbox: str, bases: str, generations: Sequence[int], masks: Iterable[str]) -> str | None:
    """Names the layers, bases and masks that a change set is read from; None while a run has not come to its end."""
    made = sha256(f"{FORMAT} {os.geteuid()}".encode())
    try:
        with open(os.path.join(sandbox, "history.json"), "rb") as file:
            made.update(file.read())
        for generation in generations:
            path = file_of(bases, generation)
            if os.path.exists(path):
                if unfinished(path) is not None:
                    return None
                status = os.stat(path)
                made.update(f"{generation} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode())
    except OSError:
        return None
    for mask in sorted(masks):
        made.update(os.fsencode(f"\0{mask}{'+' if os.path.lexists(mask) else '-'}"))
    return made.hexdigest()


def save(sandbox: str, key: str, changes: ChangeSet, witnesses: Witnesses) -> None:
    """Keep a change set, if it may be kept. Not synced: one that a crash tore is not believed. Raises OSError."""
    if not witnesses.reliable or any(change.unread or change.masks_real for change in changes):
        return
    rows = [_row(change) for change in changes]
    body = dumps([witnesses.seen, rows], separators=(",", ":")).encode()
    new = os.path.join(sandbox, NAME + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(key.encode() + _check(body) + body)
    os.rename(new, os.path.join(sandbox, NAME))


def load(sandbox: str, key: str) -> ChangeSet | None:
    """What was kept under this key, if reality still is what it was where it was asked; None if there is nothing to go by."""
    try:
        with open(os.open(os.path.join(sandbox, NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if file.read(_KEY) != key.encode():
                return None
            check, body = file.read(_CHECK), file.read()
    except OSError:
        return None
    if _check(body) != check:
        return None
    with uncollected():
        witnesses, rows = loads(body)
        if any(looks != _looks(_status(path)) for path, looks in witnesses):
            return None
        return ChangeSet(tuple(map(_change, rows)))


def _check(body: bytes) -> bytes:
    """Tells a file that a crash tore; whoever can write to our state needs no forgery."""
    return crc32(body).to_bytes(_CHECK, "big")


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _row(change: Change) -> list[Any]:
    rest = [change.target, change.xattrs, change.inside, change.renamed_from, change.link_of]
    return [change.path, change.kind.value, _spelt(change.before), _spelt(change.after), *rest]


def _spelt(node: Node | None) -> list[Any] | None:
    if node is None:
        return None
    attributes = {name: value.hex() for name, value in node.xattrs.items()} if node.xattrs else None
    return [node.type.value, node.mode, node.uid, node.gid, node.size, node.target, node.device, attributes]


_KINDS = {kind.value: kind for kind in Kind}
_TYPES = {kind.value: kind for kind in EntryType}


def _change(row: list[Any]) -> Change:
    path, kind, before, after, target, xattrs, inside, renamed_from, link_of = row
    return Change(path, _KINDS[kind], _node(before), _node(after), target, tuple(xattrs), inside, False, False, renamed_from, link_of)


def _node(spelt: list[Any] | None) -> Node | None:
    if spelt is None:
        return None
    kind, mode, uid, gid, size, target, device, attributes = spelt
    xattrs = {name: bytes.fromhex(value) for name, value in attributes.items()} if attributes else None
    return Node(_TYPES[kind], mode, uid, gid, size, target, device, xattrs)
