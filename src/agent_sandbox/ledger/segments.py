"""The files of a ledger: the one that is written, and those that were closed when they had grown large.

A closed file is named by the number of its first entry and never written again. The chain goes on in the new file, whose first entry says
which file was closed and from which on they are kept. Old ones are removed when all together grow beyond a limit; the entry that says so
is written before they go, so what is missing at the beginning is either named in the chain or was taken by somebody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.chain import HINT, walk
from agent_sandbox.ledger.encoding import place
from agent_sandbox.ledger.event import Entry

if TYPE_CHECKING:
    from typing import BinaryIO

_DIGITS = 12


@dataclass(frozen=True)
class Closed:
    """A file that is closed: the number of its first entry, where it is, and its length."""

    first: int
    path: str
    size: int


def closed_directory(path: str) -> str:
    """Where the closed files of a ledger are."""
    return f"{os.path.splitext(path)[0]}.closed"


def closed_name(path: str, first: int) -> str:
    """Where the file that begins with this entry is, once it is closed."""
    return os.path.join(closed_directory(path), f"{first:0{_DIGITS}}.jsonl")


def closed(path: str) -> list[Closed]:
    """The closed files of a ledger, oldest first. What has another name is not ours and is left alone."""
    found: list[Closed] = []
    with suppress(FileNotFoundError), os.scandir(closed_directory(path)) as entries:
        for entry in entries:
            number, dot, ending = entry.name.partition(".")
            if number.isdigit() and len(number) == _DIGITS and dot + ending == ".jsonl":
                with suppress(FileNotFoundError):  # removed meanwhile
                    found.append(Closed(int(number), entry.path, entry.stat(follow_symlinks=False).st_size))
    return sorted(found, key=lambda each: each.first)


def files(path: str) -> list[str]:
    """All files of a ledger, oldest first. One that was closed only half, by a process that died, is named once."""
    before = [each.path for each in closed(path)]
    with suppress(FileNotFoundError):  # none is written, or old ones are being removed just now
        if before and os.path.samefile(before[-1], path):
            before.pop()
    return [*before, path] if os.path.exists(path) else before


def entries(path: str) -> Iterator[Entry]:
    """Every entry that is kept, through all files. Raises `LedgerBroken` at the first fault, `FileNotFoundError` when there is no ledger.

    A file that is removed or closed while this goes on is read to its end all the same.
    """
    with opened(path) as all_of_it:
        if not all_of_it:
            raise FileNotFoundError(path)
        before: Entry | None = None
        for file in all_of_it:
            for item in walk(file, before):
                if isinstance(item, Entry):
                    before = item
                    yield item


@contextmanager
def opened(path: str) -> Iterator[Sequence[BinaryIO]]:
    """All files of a ledger, open, oldest first: those of one moment, although it may be written and its files closed meanwhile."""
    while (found := _opened_at_once(path)) is None:
        continue
    with ExitStack() as stack:
        for file in found:
            stack.enter_context(file)
        yield found


def _opened_at_once(path: str) -> list[BinaryIO] | None:
    """None when they changed while they were opened."""
    names = files(path)
    with ExitStack() as stack, suppress(FileNotFoundError):
        found: list[BinaryIO] = [stack.enter_context(open(each, "rb")) for each in names]
        is_current = not found or names[-1] != path or os.path.samestat(os.fstat(found[-1].fileno()), os.stat(path))
        if is_current and files(path) == names:
            stack.pop_all()
            return found
    return None


def first_sequence(path: str) -> int:
    """The number of the first entry of a file, which may begin with a torn write. Raises `LedgerBroken` when there is none."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                return place(line.removesuffix(b"\n"))[0]
    raise LedgerBroken(f"the ledger {path} holds no entry", hint=HINT)


def kept(path: str, limit: int) -> tuple[int, list[str]]:
    """The first entry that is kept when closed files may take `limit` bytes together, and the paths of those that are to go. The one that
    was closed last always stays."""
    total, oldest, gone = 0, 0, list[str]()
    for each in reversed(closed(path)):
        total += each.size
        if total > limit and oldest:
            gone.append(each.path)
        else:
            oldest = each.first
    return oldest, gone
