"""At the end of a run, keep what is real at every path that its layer covers for the first time.

What is there *now* was also there when the run began, if the inode has not changed since: the time of its last change cannot be set. For a
name without anything it is the directory that must not have changed. A directory that was moved takes what is below it along without a
trace in it: so on the way down each must be old, or be known to be the one that an earlier run found or that the overlay looked into, which
it notes. It notes nothing for a user who is not root, and over filesystems without handles; there a directory is believed whose last change
was that of its entries, and one that was moved here during the run, and in which then a name came or went, goes unnoticed.

The kernel stamps times with a clock that ticks every few milliseconds and is late by up to one tick; so a little is deducted from the
beginning of the run. On a network filesystem the times are the server's, and worth what its clock is.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable

from agent_sandbox.spelling import sha256
from agent_sandbox.values import dataclass, field, replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.bases import lines
from agent_sandbox.workspace.bases.contents import ContentWriter
from agent_sandbox.workspace.bases.files import Recalled
from agent_sandbox.workspace.bases.origin import attribute, looked_into
from agent_sandbox.workspace.bases.runs import append, spell_done
from agent_sandbox.workspace.beneath import Entry, TooMany
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import SETTLED_NS, Base, Seen, digest_of, look

TICK_NS = 20_000_000
_FLUSH = 1 << 20


@dataclass
class Budget:
    """How much of reality is read at the end of one run. Beyond it a base is kept without content, or a directory without a list."""

    kept_file: int = 8 << 20
    kept: int = 512 << 20  # bytes, of all runs of a sandbox together
    read_file: int = 64 << 20
    read: int = 1 << 30
    listed: int = 200_000
    characters: int = 64 << 20  # of all paths: 10,000 nested directories would fill the disk with theirs


@dataclass(frozen=True)
class Kept:
    """How many bases were added, and of how many of these reality had moved already."""

    added: int
    unknown: int


def keep(
    directory: str,
    generation: int,
    uppers: Iterable[tuple[str, int]],
    *,
    since_ns: int,
    already: Recalled,
    prefix: str,
    masks: Collection[str] = (),
    machine_root: str = "/",
    budget: Budget | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Kept:
    """Keep the bases of the active generation: `uppers` are its targets and descriptors of their upper directories.

    `since_ns` is what `begin` returned, `already` the bases of the whole chain, `prefix` that of this overlay's attributes. What is at a
    mask is noted without its content: it was hidden for a reason. Raises WorkspaceError; what is not kept then is taken as unknown by the
    next run.
    """
    budget = budget or Budget()
    contents = ContentWriter(directory, generation, budget.kept)
    keeper = _Keeper(directory, generation, since_ns - TICK_NS, already, prefix, frozenset(masks), budget, now_ns, contents)
    try:
        with explained(f"keep in {directory!r} what is real"):
            for target, upper in uppers:
                with Reality(machine_root.rstrip("/") + target) as reality:
                    keeper.cover(target, upper, reality)
            keeper.write(spell_done(since_ns))
    finally:
        contents.close()
    return Kept(keeper.count, keeper.unknown)


@dataclass(frozen=True)
class _Place:
    """What is known of a real directory while the entries of the layer's directory are looked at. `status` is None where there is none."""

    status: os.stat_result | None
    steady: bool  # it is what it was when the run began
    masked: bool


