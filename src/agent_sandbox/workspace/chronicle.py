"""`history.json`: the history of a sandbox on disk, the only truth about its layers.

It is replaced in one step, and one that cannot be read is refused: nothing is guessed, because what is not in it would be removed. A run
needs only the first few numbers; they stand at the beginning, and are read without what is slow to load for the rest.
"""

from __future__ import annotations

import os

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.spelling import as_json
from agent_sandbox.values import TYPE_CHECKING, dataclass
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.history import History, Snapshot, referenced

if TYPE_CHECKING:
    from typing import Any

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
