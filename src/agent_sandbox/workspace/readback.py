"""Read back from the layers of a sandbox what it changed.

The raw upper directories are read, never a mounted overlay. Of the overlay's attributes only those with the prefix of this mount are
believed, and of these only whiteout and opaque: the overlay is mounted so that a guest cannot set them and the kernel makes no others.
What was copied up but is the same as on the machine is no change. Times are not compared.

The top directory of a layer itself is not compared: its mode and owner are set by whoever mounts the overlay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
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
            with Reality(machine_root.rstrip("/") + target) as reality:
                reader = _Reader(target, stack, reality, bases, frozenset(masks), there, budget)
                for entry in stack.walk(target, limit=budget.entries):
                    changes.extend(reader.read(entry))
        except OSError as error:
            raise WorkspaceError(
                f"cannot read what this sandbox changed below {target!r}: {error.strerror or error}",
                hint="wait until nothing runs in it; agent-sandbox reset drops it",
            ) from error
    return ChangeSet(tuple(changes))


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

    def __post_init__(self) -> None:
        masked = any(covers(mask, self.target) for mask in self.masks)
        self.around.append(_Surroundings(self.target.rstrip("/") + "/", "", True, masked))

    def read(self, entry: Merged) -> Iterator[Change]:
        """The changes that one entry stands for. Entries come as `walk` gives them."""
        del self.around[entry.depth + 1 :]
        around = self.around[-1]
        path = around.path + entry.name
        self.budget.spend(path)
        masked = around.masked or path in self.masks
        status = self.reality.status(around.relative, entry.name) if around.real or masked else None
        base = self._base(path) if not masked else None
        if base is not None:
            before = base.seen.node if base.seen else None
        else:
            before = self._real_node(around.relative, entry.name, status) if around.real and not masked else None

        if entry.whiteout:
            if before is not None:
                yield self._deleted(path, around.below(entry.name), before)
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
            yield replace(change, masks_real=True) if masked and status is not None else change
        if hides and covers_directory and entry.own is not None:
            yield from self._removed_by_opaque(path, around.below(entry.name), frozenset(entry.names))

    def _base(self, path: str) -> Base | None:
        base = self.bases.get(path)
        return base if base is not None and base.known else None

    def _real_node(self, parent: str, name: str, status: os.stat_result | None) -> Node | None:
        directory = self.reality.directory(parent)
        if status is None or directory is None:
            return None
        try:
            return describe(directory, name, status, beneath.xattrs(directory, name), own_prefix=self.stack.prefix)
        except FileNotFoundError:
            return None

    def _deleted(self, path: str, relative: str, before: Node) -> Change:
        inside = self._count(relative) if before.type is EntryType.DIRECTORY else 0
        return Change(path, Kind.DELETED, before, None, self.target, inside=inside, masks_real=self._mask_below(path))

    def _removed_by_opaque(self, path: str, relative: str, kept: frozenset[str]) -> Iterator[Change]:
        for name in sorted({*self.reality.names(relative), *self._based_in(path)} - kept):
            gone = f"{path}/{name}"
            if gone in self.masks:
                continue
            self.budget.spend(gone)
            base = self._base(gone)
            if base is not None:
                before = base.seen.node if base.seen else None
            else:
                before = self._real_node(relative, name, self.reality.status(relative, name))
            if before is not None:
                yield self._deleted(gone, f"{relative}/{name}", before)

    def _based_in(self, directory: str) -> list[str]:
        """What was in a real directory as far as it has been kept, whether or not it still is."""
        if self.children is None:
            self.children = {}
            for path in self.bases:
                above, _, name = path.rpartition("/")
                self.children.setdefault(above, []).append(name)
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
        differing = tuple(sorted(name for name in {*old, *new} if old.get(name) != new.get(name)))
        hidden = after.type is EntryType.DIRECTORY and entry.own is None
        return Change(path, kind, before, after, self.target, differing, unread=unread or hidden, link_of=self._link_of(path, after, entry))

    def _link_of(self, path: str, after: Node, entry: Merged) -> str:
        if entry.status.st_nlink < 2 or after.type is not EntryType.FILE:
            return ""
        first = self.links.setdefault((entry.status.st_dev, entry.status.st_ino), path)
        return first if first != path else ""

    def _same_file(self, entry: Merged, size: int, base: Base | None, status: os.stat_result | None) -> tuple[bool, bool]:
        """Whether the content is the same, and whether that had to be guessed. What cannot be read is taken as different."""
        seen = base.seen if base else None
        real = self.reality.directory(self.around[entry.depth].relative)
        opened: list[int] = []
        try:
            opened.append(beneath.open_file(entry.directory, entry.name, unlock=True))
            if real is not None and (seen is None or (status is not None and seen.untouched(status))):
                opened.append(beneath.open_file(real, entry.name, one_filesystem=False))
                same, read = same_content(opened[0], opened[1], size, most=self.budget.compared)
                self.budget.compared -= read
                return bool(same), same is None
            if seen is None or not seen.digest or size > self.budget.compared:
                return False, True
            self.budget.compared -= size
            return digest_of_open(opened[0]) == seen.digest, False
        except OSError:
            return False, True
        finally:
            for fd in opened:
                os.close(fd)

    def _mask_below(self, path: str) -> bool:
        return any(covers(path, mask) for mask in self.masks_with_something)

    def _count(self, relative: str) -> int:
        """How many real entries are below a real directory, as far as may be looked."""
        directory = self.reality.directory(relative)
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
