"""Read back from the layers of a sandbox what it changed.

The raw upper directories are read, never a mounted overlay. Of the overlay's attributes only those with the prefix of this mount are
believed, and of these only whiteout and opaque: the overlay is mounted so that a guest cannot set them and the kernel makes no others.
What was copied up but is the same as on the machine is no change. Times are not compared.

The top directory of a layer itself is not compared: its mode and owner are set by whoever mounts the overlay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.values import replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import Entry, TooMany
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind, covers
from agent_sandbox.workspace.layers import quote_target
from agent_sandbox.workspace.nodes import EntryType, Node, describe, same_content
from agent_sandbox.workspace.reality import Reality

_PATH_CHARACTERS = 64 << 20  # of all paths together: 10,000 nested directories with long names would fill the memory
_COMPARED_BYTES = 16 << 30


def read_layers(
    layers: int,
    targets: Iterable[str],
    *,
    userxattr: bool,
    owner_shift: int = 0,
    machine_root: str = "/",
    masks: Collection[str] = (),
    limit: int = beneath.ENTRY_LIMIT,
) -> ChangeSet:
    """What the layers below the descriptor `layers` change on the machine at `machine_root`.

    `userxattr` says how the overlays were mounted, `masks` are the absolute paths that were hidden from the guest. A target without a layer
    has no changes. Raises `TooMany` beyond `limit` entries: a list that leaves something out is worse than none.
    """
    changes: list[Change] = []
    prefix = "user.overlay." if userxattr else "trusted.overlay."
    budget = _Budget(entries=limit)
    there = frozenset(mask for mask in masks if os.path.lexists(machine_root.rstrip("/") + mask))
    for target in targets:
        try:
            upper = beneath.open_directory(layers, f"{quote_target(target)}/upper")
        except FileNotFoundError:
            continue
        try:
            with Reality(machine_root.rstrip("/") + target) as reality:
                reader = _LayerReader(target, reality, prefix, owner_shift, frozenset(masks), there, budget, not userxattr)
                for entry in beneath.walk(upper, limit=budget.entries):
                    changes.extend(reader.read(entry))
        except OSError as error:
            raise WorkspaceError(
                f"cannot read what this sandbox changed below {target!r}: {error.strerror or error}",
                hint="wait until nothing runs in it; agent-sandbox reset drops it",
            ) from error
        finally:
            os.close(upper)
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
    """What is known of a directory of the layer when its entries are read."""

    real: bool  # there is a real directory at this place
    masked: bool  # it lies at or below a mask
    whiteouts_by_attribute: bool = False


@dataclass(slots=True)
class _LayerReader:
    target: str
    reality: Reality
    prefix: str
    owner_shift: int
    masks: frozenset[str]
    masks_with_something: frozenset[str]
    budget: _Budget
    owners: bool  # rootless there is only one owner, who gets what is copied up of others, with another mode
    around: list[_Surroundings] = field(default_factory=list)  # of the directories from the top down to where we are

    def __post_init__(self) -> None:
        self.around.append(_Surroundings(real=True, masked=any(covers(mask, self.target) for mask in self.masks)))

    def read(self, entry: Entry) -> Iterator[Change]:
        """The changes that one entry stands for. Entries come as `walk` gives them."""
        del self.around[entry.depth + 1 :]
        around = self.around[-1]
        relative = entry.path
        path = f"{self.target.rstrip('/')}/{relative}"
        self.budget.spend(path)
        parent = relative.rpartition("/")[0]
        masked = around.masked or path in self.masks
        status = self.reality.status(parent, entry.name) if around.real or masked else None
        before = self._real_node(parent, entry.name, status) if around.real and not masked else None
        own = beneath.xattrs(entry.directory, entry.name)

        if self._is_whiteout(entry, own, around):
            if before is not None:
                yield self._deleted(path, relative, before)
            return
        after = describe(entry.directory, entry.name, entry.status, own, own_prefix=self.prefix, owner_shift=self.owner_shift)
        opacity = own.get(self.prefix + "opaque")
        if after.type is EntryType.DIRECTORY:
            merged = opacity != b"y" and (before is None or before.type is EntryType.DIRECTORY)
            real = before is not None and before.type is EntryType.DIRECTORY  # even below an opaque one: what is the same is no change
            self.around.append(_Surroundings(real, masked, opacity == b"x"))
            if masked and merged and status is not None and stat.S_ISDIR(status.st_mode):
                return  # the empty directory that covers the real one; what the guest put into it comes next
        change = self._compare(path, before, after, entry, parent)
        if change is not None:
            if change.kind is Kind.RETYPED and before and before.type is EntryType.DIRECTORY:
                change = replace(change, inside=self._count(relative), masks_real=self._mask_below(path))
            yield replace(change, masks_real=True) if masked and status is not None else change
        if opacity == b"y" and before is not None and before.type is EntryType.DIRECTORY and entry.own is not None:
            yield from self._removed_by_opaque(path, relative, set(os.listdir(entry.own)))

    def _is_whiteout(self, entry: Entry, own: dict[str, bytes], around: _Surroundings) -> bool:
        if stat.S_ISCHR(entry.status.st_mode):
            return entry.status.st_rdev == 0
        empty_file = stat.S_ISREG(entry.status.st_mode) and entry.status.st_size == 0
        return around.whiteouts_by_attribute and empty_file and self.prefix + "whiteout" in own

    def _real_node(self, parent: str, name: str, status: os.stat_result | None) -> Node | None:
        directory = self.reality.directory(parent)
        if status is None or directory is None:
            return None
        try:
            return describe(directory, name, status, beneath.xattrs(directory, name, one_filesystem=False), own_prefix=self.prefix)
        except FileNotFoundError:
            return None

    def _deleted(self, path: str, relative: str, before: Node) -> Change:
        inside = self._count(relative) if before.type is EntryType.DIRECTORY else 0
        return Change(path, Kind.DELETED, before, None, self.target, inside=inside, masks_real=self._mask_below(path))

    def _removed_by_opaque(self, path: str, relative: str, kept: set[str]) -> Iterator[Change]:
        for name in self.reality.names(relative):
            gone = f"{path}/{name}"
            if name in kept or gone in self.masks:
                continue
            self.budget.spend(gone)
            before = self._real_node(relative, name, self.reality.status(relative, name))
            if before is not None:
                yield self._deleted(gone, f"{relative}/{name}", before)

    def _compare(self, path: str, before: Node | None, after: Node, entry: Entry, parent: str) -> Change | None:
        unread = False
        if before is None:
            kind = Kind.ADDED
        elif before.type is not after.type:
            kind = Kind.RETYPED
        else:
            same = (before.size, before.target, before.device) == (after.size, after.target, after.device)
            if same and after.type is EntryType.FILE:
                same, unread = self._same_file(entry, parent, after.size)
            if not same:
                kind = Kind.MODIFIED
            elif before.mode != after.mode and (self.owners or before.uid == after.uid):
                kind = Kind.MODE
            elif self.owners and (before.uid, before.gid) != (after.uid, after.gid):
                kind = Kind.OWNER
            elif before.xattrs != after.xattrs:
                kind = Kind.XATTR
            else:
                return None
        old, new = before.xattrs if before else {}, after.xattrs
        differing = tuple(sorted(name for name in {*old, *new} if old.get(name) != new.get(name)))
        hidden = after.type is EntryType.DIRECTORY and entry.own is None
        return Change(path, kind, before, after, self.target, differing, unread=unread or hidden)

    def _same_file(self, entry: Entry, parent: str, size: int) -> tuple[bool, bool]:
        """Whether the content is the same, and whether that had to be guessed. What cannot be read is taken as different."""
        real = self.reality.directory(parent)
        self.budget.compared -= size
        if real is None or self.budget.compared < 0:
            return False, True
        opened: list[int] = []
        try:
            opened.append(beneath.open_file(entry.directory, entry.name))
            opened.append(beneath.open_file(real, entry.name, one_filesystem=False))
            return same_content(*opened), False
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
