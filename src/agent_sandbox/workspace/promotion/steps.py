"""The values of a promotion: steps, which make up a plan; moves, which are staged steps; and the metadata of promoted entries.

Three kinds of step are enough. *Put* a new file, link or directory with everything new in it, in the place of nothing or of something.
*Remove* a file, link or directory with everything in it. *Adjust* the mode and the attributes of a directory that stays.

A move describes the entry at one name before and after, with inodes. Compared with the tree and the staging directory, it shows whether it
has been made. So it can be made or taken back, however often it was interrupted.

The guest decides what may be executed and read. It does not decide who owns a file, nor does it grant the right to write: others may never
write a new file, and an old one only if they could before. Mode bits and attributes that grant power need the approval of their class.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.fingerprint import Seen
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    from typing import Any

POWER_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
CAPABILITY = "security.capability"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)  # there may be a hundred thousand of these
class Look:
    """The metadata of a new entry. An owner of None is that of its directory; a time of None is that of the content."""

    mode: int
    xattrs: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One new entry. `path` is relative to the root; `content` is the source of a file's bytes, which must have `digest` if given."""

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
    """A step that puts the first of `items`, which holds the others, at `path`. It replaces `expected` and everything `inside` it."""

    path: str
    items: tuple[Item, ...]
    expected: Seen | None
    inside: Mapping[str, Seen] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Remove:
    """A step that removes the entry at `path` and everything `inside` it."""

    path: str
    expected: Seen
    inside: Mapping[str, Seen] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Adjust:
    """A step that gives a directory that stays another mode and other user attributes."""

    path: str
    expected: Seen
    look: Look


Step = Put | Remove | Adjust


@dataclass(frozen=True)
class Refusal:
    """A change that is never promoted, and why. The others can be, if the caller leaves this one out."""

    path: str
    why: str


@dataclass(frozen=True)
class Held:
    """A change that needs its own approval for each of these classes; see `protected`."""

    path: str
    classes: frozenset[str]


@dataclass(frozen=True)
class LeftOut:
    """A part of a change that is not promoted, while the rest is: an owner, an attribute, a write permission."""

    path: str
    what: str


@dataclass(frozen=True)
class Plan:
    """The steps for the tree at `root`, in order. None is carried out while something is refused or held."""

    root: str
    steps: tuple[Step, ...] = ()
    refused: tuple[Refusal, ...] = ()
    held: tuple[Held, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def replaced_bytes(self) -> int:
        """The bytes of content that go, and are kept for an undo."""
        gone = (seen for step in self.steps if not isinstance(step, Adjust) for seen in (step.expected, *step.inside.values()))
        return sum(seen.node.size for seen in gone if seen is not None and seen.node.type is EntryType.FILE)

    @property
    def bytes(self) -> int:
        """The bytes of content to be written."""
        return sum(item.size for step in self.steps if isinstance(step, Put) for item in step.items)

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
    """A staged step: `path` has `old`, and is to have `new`. `slot` is where the other of the two lies in the staging directory.

    `beside` and `within` are the entries below the old and the new one, by paths relative to them. If both are directories and the same
    inode, the directory is adjusted in place and has no slot.
    """

    path: str
    slot: str
    old: Seen | None
    new: Seen | None
    beside: Mapping[str, Seen] = field(default_factory=dict, hash=False)
    within: Mapping[str, Seen] = field(default_factory=dict, hash=False)

    @property
    def in_place(self) -> bool:
        """Whether nothing is moved, and a directory only gets other metadata."""
        return self.slot == ""


def split(path: str) -> tuple[str, str]:
    """Split a path relative to the root into its directory and its name."""
    directory, _, name = path.rpartition("/")
    return directory, name


def written(moves: Iterable[Move]) -> list[Any]:
    """Return moves as plain values for JSON. Names keep their bytes: invalid UTF-8 becomes Python's surrogate escapes."""
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


def read(values: Iterable[Any], *, device: int | None = None) -> tuple[Move, ...]:
    """Return moves from their JSON values. Raises ValueError or TypeError.

    All are on one filesystem; `device` is its number if it has another one now.
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


def _encoded(seen: Seen | None) -> list[Any] | None:
    if seen is None:
        return None
    node = seen.node
    attributes = {name: value.hex() for name, value in node.xattrs.items()}
    what = [node.type.value, node.mode, node.uid, node.gid, node.size, node.target, node.device, attributes]
    return [*what, seen.device, seen.inode, seen.mtime_ns, seen.ctime_ns, seen.looked_ns, seen.digest]


def _decoded(value: list[Any] | None, device: int | None) -> Seen | None:
    if value is None:
        return None
    kind, mode, uid, gid, size, target, special, attributes, was_on, *rest = value
    xattrs = {name: bytes.fromhex(text) for name, text in attributes.items()}
    node = Node(EntryType(kind), mode, uid, gid, size, target, special, xattrs)
    return Seen(node, was_on if device is None else device, *rest)


def seen_from(status: os.stat_result, node: Node, *, now_ns: int, digest: str = "") -> Seen:
    """Return the state of an entry that we have just made, as if it had been looked at."""
    return Seen(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now_ns, digest)


def carried(attribute: str, *, powers: bool) -> bool:
    """Return whether an extended attribute is promoted. Overlay attributes never are: a later overlay on the tree would trust them."""
    return (attribute.startswith("user.") and not attribute.startswith("user.overlay.")) or (powers and attribute == CAPABILITY)


def look_for(change: Change, old: Node | None, *, powers: bool) -> tuple[Look, list[str]]:
    """Return the metadata for the entry of a change where `old` is now, and in words the parts that are left out."""
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
