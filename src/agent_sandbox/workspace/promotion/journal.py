"""The journal of promotions, in the state directory. It makes sure that each promotion is completed or rolled back, whatever happens.

    <promotions>/lock            the lock, which names its holder
    <promotions>/<n>/begun       the root, and the name of the staging directory in it; written before the staging directory is made
    <promotions>/<n>/moves       every move, with inodes; written when all is staged, before the first move
    <promotions>/<n>/committed   the promotion has happened; written when all moves are made, verified and on disk
    <promotions>/<n>/olds/       the replaced entries, by slot: the staging directory itself, moved here
    <promotions>/kept/<n>/       entries of other programs that could not stay in the tree and must not be lost

Without `moves`, nothing in the tree has been touched. With `moves` but no `committed`, the promotion is rolled back. With `committed` but
no `olds`, it is completed.

`keep_olds` keeps the replaced entries for an undo. As a rule it moves the staging directory into the state directory, in one step. If the
state directory is on another filesystem, everything is copied, and the copy counts only once it is complete and on disk.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel.syscalls import RENAME_NOREPLACE, renameat2, syncfs
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.copy import copy
from agent_sandbox.workspace.durable import sync_directory, write_atomically
from agent_sandbox.workspace.promotion.plan import Move, decode_moves, encode_moves

if TYPE_CHECKING:
    from typing import Any

FORMAT = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class PromotionIntent:
    """The beginning of a promotion, as recorded on disk. `place` is the parent of the `staging` directory, relative to the root."""

    root: str
    identity: tuple[int, int]
    place: str
    staging: str
    started: float
    boot: str  # the boot id: filesystems may have other device numbers after the next boot
    undoes: int = 0  # the number of the promotion that this one takes back
    meanings: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)  # see `Plan`


@dataclass(frozen=True)
class StagedMoves:
    """The moves of a promotion that is fully staged, and the device and inode of each directory in which a move takes place."""

    moves: tuple[Move, ...]
    directories: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Journal:
    """The journal of one promotion. Raises OSError if the disk refuses, and `WorkspaceError` for a damaged record."""

    promotions: str
    number: int

    @property
    def path(self) -> str:
        """The directory of this journal."""
        return os.path.join(self.promotions, str(self.number))

    @property
    def olds(self) -> str:
        """The directory of the replaced and removed entries, once the promotion is done."""
        return os.path.join(self.path, "olds")

    @property
    def kept(self) -> str:
        """The directory for entries of other programs that could not stay in the tree."""
        return os.path.join(self.promotions, "kept", str(self.number))

    @property
    def committed(self) -> bool:
        """Whether the commit is recorded: then the promotion has happened."""
        return os.path.exists(os.path.join(self.path, "committed"))

    @property
    def closed(self) -> bool:
        """Whether the promotion needs no more work."""
        return self.committed and os.path.isdir(self.olds)

    def begin(self, intent: PromotionIntent) -> None:
        """Record the intent, before anything is made in the tree."""
        os.mkdir(self.path, 0o700)
        self._write("begun", {**vars(intent), "format": FORMAT})

    def prepare(self, moves: Iterable[Move], directories: Mapping[str, tuple[int, int]]) -> None:
        """Record the moves, before the first one is made."""
        self._write("moves", {"moves": encode_moves(moves), "directories": directories})

    def commit(self, facts: Mapping[str, object]) -> None:
        """Record, after the last move, that the promotion has happened, with facts about it."""
        self._write("committed", dict(facts))

    def retract(self) -> None:
        """Remove the commit record, if there is one: `commit` may have written it even if it raised."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "committed"))
            sync_directory(self.path)

    def untouched(self) -> None:
        """Record that the tree is as it was before the promotion, so that only the staging directory must still be removed."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "moves"))
            sync_directory(self.path)

    def drop(self) -> None:
        """Remove this journal."""
        directory = os.open(self.promotions, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(directory, str(self.number))
        finally:
            os.close(directory)

    def intent(self) -> PromotionIntent | None:
        """Read the intent; None if the intent was not written.

        Raises `WorkspaceError` if another version of this program wrote it.
        """
        record = self._read("begun")
        if record is None:
            return None
        if record.pop("format", None) != FORMAT:
            raise WorkspaceError(f"another version of this program wrote {self.path!r}", hint="use that version to finish it")
        record["identity"] = tuple(record["identity"])
        return PromotionIntent(**record)

    def prepared(self, *, device: int | None = None) -> StagedMoves | None:
        """Read the moves; None if staging was not complete. `device`, if given, replaces the recorded device number of their filesystem."""
        record = self._read("moves")
        if record is None:
            return None
        directories = {path: (was_on if device is None else device, inode) for path, (was_on, inode) in record["directories"].items()}
        return StagedMoves(decode_moves(record["moves"], device=device), directories)

    def facts(self) -> dict[str, Any]:
        """Read the facts about the promotion; empty if there was no commit. `started` is added from the intent, if the intent has it."""
        facts = self._read("committed")
        if facts is not None and (begun := self._read("begun")) is not None and "started" in begun:
            facts.setdefault("started", begun["started"])
        return facts or {}

    def _write(self, name: str, value: object) -> None:
        write_atomically(os.path.join(self.path, name), json.dumps(value, separators=(",", ":")) + "\n")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                record = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise WorkspaceError(
                f"{os.path.join(self.path, name)!r} is damaged", hint="the staging directory in the project holds what was there before"
            ) from error
        assert isinstance(record, dict)
        return record


def journals(promotions: str) -> list[Journal]:
    """Return the journals in a directory of promotions, oldest first."""
    try:
        names = os.listdir(promotions)
    except FileNotFoundError:
        return []
    return [Journal(promotions, number) for number in sorted(int(name) for name in names if name.isdecimal())]


def next_journal(promotions: str) -> Journal:
    """Return a journal with the next unused number. The numbers of kept entries count as used."""
    kept = journals(os.path.join(promotions, "kept"))
    return Journal(promotions, max((journal.number for journal in (*journals(promotions), *kept)), default=0) + 1)


def keep_olds(journal: Journal, place: int, staging: str) -> None:
    """Move the contents of the staging directory to `journal.olds`, and remove the staging directory. Can be interrupted and repeated."""
    home = os.open(journal.path, _DIRECTORY)
    try:
        if not os.path.isdir(journal.olds):
            _move(home, place, staging)
        remove_tree(place, staging)
        os.fsync(home)
    finally:
        os.close(home)


def _move(home: int, place: int, staging: str) -> None:
    if beneath.status_of(home, "olds.copied") is None:
        try:
            os.rename(staging, "olds", src_dir_fd=place, dst_dir_fd=home)
            return
        except FileNotFoundError:  # somebody removed the staging directory: no undo is possible, and the promotion stands
            os.mkdir("olds", 0o700, dir_fd=home)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        remove_tree(home, "olds.copying")
        replicate(place, staging, home, "olds.copying")
        syncfs(home)
        os.rename("olds.copying", "olds.copied", src_dir_fd=home, dst_dir_fd=home)
        os.fsync(home)
    remove_tree(place, staging)
    os.rename("olds.copied", "olds", src_dir_fd=home, dst_dir_fd=home)


def rescue(journal: Journal, staging: int, slot: str, name: str) -> None:
    """Move an entry of another program from its slot in the staging directory to `journal.kept`, so that the entry is not lost."""
    os.makedirs(journal.kept, mode=0o700, exist_ok=True)
    new_name = f"{slot}-{os.fsdecode(os.fsencode(name)[:200])}"
    kept = os.open(journal.kept, _DIRECTORY)
    try:
        try:
            renameat2(staging, slot, kept, new_name, RENAME_NOREPLACE)
        except FileNotFoundError:
            return  # kept already, before an interruption
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            remove_tree(kept, new_name)  # left by an interrupted copy
            replicate(staging, slot, kept, new_name)
            syncfs(kept)
        os.fsync(kept)
    finally:
        os.close(kept)
    sync_directory(os.path.dirname(journal.kept))


def replicate(source: int, name: str, target: int, new: str) -> None:
    """Copy an entry, and everything below it, with modes, owners, times and attributes. Raises OSError."""
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        _copy_entry(source, name, status, target, new)
        return
    top = beneath.open_directory(source, name)
    opened: list[tuple[int, int, str, os.stat_result]] = []  # directories being filled, and the sources of their metadata
    try:
        opened.append((_make_directory(target, new), source, name, status))
        for item in beneath.walk(top):
            while len(opened) > item.depth + 1:
                _finish(*opened.pop())
            if stat.S_ISDIR(item.status.st_mode):
                fd = os.dup(item.directory)
                opened.append((_make_directory(opened[-1][0], item.name), fd, item.name, item.status))
            else:
                _copy_entry(item.directory, item.name, item.status, opened[-1][0], item.name)
        while len(opened) > 1:
            _finish(*opened.pop())
        copied, _, _, _ = opened.pop()
        _copy_metadata(copied, source, name, status)
        os.close(copied)
    finally:
        for fd, directory, _, _ in opened:
            os.close(fd)
            if directory != source:
                os.close(directory)
        os.close(top)


def _make_directory(directory: int, name: str) -> int:
    os.mkdir(name, 0o700, dir_fd=directory)
    return beneath.open_directory(directory, name)


def _finish(copied: int, directory: int, name: str, status: os.stat_result) -> None:
    try:
        _copy_metadata(copied, directory, name, status)
    finally:
        os.close(copied)
        os.close(directory)


def _copy_entry(source: int, name: str, status: os.stat_result, target: int, new: str) -> None:
    if stat.S_ISREG(status.st_mode):
        content = beneath.open_file(source, name)
        try:
            copied = os.open(new, _NEW_FILE, 0o600, dir_fd=target)
            try:
                copy(content, copied, os.fstat(content).st_size, path=name)
                _copy_metadata(copied, source, name, status)
            finally:
                os.close(copied)
        finally:
            os.close(content)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
    else:
        os.mknod(new, status.st_mode, status.st_rdev, dir_fd=target)
    with suppress(PermissionError):
        os.chown(new, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_metadata(copied: int, source: int, name: str, status: os.stat_result) -> None:
    with suppress(PermissionError):  # the owner is in the journal too
        os.fchown(copied, status.st_uid, status.st_gid)
    for attribute, value in beneath.xattrs(source, name).items():
        with suppress(OSError):  # not every filesystem has every attribute; they are in the journal too
            os.setxattr(copied, attribute, value)
    os.fchmod(copied, stat.S_IMODE(status.st_mode))
    os.utime(copied, ns=(status.st_atime_ns, status.st_mtime_ns))
