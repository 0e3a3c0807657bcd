"""Read a sandbox's changes back from its layers.

The raw upper directories are read, never a mounted overlay. Only overlay attributes with the prefix of this mount count, and of these only
whiteout and opaque: the overlay is mounted so that a guest cannot set them and the kernel sets no others. A copied-up entry that equals the
machine's is no change. Times are not compared.

The top directory of a layer is not compared: mounting the overlay sets its mode and owner. `change_list` keeps the result.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from types import MappingProxyType

from agent_sandbox._fast.collector import uncollected
from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel.mount_plan import place_below
from agent_sandbox.kernel.wire import TRUST
from agent_sandbox.policy.paths import ancestors, contains
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.layers.change_list import Witnesses
from agent_sandbox.workspace.layers.stack import LayerEntry, Stack
from agent_sandbox.workspace.nodes import EntryType, Node, describe, same_content
from agent_sandbox.workspace.progress import Progress
from agent_sandbox.workspace.reality import Base, Bases, Fingerprint, Reality, digest_of_open

NO_BASES: Bases = MappingProxyType({})
_PATH_CHARACTERS = 64 << 20  # all paths together: 10,000 nested directories with long names would fill the memory
_COMPARED_BYTES = 16 << 30


class Counterpart:
    """The real entries at the paths of an overlay's layers. A context manager.

    `left` is the number of bytes that may still be read for comparisons.
    """

    def __init__(self, reality: Reality, *, prefix: str, left: int) -> None:
        self.left = left
        self._reality = reality
        self._prefix = prefix
        self._path: str | None = None
        self._directory: int | None = None
        self._file = -1  # the current entry, if it had to be opened

    def __enter__(self) -> Counterpart:
        return self

    def __exit__(self, *ended: object) -> None:
        self._close_file()

    def status(self, path: str, name: str) -> os.stat_result | None:
        """Return the status of the real entry `name` in the directory at `path`; None if it is missing. It becomes the current entry."""
        self._close_file()
        if path != self._path:
            self._path, self._directory = path, self._reality.directory(path)
        if self._directory is None:
            return None
        try:
            return os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            return None

    def node(self, name: str, status: os.stat_result, ours: LayerEntry | None = None) -> Node | None:
        """Return the node of the current entry; None if the entry has gone. `ours` is the layer's entry that is compared with it."""
        directory = self._directory
        if directory is None:
            return None
        try:
            attributes = self._attributes_of_file(directory, name, status, ours) if ours is not None else None
            if attributes is None:
                attributes = beneath.xattrs(directory, name)
            return describe(directory, name, status, attributes, own_prefix=self._prefix)
        except FileNotFoundError:
            return None

    def has_content_of(self, ours: LayerEntry, status: os.stat_result | None, seen: Fingerprint | None) -> bool | None:
        """Return whether a layer's file has the content of the real file, or of `seen`; None if that cannot be determined."""
        own = ours.own
        try:
            if own is None:
                own = beneath.open_file(ours.directory, ours.name, unlock=True)
            if status is not None and (seen is None or seen.untouched(status)):
                return self._same_as_real(own, ours, status)
            if seen is None or not seen.digest or ours.status.st_size > self.left:
                return None
            self.left -= ours.status.st_size
            return digest_of_open(own) == seen.digest
        except OSError:
            return None
        finally:
            if own is not None and own != ours.own:
                os.close(own)

    def forget(self) -> None:
        """Forget the current directory. Call this after another use of the same `Reality`, which may have closed the directory."""
        self._path = None

    def _attributes_of_file(self, directory: int, name: str, status: os.stat_result, ours: LayerEntry) -> dict[str, bytes] | None:
        if ours.own is None or not 0 < ours.status.st_size == status.st_size:
            return None
        if not stat.S_ISREG(status.st_mode) or not stat.S_ISREG(ours.status.st_mode):
            return None
        try:
            self._file = beneath.open_seen_file(directory, name)[0]
        except OSError:
            return None
        return beneath.xattrs_of(self._file)

    def _same_as_real(self, own: int, ours: LayerEntry, status: os.stat_result) -> bool | None:
        if self._file < 0 and self._directory is not None and stat.S_ISREG(status.st_mode):
            self._file = beneath.open_seen_file(self._directory, ours.name)[0]
        if self._file < 0:
            return None
        same, read = same_content(own, self._file, ours.status.st_size, most=self.left)
        self.left -= read
        return same

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_stack(
    stack: Stack,
    *,
    machine_root: str = "/",
    masks: Collection[str] = (),
    bases: Bases = NO_BASES,
    limit: int = beneath.ENTRY_LIMIT,
    witnesses: Witnesses | None = None,
    progress: Progress | None = None,
) -> ChangeSet:
    """Return the changes that the layers of a sandbox make to the machine at `machine_root`.

    `masks` are the absolute paths that were hidden from the guest. A change is relative to the base of its path: the real entry at the time
    when a layer first covered the path. If `bases` does not know that entry, the change is relative to the present real entry. Raises
    `TooMany` beyond `limit` entries: an incomplete list is worse than none. `witnesses` records each real entry examined.
    """
    changes: list[Change] = []
    budget = _Budget(entries=limit)
    above_masks = frozenset(path for mask in masks if os.path.lexists(machine_root.rstrip("/") + mask) for path in ancestors(mask))
    for target in stack.targets:
        try:
            with (
                Reality(place_below(target, machine_root)) as reality,
                Counterpart(reality, prefix=stack.prefix, left=budget.compared) as real,
                uncollected(),
            ):
                reader = _Reader(target, stack, reality, real, bases, frozenset(masks), above_masks, budget, witnesses)
                for entry in stack.walk(target, limit=budget.entries):
                    if progress is not None:
                        progress.advance(files=1)
                    reader.read(entry, changes)
                budget.compared = real.left
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
    """The facts about a layer's directory that are needed while its entries are read."""

    path: str  # with a trailing slash
    relative: str  # relative to the top of the overlay, without the slash
    real: bool  # a real directory is here, or was when it was covered
    masked: bool  # is at or below a mask
    hides: bool = False  # nothing real shows through: opaque, or below an opaque one, where the kernel sets no further marks

    def below(self, name: str) -> str:
        """Return the path of an entry relative to the top of the overlay."""
        return f"{self.relative}/{name}" if self.relative else name


