"""Undo a promotion by another promotion, which puts the kept old entries back. It has the same guarantees as any promotion.

An undo restores exactly content, mode, owner, user attributes and modification time. It does not restore hard links between two names, nor
the times of directories that the promotion left in place.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import Drift, Unfinished, WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.git.objects import ObjectFiles
from agent_sandbox.workspace.git.records import LOG, PACKED, REFERENCE, Meaning, means_the_same
from agent_sandbox.workspace.git.repository import read_packed, without_packed
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion.inspect import seen_at
from agent_sandbox.workspace.promotion.journal import Journal, journals
from agent_sandbox.workspace.promotion.plan import Adjust, Item, Look, Move, Plan, Put, Remove, Step, carried, ordered, split
from agent_sandbox.workspace.promotion.promote import Promotion, promote, recover
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.reality import Fingerprint
from agent_sandbox.workspace.store import Holder


def last(promotions: str) -> Journal | None:
    """Return the last promotion that has not been undone; None if there is none."""
    taken_back: set[int] = set()
    for journal in reversed([each for each in journals(promotions) if each.committed]):
        undoes = int(journal.facts().get("undoes", 0))
        if undoes:
            taken_back.add(undoes)
        elif journal.number not in taken_back:
            return journal
    return None


def undo(
    promotions: str, *, holder: Holder, wait: bool = False, clock: Callable[[], float] = time.time, progress: Progress = NO_PROGRESS
) -> Promotion:
    """Undo the last promotion. Raises as `promote` does, and `Drift` if promoted entries have changed since."""
    if problems := recover(promotions, holder, wait=wait).problems:
        raise Unfinished(problems[0], hint="nothing can be taken back before that")
    journal = last(promotions)
    if journal is None:
        raise WorkspaceError("there is no promotion to take back")
    with Olds(journal) as olds:
        plan = plan_back(journal, olds, progress)
        return promote(plan, olds, promotions, holder=holder, wait=wait, undoes=journal.number, clock=clock, progress=progress)


def plan_back(journal: Journal, olds: Olds, progress: Progress = NO_PROGRESS) -> Plan:
    """Return the plan that reverses a promotion. Raises `Drift` with every path that has changed since."""
    intent, prepared = journal.intent(), journal.prepared()
    if intent is None or prepared is None or not all(olds.has(move.slot) for move in prepared.moves if move.old and not move.in_place):
        raise WorkspaceError(
            f"what promotion {journal.number} replaced is not there any more, so it cannot be taken back", hint=f"see {journal.path!r}"
        )
    steps: list[Step] = []
    drifted: list[str] = []
    with TargetTree(intent.root) as anchor:
        records = _Records(anchor, olds, intent.root)
        progress.begin("comparing with what was promoted", len(prepared.moves))
        for move in prepared.moves:
            progress.advance(files=1)
            try:
                meaning = intent.meanings.get(move.path)
                steps += records.steps(move, meaning) if meaning else [_reversed(move, anchor, olds, intent.root, intent.meanings)]
            except Surprise as error:
                drifted.append(os.path.join(intent.root, error.path))
        steps += records.packed()
    if drifted:
        what = f"{drifted[0]!r} has" if len(drifted) == 1 else f"{len(drifted):,} of the promoted files, the first {drifted[0]!r}, have"
        raise Drift(
            f"{what} changed since the promotion; nothing was changed",
            paths=tuple(drifted),
            hint="bring back what was promoted there, or change by hand what should be undone",
        )
    return Plan(intent.root, tuple(ordered(steps)), place=intent.place)


class Olds:
    """The kept entries that a promotion replaced or removed. Implements `Contents` for the undo. A context manager."""

    def __init__(self, journal: Journal) -> None:
        self._directory = os.open(journal.olds, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._places: dict[str, str] = {}
        self._made: dict[str, bytes] = {}

    def __enter__(self) -> Olds:
        return self

    def __exit__(self, *ended: object) -> None:
        os.close(self._directory)

    def at(self, path: str, place: str, seen: Fingerprint) -> Change:
        """Return the change that puts a kept file back at `path`. `place` is the path of the file among the kept entries."""
        self._places[path] = place
        return Change(path, Kind.ADDED, None, seen.node)

    def make(self, path: str, content: bytes) -> Change:
        """Return the change that gives the file at `path` this content, which is not one of the kept entries."""
        self._made[path] = content
        return Change(path, Kind.ADDED, None, Node(EntryType.FILE, 0o644, os.geteuid(), os.getegid(), len(content)))

    def has(self, slot: str) -> bool:
        """Return whether there is a kept entry of this name."""
        return beneath.status_of(self._directory, slot) is not None

    def open_file(self, change: Change) -> int:
        """Open the new content of a change made by `at` or `make`; see `Contents`."""
        if (made := self._made.get(change.path)) is not None:
            fd = os.memfd_create("made", os.MFD_CLOEXEC)
            os.write(fd, made)
            os.lseek(fd, 0, os.SEEK_SET)
            return fd
        return beneath.open_file(self._directory, self._places[change.path])


class _Records:
    """Plans the undo of promoted git history files, which git may have rewritten since the promotion; see `git.records`."""

    def __init__(self, anchor: TargetTree, olds: Olds, root: str) -> None:
        self._anchor, self._olds, self._root = anchor, olds, root
        self._gone: dict[str, set[str]] = {}  # references to remove from a `packed-refs` file, by its path

    def steps(self, move: Move, meaning: Meaning) -> list[Step]:
        """Return the steps that undo the promotion of one git file. Raises `Surprise` if its meaning has changed since."""
        if meaning[0] == PACKED:
            return []  # its references are restored one by one
        if meaning[0] == REFERENCE:
            _, name, packed, old, new = meaning
            return self._reference(move, name, packed, old, new)
        try:
            return [_reversed(move, self._anchor, self._olds, self._root, {move.path: meaning})]
        except Surprise:
            if meaning[0] == LOG:
                return []  # a log only grows: what was added to it since stays
            raise

    def _reference(self, move: Move, name: str, packed: str, old: str, new: str) -> list[Step]:
        now = self._seen(move.path)
        below = read_packed(self._content(packed)).get(name, "")
        value = self._content(move.path).decode("utf-8", "surrogateescape").strip() if now is not None else below
        if value != new:
            raise Surprise(move.path, "it has changed since it was promoted")
        if old and not old.startswith("ref: ") and not self._has_object(os.path.dirname(packed), old):
            raise Surprise(move.path, f"git has removed the commit {old[:7]} that it had before")
        if not old and below:
            self._gone.setdefault(packed, set()).add(name)
        if not old or below == old:
            return [Remove(move.path, now, {})] if now is not None else []
        return [self._put(move.path, f"{old}\n".encode("utf-8", "surrogateescape"), now)]

    def packed(self) -> list[Step]:
        """Return the steps that remove references from `packed-refs`. Call it after `steps` was called for every reference."""
        return [
            self._put(path, without_packed(self._content(path), frozenset(names)), self._seen(path)) for path, names in self._gone.items()
        ]

    def _put(self, path: str, content: bytes, now: Fingerprint | None) -> Put:
        change = self._olds.make(os.path.join(self._root, path), content)
        kept = _look(now) if now is not None else Look(0o644)
        look = Look(kept.mode, kept.xattrs, kept.uid, kept.gid)
        return Put(path, (Item(path, EntryType.FILE, look, len(content), content=change),), now)

    def _has_object(self, common: str, name: str) -> bool:
        with ObjectFiles(os.path.join(self._root, common, "objects"), "sha1" if len(name) == 40 else "sha256") as objects:
            return objects.has(name)

    def _seen(self, path: str) -> Fingerprint | None:
        parent, name = split(path)
        return seen_at(self._anchor.directory(parent), name, content=True)

    def _content(self, path: str) -> bytes:
        parent, name = split(path)
        try:
            with open(beneath.open_file(self._anchor.directory(parent), name), "rb") as file:
                return file.read()
        except OSError:
            return b""


def _reversed(move: Move, anchor: TargetTree, olds: Olds, root: str, meanings: Mapping[str, Meaning]) -> Step:
    now, inside = _unchanged(move, anchor, meanings)
    if move.old is None:
        assert now is not None
        return Remove(move.path, now, inside)
    if move.in_place:
        assert now is not None
        return Adjust(move.path, now, _look(move.old))
    items = [_item(move.path, move.slot, move.old, olds, root)]
    for path, seen in sorted(move.beside.items(), key=lambda each: each[0].replace("/", "\0")):
        items.append(_item(f"{move.path}/{path}", f"{move.slot}/{path}", seen, olds, root))
    return Put(move.path, tuple(items), now, inside)


def _item(path: str, place: str, seen: Fingerprint, olds: Olds, root: str) -> Item:
    node = seen.node
    content = olds.at(os.path.join(root, path), place, seen) if node.type is EntryType.FILE else None
    return Item(path, node.type, _look(seen), node.size, node.target, node.device, content, seen.digest)


def _look(seen: Fingerprint) -> Look:
    node = seen.node
    return Look(node.mode, {name: value for name, value in node.xattrs.items() if _restored(name)}, node.uid, node.gid, seen.mtime_ns)


def _restored(attribute: str) -> bool:
    return carried(attribute, powers=True) or attribute.startswith("system.posix_acl_")


def _unchanged(move: Move, anchor: TargetTree, meanings: Mapping[str, Meaning]) -> tuple[Fingerprint | None, dict[str, Fingerprint]]:
    """Return the present entry at the move's path, and the entries below it. Raises `Surprise` if they changed since the promotion."""
    if move.in_place:
        return _adjusted(move, anchor), {}
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    now = seen_at(directory, name, content=True)
    if not _same(move.new, now) and not _means_the_same(meanings.get(move.path), directory, name):
        raise Surprise(move.path, "it has changed since it was promoted")
    inside: dict[str, Fingerprint] = {}
    if now is not None and now.node.type is EntryType.DIRECTORY:
        inside = dict(_below(anchor.directory(move.path), move.within, move.path, meanings))
        if inside.keys() != move.within.keys():
            raise Surprise(move.path, "something has been added or removed in it since it was promoted")
    return now, inside


