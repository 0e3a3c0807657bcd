"""Turn a change set into steps, without touching anything.

Everything a plan needs is in its arguments: the changes, the real state now, the protected classes of the changes, and the approvals.
Changes that cannot be promoted, or that need a further approval, are returned as values.

Hard links in the sandbox become separate files. Each is replaced, compared and taken back by itself, and an inode with a second name
outside the tree could be written through that name.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agent_sandbox.workspace.changes import Change, ChangeSet, Kind, covers
from agent_sandbox.workspace.fingerprint import Seen
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.steps import Adjust, Held, Item, LeftOut, Look, Plan, Put, Refusal, Remove, Step, carried, look_for
from agent_sandbox.workspace.protected import POWERS

Expected = Mapping[str, Seen | None]
LARGEST_BYTES = 64 << 30  # of content in one promotion, holes included: all of it is read for its digest
_LONGEST_PATH = 4095
_LONGEST_NAME = 255
_NO_NAMES = frozenset({"", ".", ".."})
_NEVER = {
    EntryType.DEVICE: "a device is never promoted",
    EntryType.FIFO: "a FIFO is never promoted",
    EntryType.SOCKET: "a socket is never promoted",
}


def plan(
    changes: ChangeSet,
    expected: Expected,
    *,
    root: str,
    classes: Mapping[str, frozenset[str]],
    approved: frozenset[str] = frozenset(),
    digests: Mapping[str, str] | None = None,
    largest_bytes: int = LARGEST_BYTES,
) -> Plan:
    """Return the plan that brings these changes to the tree at `root`.

    `expected` is the real state of each path now (absolute, with everything below a directory that goes), as `inspect.look_at` returns it.
    `classes` is the result of `protected.classes_of_all`. With `digests`, the content of these paths must have these digests: those of the
    content that a person was shown.
    """
    builder = _PlanBuilder(root, expected, sorted(expected), classes, approved, digests or {})
    for change in changes:
        builder.add(change)
    if bulk := classes.get(root, frozenset()) - approved:
        builder.held.append(Held(root, bulk))
    result = Plan(root, tuple(ordered(builder.steps())), tuple(builder.refused), tuple(builder.held), tuple(builder.left_out))
    if result.bytes > largest_bytes:
        item = max((item for step in result.steps if isinstance(step, Put) for item in step.items), key=lambda item: item.size)
        why = f"with it there are {result.bytes:,} bytes of content, more than the {largest_bytes:,} that one promotion may hold"
        return Plan(root, (), (*result.refused, Refusal(os.path.join(root, item.path), why)), result.held, result.left_out)
    return result


def relative(path: str, root: str) -> str:
    """Return an absolute path relative to the root; "" is the root itself. Raises ValueError, with the reason, for any other path."""
    if not path.startswith("/") or not covers(root, path):
        raise ValueError("it lies outside the tree")
    length = len if path.isascii() else _bytes_of
    if length(path) > _LONGEST_PATH:  # first: the checks below look at each name
        raise ValueError("it is too long")
    below = path[len(root.rstrip("/")) :].removeprefix("/")
    names = below.split("/") if below else []
    if not _NO_NAMES.isdisjoint(names):
        raise ValueError("it is no plain path")
    if "\0" in path:
        raise ValueError("it holds a NUL")
    if max(map(length, names), default=0) > _LONGEST_NAME:
        raise ValueError("a name in it is too long")
    return below


def _bytes_of(name: str) -> int:
    return len(os.fsencode(name))


@dataclass
class _PlanBuilder:
    root: str
    expected: Expected
    sorted_paths: list[str]
    classes: Mapping[str, frozenset[str]]
    approved: frozenset[str]
    digests: Mapping[str, str]
    refused: list[Refusal] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _items: list[Item] = field(default_factory=list)  # of the last step, while it is a Put of a directory
    _within: str = ""  # its path with a slash

    def steps(self) -> list[Step]:
        self._close()
        return self._steps

    def add(self, change: Change) -> None:
        try:
            path = relative(change.path, self.root)
        except ValueError as error:
            self.refused.append(Refusal(change.path, str(error)))
            return
        if change.after is not None and (why := _NEVER.get(change.after.type)):
            self.refused.append(Refusal(change.path, why))
            return
        if change.masks_real:
            self.refused.append(Refusal(change.path, "something is there that was hidden from the sandbox, so it cannot have meant that"))
            return
        needs = self.classes.get(change.path)
        if needs and not needs <= self.approved:
            self.held.append(Held(change.path, needs - self.approved))
            return
        if change.path not in self.expected and not (self._within and path.startswith(self._within)):
            self.refused.append(Refusal(change.path, "nobody has looked at what is there now"))
            return
        if change.after is None:
            self._remove(change, path)
        else:
            self._put(change, path)

    def _remove(self, change: Change, path: str) -> None:
        now = self.expected.get(change.path)
        covered = any(isinstance(step, Remove) and covers(step.path, path) for step in self._steps[-1:])
        if now is None or covered or (self._within and path.startswith(self._within)):
            return  # gone already, or it goes with its directory
        self._close()
        self._steps.append(Remove(path, now, dict(self._inside(change.path, now))))

    def _put(self, change: Change, path: str) -> None:
        node = change.after
        assert node is not None
        new_directory = bool(self._within) and path.startswith(self._within)
        now = None if new_directory else self.expected.get(change.path)
        look, left = look_for(change, now.node if now else None, powers=POWERS in self.approved)
        self.left_out += [LeftOut(change.path, what) for what in left]
        if now is not None and now.node.type is EntryType.DIRECTORY is node.type:
            self._adjust(change, path, now, look)
            return
        if change.kind is Kind.OWNER:
            return
        item = Item(path, node.type, look, node.size, node.target, content=change, digest=self.digests.get(change.path, ""))
        if new_directory:
            self._items.append(item)
            return
        self._close()
        self._steps.append(Put(path, (item,), now, dict(self._inside(change.path, now))))
        if node.type is EntryType.DIRECTORY:
            self._items, self._within = [item], path + "/"

    def _adjust(self, change: Change, path: str, now: Seen, look: Look) -> None:
        self._close()
        if change.kind is Kind.ADDED:
            return  # another program has made this directory: it stays as it is, and new entries go into it
        attributes = {name: value for name, value in now.node.xattrs.items() if carried(name, powers=True)}
        if look.mode != now.node.mode or look.xattrs != attributes:
            self._steps.append(Adjust(path, now, look))

    def _inside(self, path: str, now: Seen | None) -> Iterator[tuple[str, Seen]]:
        """Yield the entries expected below a directory that goes, by path relative to it."""
        if now is None or now.node.type is not EntryType.DIRECTORY:
            return
        start = path + "/"
        at = bisect_left(self.sorted_paths, start)
        while at < len(self.sorted_paths) and self.sorted_paths[at].startswith(start):
            seen = self.expected[self.sorted_paths[at]]
            if seen is not None:
                yield self.sorted_paths[at][len(start) :], seen
            at += 1

    def _close(self) -> None:
        if self._items and isinstance(last := self._steps[-1], Put):
            self._steps[-1] = Put(last.path, tuple(self._items), last.expected, last.inside)
        self._items, self._within = [], ""


def ordered(steps: list[Step]) -> Iterator[Step]:
    """Yield directories that are opened up for their owner first, and those that are closed last.

    The steps in between may work in them.
    """
    opening = [step for step in steps if isinstance(step, Adjust) and step.look.mode & ~step.expected.node.mode & 0o300]
    closing = [step for step in steps if isinstance(step, Adjust) and not step.look.mode & ~step.expected.node.mode & 0o300]
    yield from opening
    yield from (step for step in steps if not isinstance(step, Adjust))
    yield from reversed(closing)
