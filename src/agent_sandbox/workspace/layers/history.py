"""The generations and snapshots of a sandbox, and `history.json`, the only authority on its layers.

The module has three parts: pure operations that return a new `History`, the file, and the names of layers on disk. A layer is
`<layers>/<key>/{upper,work}`, with one key per overlay. A *stacking* store puts generations over one another; any other store copies them.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.kernel.mount_plan import DIGEST, quote_target
from agent_sandbox.workspace.durable import explained, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

NAME = "history.json"
_LARGEST = 64 << 20  # bytes
LONGEST_CHAIN = 48  # frozen layers; the kernel takes some hundreds, but searches every one for a name that does not exist
LONGEST_LABEL = 200
MOST_STEPS = 100  # runs whose state before is kept


@dataclass(frozen=True)
class Snapshot:
    """A state to go back to. `chain` are its generations, uppermost first; `automatic` means that the user did not ask for it.

    A snapshot that a run took before it began is a step: `outcome` says how that run ended, and is empty until then.
    """

    id: int
    label: str
    parent: int | None
    chain: tuple[int, ...]
    created: float
    automatic: bool = False
    outcome: str | None = None


@dataclass(frozen=True)
class History:
    """The present state of a sandbox, and its snapshots.

    Runs write to the generation `active`, which lies over the generations in `chain`. The state descends from the snapshot `head`. `used`
    says that a run has used the active generation.
    """

    active: int = 1
    chain: tuple[int, ...] = ()
    used: bool = False
    next: int = 2
    head: int | None = None
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of all present generations, uppermost first."""
        return (self.active, *self.chain)

    def snapshot(self, number: int) -> Snapshot:
        """Return the snapshot with this id."""
        return next(each for each in self.snapshots if each.id == number)


@dataclass(frozen=True)
class HistoryStep:
    """A new history, and the snapshot that it adds, if any. `copies` are pairs of generations: old number, new number.

    The caller has to copy each of them before it writes the history.
    """

    history: History
    snapshot: Snapshot | None = None
    copies: tuple[tuple[int, int], ...] = ()


def take(history: History, label: str, *, now: float, stacking: bool) -> HistoryStep:
    """Return the history with a snapshot of the present state. `stacking` says whether the store stacks generations or copies them."""
    return _taken(history, _checked(label), now=now, stacking=stacking, automatic=False)


def begin_step(history: History, label: str, *, now: float, stacking: bool) -> HistoryStep:
    """Return the history with a snapshot of the state before a run. The oldest steps are forgotten, if there are too many."""
    steps = [each for each in history.snapshots if each.outcome is not None]
    for old in steps[: max(0, len(steps) - MOST_STEPS + 1)]:
        history = forget(history, old)
    name = "".join(each if each.isprintable() else "�" for each in label[:LONGEST_LABEL])
    return _taken(history, f"run {name}" if name.isdecimal() else name, now=now, stacking=stacking, automatic=True, outcome="")


def end_step(history: History, number: int, outcome: str) -> History:
    """Return the history with the end of the run of a step."""
    return replace(history, snapshots=tuple(replace(each, outcome=outcome) if each.id == number else each for each in history.snapshots))


def _taken(history: History, label: str, *, now: float, stacking: bool, automatic: bool, outcome: str | None = None) -> HistoryStep:
    number = max((each.id for each in history.snapshots), default=0) + 1
    chain, copies = _frozen(history, stacking)
    snapshot = Snapshot(number, label, history.head, chain, now, automatic, outcome)
    after = replace(history, head=number, snapshots=(*history.snapshots, snapshot))
    if stacking and history.used:
        after = replace(after, active=history.next, chain=chain, used=False, next=history.next + 1)
    elif not stacking:
        after = replace(after, used=False, next=history.next + len(copies))
    return HistoryStep(after, snapshot, copies)


