"""Capture originals: at the end of a run, record the real state of every path that its layer covers for the first time.

The present state of an entry is its state at the start of the run if its inode has not changed since. The inode's ctime shows that, because
no program can set it. For a name that does not exist, the ctime of its directory decides. A moved directory carries its contents along
without leaving a trace in them. So every directory on the way down must be unchanged since the start, or lie in an unchanged directory, or
be the directory that the overlay copied up in this run. The overlay records what it copied up in an attribute, but not for users other than
root, nor on filesystems without handles. Without that attribute, a directory is trusted if its last change was to its entries. Then one
case goes unnoticed: a directory that was moved in during the run and then gained or lost a name.

Only directories of the layer are walked. A directory that has not changed since the run began has no new names, so its entries are skipped.
The cost depends on the number of the layer's directories and on this run's changes, not on the changes of earlier runs. Files in a
directory that the guest made earlier and then moved are skipped too. They get no base, and need none where nothing is real.

On a network filesystem the times are the server's, and only as good as its clock.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.kernel.mount_plan import IMAGES
from agent_sandbox.kernel.syscalls import born_ns, name_to_handle_at
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany, open_beneath
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.nodes import EntryType, describe
from agent_sandbox.workspace.originals import files
from agent_sandbox.workspace.originals.files import ContentWriter, Recalled
from agent_sandbox.workspace.originals.runs import TICK_NS, append, file_clock_ns, spell_done
from agent_sandbox.workspace.reality import Base, Fingerprint, Reality, digest_of_open, granule_ns, is_settled, look

_FLUSH = 1 << 20
_ORIGIN = struct.Struct("=BBBBB16s")  # struct ovl_fb: version, magic, length, flags, handle type, filesystem; the handle follows


@dataclass
class Budget:
    """Limits on how much of the real tree is read at the end of one run.

    Beyond these limits a base is kept without content, or a directory without the list of its entries.
    """

    kept_file: int = 8 << 20
    kept: int = 512 << 20  # bytes, over all runs of a sandbox
    read_file: int = 64 << 20
    read: int = 1 << 30
    listed: int = 200_000
    characters: int = 64 << 20  # of all paths together: the paths of 10,000 nested directories would fill the disk


@dataclass(frozen=True)
class Captured:
    """The number of bases added, and how many of them are unknown because the real entry had already changed."""

    added: int
    unknown: int


@dataclass(frozen=True)
class RealDirectory:
    """The real directory at the path of a layer's directory. `status` is None if no real directory is there."""

    status: os.stat_result | None
    steady: bool  # the same as when the run began
    masked: bool


