"""The journal of promotions, which makes each of them complete or undone whatever happens. It lies in the state directory.

    <promotions>/lock            the lock, which names its holder
    <promotions>/<n>/begun       the root, and the name of the staging directory in it; written before that is made
    <promotions>/<n>/moves       every move, with inodes; written when all is staged, before the first move
    <promotions>/<n>/committed   the promotion has happened; written when all moves are made, verified and on disk
    <promotions>/<n>/olds/       the replaced entries, by slot: the staging directory itself, moved here
    <promotions>/kept/<n>/       entries of others that could be left neither in the tree nor behind

Without `moves`, nothing in the tree has been touched. With `moves` but no `committed`, the promotion is rolled back. With `committed` but
no `olds`, it is completed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.durable import sync_directory, write_atomically
from agent_sandbox.workspace.promotion.steps import Move, read, written
from agent_sandbox.workspace.removal import remove_tree

if TYPE_CHECKING:
    from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Intent:
    """The place of a promotion. `place` is the parent of the staging directory, relative to the root."""

    root: str
    identity: tuple[int, int]
    place: str
    staging: str
    started: float
    boot: str  # the boot id: filesystems may have other device numbers after the next boot
    undoes: int = 0  # the number of the promotion that this one takes back


@dataclass(frozen=True)
class Prepared:
    """Everything that was staged: the moves, and the directories in which they take place."""

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
        """The directory for entries that belong to others."""
        return os.path.join(self.promotions, "kept", str(self.number))

    @property
    def committed(self) -> bool:
        """Whether the promotion has happened."""
        return os.path.exists(os.path.join(self.path, "committed"))

    @property
    def closed(self) -> bool:
        """Whether nothing is left to do about the promotion."""
        return self.committed and os.path.isdir(self.olds)

    def begin(self, intent: Intent) -> None:
        """Record the intent, before anything is made."""
        os.mkdir(self.path, 0o700)
        self._write("begun", {**vars(intent), "format": FORMAT})

    def prepare(self, moves: Iterable[Move], directories: Mapping[str, tuple[int, int]]) -> None:
        """Record the moves, before the first one is made."""
        self._write("moves", {"moves": written(moves), "directories": directories})

    def commit(self, facts: Mapping[str, object]) -> None:
        """Record the facts, after the last move. From here on the promotion has happened."""
        self._write("committed", dict(facts))

    def retract(self) -> None:
        """Remove the commit record: it may be there although writing it failed."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "committed"))
            sync_directory(self.path)

    def untouched(self) -> None:
        """Record that the tree is as it was, and only the staging directory is left to remove."""
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

    def intent(self) -> Intent | None:
        """Read the intent; None if not even that was written.

        Raises `WorkspaceError` if another version of this program wrote it.
        """
        record = self._read("begun")
        if record is None:
            return None
        if record.pop("format", None) != FORMAT:
            raise WorkspaceError(f"another version of this program wrote {self.path!r}", hint="use that version to finish it")
        record["identity"] = tuple(record["identity"])
        return Intent(**record)

    def prepared(self, *, device: int | None = None) -> Prepared | None:
        """Read the moves; None if staging was not complete. `device` is the filesystem's number if it is another one now."""
        record = self._read("moves")
        if record is None:
            return None
        directories = {path: (was_on if device is None else device, inode) for path, (was_on, inode) in record["directories"].items()}
        return Prepared(read(record["moves"], device=device), directories)

    def facts(self) -> dict[str, Any]:
        """Read the facts of the commit; empty if there was none."""
        return self._read("committed") or {}

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


def boot_id() -> str:
    """Return the id that tells one boot of the machine from the next."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def journals(promotions: str) -> list[Journal]:
    """Return all journals, oldest first."""
    try:
        names = os.listdir(promotions)
    except FileNotFoundError:
        return []
    return [Journal(promotions, number) for number in sorted(int(name) for name in names if name.isdecimal())]


def next_journal(promotions: str) -> Journal:
    """Return a journal with a number that is unused, also among the kept entries."""
    kept = journals(os.path.join(promotions, "kept"))
    return Journal(promotions, max((journal.number for journal in (*journals(promotions), *kept)), default=0) + 1)
