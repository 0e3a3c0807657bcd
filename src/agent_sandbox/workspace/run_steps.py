"""The timeline of a stored sandbox: its runs with a step, as a tree, and the files before each of them.

A step is a snapshot that a run took before it began, so it is gone back to as to any snapshot. It has files and no memory. What a run
changed is not kept: it is the difference of the states before and after it, and is read from the layers when somebody asks.
"""

from __future__ import annotations

import errno
import os

from agent_sandbox._fast.contexts import contextmanager
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.workspace.changes import Kind
from agent_sandbox.workspace.nodes import EntryType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_sandbox.policy.model import Policy
    from agent_sandbox.workspace.changes import Change, ChangeSet
    from agent_sandbox.workspace.layers.history import History, Snapshot
    from agent_sandbox.workspace.layers.stack import Stack
    from agent_sandbox.workspace.stored_sandbox import Stored

LARGEST_FILE = 64 << 20  # bytes of a file that is shown
MOST_COMPARED = 40  # runs of one timeline whose changed files are named: the newest
ENDED_WELL = "exited 0"
_CHUNK = 1 << 20
_OF_THE_SANDBOX = (Kind.ADDED, Kind.RETYPED)  # of entries below which nothing is real


@dataclass(frozen=True)
class RunStep:
    """A run, and the state before it. `parent` is the run before it, 0 for the first.

    `error` is how it ended, if not well. `files` are those that it changed, each with "new", "changed" or "gone"; None if that is unknown.
    """

    number: int
    parent: int
    command: str
    at: float
    error: str
    files: dict[str, str] | None
    led_here: bool  # whether it led to the present state


