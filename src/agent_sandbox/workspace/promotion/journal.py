"""What is written down of promotions, so that each is whole or undone whatever happens. It lies in the state directory.

    <promotions>/lock            who is at it
    <promotions>/<n>/begun       where: the root, and the name of the staging directory in it; written before that is made
    <promotions>/<n>/moves       what: everything that will be moved, with inodes; written when all is staged, before the first move
    <promotions>/<n>/committed   from here on it has happened; written when all moves are made, verified and on the disk
    <promotions>/<n>/olds/       what was there before, by slots: the staging directory itself, moved here
    <promotions>/kept/<n>/       what was somebody else's and could be left neither in the tree nor behind

Without `moves` nothing in the tree has been touched. With `moves` and without `committed` it is rolled back. With `committed` and without
`olds` it is finished.
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
    """Where a promotion takes place. `place` is the directory of the staging directory, relative to the root."""

    root: str
    identity: tuple[int, int]
    place: str
    staging: str
    started: float
    boot: str  # which start of the machine it was: filesystems may have other numbers after the next
    undoes: int = 0  # the number of the promotion that this one takes back


@dataclass(frozen=True)
class Prepared:
    """All that was staged: the moves, and the directories that they take place in."""

    moves: tuple[Move, ...]
    directories: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Journal:
    """One promotion. Raises OSError where the disk refuses, and `WorkspaceError` for what cannot be read."""

    promotions: str
    number: int

    @property
    def path(self) -> str:
        """Its directory."""
        return os.path.join(self.promotions, str(self.number))

    @property
    def olds(self) -> str:
        """Where what it replaced and removed is kept, once it is done."""
        return os.path.join(self.path, "olds")

    @property
    def kept(self) -> str:
        """Where what was somebody else's is put."""
        return os.path.join(self.promotions, "kept", str(self.number))

    @property
    def committed(self) -> bool:
        """Whether it has happened."""
        return os.path.exists(os.path.join(self.path, "committed"))

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be done about it."""
        return self.committed and os.path.isdir(self.olds)

    def begin(self, intent: Intent) -> None:
        """Before anything is made."""
        os.mkdir(self.path, 0o700)
        self._write("begun", {**vars(intent), "format": FORMAT})

    def prepare(self, moves: Iterable[Move], directories: Mapping[str, tuple[int, int]]) -> None:
        """Before the first move."""
        self._write("moves", {"moves": written(moves), "directories": directories})

    def commit(self, facts: Mapping[str, object]) -> None:
        """After the last one."""
        self._write("committed", dict(facts))

    def retract(self) -> None:
        """Make sure that it does not count as committed: the record may be there although writing it failed."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "committed"))
            sync_directory(self.path)

    def untouched(self) -> None:
        """Say that the tree is as it was, and only the staging directory is left to be removed."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "moves"))
            sync_directory(self.path)

    def drop(self) -> None:
        """Forget it."""
        directory = os.open(self.promotions, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(directory, str(self.number))
        finally:
            os.close(directory)

    def intent(self) -> Intent | None:
        """What was begun; None when not even that was written."""
        found = self._read("begun")
        if found is None:
            return None
        if found.pop("format", None) != FORMAT:
            raise WorkspaceError(f"another version of this program wrote {self.path!r}", hint="use that version to finish it")
        found["identity"] = tuple(found["identity"])
        return Intent(**found)

    def prepared(self, *, device: int | None = None) -> Prepared | None:
        """What was staged; None when it was not complete. `device` is the number of the filesystem, if that is another one now."""
        found = self._read("moves")
        if found is None:
            return None
        directories = {path: (was_on if device is None else device, inode) for path, (was_on, inode) in found["directories"].items()}
        return Prepared(read(found["moves"], device=device), directories)

    def facts(self) -> dict[str, Any]:
        """What was said when it was committed."""
        return self._read("committed") or {}

    def _write(self, name: str, value: object) -> None:
        write_atomically(os.path.join(self.path, name), json.dumps(value, separators=(",", ":")) + "\n")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                found = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise WorkspaceError(
                f"{os.path.join(self.path, name)!r} is damaged", hint="the staging directory in the project holds what was there before"
            ) from error
        assert isinstance(found, dict)
        return found


def boot_id() -> str:
    """What tells one start of the machine from the next."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def journals(promotions: str) -> list[Journal]:
    """All that are there, oldest first."""
    try:
        names = os.listdir(promotions)
    except FileNotFoundError:
        return []
    return [Journal(promotions, number) for number in sorted(int(name) for name in names if name.isdecimal())]


def next_journal(promotions: str) -> Journal:
    """One with a number that none has, and under which nothing is kept."""
    kept = journals(os.path.join(promotions, "kept"))
    return Journal(promotions, max((journal.number for journal in (*journals(promotions), *kept)), default=0) + 1)
