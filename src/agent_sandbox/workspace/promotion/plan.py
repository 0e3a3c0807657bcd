"""Turn a change set into a plan of steps, without touching anything.

Everything a plan needs is in its arguments: the changes, the real state now, the protected classes of the changes, and the approvals.
Changes that cannot be promoted, or that need a further approval, are returned as values.

Three kinds of step are enough. *Put* a new file, link or directory with everything new in it, in the place of nothing or of something.
*Remove* a file, link or directory with everything in it. *Adjust* the mode and the attributes of a directory that stays.

A move is a staged step: it describes the entry at one name before and after the step, with inodes. A comparison of the move with the tree
and the staging directory shows whether the move has been made. So moves can be made and taken back even after interruptions.

The guest decides which files may be executed and read. The guest does not decide who owns a file, and grants nobody the right to write.
Group and others may never write a new file, and may write an old file only if they could before. Mode bits and attributes that grant power
need the approval of their class.

Hard links in the sandbox become separate files. Each file is replaced, compared and taken back by itself. An inode with a second name
outside the tree could be written through that name.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType, Node, as_row, from_row
from agent_sandbox.workspace.protected import POWERS
from agent_sandbox.workspace.reality import Fingerprint

if TYPE_CHECKING:
    from typing import Any

POWER_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
CAPABILITY = "security.capability"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
Expected = Mapping[str, Fingerprint | None]
LARGEST_BYTES = 64 << 30  # of content in one promotion, holes included: all of it is read for its digest
_LONGEST_PATH = 4095
_LONGEST_NAME = 255
_NO_NAMES = frozenset({"", ".", ".."})
_NEVER = {
    EntryType.DEVICE: "a device is never promoted",
    EntryType.FIFO: "a FIFO is never promoted",
    EntryType.SOCKET: "a socket is never promoted",
}


@dataclass(frozen=True, slots=True)  # there may be a hundred thousand of these
class Look:
    """The metadata of a new entry. No owner means the owner of its directory; no time means the modification time of the content."""

    mode: int
    xattrs: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One new entry. `path` is relative to the root. `content` is the source of a file's bytes; `digest`, if set, must be their digest."""

    path: str
    type: EntryType
    look: Look
    size: int = 0
    target: str = ""
    device: int = 0
    content: Change | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    """A step that puts the first of `items` at `path`, with the others below it. It replaces `expected` and everything `inside` that."""

    path: str
    items: tuple[Item, ...]
    expected: Fingerprint | None
    inside: Mapping[str, Fingerprint] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Remove:
    """A step that removes the entry at `path` and everything `inside` it."""

    path: str
    expected: Fingerprint
    inside: Mapping[str, Fingerprint] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Adjust:
    """A step that changes the mode and user attributes of an existing directory."""

    path: str
    expected: Fingerprint
    look: Look


Step = Put | Remove | Adjust


@dataclass(frozen=True)
class Refusal:
    """A change that can never be promoted, and the reason. The other changes can be promoted without it."""

    path: str
    why: str


@dataclass(frozen=True)
class HeldChange:
    """A change that needs an approval for each of its protected `classes`; see `protected`."""

    path: str
    classes: frozenset[str]


@dataclass(frozen=True)
class LeftOut:
    """A part of a change that is not promoted, such as an owner, an attribute or a write permission. The rest of the change is promoted."""

    path: str
    what: str