@dataclass
class OriginalsWriter:
    """Records the bases that one run adds. Lines are buffered before they are written to the files."""

    directory: str
    generation: int
    began: int  # when this run began
    before: int  # an entry with an older ctime did not change during the run
    already: Recalled
    prefix: str
    masks: frozenset[str]
    budget: Budget
    now_ns: Callable[[], int]
    contents: ContentWriter
    handles: bool = True  # whether the handles that the overlay recorded are of the real directories
    unknown: int = 0
    _paths: set[str] = field(default_factory=set)
    _text: list[str] = field(default_factory=list)
    _size: int = 0
    _absent: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of bases added."""
        return len(self._paths)

    def unmoved(self, status: os.stat_result | None) -> bool:
        """Return whether an entry with this status is unchanged since the run began. None, a missing entry, counts as unchanged."""
        if status is None:
            return True
        # Some filesystems keep whole seconds, or two of them: then a later change may have an earlier time.
        rounded = granule_ns(status.st_ctime_ns)
        return status.st_ctime_ns + (rounded if rounded > TICK_NS else 0) < self.before

    def keep(self, path: str, real: int | None, name: str, status: os.stat_result | None, place: RealDirectory, masked: bool) -> None:
        """Add the base of one path. `real` is a descriptor of the real directory `place`; `status` is the status of the entry `name` in it.

        If the entry is `masked`, its content is not kept.
        """
        now = os.fstat(real) if real is not None else None
        if now is not None and place.status is not None and (now.st_dev, now.st_ino) != (place.status.st_dev, place.status.st_ino):
            self._add(Base(path, None, known=False))  # the directory has just been swapped
        elif status is None or real is None:
            if place.steady and self.unmoved(now):
                self._absent.setdefault(path.rpartition("/")[0] or "/", []).append(name)
                self._count(path)
            else:
                self._add(Base(path, None, known=False))
        else:
            self._add(self._base(path, real, name, place, content=not masked and stat.S_ISREG(status.st_mode)))

    def _base(self, path: str, real: int, name: str, place: RealDirectory, *, content: bool) -> Base:
        """Return the base of an entry, with the `content` of a regular file. It is unknown if the entry changed meanwhile."""
        try:
            seen, kept = self._read(real, name) if content else (look(real, name, now_ns=self.now_ns()), "")
            if seen is not None and seen.node.type is EntryType.FILE and not seen.digest:
                seen = self._settled(seen)
            status = os.stat(name, dir_fd=real, follow_symlinks=False)
        except OSError:
            return Base(path, None, known=False)
        if seen is None or (seen.device, seen.inode, seen.ctime_ns) != (status.st_dev, status.st_ino, status.st_ctime_ns):
            return Base(path, None, known=False)
        return Base(path, seen, place.steady and self.unmoved(status), kept)

    def _settled(self, seen: Fingerprint) -> Fingerprint:
        """Return the fingerprint of an unread file, looked at when any later change must show in the ctime.

        Waits for that if the file changed right before the run, at most a tick of the kernel's clock. Only the times can show later that
        such a file has not changed.
        """
        early = seen.ctime_ns + TICK_NS - seen.looked_ns
        if 0 <= early <= TICK_NS:
            time.sleep((early + TICK_NS / 4) / 1e9)
            return replace(seen, looked_ns=self.now_ns())
        return seen

    def _read(self, real: int, name: str) -> tuple[Fingerprint | None, str]:
        """Return the fingerprint of a regular file, and the place of its content, if that is kept. Raises OSError."""
        now = self.now_ns()
        try:
            fd, status = beneath.open_seen_file(real, name)
        except OSError:  # it was replaced, or we may not read it, and then the guest could not either
            return look(real, name, now_ns=now), ""
        try:
            node = describe(real, name, status, beneath.xattrs_of(fd), own_prefix="trusted.overlay.")
            size, digest, kept = status.st_size, "", ""
            if size <= min(self.budget.read_file, self.budget.read):
                self.budget.read -= size
                if size > self.budget.kept_file:
                    digest = digest_of_open(fd)
                else:
                    content = os.read(fd, size + 1)
                    while len(content) <= size and (more := os.read(fd, size + 1 - len(content))):
                        content += more
                    if len(content) != size:
                        raise OSError(errno.EAGAIN, "it is being written", name)
                    digest, kept = sha256(content).hexdigest(), self.contents.add(content)
        finally:
            os.close(fd)
        return Fingerprint(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now, digest), kept

    def list(self, path: str, relative: str, reality: Reality, place: RealDirectory) -> None:
        """Add the bases of everything below a real directory, and then a `below` line, which says that none is missing.

        Content is read only if the entry's times may fail to show a later change. If an entry cannot be recorded, there is no `below` line.
        """
        directory = reality.directory(relative)
        if directory is None:
            return
        places = [place]
        try:
            for entry in beneath.walk(directory, limit=self.budget.listed, unlock=False):
                self.budget.listed -= 1
                del places[entry.depth + 1 :]
                inner = f"{path}/{entry.path}"
                settled = is_settled(entry.status.st_ctime_ns, self.now_ns())
                if inner not in self.already and inner not in self._paths:
                    regular = stat.S_ISREG(entry.status.st_mode)
                    content = regular and not settled and not any(contains(mask, inner) for mask in self.masks)
                    self._add(self._base(inner, entry.directory, entry.name, places[-1], content=content))
                if stat.S_ISDIR(entry.status.st_mode):
                    if entry.own is None:
                        return  # another filesystem, or a directory that we may not enter: the list is incomplete
                    places.append(RealDirectory(entry.status, places[-1].steady and self.unmoved(entry.status), False))
        except (OSError, TooMany, beneath.MovedAway):
            return
        self._append(files.spell_below(path))

    def _add(self, base: Base) -> None:
        self._count(base.path)
        self.unknown += not base.known
        self._append(files.spell_base(base))

    def _count(self, path: str) -> None:
        self._paths.add(path)
        self.budget.characters -= len(path)
        if self.budget.characters < 0:
            raise TooMany("this sandbox covers more than can be kept track of", hint="agent-sandbox reset drops it")

    def _append(self, line: str) -> None:
        self._text.append(line)
        self._size += len(line)
        if self._size > _FLUSH:
            self.write("")

    def flush_absent(self) -> None:
        """Write the buffered names that did not exist, one line per directory."""
        for parent, names in self._absent.items():
            self._append(files.spell_nothing(parent, names))
        self._absent.clear()

    def write(self, last: str) -> None:
        """Write the buffered contents and lines, then `last`."""
        self.contents.flush()
        append(self.directory, self.generation, "".join([*self._text, last]))
        self._text.clear()
        self._size = 0


def is_copied_up(upper: int, path: str, prefix: str, real: int, *, since_ns: int) -> bool | None:
    """Return whether the layer's directory at `path` is a copy, made after `since_ns`, of the real directory of that name in `real`.

    A copy from an earlier run shows only what was real in that run; another directory may have been there meanwhile. The overlay records
    the file handle of the directory that it copied. Return None if the handle cannot be compared: for users other than root, on filesystems
    without handles, and above masked paths. Above masked paths the overlay copied a directory of our mask layer, on another kind of
    filesystem.
    """
    origin = attribute(upper, path, prefix + "origin")
    if origin is None:
        return False  # made by the guest: nothing ties it to the real directory
    if len(origin) <= _ORIGIN.size:
        return None
    recorded = _ORIGIN.unpack_from(origin)[4], origin[_ORIGIN.size :]
    try:
        kind, handle = name_to_handle_at(real, path.rpartition("/")[2])
    except OSError:
        return False
    if (kind, len(handle)) != (recorded[0], len(recorded[1])):
        return None
    return (kind, handle) == recorded and _born_since(upper, path, since_ns)


def _born_since(upper: int, path: str, since_ns: int) -> bool:
    try:
        handle = open_beneath(upper, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        born = born_ns(handle)
    finally:
        os.close(handle)
    return born is not None and born >= since_ns


def attribute(directory: int, path: str, name: str) -> bytes | None:
    """Return an extended attribute of the entry at `path` in a layer; None if the entry or the attribute is missing."""
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


def keep(
    directory: str,
    generation: int,
    uppers: Iterable[tuple[str, int]],
    *,
    since_ns: int,
    began_ns: int,
    already: Recalled,
    prefix: str,
    masks: Collection[str] = (),
    machine_root: str = "/",
    budget: Budget | None = None,
    now_ns: Callable[[], int] = file_clock_ns,
    handles: bool = True,
) -> Captured:
    """Capture the bases of the active generation. `uppers` are its overlay targets, with descriptors of their upper directories.

    `since_ns` is the result of `begin`, `began_ns` its argument, `already` the bases of the whole chain, `prefix` the prefix of this
    overlay's attributes. An entry at a mask is recorded without content: it was hidden for a reason. Without `handles`, the overlay copied
    from a copy of the real tree. Raises WorkspaceError; then every base that was not kept counts as unknown in the next run.
    """
    budget = budget or Budget()
    contents = ContentWriter(directory, generation, budget.kept)
    before_ns = since_ns if since_ns == began_ns else since_ns - TICK_NS  # an earlier version took the start of a run from a finer clock
    keeper = OriginalsWriter(
        directory, generation, began_ns, before_ns, already, prefix, frozenset(masks), budget, now_ns, contents, handles
    )
    try:
        with explained(f"keep in {directory!r} what is real"):
            for target, upper in uppers:
                if target.startswith(IMAGES):  # the files of an image never change
                    continue
                with Reality(machine_root.rstrip("/") + target) as reality:
                    _Cover(keeper, target, upper, reality).look()
            keeper.write(spell_done(since_ns))
    finally:
        contents.close()
    return Captured(keeper.count, keeper.unknown)


def bases_now(paths: Collection[str], *, machine_root: str = "/") -> list[Base]:
    """Return bases with the present real state of these directories. The caller has just put them into that state. Raises OSError."""
    bases: list[Base] = []
    with Reality(machine_root) as reality:
        for path in paths:
            parent, _, name = path.rpartition("/")
            directory = reality.directory(parent.lstrip("/"))
            seen = look(directory, name, now_ns=file_clock_ns()) if directory is not None else None
            bases.append(Base(path, seen))
    return bases


class _Cover:
    """Captures the bases of one overlay's layer from the real tree that the layer covers."""

    def __init__(self, keeper: OriginalsWriter, target: str, upper: int, reality: Reality) -> None:
        self._keeper, self._upper, self._reality = keeper, upper, reality
        self._prefix = target.rstrip("/") + "/"
        top = reality.directory("")
        masked = any(contains(mask, target) for mask in keeper.masks)
        self._places: list[RealDirectory | None] = [
            RealDirectory(os.fstat(top) if top is not None else None, True, masked)
        ]  # from the top to the current
        self._hidden: list[tuple[str, str, RealDirectory]] = []

    def look(self) -> None:
        """Capture the bases of all paths that are new in the layer."""
        keeper = self._keeper
        if not keeper.unmoved(os.fstat(self._upper)):
            self._directory("", self._upper)
        for entry in beneath.walk(self._upper, directories_only=True):
            del self._places[entry.depth + 1 :]
            self._places.append(None)
            if entry.own is not None and not keeper.unmoved(entry.status):
                self._directory(entry.path, entry.own)
        keeper.flush_absent()
        for path, relative, place in self._hidden:  # last: the layer's own entries below them have bases with content by now
            keeper.list(path, relative, self._reality, place)

    def _directory(self, relative: str, own: int) -> None:
        """Capture the bases of the entries in one directory of the layer. `own` is a descriptor of that directory."""
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
                    self._hidden.append((path, inner, RealDirectory(status, place.steady and keeper.unmoved(status), False)))

    def _place(self, relative: str) -> RealDirectory:
        """Return the real directory at the layer's current path. It and the directories above it are cached."""
        place = self._places[0]
        assert place is not None
        names = relative.split("/")
        for depth in range(1, len(self._places)):
            known = self._places[depth]
            place = self._places[depth] = known if known is not None else self._enter("/".join(names[:depth]), place)
        return place

    def _enter(self, relative: str, above: RealDirectory) -> RealDirectory:
        keeper = self._keeper
        parent, _, name = relative.rpartition("/")
        masked = above.masked or self._prefix + relative in keeper.masks
        status = self._reality.status(parent, name) if above.status is not None else None
        if status is None or not stat.S_ISDIR(status.st_mode):
            return RealDirectory(None, above.steady and keeper.unmoved(status or above.status), masked)
        same = keeper.unmoved(status) or self._is_same(relative, parent, status)
        return RealDirectory(status, above.steady and same, masked)

    def _is_same(self, relative: str, parent: str, status: os.stat_result) -> bool:
        """Return whether a real directory that changed during the run was at this path during the whole run."""
        real = self._reality.directory(parent)
        if real is None:
            return False
        if self._keeper.unmoved(os.fstat(real)):  # no name in it came or went
            return True
        copied = None
        if self._keeper.handles:
            copied = is_copied_up(self._upper, relative, self._keeper.prefix, real, since_ns=self._keeper.began)
        return status.st_ctime_ns == status.st_mtime_ns if copied is None else copied
