"""Merge one path, and answer conflicts. *Ours* is the sandbox's version, *theirs* is the present real version.

Content, link target, permission bits, owner and attributes are merged separately. If one side alone changed a property, the result has that
side's value. If both made the same change, the result has that change. Anything else is a conflict. Without a base every difference is a
conflict, and the conflict says that the base is not known. Nothing is read or written here: versions come with their content.

An answer applies to conflicts only. Properties that merged cleanly stay merged, also when the answer prefers one side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.workspace.merge.text import Labels, Merged, merge_text
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")


@dataclass(frozen=True)
class Version:
    """The entry at a path on one side of a merge. A file has its `content`, or only a digest if it is too large or was not kept."""

    node: Node
    content: bytes | None = None
    digest: str = ""

    def holds_the_same(self, other: Version | None) -> bool:
        """Return whether both are files with the same content. Unknown content counts as different."""
        if other is None:
            return False
        if self.content is not None and other.content is not None:
            return self.content == other.content
        return bool(self.digest) and self.digest == other.digest


class ConflictKind(Enum):
    """Kinds of merge conflict."""

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


@dataclass(frozen=True)
class Conflict:
    """A merge conflict to be answered. `known` is False if there was no base; `merged` is the text merge, if the conflict is about text."""

    path: str
    kind: ConflictKind
    base: Version | None
    ours: Version | None
    theirs: Version | None
    known: bool = True
    merged: Merged | None = None
    why: str = ""

    def sentence(self) -> str:
        """Describe the conflict for a person."""
        text = f"{self.path!r}: {self.kind.value}" + (f": {self.why}" if self.why else "")
        return text if self.known else f"{text} (what it was before is not known)"


@dataclass(frozen=True)
class MergedEntry:
    """The merge result for one path. `result` is None if no entry is left, and has the sandbox's value for each property in conflict."""

    path: str
    result: Version | None
    conflicts: tuple[Conflict, ...] = ()


def merge_entry(path: str, base: Version | None, ours: Version | None, theirs: Version | None, *, known: bool = True) -> MergedEntry:
    """Merge two versions of a path. If `known` is False there is no base, and `base` is ignored."""
    base = base if known else None
    if _same(ours, theirs) or (known and _same(theirs, base)):
        return MergedEntry(path, ours)
    if known and _same(ours, base):
        return MergedEntry(path, theirs)
    if ours is None or theirs is None:
        kind = ConflictKind.DELETED_OURS if ours is None else ConflictKind.DELETED_THEIRS
        return MergedEntry(path, ours, (Conflict(path, kind, base, ours, theirs, known),))
    merge = _EntryMerge(path, base, ours, theirs, known)
    if ours.node.type is not theirs.node.type or ours.node.device != theirs.node.device:
        merge.conflict(ConflictKind.ADDED if known and base is None else ConflictKind.TYPE)
        return MergedEntry(path, ours, tuple(merge.conflicts))
    result = merge.of_one_type()
    return MergedEntry(path, result, tuple(merge.conflicts))


def _same(one: Version | None, other: Version | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.node == other.node and (one.node.type is not EntryType.FILE or one.holds_the_same(other))


class _EntryMerge:
    """Merges two versions of the same type, property by property."""

    def __init__(self, path: str, base: Version | None, ours: Version, theirs: Version, known: bool) -> None:
        self._path, self._base, self._ours, self._theirs, self._known = path, base, ours, theirs, known
        self.conflicts: list[Conflict] = []

    def conflict(self, kind: ConflictKind, merged: Merged | None = None, why: str = "") -> None:
        self.conflicts.append(Conflict(self._path, kind, self._base, self._ours, self._theirs, self._known, merged, why))

    def of_one_type(self) -> Version:
        mine, real = self._ours.node, self._theirs.node
        # An entry that had another type before is no base for any property.
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
        """Return the merged content, its digest if known, and its size. The content is None if it is not at hand."""
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


if TYPE_CHECKING:
    from typing import Literal

    Word = Literal["ours", "theirs", "markers"]
    Answer = Word | bytes | None
    Choice = Callable[[Conflict], Answer]

WORDS = ("ours", "theirs", "markers")
_OF_ONE_PROPERTY = (ConflictKind.MODE, ConflictKind.OWNER, ConflictKind.TARGET, ConflictKind.XATTRS)


def resolve(entry: MergedEntry, how: Word | Choice, labels: Labels | None = None) -> MergedEntry:
    """Return the entry with its conflicts answered. Conflicts that cannot be answered in this way stay.

    "ours" is the sandbox's side, "theirs" is reality's. "markers" answers conflicts within a text. A function is called with each conflict.
    It returns one of these words, the content for the file, or None to leave the conflict. Raises ValueError for any other word.
    """
    result = entry.result
    left: list[Conflict] = []
    for conflict in entry.conflicts:
        answer = how(conflict) if callable(how) else how
        if isinstance(answer, str) and answer not in WORDS:
            raise ValueError(f"a conflict is resolved by {', '.join(WORDS)} or by a function, not by {answer!r}")
        content = _with_markers(conflict, labels) if answer == "markers" else answer
        if content == "ours" or content == "theirs":
            result = _by_side(result, conflict, ours=content == "ours")
        elif isinstance(content, bytes) and conflict.kind not in _OF_ONE_PROPERTY:
            result = _file(result or conflict.ours or conflict.theirs, content)
        else:
            left.append(conflict)
    return MergedEntry(entry.path, result, tuple(left))


def _with_markers(conflict: Conflict, labels: Labels | None) -> bytes | None:
    merged = conflict.merged
    return None if merged is None or merged.why else merged.with_markers(labels)


def _file(like: Version | None, content: bytes) -> Version:
    """Return a file with this content and the metadata of `like`. If `like` is no file, the new file has only the owner of `like`."""
    assert like is not None, "a conflict has a side"
    node = like.node if like.node.type is EntryType.FILE else Node(EntryType.FILE, 0o644, like.node.uid, like.node.gid)
    return Version(replace(node, size=len(content)), content)


def _by_side(result: Version | None, conflict: Conflict, *, ours: bool) -> Version | None:
    side = conflict.ours if ours else conflict.theirs
    if side is None or result is None:
        return side
    match conflict.kind:
        case ConflictKind.CONTENT:
            assert conflict.merged is not None
            return _file(result, conflict.merged.ours() if ours else conflict.merged.theirs())
        case ConflictKind.WHOLE:
            return Version(replace(result.node, size=side.node.size), side.content, side.digest)
        case ConflictKind.MODE:
            return replace(result, node=replace(result.node, mode=side.node.mode))
        case ConflictKind.OWNER:
            return replace(result, node=replace(result.node, uid=side.node.uid, gid=side.node.gid))
        case ConflictKind.TARGET:
            return replace(result, node=replace(result.node, target=side.node.target))
        case ConflictKind.XATTRS:
            return replace(result, node=replace(result.node, xattrs=side.node.xattrs))
        case _:
            return side