@dataclass(slots=True)
class _Reader:
    target: str
    stack: Stack
    reality: Reality
    real: Counterpart
    bases: Bases
    masks: frozenset[str]
    above_masks: frozenset[str]  # the masks at which something real is, and every directory above one
    budget: _Budget
    witnesses: Witnesses | None = None
    around: list[_Surroundings] = field(default_factory=list)  # the directories from the top down to the current one
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    children: dict[str, list[str]] | None = None  # of the bases, computed when first needed

    def __post_init__(self) -> None:
        masked = any(contains(mask, self.target) for mask in self.masks)
        self.around.append(_Surroundings(self.target.rstrip("/") + "/", "", True, masked))

    def read(self, entry: LayerEntry, changes: list[Change]) -> None:
        """Read one layer entry, and append its changes to `changes`. Entries must come in the order of `walk`."""
        if len(self.around) > entry.depth + 1:
            del self.around[entry.depth + 1 :]
        around = self.around[-1]
        path = around.path + entry.name
        self.budget.spend(path)
        masked = around.masked or path in self.masks
        base = self._base(path) if self.bases and not masked else None
        status = None
        if base is not None:  # the real entry matters only where content has to be compared: see `_kind`
            before = base.seen.node if base.seen else None
        else:
            status = self.real.status(around.relative, entry.name) if around.real or masked else None
            before = self.real.node(entry.name, status, entry) if status is not None and not masked else None

        if self.witnesses is not None and (around.real or masked):
            if masked or around.hides or entry.opaque or (entry.whiteout and before is not None and before.type is EntryType.DIRECTORY):
                self.witnesses.give_up()
            elif base is None:
                self.witnesses.note(path, status)
        if entry.whiteout:
            if before is not None:
                changes.append(self._deleted(path, around.below(entry.name), before))
            return
        after = describe(
            entry.directory, entry.name, entry.status, entry.attributes, own_prefix=self.stack.prefix, owner_shift=self.stack.owner_shift
        )
        if after.type is EntryType.SYMLINK and contains(TRUST, after.target):
            return  # a link of the view to certificates of the run, which was moved or touched; see `engine.trust`
        covers_directory = before is not None and before.type is EntryType.DIRECTORY
        hides = after.type is EntryType.DIRECTORY and (entry.opaque or around.hides)
        if after.type is EntryType.DIRECTORY:
            # Below an opaque directory the real one still counts: an equal entry is no change.
            self.around.append(_Surroundings(path + "/", around.below(entry.name), covers_directory, masked, hides))
            merged = not hides and (before is None or covers_directory)
            if masked and merged and status is not None and stat.S_ISDIR(status.st_mode):
                return  # the empty directory that masks the real one; its entries come next
        kind, unread = self._kind(before, after, entry, base, status, around)
        if kind is not None:
            old, new = before.xattrs if before else {}, after.xattrs
            differing = tuple(sorted(name for name in {*old, *new} if old.get(name) != new.get(name))) if old or new else ()
            change = Change(path, kind, before, after, self.target, differing, 0, masked and status is not None, unread)
            changes.append(self._completed(change, before, entry))
        if hides and covers_directory and entry.own is not None:
            changes.extend(self._removed_by_opaque(self.around[-1], frozenset(entry.names)))

    def _base(self, path: str) -> Base | None:
        base = self.bases.get(path)
        return base if base is not None and base.known else None

    def _kind(
        self,
        before: Node | None,
        after: Node,
        entry: LayerEntry,
        base: Base | None,
        status: os.stat_result | None,
        around: _Surroundings,
    ) -> tuple[Kind | None, bool]:
        """Return the kind of change (None if nothing changed), and whether something was unreadable, which counts as changed."""
        if before is None:
            return Kind.ADDED, after.type is EntryType.DIRECTORY and entry.own is None
        if before.type is not after.type:
            return Kind.RETYPED, after.type is EntryType.DIRECTORY and entry.own is None
        if before.size != after.size or before.target != after.target or before.device != after.device:
            return Kind.MODIFIED, False
        if after.size:
            if base is not None and around.real:
                status = self.real.status(around.relative, entry.name)
            same = self.real.has_content_of(entry, status, base.seen if base else None)
            if not same:
                return Kind.MODIFIED, same is None
        unread = after.type is EntryType.DIRECTORY and entry.own is None
        owners = not self.stack.userxattr  # rootless there is one owner, who also gets copied-up files of others, with another mode
        if before.mode != after.mode and (owners or before.uid == after.uid):
            return Kind.MODE, unread
        if owners and (before.uid, before.gid) != (after.uid, after.gid):
            return Kind.OWNER, unread
        return (Kind.XATTR if before.xattrs != after.xattrs else None), unread

    def _completed(self, change: Change, before: Node | None, entry: LayerEntry) -> Change:
        """Return the change with its rarer fields: another path of the same inode, or the number of entries in a replaced directory."""
        if entry.status.st_nlink > 1 and stat.S_ISREG(entry.status.st_mode):
            first = self.links.setdefault((entry.status.st_dev, entry.status.st_ino), change.path)
            return replace(change, link_of=first) if first != change.path else change
        if change.kind is Kind.RETYPED and before is not None and before.type is EntryType.DIRECTORY:
            inside = self._count(self.around[entry.depth].below(entry.name))
            return replace(change, inside=inside, masks_real=self._mask_below(change.path))
        return change

    def _deleted(self, path: str, relative: str, before: Node) -> Change:
        inside = self._count(relative) if before.type is EntryType.DIRECTORY else 0
        return Change(path, Kind.DELETED, before, None, self.target, inside=inside, masks_real=self._mask_below(path))

    def _removed_by_opaque(self, within: _Surroundings, kept: frozenset[str]) -> Iterator[Change]:
        """Yield a deletion for each real entry of an opaque directory, the last one read, except for the names in `kept`."""
        names = {*self.reality.names(within.relative), *self._based_in(within.path)} - kept
        self.real.forget()
        for name in sorted(names):
            path = within.path + name
            if path in self.masks:
                continue
            self.budget.spend(path)
            base, status = self._base(path), self.real.status(within.relative, name)
            if base is not None:
                before = base.seen.node if base.seen else None
            else:
                before = self.real.node(name, status) if status is not None else None
            if before is not None:
                yield self._deleted(path, within.below(name), before)

    def _based_in(self, directory: str) -> list[str]:
        """Return the names in a real directory that have a base, also names that no longer exist."""
        if self.children is None:
            self.children = {}
            for path in self.bases:
                above, slash, name = path.rpartition("/")
                self.children.setdefault(above + slash, []).append(name)
        return self.children.get(directory, [])

    def _mask_below(self, path: str) -> bool:
        return path in self.above_masks

    def _count(self, relative: str) -> int:
        """Return the number of real entries below a real directory, within limits and permissions."""
        directory = self.reality.directory(relative)
        self.real.forget()
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
