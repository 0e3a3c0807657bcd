"""At the end of a run, keep what is real at every path that its layer covers for the first time.

What is there *now* was also there when the run began, if the inode has not changed since: the time of its last change cannot be set. For a
name without anything it is the directory that must not have changed. A directory that was moved takes what is below it along without a
trace in it: so on the way down each must be old, or lie in one that is, or be the one that the overlay looked into in this run, which it
notes. It notes nothing for a user who is not root, and over filesystems without handles; there a directory is believed whose last change
was that of its entries, and one that was moved here during the run, and in which then a name came or went, goes unnoticed.

The kernel stamps times with a clock that ticks every few milliseconds and is late by up to one tick; so a little is deducted from the
beginning of the run. On a network filesystem the times are the server's, and worth what its clock is.

Only directories of the layer are walked through. One that has not changed since the run began has had no new name in it, so what is in it
is not looked at: the cost is that of the directories in the layer and of what the run changed, not of all that runs before it did. Files in
a directory that the guest made earlier and has moved are passed by with it. They have no base then, and where nothing is real none is
needed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.bases.contents import ContentWriter
from agent_sandbox.workspace.bases.files import Recalled
from agent_sandbox.workspace.bases.keeper import Budget, Keeper, Kept, Place
from agent_sandbox.workspace.bases.origin import attribute, looked_into
from agent_sandbox.workspace.bases.runs import spell_done
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import Base, look

TICK_NS = 20_000_000


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
    now_ns: Callable[[], int] = time.time_ns,
) -> Kept:
    """Keep the bases of the active generation: `uppers` are its targets and descriptors of their upper directories.

    `since_ns` is what `begin` returned, `began_ns` what it was given, `already` the bases of the whole chain, `prefix` that of this
    overlay's attributes. What is at a mask is noted without its content: it was hidden for a reason. Raises WorkspaceError; what is not
    kept then is taken as unknown by the next run.
    """
    budget = budget or Budget()
    contents = ContentWriter(directory, generation, budget.kept)
    keeper = Keeper(directory, generation, began_ns, since_ns - TICK_NS, already, prefix, frozenset(masks), budget, now_ns, contents)
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
        """Whether a real directory that changed during the run was there all the time."""
        real = self._reality.directory(parent)
        if real is None:
            return False
        if self._keeper.unmoved(os.fstat(real)):  # no name in it came or went
            return True
        noted = looked_into(self._upper, relative, self._keeper.prefix, real, since_ns=self._keeper.began)
        return status.st_ctime_ns == status.st_mtime_ns if noted is None else noted
