"""Read back from the layers of a sandbox what it changed.

The raw upper directories are read, never a mounted overlay. Of the overlay's attributes only those with the prefix of this mount are
believed, and of these only whiteout and opaque: the overlay is mounted so that a guest cannot set them and the kernel makes no others.
What was copied up but is the same as on the machine is no change. Times are not compared.

The top directory of a layer itself is not compared: its mode and owner are set by whoever mounts the overlay.
"""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.values import replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind, covers
from agent_sandbox.workspace.merged import Merged
from agent_sandbox.workspace.nodes import EntryType, Node, describe, same_content
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import Base, Bases, digest_of_open
from agent_sandbox.workspace.stack import Stack

NO_BASES: Bases = MappingProxyType({})
_PATH_CHARACTERS = 64 << 20  # of all paths together: 10,000 nested directories with long names would fill the memory
_COMPARED_BYTES = 16 << 30


def read_stack(
    stack: Stack,
    *,
    machine_root: str = "/",
    masks: Collection[str] = (),
    bases: Bases = NO_BASES,
    limit: int = beneath.ENTRY_LIMIT,
) -> ChangeSet:
    """What the layers of a sandbox change on the machine at `machine_root`.

    `masks` are the absolute paths that were hidden from the guest. Where `bases` knows what was real when a layer first covered a path, the
    change is from that; elsewhere from what is real now. Raises `TooMany` beyond `limit` entries: a list that leaves something out is worse
    than none.
    """
    changes: list[Change] = []
    budget = _Budget(entries=limit)
    there = frozenset(mask for mask in masks if os.path.lexists(machine_root.rstrip("/") + mask))
    for target in stack.targets:
        try:
            with Reality(machine_root.rstrip("/") + target) as reality, _uncollected():
                reader = _Reader(target, stack, reality, bases, frozenset(masks), there, budget)
                for entry in stack.walk(target, limit=budget.entries):
                    reader.read(entry, changes)
        except OSError as error:
            raise WorkspaceError(
                f"cannot read what this sandbox changed below {target!r}: {error.strerror or error}",
                hint="wait until nothing runs in it; agent-sandbox reset drops it",
            ) from error
    return ChangeSet(tuple(changes))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: it would go through tens of thousands of new values again and again, and find no cycle in them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class _Budget:
    entries: int
    characters: int = _PATH_CHARACTERS
    compared: int = _COMPARED_BYTES

    def spend(self, path: str) -> None:
        self.entries -= 1
        self.characters -= len(path)
        if self.entries < 0 or self.characters < 0:
            raise TooMany("this sandbox changed more than can be listed", hint="agent-sandbox reset drops it")


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What is known of a directory of the layers when its entries are read."""

    path: str  # with a slash at the end
    relative: str  # the same from the top of the overlay, without it
    real: bool  # there is, or when it was covered there was, a real directory at this place
    masked: bool  # it lies at or below a mask
    hides: bool = False  # nothing real shows through: it is opaque, or lies below one that is, where no directory is marked again

    def below(self, name: str) -> str:
        """The path of an entry from the top of the overlay."""
        return f"{self.relative}/{name}" if self.relative else name


@dataclass(slots=True)
class _Reader:
    target: str
    stack: Stack
    reality: Reality
    bases: Bases
    masks: frozenset[str]
    masks_with_something: frozenset[str]
    budget: _Budget
    around: list[_Surroundings] = field(default_factory=list)  # of the directories from the top down to where we are
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    children: dict[str, list[str]] | None = None  # of the bases, made when first needed
    current: _Surroundings | None = None  # whose real directory is open
    real: int | None = None  # and this is it

    def __post_init__(self) -> None:
        masked = any(covers(mask, self.target) for mask in self.masks)
        self.around.append(_Surroundings(self.target.rstrip("/") + "/", "", True, masked))

    def read(self, entry: Merged, changes: list[Change]) -> None:
        """Add the changes that one entry stands for. Entries come as `walk` gives them."""
        if len(self.around) > entry.depth + 1:
            del self.around[entry.depth + 1 :]
        around = self.around[-1]
        path = around.path + entry.name
        self.budget.spend(path)
        masked = around.masked or path in self.masks
        status = self._status(around, entry.name) if around.real or masked else None
        base = self._base(path) if self.bases and not masked else None
        if base is not None:
            before = base.seen.node if base.seen else None
        else:
            before = self._node(entry.name, status) if status is not None and not masked else None

        if entry.whiteout:
            if before is not None:
                changes.append(self._deleted(path, around.below(entry.name), before))
            return
        prefix, shift = self.stack.prefix, self.stack.owner_shift
        after = describe(entry.directory, entry.name, entry.status, entry.attributes, own_prefix=prefix, owner_shift=shift)
        covers_directory = before is not None and before.type is EntryType.DIRECTORY
        hides = after.type is EntryType.DIRECTORY and (entry.opaque or around.hides)
        if after.type is EntryType.DIRECTORY:
            # Even below an opaque one the real directory counts: what is the same is no change.
            self.around.append(_Surroundings(path + "/", around.below(entry.name), covers_directory, masked, hides))
            merged = not hides and (before is None or covers_directory)
            if masked and merged and status is not None and stat.S_ISDIR(status.st_mode):
                return  # the empty directory that covers the real one; what the guest put into it comes next
        change = self._compare(path, before, after, entry, base, status)
        if change is not None:
            if change.kind is Kind.RETYPED and covers_directory:
                change = replace(change, inside=self._count(around.below(entry.name)), masks_real=self._mask_below(path))
            changes.append(replace(change, masks_real=True) if masked and status is not None else change)
        if hides and covers_directory and entry.own is not None:
            changes.extend(self._removed_by_opaque(self.around[-1], frozenset(entry.names)))

    def _base(self, path: str) -> Base | None:
        base = self.bases.get(path)
        return base if base is not None and base.known else None

    def _status(self, around: _Surroundings, name: str) -> os.stat_result | None:
        """What is really there; afterwards `real` is the directory that holds it."""
        if around is not self.current:
            self.current, self.real = around, self.reality.directory(around.relative)
        try:
            return os.stat(name, dir_fd=self.real, follow_symlinks=False) if self.real is not None else None
        except OSError:
            return None

    def _node(self, name: str, status: os.stat_result) -> Node | None:
        if self.real is None:
            return None
        try:
            return describe(self.real, name, status, beneath.xattrs(self.real, name), own_prefix=self.stack.prefix)
        except FileNotFoundError:
            return None

    def _deleted(self, path: str, relative: str, before: Node) -> Change:
        inside = self._count(relative) if before.type is EntryType.DIRECTORY else 0
        return Change(path, Kind.DELETED, before, None, self.target, inside=inside, masks_real=self._mask_below(path))

    def _removed_by_opaque(self, within: _Surroundings, kept: frozenset[str]) -> Iterator[Change]:
        """What an opaque directory, the last that was read, hides."""
        for name in sorted({*self.reality.names(within.relative), *self._based_in(within.path)} - kept):
            path = within.path + name
            if path in self.masks:
                continue
            self.budget.spend(path)
            base, status = self._base(path), self._status(within, name)
            if base is not None:
                before = base.seen.node if base.seen else None
            else:
                before = self._node(name, status) if status is not None else None
            if before is not None:
                yield self._deleted(path, within.below(name), before)

    def _based_in(self, directory: str) -> list[str]:
        """What was in a real directory as far as it has been kept, whether or not it still is."""
        if self.children is None:
            self.children = {}
            for path in self.bases:
                above, slash, name = path.rpartition("/")
                self.children.setdefault(above + slash, []).append(name)
        return self.children.get(directory, [])

    def _compare(
        self, path: str, before: Node | None, after: Node, entry: Merged, base: Base | None, status: os.stat_result | None
    ) -> Change | None:
        owners = not self.stack.userxattr  # rootless there is only one, who gets what is copied up of others, with another mode
        unread = False
        if before is None:
            kind = Kind.ADDED
        elif before.type is not after.type:
            kind = Kind.RETYPED
        else:
            same = (before.size, before.target, before.device) == (after.size, after.target, after.device)
            if same and after.size:
                same, unread = self._same_file(entry, after.size, base, status)
            if not same:
                kind = Kind.MODIFIED
            elif before.mode != after.mode and (owners or before.uid == after.uid):
                kind = Kind.MODE
            elif owners and (before.uid, before.gid) != (after.uid, after.gid):
                kind = Kind.OWNER
            elif before.xattrs != after.xattrs:
                kind = Kind.XATTR
            else:
                return None
        old, new = before.xattrs if before else {}, after.xattrs
        differing = tuple(sorted(name for name in {*old, *new} if old.get(name) != new.get(name))) if old or new else ()
        hidden = after.type is EntryType.DIRECTORY and entry.own is None
        link_of = ""
        if entry.status.st_nlink > 1 and after.type is EntryType.FILE:
            first = self.links.setdefault((entry.status.st_dev, entry.status.st_ino), path)
            link_of = first if first != path else ""
        return Change(path, kind, before, after, self.target, differing, unread=unread or hidden, link_of=link_of)

    def _same_file(self, entry: Merged, size: int, base: Base | None, status: os.stat_result | None) -> tuple[bool, bool]:
        """Whether the content is the same, and whether that had to be guessed. What cannot be read is taken as different."""
        seen = base.seen if base else None
        own = entry.own
        real = -1
        try:
            if own is None:
                own = beneath.open_file(entry.directory, entry.name, unlock=True)
            if self.real is not None and status is not None and (seen is None or seen.untouched(status)):
                real = beneath.open_seen_file(self.real, entry.name)[0]
                same, read = same_content(own, real, size, most=self.budget.compared)
                self.budget.compared -= read
                return bool(same), same is None
            if seen is None or not seen.digest or size > self.budget.compared:
                return False, True
            self.budget.compared -= size
            return digest_of_open(own) == seen.digest, False
        except OSError:
            return False, True
        finally:
            if own is not None and own != entry.own:
                os.close(own)
            if real >= 0:
                os.close(real)

    def _mask_below(self, path: str) -> bool:
        return any(covers(path, mask) for mask in self.masks_with_something)

    def _count(self, relative: str) -> int:
        """How many real entries are below a real directory, as far as may be looked."""
        directory, self.current = self.reality.directory(relative), None
        if directory is None:
            return 0
        count = 0
        try:
            for _ in beneath.walk(directory, limit=max(self.budget.entries, 0), unlock=False):
                count += 1
        except (OSError, TooMany):
            pass
        self.budget.entries -= count
        return count
