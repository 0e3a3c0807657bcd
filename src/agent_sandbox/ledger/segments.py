"""The files of a ledger: the current one, and those closed by rotation when they had grown large.

A closed file is named by the number of its first entry and never written again. The chain continues in the new file. Its first entry names
the closed file and the oldest entry that is kept. Old files are removed when all together exceed a limit. The entry that says so is written
before they are removed. So entries missing at the beginning are either named in the chain, or were removed by someone else.
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
    """A closed file: the number of its first entry, its path and its length."""

    first: int
    path: str
    size: int


def closed_directory(path: str) -> str:
    """Return the directory of a ledger's closed files."""
    return f"{os.path.splitext(path)[0]}.closed"


def closed_name(path: str, first: int) -> str:
    """Return the path of the closed file that begins with this entry."""
    return os.path.join(closed_directory(path), f"{first:0{_DIGITS}}.jsonl")


def closed(path: str) -> list[Closed]:
    """Return the closed files of a ledger, oldest first. Files with other names are not ours and are ignored."""
    segments: list[Closed] = []
    with suppress(FileNotFoundError), os.scandir(closed_directory(path)) as entries:
        for entry in entries:
            number, dot, ending = entry.name.partition(".")
            if number.isdigit() and len(number) == _DIGITS and dot + ending == ".jsonl":
                with suppress(FileNotFoundError):  # removed meanwhile
                    segments.append(Closed(int(number), entry.path, entry.stat(follow_symlinks=False).st_size))
    return sorted(segments, key=lambda each: each.first)


def files(path: str) -> list[str]:
    """Return all files of a ledger, oldest first.

    A file that a dying process closed only half has two names, and is listed once.
    """
    before = [each.path for each in closed(path)]
    with suppress(FileNotFoundError):  # there is no current file, or old ones are being removed right now
        if before and os.path.samefile(before[-1], path):
            before.pop()
    return [*before, path] if os.path.exists(path) else before


def entries(path: str) -> Iterator[Entry]:
    """Yield every entry that is kept, through all files.

    A file that is removed or closed meanwhile is still read to its end. Raises `LedgerBroken` at the first fault, `FileNotFoundError` if
    there is no ledger.
    """
    with opened(path) as all_files:
        if not all_files:
            raise FileNotFoundError(path)
        before: Entry | None = None
        for file in all_files:
            for item in walk(file, before):
                if isinstance(item, Entry):
                    before = item
                    yield item


@contextmanager
def opened(path: str) -> Iterator[Sequence[BinaryIO]]:
    """Open all files of a ledger, oldest first, as a consistent snapshot even while it is written and rotated."""
    while (open_files := _opened_at_once(path)) is None:
        continue
    with ExitStack() as stack:
        for file in open_files:
            stack.enter_context(file)
        yield open_files


def _opened_at_once(path: str) -> list[BinaryIO] | None:
    """Open all files; None if they changed meanwhile."""
    names = files(path)
    with ExitStack() as stack, suppress(FileNotFoundError):
        open_files: list[BinaryIO] = [stack.enter_context(open(each, "rb")) for each in names]
        is_current = not open_files or names[-1] != path or os.path.samestat(os.fstat(open_files[-1].fileno()), os.stat(path))
        if is_current and files(path) == names:
            stack.pop_all()
            return open_files
    return None


def first_sequence(path: str) -> int:
    """Return the number of the first entry of a file, which may begin with a torn write. Raises `LedgerBroken` if there is none."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                return place(line.removesuffix(b"\n"))[0]
    raise LedgerBroken(f"the ledger {path} holds no entry", hint=HINT)


def kept(path: str, limit: int) -> tuple[int, list[str]]:
    """Return the first entry to keep, and the paths of the closed files to remove.

    Closed files may take `limit` bytes together. The one closed last always stays.
    """
    total, oldest, gone = 0, 0, list[str]()
    for each in reversed(closed(path)):
        total += each.size
        if total > limit and oldest:
            gone.append(each.path)
        else:
            oldest = each.first
    return oldest, gone