@dataclass
class _Keeper:
    directory: str
    generation: int
    before: int  # what changed before this had not changed during the run
    already: Recalled
    prefix: str
    masks: frozenset[str]
    budget: Budget
    now_ns: Callable[[], int]
    contents: ContentWriter
    unknown: int = 0
    _kept: set[str] = field(default_factory=set)
    _text: list[str] = field(default_factory=list)
    _size: int = 0
    _nothing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many bases were added."""
        return len(self._kept)

    def cover(self, target: str, upper: int, reality: Reality) -> None:
        top = reality.directory("")
        top_path = target.rstrip("/") + "/"
        around = [_Place(os.fstat(top) if top is not None else None, True, any(covers(mask, target) for mask in self.masks))]
        hidden: list[tuple[str, str, _Place]] = []
        for entry in beneath.walk(upper):
            del around[entry.depth + 1 :]
            place = around[-1]
            relative = entry.path
            path = f"{top_path}{relative}"
            is_directory = stat.S_ISDIR(entry.status.st_mode)
            covered = path in self.already
            if covered and not is_directory and (place.status is None or entry.status.st_ctime_ns < self.before):
                continue  # it was here before this run, and this run did not touch it
            parent = relative.rpartition("/")[0]
            status = reality.status(parent, entry.name) if place.status is not None else None
            masked = place.masked or path in self.masks
            if not covered:
                self._keep(path, reality.directory(parent), entry.name, status, place, masked)
            if status is not None and stat.S_ISDIR(status.st_mode):
                if not masked and path not in self.already.listed and self._hides(entry):
                    hidden.append((path, relative, _Place(status, place.steady and self._unmoved(status), False)))
                if is_directory:
                    same = self._unmoved(status) or self._is_same(path, entry, reality.directory(parent), status)
                    around.append(_Place(status, place.steady and same, masked))
            elif is_directory:
                around.append(_Place(None, place.steady and self._unmoved(status or place.status), masked))
        self._flush_nothing()
        for path, relative, place in hidden:  # last: what the layer has below them itself has been kept with its content by now
            self._list(path, relative, reality, place)

    def _is_same(self, path: str, entry: Entry, real: int | None, status: os.stat_result) -> bool:
        """Whether a real directory that changed during the run is the one that was there before."""
        base = self.already.get(path)
        if base is not None and base.known and base.seen is not None:
            return (base.seen.device, base.seen.inode) == (status.st_dev, status.st_ino)
        noted = looked_into(entry, self.prefix, real)
        return status.st_ctime_ns == status.st_mtime_ns if noted is None else noted

    def _unmoved(self, status: os.stat_result | None) -> bool:
        return status is None or status.st_ctime_ns < self.before

    def _keep(self, path: str, real: int | None, name: str, status: os.stat_result | None, place: _Place, masked: bool) -> None:
        now = os.fstat(real) if real is not None else None
        if now is not None and place.status is not None and (now.st_dev, now.st_ino) != (place.status.st_dev, place.status.st_ino):
            self._add(Base(path, None, known=False))  # the directory was swapped just now
        elif status is None or real is None:
            if place.steady and self._unmoved(now):
                self._nothing.setdefault(path.rpartition("/")[0] or "/", []).append(name)
                self._count(path)
            else:
                self._add(Base(path, None, known=False))
        else:
            self._add(self._base(path, real, name, place, content=not masked))

    def _base(self, path: str, real: int, name: str, place: _Place, *, content: bool) -> Base:
        """What is there, and whether it was when the run began: judged by its times after it was read."""
        kept = ""
        try:
            seen = look(real, name, now_ns=self.now_ns())
            if seen is not None and content:
                seen, kept = self._with_content(seen, real, name)
            status = os.stat(name, dir_fd=real, follow_symlinks=False)
        except OSError:
            return Base(path, None, known=False)
        if seen is None or (seen.device, seen.inode, seen.ctime_ns) != (status.st_dev, status.st_ino, status.st_ctime_ns):
            return Base(path, None, known=False)
        return Base(path, seen, place.steady and self._unmoved(status), kept)

    def _with_content(self, seen: Seen, real: int, name: str) -> tuple[Seen, str]:
        size = seen.node.size
        if seen.node.type is not EntryType.FILE or size > min(self.budget.read_file, self.budget.read):
            return seen, ""
        self.budget.read -= size
        try:
            if size > self.budget.kept_file:
                return replace(seen, digest=digest_of(real, name)), ""
            fd = beneath.open_file(real, name, one_filesystem=False)
        except PermissionError:
            return seen, ""  # what we may not read the guest could not either
        with open(fd, "rb", buffering=0) as file:
            content = file.read(size + 1) or b""
        if len(content) != size:
            raise OSError(errno.EAGAIN, "it is being written", name)
        return replace(seen, digest=sha256(content).hexdigest()), self.contents.add(content)

    def _hides(self, entry: Entry) -> bool:
        """Whether nothing of a real directory shows through this entry of the layer."""
        return entry.own is None or attribute(entry, self.prefix + "opaque") == b"y"

    def _list(self, path: str, relative: str, reality: Reality, place: _Place) -> None:
        """Note all that is below a real directory. Content is read only where times will not tell later whether it changed."""
        directory = reality.directory(relative)
        if directory is None:
            return
        places = [place]
        try:
            for entry in beneath.walk(directory, limit=self.budget.listed, unlock=False):
                self.budget.listed -= 1
                del places[entry.depth + 1 :]
                inner = f"{path}/{entry.path}"
                settled = entry.status.st_ctime_ns + SETTLED_NS < self.now_ns()
                if inner not in self.already and inner not in self._kept:
                    content = not settled and not any(covers(mask, inner) for mask in self.masks)
                    self._add(self._base(inner, entry.directory, entry.name, places[-1], content=content))
                if stat.S_ISDIR(entry.status.st_mode):
                    if entry.own is None:
                        return  # another filesystem, or one that we may not enter: the list has a hole
                    places.append(_Place(entry.status, places[-1].steady and self._unmoved(entry.status), False))
        except (OSError, TooMany, beneath.Moved):
            return
        self._append(lines.spell_below(path))

    def _add(self, base: Base) -> None:
        self._count(base.path)
        self.unknown += not base.known
        self._append(lines.spell_base(base))

    def _count(self, path: str) -> None:
        self._kept.add(path)
        self.budget.characters -= len(path)
        if self.budget.characters < 0:
            raise TooMany("this sandbox covers more than can be kept track of", hint="agent-sandbox reset drops it")

    def _append(self, line: str) -> None:
        self._text.append(line)
        self._size += len(line)
        if self._size > _FLUSH:
            self.write("")

    def _flush_nothing(self) -> None:
        for parent, names in self._nothing.items():
            self._append(lines.spell_nothing(parent, names))
        self._nothing.clear()

    def write(self, last: str) -> None:
        """Write what is waiting, and this."""
        append(self.directory, self.generation, "".join([*self._text, last]))
        self._text.clear()
        self._size = 0
