"""Take in what is real at one path, say whether it was there when the run began, and write it down."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from agent_sandbox.spelling import sha256
from agent_sandbox.values import dataclass, field, replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.bases import lines
from agent_sandbox.workspace.bases.contents import ContentWriter
from agent_sandbox.workspace.bases.files import Recalled
from agent_sandbox.workspace.bases.runs import append
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import SETTLED_NS, Base, Seen, digest_of, look

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
    began: int  # when the run began
    before: int  # what changed before this had not changed during the run, or an earlier one whose bases were not kept
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

    def flush_nothing(self) -> None:
        """Write down the names where nothing was, those of a directory together."""
        for parent, names in self._nothing.items():
            self._append(lines.spell_nothing(parent, names))
        self._nothing.clear()

    def write(self, last: str) -> None:
        """Write what is waiting, and this."""
        append(self.directory, self.generation, "".join([*self._text, last]))
        self._text.clear()
        self._size = 0
