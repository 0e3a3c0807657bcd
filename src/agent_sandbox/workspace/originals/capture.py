"""Capture what is real at every path that a run's layer covers for the first time, at the end of the run."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.kernel.syscalls import name_to_handle_at
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany, open_beneath
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.fingerprint import SETTLED_NS, Base, Seen, digest_of, look
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.originals import records
from agent_sandbox.workspace.originals.files import ContentWriter, Recalled
from agent_sandbox.workspace.originals.runs import append, spell_done
from agent_sandbox.workspace.reality import Reality

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


@dataclass(frozen=True)
class Place:
    """What is known of a real directory while the entries of the layer's directory are looked at. `status` is None where there is none."""

    status: os.stat_result | None
    steady: bool  # it is what it was when the run began
    masked: bool


@dataclass
class Keeper:
    """The bases that one run adds, on their way into the files."""

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

    def unmoved(self, status: os.stat_result | None) -> bool:
        """Whether this has not changed since the run began; None is nothing, which has not."""
        return status is None or status.st_ctime_ns < self.before

    def keep(self, path: str, real: int | None, name: str, status: os.stat_result | None, place: Place, masked: bool) -> None:
        """Add the base of one path. `real` is the directory it is in, `status` what is there."""
        now = os.fstat(real) if real is not None else None
        if now is not None and place.status is not None and (now.st_dev, now.st_ino) != (place.status.st_dev, place.status.st_ino):
            self._add(Base(path, None, known=False))  # the directory was swapped just now
        elif status is None or real is None:
            if place.steady and self.unmoved(now):
                self._nothing.setdefault(path.rpartition("/")[0] or "/", []).append(name)
                self._count(path)
            else:
                self._add(Base(path, None, known=False))
        else:
            self._add(self._base(path, real, name, place, content=not masked))

    def _base(self, path: str, real: int, name: str, place: Place, *, content: bool) -> Base:
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
        return Base(path, seen, place.steady and self.unmoved(status), kept)

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

    def list(self, path: str, relative: str, reality: Reality, place: Place) -> None:
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
                    places.append(Place(entry.status, places[-1].steady and self.unmoved(entry.status), False))
        except (OSError, TooMany, beneath.Moved):
            return
        self._append(records.spell_below(path))

    def _add(self, base: Base) -> None:
        self._count(base.path)
        self.unknown += not base.known
        self._append(records.spell_base(base))

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

    def flush_nothing(self) -> None:
        """Write down the names where nothing was, those of a directory together."""
        for parent, names in self._nothing.items():
            self._append(records.spell_nothing(parent, names))
        self._nothing.clear()

    def write(self, last: str) -> None:
        """Write what is waiting, and this."""
        append(self.directory, self.generation, "".join([*self._text, last]))
        self._text.clear()
        self._size = 0


_ORIGIN = struct.Struct("=BBBBB16s")  # struct ovl_fb: version, magic, length, flags, the kind of handle, the filesystem; then the handle


def looked_into(upper: int, path: str, prefix: str, real: int) -> bool | None:
    """Whether the directory at `path` of a layer was copied from the real one of the same name in `real`.

    None where overlays do not note it: for a user who is not root, over a filesystem that has no handles, and on the way to what is hidden,
    where the directory that was copied is one of ours that hides it, on a filesystem of another kind.
    """
    origin = attribute(upper, path, prefix + "origin")
    if origin is None:
        return False  # the guest made this one: nothing ties it to the real one
    if len(origin) <= _ORIGIN.size:
        return None
    noted = _ORIGIN.unpack_from(origin)[4], origin[_ORIGIN.size :]
    try:
        kind, handle = name_to_handle_at(real, path.rpartition("/")[2])
    except OSError:
        return False
    return (kind, handle) == noted if (kind, len(handle)) == (noted[0], len(noted[1])) else None


def attribute(directory: int, path: str, name: str) -> bytes | None:
    """An attribute of what is at `path` below a directory of a layer; None if it has none."""
    try:
        handle = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return os.getxattr(f"/proc/self/fd/{handle}", name)
    except OSError:
        return None
    finally:
        os.close(handle)


TICK_NS = 20_000_000


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
    keeper = Keeper(directory, generation, since_ns - TICK_NS, already, prefix, frozenset(masks), budget, now_ns, contents)
    try:
        with explained(f"keep in {directory!r} what is real"):
            for target, upper in uppers:
                with Reality(machine_root.rstrip("/") + target) as reality:
                    _Cover(keeper, target, upper, reality).look()
            keeper.write(spell_done(since_ns))
    finally:
        contents.close()
    return Kept(keeper.count, keeper.unknown)


