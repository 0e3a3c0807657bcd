"""The generations and snapshots of a sandbox, and `history.json`, the only truth about its layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.workspace.durable import explained, write_atomically

if TYPE_CHECKING:
    from typing import Any

LONGEST_CHAIN = 48  # of frozen layers; the kernel takes some hundreds, but each is looked into for a name that is not there
LONGEST_LABEL = 200


@dataclass(frozen=True)
class Snapshot:
    """A state that can be gone back to. `chain` are its layers, uppermost first; `automatic` says that nobody asked for it by name."""

    id: int
    label: str
    parent: int | None
    chain: tuple[int, ...]
    created: float
    automatic: bool = False


@dataclass(frozen=True)
class History:
    """What a sandbox is now: `active` over `chain`, descending from the snapshot `head`; `used` since it was made, by a run."""

    active: int = 1
    chain: tuple[int, ...] = ()
    used: bool = False
    next: int = 2
    head: int | None = None
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """All that make it up, uppermost first."""
        return (self.active, *self.chain)

    def snapshot(self, number: int) -> Snapshot:
        """The snapshot with this id."""
        return next(each for each in self.snapshots if each.id == number)


@dataclass(frozen=True)
class Move:
    """A new history. What `copies` names, each generation to a new one, has to be there before it is written."""

    history: History
    snapshot: Snapshot | None = None
    copies: tuple[tuple[int, int], ...] = ()


def take(history: History, label: str, *, now: float, stacking: bool) -> Move:
    """A snapshot of what is now."""
    return _taken(history, _checked(label), now=now, stacking=stacking, automatic=False)


def _taken(history: History, label: str, *, now: float, stacking: bool, automatic: bool) -> Move:
    number = max((each.id for each in history.snapshots), default=0) + 1
    chain, copies = _frozen(history, stacking)
    made = Snapshot(number, label, history.head, chain, now, automatic)
    after = replace(history, head=number, snapshots=(*history.snapshots, made))
    if stacking and history.used:
        after = replace(after, active=history.next, chain=chain, used=False, next=history.next + 1)
    elif not stacking:
        after = replace(after, used=False, next=history.next + len(copies))
    return Move(after, made, copies)


def _frozen(history: History, stacking: bool) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The layers of a snapshot of what is now, and what is copied for it."""
    if stacking:
        return (history.layers if history.used else history.chain), ()
    if not history.used and history.head is not None:
        return history.snapshot(history.head).chain, ()
    return (history.next,), ((history.active, history.next),)


def go_back(history: History, to: Snapshot, *, now: float, stacking: bool) -> Move:
    """Go back to a snapshot. What is now stays reachable: by a snapshot of its own, unless nothing has run since the last."""
    kept: Snapshot | None = None
    if history.used:
        label = f"before rollback to {to.label or to.id}"[:LONGEST_LABEL]
        if stacking:
            history, kept = _both(_taken(history, label, now=now, stacking=True, automatic=True))
        else:  # the active generation itself becomes the snapshot's: no copy of it is needed
            number = max(each.id for each in history.snapshots) + 1
            kept = Snapshot(number, label, history.head, (history.active,), now, automatic=True)
            history = replace(history, snapshots=(*history.snapshots, kept))
    fresh = replace(history, active=history.next, chain=to.chain if stacking else (), used=False, next=history.next + 1, head=to.id)
    return Move(fresh, kept, () if stacking else ((to.chain[0], history.next),))


def _both(move: Move) -> tuple[History, Snapshot | None]:
    return move.history, move.snapshot


def replaced(history: History, label: str, *, now: float, stacking: bool) -> tuple[Move, int]:
    """A new generation takes the place of all layers, after a snapshot of them. Returns its number too: it has to be made first.

    `copies` stays empty in a store that copies, because the old active generation becomes the snapshot's.
    """
    number = max((each.id for each in history.snapshots), default=0) + 1
    layers = history.layers if history.used or not stacking else history.chain
    kept = Snapshot(number, label[:LONGEST_LABEL], history.head, layers, now, automatic=True)
    history = replace(history, snapshots=(*history.snapshots, kept), head=number)
    made = history.next
    if stacking:
        return Move(replace(history, active=made + 1, chain=(made,), used=True, next=made + 2), kept), made
    return Move(replace(history, active=made, chain=(), used=True, next=made + 1), kept), made


def restored(history: History, which: Snapshot, *, stacking: bool) -> History:
    """What a snapshot has is the present again, and the snapshot is gone; what is now is not kept."""
    rest = forget(history, which)
    if stacking:
        return replace(rest, active=history.next, chain=which.chain, used=True, next=history.next + 1, head=which.parent)
    return replace(rest, active=which.chain[0], chain=(), used=True, head=which.parent)


