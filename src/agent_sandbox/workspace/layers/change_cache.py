"""The change cache: the change set of an idle sandbox, stored beside its layers, so that they need not be read again.

A change set depends on the layers, on the bases, and on reality where a base is unknown. The first two are in the key: the history, and the
file of the bases, to which every run adds its beginning and its end. For reality there are *witnesses*: the status of each real entry that
was examined, checked again on load. Where witnesses are not enough nothing is cached: a change that hides a whole directory depends on
everything in it.
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
_KEY, _CHECK = 64, 4  # bytes
_KINDS = {kind.value: kind for kind in Kind}
_TYPES = {kind.value: kind for kind in EntryType}


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector for a block: it would scan tens of thousands of new values again and again, and find no cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Witnesses:
    """The real entries at paths with an unknown base. `reliable` is False when they do not cover everything that was examined."""

    def __init__(self) -> None:
        self.reliable = True
        self.seen: list[list[Any]] = []

    def note(self, path: str, status: os.stat_result | None) -> None:
        """Record the status of one real path."""
        self.seen.append([path, _looks(status)])
        if len(self.seen) > _MOST_WITNESSES:
            self.give_up()

    def give_up(self) -> None:
        """Mark the witnesses as unreliable: more of reality was examined than single paths."""
        self.reliable = False


def _looks(status: os.stat_result | None) -> list[int] | None:
    """Return the fields that must not change: for a directory those that are compared, for other entries all that reveal a change."""
    if status is None:
        return None
    looks = [status.st_mode, status.st_uid, status.st_gid]
    return looks if stat.S_ISDIR(status.st_mode) else [*looks, status.st_dev, status.st_ino, status.st_ctime_ns]


def key_of(sandbox: str, bases: str, generations: Sequence[int], masks: Iterable[str]) -> str | None:
    """Return a key of the layers, bases and masks of a change set; None while a run is unfinished."""
    digest = sha256(f"{FORMAT} {os.geteuid()}".encode())
    try:
        with open(os.path.join(sandbox, "history.json"), "rb") as file:
            digest.update(file.read())
        for generation in generations:
            path = file_of(bases, generation)
            if os.path.exists(path):
                if unfinished(path) is not None:
                    return None
                status = os.stat(path)
                digest.update(f"{generation} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode())
    except OSError:
        return None
    for mask in sorted(masks):
        digest.update(os.fsencode(f"\0{mask}{'+' if os.path.lexists(mask) else '-'}"))
    return digest.hexdigest()


def save(sandbox: str, key: str, changes: ChangeSet, witnesses: Witnesses) -> None:
    """Store a change set if it is cacheable. Not synced: a file torn by a crash fails its checksum. Raises OSError."""
    if not witnesses.reliable or any(change.unread or change.masks_real for change in changes):
        return
    rows = [_row(change) for change in changes]
    body = dumps([witnesses.seen, rows], separators=(",", ":")).encode()
    new = os.path.join(sandbox, NAME + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(key.encode() + _check(body) + body)
    os.rename(new, os.path.join(sandbox, NAME))


def load(sandbox: str, key: str) -> ChangeSet | None:
    """Return the change set stored under this key if every witness still holds; otherwise None."""
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
    """Return a checksum that reveals a file torn by a crash. It need not resist forgery: an attacker who can write here needs none."""
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


def _change(row: list[Any]) -> Change:
    path, kind, before, after, target, xattrs, inside, renamed_from, link_of = row
    return Change(path, _KINDS[kind], _node(before), _node(after), target, tuple(xattrs), inside, False, False, renamed_from, link_of)


def _node(spelt: list[Any] | None) -> Node | None:
    if spelt is None:
        return None
    kind, mode, uid, gid, size, target, device, attributes = spelt
    xattrs = {name: bytes.fromhex(value) for name, value in attributes.items()} if attributes else None
    return Node(_TYPES[kind], mode, uid, gid, size, target, device, xattrs)
