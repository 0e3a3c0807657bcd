"""The list of a sandbox's changes, kept beside its layers. It is written when a run that changed much ends, and when a list is asked for.

A change set depends on the layers, on the bases, and on reality where a base is unknown. The *key* of a list covers the layers by the
history, and the bases by the state of their files: every run appends its beginning, which is synced before a guest starts, and its end. So
a list from before a run, of another snapshot or of a run that was killed has another key. The key also covers the boot: the list and the
layers are not synced, and a machine that stops may lose the one and not the other.

Reality is covered by *witnesses*: the status of each real entry that was examined, checked again on load. If witnesses do not cover all
that was examined, nothing is kept: a change that hides a whole directory depends on everything in the directory.

Guests cannot see the file. It protects nothing against a program that can write it: such a program can write the layers, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from json import dumps, loads
from zlib import crc32

from agent_sandbox._fast.collector import uncollected
from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.durable import boot_id, write_atomically
from agent_sandbox.workspace.nodes import as_row, from_row
from agent_sandbox.workspace.originals.runs import file_of, unfinished

if TYPE_CHECKING:
    from typing import Any

LIST = "changes.json"
_FORMAT = 2
_MOST_WITNESSES = 1000
_KEY_BYTES, _CHECKSUM = 64, 4  # bytes
_KINDS = {kind.value: kind for kind in Kind}


class Witnesses:
    """The status of each real entry on which a change set depends. `reliable` is False if it depends on more than these entries."""

    def __init__(self) -> None:
        self.reliable = True
        self.seen: list[list[Any]] = []

    def note(self, path: str, status: os.stat_result | None) -> None:
        """Record the status of the real entry at a path."""
        self.seen.append([path, _looks(status)])
        if len(self.seen) > _MOST_WITNESSES:
            self.give_up()

    def give_up(self) -> None:
        """Mark the witnesses as unreliable, because the change set depends on more real entries than they cover."""
        self.reliable = False


def _looks(status: os.stat_result | None) -> list[int] | None:
    """Return the fields of a status that must stay the same for a kept list to be used.

    These are mode and owner; for an entry that is no directory also device, inode and change time.
    """
    if status is None:
        return None
    looks = [status.st_mode, status.st_uid, status.st_gid]
    return looks if stat.S_ISDIR(status.st_mode) else [*looks, status.st_dev, status.st_ino, status.st_ctime_ns]


def key_of(sandbox: str, bases: str, generations: Sequence[int], masks: Iterable[str]) -> str | None:
    """Return the key of a list of changes with these layers, bases and masks; None while a run is unfinished."""
    try:
        digest = sha256(f"{_FORMAT} {os.geteuid()} {boot_id()}".encode())
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


def save_changes(sandbox: str, key: str, changes: ChangeSet, witnesses: Witnesses) -> None:
    """Keep a change set under a key, if its witnesses are reliable. Raises OSError.

    The file is not synced: its checksum reveals a file torn by a crash.
    """
    if not witnesses.reliable or any(change.unread or change.masks_real for change in changes):
        return
    rows = [_change_row(change) for change in changes]
    body = dumps([witnesses.seen, rows], separators=(",", ":")).encode()
    write_atomically(os.path.join(sandbox, LIST), key.encode() + _checksum(body) + body, sync=False)


def load_changes(sandbox: str, key: str) -> ChangeSet | None:
    """Return the change set kept under this key, if every real entry it depends on is unchanged; otherwise None."""
    try:
        with open(os.open(os.path.join(sandbox, LIST), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if file.read(_KEY_BYTES) != key.encode():
                return None
            check, body = file.read(_CHECKSUM), file.read()
    except OSError:
        return None
    if _checksum(body) != check:
        return None
    with uncollected():
        witnesses, rows = loads(body)
        if any(looks != _looks(_status(path)) for path, looks in witnesses):
            return None
        return ChangeSet(tuple(map(_change_of, rows)))


def _checksum(body: bytes) -> bytes:
    """Return a checksum that reveals a file torn by a crash. It does not protect against forgery by somebody who can write the file."""
    return crc32(body).to_bytes(_CHECKSUM, "big")


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _change_row(change: Change) -> list[Any]:
    rest = [change.target, change.xattrs, change.inside, change.renamed_from, change.link_of]
    return [change.path, change.kind.value, as_row(change.before), as_row(change.after), *rest]


def _change_of(row: list[Any]) -> Change:
    path, kind, before, after, target, xattrs, inside, renamed_from, link_of = row
    return Change(path, _KINDS[kind], from_row(before), from_row(after), target, tuple(xattrs), inside, False, False, renamed_from, link_of)