def _frozen(history: History, stacking: bool) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the generations that a snapshot of the present state consists of, and the copies (old and new number) that it needs."""
    if stacking:
        return (history.layers if history.used else history.chain), ()
    if not history.used and history.head is not None:
        return history.snapshot(history.head).chain, ()
    return (history.next,), ((history.active, history.next),)


def go_back(history: History, to: Snapshot, *, now: float, stacking: bool) -> HistoryStep:
    """Return the history after going back to a snapshot. If a run has used the active generation, an automatic snapshot keeps its state."""
    snapshot: Snapshot | None = None
    if history.used:
        label = f"before rollback to {to.label or to.id}"[:LONGEST_LABEL]
        if stacking:
            history, snapshot = _both(_taken(history, label, now=now, stacking=True, automatic=True))
        else:  # the active generation becomes the snapshot's, so it needs no copy
            number = max(each.id for each in history.snapshots) + 1
            snapshot = Snapshot(number, label, history.head, (history.active,), now, automatic=True)
            history = replace(history, snapshots=(*history.snapshots, snapshot))
    fresh = replace(history, active=history.next, chain=to.chain if stacking else (), used=False, next=history.next + 1, head=to.id)
    return HistoryStep(fresh, snapshot, () if stacking else ((to.chain[0], history.next),))


def _both(move: HistoryStep) -> tuple[History, Snapshot | None]:
    return move.history, move.snapshot


def replaced(history: History, label: str, *, now: float, stacking: bool) -> tuple[HistoryStep, int]:
    """Replace all generations by a new one, and add a snapshot of the old ones. Return the step and the number of the new generation.

    The caller must make the new generation before it writes the history. `copies` stays empty even without `stacking`, because the snapshot
    takes over the old active generation.
    """
    number = max((each.id for each in history.snapshots), default=0) + 1
    layers = history.layers if history.used or not stacking else history.chain
    snapshot = Snapshot(number, label[:LONGEST_LABEL], history.head, layers, now, automatic=True)
    history = replace(history, snapshots=(*history.snapshots, snapshot), head=number)
    made = history.next
    if stacking:
        return HistoryStep(replace(history, active=made + 1, chain=(made,), used=True, next=made + 2), snapshot), made
    return HistoryStep(replace(history, active=made, chain=(), used=True, next=made + 1), snapshot), made


def restored(history: History, which: Snapshot, *, stacking: bool) -> History:
    """Make a snapshot the present state, and delete the snapshot. The state before is not kept."""
    rest = forget(history, which)
    if stacking:
        return replace(rest, active=history.next, chain=which.chain, used=True, next=history.next + 1, head=which.parent)
    return replace(rest, active=which.chain[0], chain=(), used=True, head=which.parent)


def squashed(history: History) -> tuple[History, int]:
    """Replace the chain by one new generation. Return the new history and the number of that generation.

    The caller must make the generation before it writes the history.
    """
    return replace(history, chain=(history.next,), next=history.next + 1), history.next


def forget(history: History, which: Snapshot) -> History:
    """Remove a snapshot. Its children become children of its parent."""
    rest = tuple(
        replace(each, parent=which.parent) if each.parent == which.id else each for each in history.snapshots if each.id != which.id
    )
    if history.head != which.id:
        return replace(history, snapshots=rest)
    return replace(history, snapshots=rest, head=which.parent, used=True)  # the present state may no longer equal any snapshot


def referenced(history: History) -> frozenset[int]:
    """Return the generations that the present state or a snapshot needs."""
    return frozenset(history.layers).union(*(each.chain for each in history.snapshots))


def garbage(history: History, present: Iterable[str]) -> list[str]:
    """Return those names in `present` that are generations and that the history does not need. Other names are not ours."""
    needed = {str(number) for number in referenced(history)}
    return sorted(name for name in present if name.isdecimal() and name.isascii() and name not in needed)


def tree(history: History) -> Iterator[tuple[int, Snapshot]]:
    """Yield each snapshot with its depth in the tree, after its parent, older siblings first."""
    children: dict[int | None, list[Snapshot]] = {}
    for each in history.snapshots:
        children.setdefault(each.parent, []).append(each)
    waiting = [(0, each) for each in reversed(children.get(None, []))]
    while waiting:
        depth, each = waiting.pop()
        yield depth, each
        waiting += [(depth + 1, child) for child in reversed(children.get(each.id, []))]


def find(history: History, name: str | int | None) -> Snapshot:
    """Return the snapshot with this id or label. Without a name, return the one that the present state descends from, else the newest.

    Raises `PolicyError`, listing the snapshots, when none or several match.
    """
    if not history.snapshots:
        raise PolicyError("this sandbox has no snapshots", hint="make one: agent-sandbox snapshot LABEL")
    if name is None:
        return history.snapshot(history.head) if history.head is not None else history.snapshots[-1]
    matches = [each for each in history.snapshots if str(each.id) == str(name) or each.label == name]
    if len(matches) == 1:
        return matches[0]
    what = f"there is no snapshot {name!r}" if not matches else f"{len(matches)} snapshots are called {name!r}"
    raise PolicyError(what, hint=f"there is: {_listed(matches or history.snapshots)}")


def _listed(snapshots: Iterable[Snapshot]) -> str:
    *last, first = [f"{each.id} ({each.label})" if each.label else str(each.id) for each in snapshots][-8:]
    return ", ".join([*last, first])


def _checked(label: str) -> str:
    if label.isdecimal():
        raise PolicyError(f"a label cannot be a number: {label!r}", hint="snapshots are numbered already; use a word")
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise PolicyError(f"not a label: {label[:40]!r}", hint=f"use at most {LONGEST_LABEL} characters that can be seen")
    return label


@dataclass(frozen=True)
class Present:
    """The part of a history that a run needs. `others` are the generations that only snapshots need."""

    active: int
    chain: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    used: bool = False

    @classmethod
    def of(cls, history: History) -> Present:
        """Return the part of a history that a run needs."""
        others = sorted(referenced(history) - set(history.layers))
        return cls(history.active, history.chain, tuple(others), history.used)


def save(directory: str, history: History) -> None:
    """Write the history atomically. Afterwards the file holds this history or the one before."""
    present = Present.of(history)
    known = {
        "active": present.active,
        "chain": list(present.chain),
        "others": list(present.others),
        "used": present.used,
        "next": history.next,
        "head": history.head,
        "snapshots": [{**vars(each), "chain": list(each.chain)} for each in history.snapshots],
    }
    with explained(f"write the history of the sandbox in {directory!r}"):
        write_atomically(os.path.join(directory, NAME), as_json(known) + "\n")


def load(directory: str) -> History | None:
    """Read the history; None if there is none. Raises `WorkspaceError` if it is damaged."""
    text = _read(directory)
    if text is None:
        return None
    from json import loads

    try:
        return _history(loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(directory) from error


def glance(directory: str) -> Present | None:
    """Read the part of the history that a run needs, without parsing JSON; None if there is no history in the exact format of `save`."""
    text = _read(directory)
    head, _, rest = (text or "").partition(',"next":')
    active, _, head = head.removeprefix('{"active":').partition(',"chain":[')
    chain, _, head = head.partition('],"others":[')
    others, _, used = head.partition('],"used":')
    lists = [each.split(",") if each else [] for each in (chain, others)]
    if not (rest and used in ("true", "false") and all(map(str.isdecimal, (active, *lists[0], *lists[1])))):
        return None
    return Present(int(active), tuple(map(int, lists[0])), tuple(map(int, lists[1])), used == "true")


def damaged(directory: str, why: str = "cannot be read") -> WorkspaceError:
    """Return the error for a damaged history."""
    return WorkspaceError(
        f"the history of this sandbox, {os.path.join(directory, NAME)!r}, {why}",
        hint="nothing was deleted; put the file back from a copy, or drop the sandbox with: agent-sandbox reset",
    )


def _read(directory: str) -> str | None:
    with explained(f"read the history of the sandbox in {directory!r}"):
        try:
            with open(os.open(os.path.join(directory, NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                return file.read(_LARGEST).decode(errors="replace")
        except FileNotFoundError:
            return None


def _history(fields: dict[str, Any]) -> History:
    snapshots = tuple(
        Snapshot(
            _number(each["id"]),
            _text(each["label"]),
            None if each["parent"] is None else _number(each["parent"]),
            _numbers(each["chain"]),
            float(each["created"]),
            _flag(each["automatic"]),
            None if each.get("outcome") is None else _text(each["outcome"]),
        )
        for each in fields["snapshots"]
    )
    head = None if fields["head"] is None else _number(fields["head"])
    history = History(
        _number(fields["active"]), _numbers(fields["chain"]), _flag(fields["used"]), _number(fields["next"]), head, tuple(snapshots)
    )
    ids = [each.id for each in snapshots]
    earlier: set[int | None] = {None}
    for each in sorted(snapshots, key=lambda each: each.id):
        if each.parent not in earlier:
            raise ValueError(f"snapshot {each.id} descends from {each.parent}, which is not before it")
        earlier.add(each.id)
    if len(set(ids)) < len(ids) or history.head not in earlier:
        raise ValueError("snapshots and head do not fit together")
    if max(history.layers, default=0) >= history.next or any(max(each.chain, default=0) >= history.next for each in snapshots):
        raise ValueError("a generation has a number that was not given yet")
    return history


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"not a number of a generation or snapshot: {value!r}")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"not a chain: {value!r}")
    return tuple(_number(each) for each in value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a label: {value!r}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"neither true nor false: {value!r}")
    return value


def layer_targets(layers: int) -> tuple[str, ...]:
    """Return the targets (mount points of overlays) that have layers in this directory, sorted. Unknown directories are skipped."""
    targets = (_target_of(layers, key) for key in os.listdir(layers))
    return tuple(sorted(target for target in targets if target is not None))


def _target_of(layers: int, key: str) -> str | None:
    try:
        if key.startswith(DIGEST):
            with open(os.open(f"{key}/target", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=layers), "rb") as file:
                target = os.fsdecode(file.read())
        else:
            head, *rest = key.split("%")
            target = os.fsdecode(head.encode() + b"".join(bytes((int(part[:2], 16),)) + part[2:].encode() for part in rest))
        return target if quote_target(target) == key else None
    except (OSError, ValueError):
        return None