def bases_now(paths: Collection[str], *, machine_root: str = "/") -> list[Base]:
    """Directories as they are at this moment, for whoever has just made them what they are. Raises OSError."""
    found: list[Base] = []
    with Reality(machine_root) as reality:
        for path in paths:
            parent, _, name = path.rpartition("/")
            directory = reality.directory(parent.lstrip("/"))
            seen = look(directory, name, now_ns=time.time_ns()) if directory is not None else None
            found.append(Base(path, seen))
    return found


class _Cover:
    """One overlay's layer, and what it covers."""

    def __init__(self, keeper: Keeper, target: str, upper: int, reality: Reality) -> None:
        self._keeper, self._upper, self._reality = keeper, upper, reality
        self._prefix = target.rstrip("/") + "/"
        top = reality.directory("")
        masked = any(covers(mask, target) for mask in keeper.masks)
        self._places: list[Place | None] = [Place(os.fstat(top) if top is not None else None, True, masked)]  # from the top to where we are
        self._hidden: list[tuple[str, str, Place]] = []

    def look(self) -> None:
        """Keep the bases of all that is new in it."""
        keeper = self._keeper
        if not keeper.unmoved(os.fstat(self._upper)):
            self._directory("", self._upper)
        for entry in beneath.walk(self._upper, directories_only=True):
            del self._places[entry.depth + 1 :]
            self._places.append(None)
            if entry.own is not None and not keeper.unmoved(entry.status):
                self._directory(entry.path, entry.own)
        keeper.flush_nothing()
        for path, relative, place in self._hidden:  # last: what the layer has below them itself has been kept with its content by now
            keeper.list(path, relative, self._reality, place)

    def _directory(self, relative: str, own: int) -> None:
        """What is in one directory of the layer."""
        keeper, reality = self._keeper, self._reality
        place = self._place(relative)
        for name in sorted(beneath.names(own, limit=beneath.ENTRY_LIMIT)):
            inner = f"{relative}/{name}" if relative else name
            path = self._prefix + inner
            try:
                covering = os.stat(name, dir_fd=own, follow_symlinks=False)
            except FileNotFoundError:
                continue
            covered = path in keeper.already
            if covered and keeper.unmoved(covering) and not stat.S_ISDIR(covering.st_mode):
                continue
            status = reality.status(relative, name) if place.status is not None else None
            masked = place.masked or path in keeper.masks
            if not covered:
                keeper.keep(path, reality.directory(relative), name, status, place, masked)
            if status is not None and stat.S_ISDIR(status.st_mode) and not masked and path not in keeper.already.listed:
                opaque = stat.S_ISDIR(covering.st_mode) and attribute(own, name, keeper.prefix + "opaque") == b"y"
                if opaque or not stat.S_ISDIR(covering.st_mode):
                    self._hidden.append((path, inner, Place(status, place.steady and keeper.unmoved(status), False)))

    def _place(self, relative: str) -> Place:
        """What is known of the real directory at a place, and of those on the way to it."""
        place = self._places[0]
        assert place is not None
        names = relative.split("/")
        for depth in range(1, len(self._places)):
            known = self._places[depth]
            place = self._places[depth] = known if known is not None else self._enter("/".join(names[:depth]), place)
        return place

    def _enter(self, relative: str, above: Place) -> Place:
        keeper = self._keeper
        parent, _, name = relative.rpartition("/")
        masked = above.masked or self._prefix + relative in keeper.masks
        status = self._reality.status(parent, name) if above.status is not None else None
        if status is None or not stat.S_ISDIR(status.st_mode):
            return Place(None, above.steady and keeper.unmoved(status or above.status), masked)
        same = keeper.unmoved(status) or self._is_same(relative, parent, status)
        return Place(status, above.steady and same, masked)

    def _is_same(self, relative: str, parent: str, status: os.stat_result) -> bool:
        """Whether a real directory that changed during the run is the one that was there before."""
        base = self._keeper.already.get(self._prefix + relative)
        if base is not None and base.known and base.seen is not None:
            return (base.seen.device, base.seen.inode) == (status.st_dev, status.st_ino)
        real = self._reality.directory(parent)
        noted = looked_into(self._upper, relative, self._keeper.prefix, real) if real is not None else False
        return status.st_ctime_ns == status.st_mtime_ns if noted is None else noted