def squashed(history: History) -> tuple[History, int]:
    """The same with the chain in one new generation, whose number is returned: it has to be made first."""
    return replace(history, chain=(history.next,), next=history.next + 1), history.next


def forget(history: History, which: Snapshot) -> History:
    """Without a snapshot. Those that descend from it descend from its parent now."""
    rest = tuple(
        replace(each, parent=which.parent) if each.parent == which.id else each for each in history.snapshots if each.id != which.id
    )
    if history.head != which.id:
        return replace(history, snapshots=rest)
    return replace(history, snapshots=rest, head=which.parent, used=True)  # what is now may be no snapshot's any more


def referenced(history: History) -> frozenset[int]:
    """The generations that are still needed."""
    return frozenset(history.layers).union(*(each.chain for each in history.snapshots))


def garbage(history: History, present: Iterable[str]) -> list[str]:
    """Of the names in a directory of generations, those of generations that nothing refers to. Other names are none of ours."""
    needed = {str(number) for number in referenced(history)}
    return sorted(name for name in present if name.isdecimal() and name.isascii() and name not in needed)


def tree(history: History) -> Iterator[tuple[int, Snapshot]]:
    """The snapshots with how deep they lie: below its parent each, older ones first."""
    children: dict[int | None, list[Snapshot]] = {}
    for each in history.snapshots:
        children.setdefault(each.parent, []).append(each)
    waiting = [(0, each) for each in reversed(children.get(None, []))]
    while waiting:
        depth, each = waiting.pop()
        yield depth, each
        waiting += [(depth + 1, child) for child in reversed(children.get(each.id, []))]


def find(history: History, name: str | int | None) -> Snapshot:
    """The snapshot of this id or label; without one, the last: what is now descends from it. Raises `PolicyError`, saying what there is."""
    if not history.snapshots:
        raise PolicyError("this sandbox has no snapshots", hint="make one: agent-sandbox snapshot LABEL")
    if name is None:
        return history.snapshot(history.head) if history.head is not None else history.snapshots[-1]
    found = [each for each in history.snapshots if str(each.id) == str(name) or each.label == name]
    if len(found) == 1:
        return found[0]
    what = f"there is no snapshot {name!r}" if not found else f"{len(found)} snapshots are called {name!r}"
    raise PolicyError(what, hint=f"there is: {_listed(found or history.snapshots)}")


def _listed(snapshots: Iterable[Snapshot]) -> str:
    *last, first = [f"{each.id} ({each.label})" if each.label else str(each.id) for each in snapshots][-8:]
    return ", ".join([*last, first])


def _checked(label: str) -> str:
    if label.isdecimal():
        raise PolicyError(f"a label cannot be a number: {label!r}", hint="snapshots are numbered already; use a word")
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise PolicyError(f"not a label: {label[:40]!r}", hint=f"use at most {LONGEST_LABEL} characters that can be seen")
    return label


NAME = "history.json"
_LARGEST = 64 << 20


@dataclass(frozen=True)
class Present:
    """What a run needs of a history. `others` are the generations that only snapshots still need."""

    active: int
    chain: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    used: bool = False

    @classmethod
    def of(cls, history: History) -> Present:
        """The present of a history."""
        others = sorted(referenced(history) - set(history.layers))
        return cls(history.active, history.chain, tuple(others), history.used)


def save(directory: str, history: History) -> None:
    """Write it. Afterwards the file holds this history or the one before."""
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
    """Read it; None when there is none. Raises `WorkspaceError` for one that is damaged, having changed nothing."""
    text = _read(directory)
    if text is None:
        return None
    from json import loads

    try:
        return _history(loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(directory) from error


def glance(directory: str) -> Present | None:
    """What a run needs of it; None when there is no history, or it is not spelt as `save` does."""
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
    """The refusal of a history."""
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


def _history(found: dict[str, Any]) -> History:
    snapshots = tuple(
        Snapshot(
            _number(each["id"]),
            _text(each["label"]),
            None if each["parent"] is None else _number(each["parent"]),
            _numbers(each["chain"]),
            float(each["created"]),
            _flag(each["automatic"]),
        )
        for each in found["snapshots"]
    )
    head = None if found["head"] is None else _number(found["head"])
    history = History(
        _number(found["active"]), _numbers(found["chain"]), _flag(found["used"]), _number(found["next"]), head, tuple(snapshots)
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