class RunTimeline:
    """Reads the steps of a stored sandbox, while its layers are open."""

    def __init__(self, stored: Stored, policy: Policy, stack: Callable[[tuple[int, ...]], Stack]) -> None:
        self._stored, self._policy, self._stack = stored, policy, stack
        self._history: History = stored.snapshots()
        self._known: dict[tuple[int, ...], tuple[Stack, dict[str, Change]]] = {}

    @property
    def present(self) -> int:
        """The step before whose run the sandbox is, since it went back there; 0 if something ran since."""
        head = self._head
        return head.id if head is not None and head.outcome is not None and not self._history.used else 0

    @property
    def _head(self) -> Snapshot | None:
        return None if self._history.head is None else self._history.snapshot(self._history.head)

    def steps(self) -> tuple[RunStep, ...]:
        """Return all steps, oldest first."""
        found = [each for each in self._history.snapshots if each.outcome is not None]
        line = self._line()
        named = {each.id for each in found[-MOST_COMPARED:]}
        return tuple(
            RunStep(
                each.id,
                self._parent(each),
                each.label,
                each.created,
                "" if each.outcome == ENDED_WELL else each.outcome or "it did not end",
                self._changed(each) if each.id in named else None,
                each.id in line,
            )
            for each in found
        )

    def find(self, number: int) -> Snapshot:
        """Return a step by its number. Raises `PolicyError`."""
        for each in self._history.snapshots:
            if each.id == number and each.outcome is not None:
                return each
        raise PolicyError(f"this sandbox has no step {number}", hint="see the steps: agent-sandbox timeline .")

    def read(self, number: int, path: str) -> bytes:
        """Return a file as it was before a step; one that the sandbox had not changed then, as it is now. Raises OSError."""
        stack, changes = self._state(self.find(number).chain)
        change = self._at(changes, path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if change is None else stack.open_file(change)
        with open(fd, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise OSError(f"{path!r} is larger than {LARGEST_FILE >> 20} MiB")
        return content

    def names(self, number: int, path: str) -> tuple[str, ...]:
        """Return the names in a directory as it was before a step. Raises OSError."""
        _, changes = self._state(self.find(number).chain)
        here = self._at(changes, path)
        if here is not None and here.after is not None and here.after.type is not EntryType.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        names = {*os.listdir(path)} if here is None or here.kind not in _OF_THE_SANDBOX else set[str]()
        for change in changes.values():
            above, _, name = change.path.rpartition("/")
            if (above or "/") == path:
                (names.discard if change.after is None else names.add)(name)
        return tuple(sorted(names))

    def differences(self, old: int, new: int | None) -> dict[str, str]:
        """Return the files that differ between the states before two steps, or before one and the present."""
        after = self._history.layers if new is None else self.find(new).chain
        return self._differences(self.find(old).chain, after)

    def _at(self, changes: dict[str, Change], path: str) -> Change | None:
        """Return the change of a path; None if it is as in reality. Raises FileNotFoundError if it was gone.

        No link that the sandbox made is followed.
        """
        change = changes.get(path)
        above = path
        while change is None and above != "/":
            above = os.path.dirname(above)
            parent = changes.get(above)
            if parent is not None and (
                parent.after is None or parent.kind in _OF_THE_SANDBOX or parent.after.type is not EntryType.DIRECTORY
            ):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if change is not None and change.after is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return change

    def _line(self) -> set[int]:
        """Return the runs that led to the present state."""
        line: set[int] = set()
        head = self._head
        if head is None:
            return line
        at = head.id if head.outcome is not None and self._history.used else self._parent(head)
        while at:
            line.add(at)
            at = self._parent(self._history.snapshot(at))
        return line

    def _parent(self, step: Snapshot) -> int:
        """Return the run that led to a state: the nearest step before it whose run is part of it."""
        below, at = step, step.parent
        while at is not None:
            above = self._history.snapshot(at)
            if above.outcome is not None and above.chain != below.chain:
                return above.id
            below, at = (below if above.chain == below.chain else above), above.parent
        return 0

    def _changed(self, step: Snapshot) -> dict[str, str] | None:
        after = next((each.chain for each in self._history.snapshots if each.parent == step.id and each.chain != step.chain), None)
        if after is None and self._history.head == step.id and self._history.used:
            after = self._history.layers
        return None if after is None else self._differences(step.chain, after)

    def _state(self, chain: tuple[int, ...]) -> tuple[Stack, dict[str, Change]]:
        if chain not in self._known:
            stack = self._stack(chain)
            changes: ChangeSet = self._stored.changes_of(stack, self._policy)
            self._known[chain] = stack, {each.path: each for each in changes}
        return self._known[chain]

    def _differences(self, old: tuple[int, ...], new: tuple[int, ...]) -> dict[str, str]:
        (before, were), (after, are) = self._state(old), self._state(new)
        found = {}
        for path in sorted({*were, *are}):
            if kind := _difference(before, were.get(path), after, are.get(path)):
                found[path] = kind
        return found


@contextmanager
def opened(stored: Stored, policy: Policy) -> Iterator[RunTimeline]:
    """Open the timeline of a stored sandbox for a block. Raises `PolicyError` if it has none."""
    if not stored.state.exists or not any(each.outcome is not None for each in stored.snapshots().snapshots):
        why = f"no run of the sandbox of {stored.state.project!r} was a step"
        raise PolicyError(why, hint="make each of them one: agent-sandbox run --timeline -- COMMAND")
    with stored.stacks() as stack:
        yield RunTimeline(stored, policy, stack)


def _difference(before: Stack, old: Change | None, after: Stack, new: Change | None) -> str:
    """Return how an entry differs between two states: "new", "changed", "gone", or empty. None is an entry as in reality."""
    if old is None or new is None:
        change = new or old
        assert change is not None
        if change.kind is Kind.ADDED:
            return "new" if new is not None else "gone"
        if change.after is None:
            return "gone" if new is not None else "new"
        return "changed"
    if old.after is None or new.after is None:
        return "" if old.after is new.after else "gone" if new.after is None else "new"
    if old.after != new.after or old.xattrs != new.xattrs:
        return "changed"
    return "" if new.after.type is not EntryType.FILE or _same_content(before, old, after, new) else "changed"


def _same_content(before: Stack, old: Change, after: Stack, new: Change) -> bool:
    first, second = before.open_file(old), after.open_file(new)
    with open(first, "rb") as one, open(second, "rb") as other:
        if os.path.samestat(os.fstat(first), os.fstat(second)):
            return True
        while part := one.read(_CHUNK):
            if part != other.read(_CHUNK):
                return False
        return not other.read(1)