def _adjusted(move: Move, anchor: TargetTree) -> Fingerprint:
    assert move.new is not None
    directory = anchor.directory(move.path)
    status = os.fstat(directory)
    now = replace(move.new, device=status.st_dev, inode=status.st_ino)
    if stat.S_IMODE(status.st_mode) != move.new.node.mode:
        raise Surprise(move.path, "it has changed since it was promoted")
    return now


def _means_the_same(meaning: Meaning | None, directory: int, name: str) -> bool:
    if meaning is None:
        return False
    try:
        with open(beneath.open_file(directory, name), "rb") as file:
            return means_the_same(meaning, file.read())
    except OSError:
        return False


def _below(
    directory: int, left: Mapping[str, Fingerprint], path: str, meanings: Mapping[str, Meaning]
) -> Iterator[tuple[str, Fingerprint]]:
    for entry in beneath.walk(directory, unlock=False):
        now = seen_at(entry.directory, entry.name, content=True)
        same = now is not None and _same(left.get(entry.path), now)
        if now is None or (not same and not _means_the_same(meanings.get(f"{path}/{entry.path}"), entry.directory, entry.name)):
            raise Surprise(f"{path}/{entry.path}", "it has changed since it was promoted")
        yield entry.path, now


def _same(left: Fingerprint | None, now: Fingerprint | None) -> bool:
    """Return whether the present entry (`now`) equals the entry that the promotion left (`left`). The inode may differ.

    Only attributes that a promotion carries are compared; the machine may change the others.
    """
    if left is None or now is None:
        return left is now
    one, other = left.node, now.node
    same_node = (one.type, one.mode, one.uid, one.gid, one.size, one.target) == (
        other.type,
        other.mode,
        other.uid,
        other.gid,
        other.size,
        other.target,
    )
    attributes = [{name: value for name, value in node.xattrs.items() if carried(name, powers=True)} for node in (one, other)]
    return same_node and attributes[0] == attributes[1] and left.digest == now.digest
