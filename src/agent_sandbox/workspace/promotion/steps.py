"""What a promotion does, as values: steps that a plan consists of, and moves, which are steps that have been staged.

Three kinds are enough. *Put* a new file, link or directory with all that is new in it, in the place of nothing or of something. *Remove* a
file, link or directory with all that is in it. *Adjust* the mode and the attributes of a directory that stays.

A move says of one name what is there before and after, with inodes: whoever looks at the tree and at the staging directory can tell from it
whether it has been made, and can make it or take it back, however often it has been interrupted.
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

    from agent_sandbox.workspace.changes import Change


@dataclass(frozen=True, slots=True)  # there may be a hundred thousand of these
class Look:
    """How a new entry is to look. An owner that is None is that of the directory it is put in; a time that is None, that of the content."""

    mode: int
    xattrs: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One new entry. `path` is relative to the root, `content` where a file's bytes come from, `digest`, if given, what they must be."""

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
    """Put the first of `items`, which holds the others, at `path`, in the place of `expected` and what is `inside` it."""

    path: str
    items: tuple[Item, ...]
    expected: Seen | None
    inside: Mapping[str, Seen] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove what is at `path` and all that is `inside` it."""

    path: str
    expected: Seen
    inside: Mapping[str, Seen] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Adjust:
    """Give a directory that stays another mode and other attributes of its user."""

    path: str
    expected: Seen
    look: Look


Step = Put | Remove | Adjust


@dataclass(frozen=True)
class Refusal:
    """A change that is never promoted, and why. The rest can be, if the caller leaves this one out."""

    path: str
    why: str


@dataclass(frozen=True)
class Held:
    """A change that needs its own yes for each of these classes; see `protected`."""

    path: str
    classes: frozenset[str]


@dataclass(frozen=True)
class LeftOut:
    """A part of a change that does not come along, while the rest does: an owner, an attribute, a right to write."""

    path: str
    what: str


@dataclass(frozen=True)
class Plan:
    """What would be done to the tree at `root`, in this order. Nothing is done while something is refused or held."""

    root: str
    steps: tuple[Step, ...] = ()
    refused: tuple[Refusal, ...] = ()
    held: tuple[Held, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def replaced_bytes(self) -> int:
        """How much content goes, and is kept for an undo."""
        gone = (seen for step in self.steps if not isinstance(step, Adjust) for seen in (step.expected, *step.inside.values()))
        return sum(seen.node.size for seen in gone if seen is not None and seen.node.type is EntryType.FILE)

    @property
    def bytes(self) -> int:
        """How much content is to be written."""
        return sum(item.size for step in self.steps if isinstance(step, Put) for item in step.items)

    def counts(self) -> dict[str, int]:
        """How many entries are added, replaced, removed and adjusted, with those inside directories."""
        found = {"added": 0, "replaced": 0, "removed": 0, "adjusted": 0}
        for step in self.steps:
            match step:
                case Put(expected=None):
                    found["added"] += len(step.items)
                case Put():
                    found["replaced"] += 1
                    found["added"] += len(step.items) - 1
                    found["removed"] += len(step.inside)
                case Remove():
                    found["removed"] += 1 + len(step.inside)
                case Adjust():
                    found["adjusted"] += 1
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """A step that is staged: at `path` is `old`, and is to be `new`. `slot` is the name, in the staging directory, of the one that is not.

    `beside` and `within` are what is below the old and the new, by paths relative to them. When both are directories and the same inode,
    it is adjusted in place and has no slot.
    """

    path: str
    slot: str
    old: Seen | None
    new: Seen | None
    beside: Mapping[str, Seen] = field(default_factory=dict, hash=False)
    within: Mapping[str, Seen] = field(default_factory=dict, hash=False)

    @property
    def in_place(self) -> bool:
        """Whether nothing is moved, and a directory only gets another look."""
        return self.slot == ""


def split(path: str) -> tuple[str, str]:
    """The directory and the name of a path relative to the root."""
    directory, _, name = path.rpartition("/")
    return directory, name


def written(moves: Iterable[Move]) -> list[Any]:
    """Moves as plain values for JSON. Names keep their bytes: what is no UTF-8 is escaped as Python escapes it."""
    return [
        [
            move.path,
            move.slot,
            _spelt(move.old),
            _spelt(move.new),
            {path: _spelt(seen) for path, seen in move.beside.items()},
            {path: _spelt(seen) for path, seen in move.within.items()},
        ]
        for move in moves
    ]


def read(values: Iterable[Any], *, device: int | None = None) -> tuple[Move, ...]:
    """Moves again. All are on one filesystem; `device` is its number if it has another one now. Raises ValueError or TypeError."""
    return tuple(
        Move(
            path,
            slot,
            _read(old, device),
            _read(new, device),
            {name: seen for name, value in beside.items() if (seen := _read(value, device))},
            {name: seen for name, value in within.items() if (seen := _read(value, device))},
        )
        for path, slot, old, new, beside, within in values
    )


def _spelt(seen: Seen | None) -> list[Any] | None:
    if seen is None:
        return None
    node = seen.node
    attributes = {name: value.hex() for name, value in node.xattrs.items()}
    what = [node.type.value, node.mode, node.uid, node.gid, node.size, node.target, node.device, attributes]
    return [*what, seen.device, seen.inode, seen.mtime_ns, seen.ctime_ns, seen.looked_ns, seen.digest]


def _read(value: list[Any] | None, device: int | None) -> Seen | None:
    if value is None:
        return None
    kind, mode, uid, gid, size, target, special, attributes, was_on, *rest = value
    xattrs = {name: bytes.fromhex(text) for name, text in attributes.items()}
    node = Node(EntryType(kind), mode, uid, gid, size, target, special, xattrs)
    return Seen(node, was_on if device is None else device, *rest)


def seen_from(status: os.stat_result, node: Node, *, now_ns: int, digest: str = "") -> Seen:
    """What we have just made, as if it had been looked at."""
    return Seen(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now_ns, digest)


POWER_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
CAPABILITY = "security.capability"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def carried(attribute: str, *, powers: bool) -> bool:
    """Whether an extended attribute comes along. Those of overlays never do: they would be believed when the tree is overlaid again."""
    return (attribute.startswith("user.") and not attribute.startswith("user.overlay.")) or (powers and attribute == CAPABILITY)


def look_for(change: Change, old: Node | None, *, powers: bool) -> tuple[Look, list[str]]:
    """How the entry of a change is to look where `old` is now, and in words what does not come along."""
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
