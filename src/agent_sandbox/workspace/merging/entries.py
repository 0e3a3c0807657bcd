"""Merge one path: what it was, what the sandbox made of it (*ours*) and what is real now (*theirs*).

Content, link target, permission bits, owner and attributes are merged each for itself: who changed it alone decides, both the same is no
question, and anything else is a conflict. Where there is no base every difference is one, and it says so. Nothing is read or written here:
the versions come with their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from agent_sandbox.values import TYPE_CHECKING, dataclass
from agent_sandbox.workspace.merging.text import Merged, merge_text
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")


@dataclass(frozen=True)
class Version:
    """What is at a path on one side. A file has its `content`, or only its digest when it is too large or was not kept."""

    node: Node
    content: bytes | None = None
    digest: str = ""

    def holds_the_same(self, other: Version | None) -> bool:
        """Whether both are files with the same content; what cannot be told counts as different."""
        if other is None:
            return False
        if self.content is not None and other.content is not None:
            return self.content == other.content
        return bool(self.digest) and self.digest == other.digest


class ConflictKind(Enum):
    """What both sides cannot have."""

    CONTENT = "both changed the same lines"
    WHOLE = "both changed it, and it cannot be merged line by line"
    ADDED = "both added it"
    DELETED_OURS = "the sandbox deleted it, and in reality it was changed"
    DELETED_THEIRS = "the sandbox changed it, and in reality it was deleted"
    TYPE = "both made something else of it"
    TARGET = "both changed where the link leads"
    MODE = "both changed its permissions"
    OWNER = "both changed its owner"
    XATTRS = "both changed the same extended attribute"
    TREE = "one side has something below it, the other has no directory here"


@dataclass(frozen=True)
class Conflict:
    """A question for somebody. `known` is False when there was no base to compare with; `merged` is there when it is about text."""

    path: str
    kind: ConflictKind
    base: Version | None
    ours: Version | None
    theirs: Version | None
    known: bool = True
    merged: Merged | None = None
    why: str = ""

    def sentence(self) -> str:
        """The question, for a person."""
        said = f"{self.path!r}: {self.kind.value}" + (f": {self.why}" if self.why else "")
        return said if self.known else f"{said} (what it was before is not known)"


@dataclass(frozen=True)
class MergedEntry:
    """What a path shall be, None being nothing. Where there are `conflicts`, the sandbox's side stands in for the answer."""

    path: str
    result: Version | None
    conflicts: tuple[Conflict, ...] = ()


def merge_entry(path: str, base: Version | None, ours: Version | None, theirs: Version | None, *, known: bool = True) -> MergedEntry:
    """Merge one path. With `known` False there is no base, and `base` is not looked at."""
    base = base if known else None
    if _same(ours, theirs) or (known and _same(theirs, base)):
        return MergedEntry(path, ours)
    if known and _same(ours, base):
        return MergedEntry(path, theirs)
    if ours is None or theirs is None:
        kind = ConflictKind.DELETED_OURS if ours is None else ConflictKind.DELETED_THEIRS
        return MergedEntry(path, ours, (Conflict(path, kind, base, ours, theirs, known),))
    merging = _Merging(path, base, ours, theirs, known)
    if ours.node.type is not theirs.node.type or ours.node.device != theirs.node.device:
        merging.conflict(ConflictKind.ADDED if known and base is None else ConflictKind.TYPE)
        return MergedEntry(path, ours, tuple(merging.conflicts))
    result = merging.of_one_type()
    return MergedEntry(path, result, tuple(merging.conflicts))


def _same(one: Version | None, other: Version | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.node == other.node and (one.node.type is not EntryType.FILE or one.holds_the_same(other))


class _Merging:
    """Two versions of the same type, property by property."""

    def __init__(self, path: str, base: Version | None, ours: Version, theirs: Version, known: bool) -> None:
        self._path, self._base, self._ours, self._theirs, self._known = path, base, ours, theirs, known
        self.conflicts: list[Conflict] = []

    def conflict(self, kind: ConflictKind, merged: Merged | None = None, why: str = "") -> None:
        self.conflicts.append(Conflict(self._path, kind, self._base, self._ours, self._theirs, self._known, merged, why))

    def of_one_type(self) -> Version:
        mine, real = self._ours.node, self._theirs.node
        # What was something else before is no base for any of its properties.
        old = self._base if self._base is not None and self._base.node.type is mine.type else None
        was = old.node if old is not None else None
        content, digest, size = self._content(old) if mine.type is EntryType.FILE else (None, "", 0)
        owner = self._choose(ConflictKind.OWNER, (was.uid, was.gid) if was else None, (mine.uid, mine.gid), (real.uid, real.gid))
        node = Node(
            type=mine.type,
            mode=self._choose(ConflictKind.MODE, was.mode if was else None, mine.mode, real.mode),
            uid=owner[0],
            gid=owner[1],
            size=size,
            target=self._choose(ConflictKind.TARGET, was.target if was else None, mine.target, real.target),
            device=mine.device,
            xattrs=self._xattrs(was.xattrs if was else {}, mine.xattrs, real.xattrs),
        )
        return Version(node, content, digest)

    def _choose(self, kind: ConflictKind, before: _T | None, mine: _T, real: _T) -> _T:
        if mine == real or real == before:
            return mine
        if mine != before:
            self.conflict(kind)
            return mine
        return real

    def _content(self, old: Version | None) -> tuple[bytes | None, str, int]:
        """Content, its digest where it is not at hand, and its size."""
        ours, theirs = self._ours, self._theirs
        taken = ours
        if not ours.holds_the_same(theirs) and not theirs.holds_the_same(old):
            if ours.holds_the_same(old):
                taken = theirs
            elif ours.content is None or theirs.content is None:
                self.conflict(ConflictKind.WHOLE, why="it is too large")
            else:
                merged = merge_text(old.content if old else None, ours.content, theirs.content)
                if not merged.conflicts:
                    text = merged.text()
                    return text, "", len(text)
                added = self._known and self._base is None
                self.conflict(
                    ConflictKind.WHOLE if merged.why else ConflictKind.ADDED if added else ConflictKind.CONTENT, merged, merged.why
                )
        return taken.content, taken.digest, taken.node.size

    def _xattrs(self, was: Mapping[str, bytes], mine: Mapping[str, bytes], real: Mapping[str, bytes]) -> dict[str, bytes]:
        result: dict[str, bytes] = {}
        clash = False
        for name in sorted({*mine, *real}):
            before, one, other = was.get(name), mine.get(name), real.get(name)
            clash = clash or not (one == other or before in (one, other))
            chosen = other if one == before else one
            if chosen is not None:
                result[name] = chosen
        if clash:
            self.conflict(ConflictKind.XATTRS)
        return result