@dataclass(frozen=True)
class Plan:
    """The steps for the tree at `root`, in order. No step is carried out while a change is refused or held.

    `meanings` tell an undo what must be unchanged in files of a git repository; see `git.records`. `place` is the directory in which new
    entries are staged. All paths are relative to the root.
    """

    root: str
    steps: tuple[Step, ...] = ()
    refused: tuple[Refusal, ...] = ()
    held: tuple[HeldChange, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    meanings: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    place: str = ""

    @property
    def replaced_bytes(self) -> int:
        """The number of bytes in the files that leave the tree. They are kept for an undo."""
        gone = (seen for step in self.steps if not isinstance(step, Adjust) for seen in (step.expected, *step.inside.values()))
        return sum(seen.node.size for seen in gone if seen is not None and seen.node.type is EntryType.FILE)

    @property
    def bytes(self) -> int:
        """The number of bytes of file content to write."""
        return sum(item.size for step in self.steps if isinstance(step, Put) for item in step.items)

    @property
    def files(self) -> int:
        """The number of files and links to write."""
        return sum(item.type is not EntryType.DIRECTORY for step in self.steps if isinstance(step, Put) for item in step.items)

    def counts(self) -> dict[str, int]:
        """Return how many entries are added, replaced, removed and adjusted, including those inside directories."""
        totals = {"added": 0, "replaced": 0, "removed": 0, "adjusted": 0}
        for step in self.steps:
            match step:
                case Put(expected=None):
                    totals["added"] += len(step.items)
                case Put():
                    totals["replaced"] += 1
                    totals["added"] += len(step.items) - 1
                    totals["removed"] += len(step.inside)
                case Remove():
                    totals["removed"] += 1 + len(step.inside)
                case Adjust():
                    totals["adjusted"] += 1
        return totals


@dataclass(frozen=True, slots=True)
class Move:
    """A staged step that replaces the entry `old` at `path` by the entry `new`.

    `slot` is a name in the staging directory. Before the move it holds `new`, afterwards `old`. `beside` are the entries below `old`, by
    path relative to `old`; `within` are the entries below `new`, by path relative to `new`. If `old` and `new` are the same directory, the
    directory is adjusted in place and has no slot.
    """

    path: str
    slot: str
    old: Fingerprint | None
    new: Fingerprint | None
    beside: Mapping[str, Fingerprint] = field(default_factory=dict, hash=False)
    within: Mapping[str, Fingerprint] = field(default_factory=dict, hash=False)

    @property
    def in_place(self) -> bool:
        """Whether the move only changes the metadata of a directory."""
        return self.slot == ""


def split(path: str) -> tuple[str, str]:
    """Split a path relative to the root into its directory and its name."""
    directory, _, name = path.rpartition("/")
    return directory, name


def encode_moves(moves: Iterable[Move]) -> list[Any]:
    """Return moves as plain values for JSON. Invalid UTF-8 in a name becomes Python's surrogate escapes, so no byte is lost."""
    return [
        [
            move.path,
            move.slot,
            _encoded(move.old),
            _encoded(move.new),
            {path: _encoded(seen) for path, seen in move.beside.items()},
            {path: _encoded(seen) for path, seen in move.within.items()},
        ]
        for move in moves
    ]


def decode_moves(values: Iterable[Any], *, device: int | None = None) -> tuple[Move, ...]:
    """Return moves from their JSON values. Raises ValueError or TypeError for malformed values.

    All entries are on one filesystem. `device`, if given, is the present number of that filesystem, and replaces the recorded number.
    """
    return tuple(
        Move(
            path,
            slot,
            _decoded(old, device),
            _decoded(new, device),
            {name: seen for name, value in beside.items() if (seen := _decoded(value, device))},
            {name: seen for name, value in within.items() if (seen := _decoded(value, device))},
        )
        for path, slot, old, new, beside, within in values
    )


def _encoded(seen: Fingerprint | None) -> list[Any] | None:
    if seen is None:
        return None
    return [*(as_row(seen.node) or ()), seen.device, seen.inode, seen.mtime_ns, seen.ctime_ns, seen.looked_ns, seen.digest]


def _decoded(value: list[Any] | None, device: int | None) -> Fingerprint | None:
    if value is None:
        return None
    node = from_row(value[:8])
    assert node is not None
    was_on, *rest = value[8:]
    return Fingerprint(node, was_on if device is None else device, *rest)


def seen_from(status: os.stat_result, node: Node, *, now_ns: int, digest: str = "") -> Fingerprint:
    """Return the fingerprint of an entry from its status and its node. `now_ns` is the time at which the status was read."""
    return Fingerprint(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now_ns, digest)


def carried(attribute: str, *, powers: bool) -> bool:
    """Return whether an extended attribute is promoted. File capabilities are promoted only with `powers`.

    Overlay attributes are never promoted, because a later overlay on the tree would trust them.
    """
    return (attribute.startswith("user.") and not attribute.startswith("user.overlay.")) or (powers and attribute == CAPABILITY)


def look_for(change: Change, old: Node | None, *, powers: bool) -> tuple[Look, list[str]]:
    """Return the metadata for the new entry of a change that replaces `old`, and descriptions of the parts left out.

    With `powers`, the new entry may have set-id bits and file capabilities.
    """
    node = change.after
    assert node is not None
    same_type = old if old is not None and old.type is node.type else None
    kept = same_type.mode if same_type else 0
    mode = (node.mode & 0o777 & ~_OTHERS_WRITE) | (node.mode & kept & _OTHERS_WRITE)
    bits = node.mode & POWER_BITS
    mode |= bits if powers else bits & kept if node.type is EntryType.DIRECTORY else 0
    xattrs = {name: value for name, value in node.xattrs.items() if carried(name, powers=powers)}
    left = [f"the attribute {name}" for name in change.xattrs if name in node.xattrs and name not in xattrs]
    if node.type is not EntryType.SYMLINK and node.mode & 0o777 & ~mode:
        left.append("the right of others to write")
    before = change.before
    if before is not None and change.kind is not Kind.RETYPED and (before.uid, before.gid) != (node.uid, node.gid):
        left.append("the owner")
    owner = (same_type.uid, same_type.gid) if same_type else (None, None)
    return Look(mode, xattrs, *owner), left


def plan(
    changes: ChangeSet,
    expected: Expected,
    *,
    root: str,
    classes: Mapping[str, frozenset[str]],
    approved: frozenset[str] = frozenset(),
    digests: Mapping[str, str] | None = None,
    largest_bytes: int = LARGEST_BYTES,
) -> Plan:
    """Return the plan that brings these changes to the tree at `root`.

    `expected` is the present real state by absolute path, as `inspect.look_at` returns it. `classes` are the protected classes of the
    changes, as `protected.classes_of_all` returns them; `approved` are the classes that a person approved. `digests` are the digests of the
    content that a person was shown, by path; the promoted content must have these digests.
    """
    builder = _PlanBuilder(root, expected, sorted(expected), classes, approved, digests or {})
    for change in changes:
        builder.add(change)
    if bulk := classes.get(root, frozenset()) - approved:
        builder.held.append(HeldChange(root, bulk))
    result = Plan(root, tuple(ordered(builder.steps())), tuple(builder.refused), tuple(builder.held), tuple(builder.left_out))
    if result.bytes > largest_bytes:
        item = max((item for step in result.steps if isinstance(step, Put) for item in step.items), key=lambda item: item.size)
        why = f"with it there are {result.bytes:,} bytes of content, more than the {largest_bytes:,} that one promotion may hold"
        return Plan(root, (), (*result.refused, Refusal(os.path.join(root, item.path), why)), result.held, result.left_out)
    return result


def relative(path: str, root: str) -> str:
    """Return an absolute path relative to the root; "" is the root itself.

    Raises ValueError, with the reason, for a path outside the root, a path that is not plain, or a path that is too long.
    """
    if not path.startswith("/") or not contains(root, path):
        raise ValueError("it lies outside the tree")
    length = len if path.isascii() else _bytes_of
    if length(path) > _LONGEST_PATH:  # first: the checks below look at each name
        raise ValueError("it is too long")
    below = path[len(root.rstrip("/")) :].removeprefix("/")
    names = below.split("/") if below else []
    if not _NO_NAMES.isdisjoint(names):
        raise ValueError("it is no plain path")
    if "\0" in path:
        raise ValueError("it holds a NUL")
    if max(map(length, names), default=0) > _LONGEST_NAME:
        raise ValueError("a name in it is too long")
    return below


def _bytes_of(name: str) -> int:
    return len(os.fsencode(name))


@dataclass
class _PlanBuilder:
    root: str
    expected: Expected
    sorted_paths: list[str]
    classes: Mapping[str, frozenset[str]]
    approved: frozenset[str]
    digests: Mapping[str, str]
    refused: list[Refusal] = field(default_factory=list)
    held: list[HeldChange] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _items: list[Item] = field(default_factory=list)  # of the last step, while it is a Put of a directory
    _within: str = ""  # its path with a slash

    def steps(self) -> list[Step]:
        self._close()
        return self._steps

    def add(self, change: Change) -> None:
        try:
            path = relative(change.path, self.root)
        except ValueError as error:
            self.refused.append(Refusal(change.path, str(error)))
            return
        if change.after is not None and (why := _NEVER.get(change.after.type)):
            self.refused.append(Refusal(change.path, why))
            return
        if change.masks_real:
            self.refused.append(Refusal(change.path, "a real file that was hidden from the sandbox is there"))
            return
        needs = self.classes.get(change.path)
        if needs and not needs <= self.approved:
            self.held.append(HeldChange(change.path, needs - self.approved))
            return
        if change.path not in self.expected and not (self._within and path.startswith(self._within)):
            self.refused.append(Refusal(change.path, "the real file was not examined"))
            return
        if change.after is None:
            self._remove(change, path)
        else:
            self._put(change, path)

    def _remove(self, change: Change, path: str) -> None:
        now = self.expected.get(change.path)
        covered = any(isinstance(step, Remove) and contains(step.path, path) for step in self._steps[-1:])
        if now is None or covered or (self._within and path.startswith(self._within)):
            return  # gone already, or it goes with its directory
        self._close()
        self._steps.append(Remove(path, now, dict(self._inside(change.path, now))))

    def _put(self, change: Change, path: str) -> None:
        node = change.after
        assert node is not None
        new_directory = bool(self._within) and path.startswith(self._within)
        now = None if new_directory else self.expected.get(change.path)
        look, left = look_for(change, now.node if now else None, powers=POWERS in self.approved)
        self.left_out += [LeftOut(change.path, what) for what in left]
        if now is not None and now.node.type is EntryType.DIRECTORY is node.type:
            self._adjust(change, path, now, look)
            return
        if change.kind is Kind.OWNER:
            return
        item = Item(path, node.type, look, node.size, node.target, content=change, digest=self.digests.get(change.path, ""))
        if new_directory:
            self._items.append(item)
            return
        self._close()
        self._steps.append(Put(path, (item,), now, dict(self._inside(change.path, now))))
        if node.type is EntryType.DIRECTORY:
            self._items, self._within = [item], path + "/"

    def _adjust(self, change: Change, path: str, now: Fingerprint, look: Look) -> None:
        self._close()
        if change.kind is Kind.ADDED:
            return  # another program has made this directory: it stays as it is, and new entries go into it
        attributes = {name: value for name, value in now.node.xattrs.items() if carried(name, powers=True)}
        if look.mode != now.node.mode or look.xattrs != attributes:
            self._steps.append(Adjust(path, now, look))

    def _inside(self, path: str, now: Fingerprint | None) -> Iterator[tuple[str, Fingerprint]]:
        """Yield the entries expected below a directory that is removed or replaced, by path relative to it."""
        if now is None or now.node.type is not EntryType.DIRECTORY:
            return
        start = path + "/"
        at = bisect_left(self.sorted_paths, start)
        while at < len(self.sorted_paths) and self.sorted_paths[at].startswith(start):
            seen = self.expected[self.sorted_paths[at]]
            if seen is not None:
                yield self.sorted_paths[at][len(start) :], seen
            at += 1

    def _close(self) -> None:
        if self._items and isinstance(last := self._steps[-1], Put):
            self._steps[-1] = Put(last.path, tuple(self._items), last.expected, last.inside)
        self._items, self._within = [], ""


def ordered(steps: list[Step]) -> Iterator[Step]:
    """Yield the steps in a safe order: first the steps that give an owner access to a directory, last the other adjustments of directories.

    The steps in between may need access to these directories.
    """
    opening = [step for step in steps if isinstance(step, Adjust) and step.look.mode & ~step.expected.node.mode & 0o300]
    closing = [step for step in steps if isinstance(step, Adjust) and not step.look.mode & ~step.expected.node.mode & 0o300]
    yield from opening
    yield from (step for step in steps if not isinstance(step, Adjust))
    yield from reversed(closing)
