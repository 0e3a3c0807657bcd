"""The hash chain: find its end, check that nothing in it was changed, and follow it through the files of a ledger.

A kill, a power cut or a full disk may leave bytes that are not a whole entry. Such bytes are accepted under two conditions: none of their
lines ends like an entry, and the next entry is a `Torn` that seals exactly these bytes, by offset, length and digest. They are kept,
counted, and never merged with later lines. Numbers go up by one; only a `Gap` skips numbers, and it names the numbers that it skips.

The hashes detect accidents, and a changed entry if the entries after it were not rewritten, too. The seals also detect that, given the
key. The anchor detects that the end, or all of the ledger, is missing. `verify` combines the three.

A ledger is the current file, and the files that rotation closed when they had grown large. A closed file is named by the number of its
first entry and never written again. The chain continues in the new file, whose first entry names the closed file and the oldest entry that
is kept. Old files are removed when all together exceed a limit; the entry that says so is written before. So entries missing at the
beginning are either named in the chain, or were removed by someone else.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.contexts import ExitStack, contextmanager, suppress
from agent_sandbox._fast.encoding import Seal, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.encoding import UnknownForm, decode, last_place, looks_whole, place, sealed
from agent_sandbox.ledger.event import Entry, Gap, Rotated, Torn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import BinaryIO

START = "0" * 64  # the hash before the first entry
_STEP = 2 << 10  # bytes; most entries are far smaller

_OTHER_KEY = (
    "if XDG_DATA_HOME or AGENT_SANDBOX_KEYS is another than before, set it back; if not, keep the file as evidence and move it aside"
)
HINT = "keep the file as evidence and move it aside; a new ledger starts with the next action, and says what is missing"
_DIGITS = 12


@dataclass(frozen=True)
class Head:
    """The end of the chain: number, hash and seal of the last entry, the offset after its line, and the bytes of a torn write there."""

    sequence: int = 0
    hash: str = START
    seal: str = ""
    end: int = 0
    remains: bytes = b""
    line_ended: bool = True  # whether the file's last byte is a newline


@dataclass(frozen=True)
class Verified:
    """The result for an intact chain. `torn` counts the sealed torn writes; `unsealed` is the length in bytes of an unsealed one."""

    count: int
    head: str
    torn: int
    unsealed: int


def find_head(descriptor: int, size: int, seal: Seal) -> Head:
    """Find the end of the chain, reading only the tail of the file.

    Raises `LedgerBroken` if the last entry was not sealed with this key, or if the bytes after it are not a torn write.
    """
    length = min(size, _STEP)
    while True:
        start = size - length
        tail = os.pread(descriptor, length, start)
        if last := last_place(tail, seal):
            return Head(*last, size)
        position = len(tail)
        while position > 0:
            line_start = tail.rfind(b"\n", 0, position) + 1
            if line_start == 0 and start > 0:
                break  # this line may begin before the part that was read
            line = tail[line_start:position]
            try:
                sequence, digest, mark = place(line)
            except ValueError:
                if looks_whole(line):
                    raise LedgerBroken(f"the ledger entry at byte {start + line_start} was changed", hint=HINT) from None
                position = line_start - 1
                continue
            if mark != sealed(bytes.fromhex(digest), seal):
                raise LedgerBroken(f"entry {sequence} of the ledger was not written with this ledger's key", hint=_OTHER_KEY)
            behind = tail[position:].removeprefix(b"\n")
            return Head(sequence, digest, mark, size - len(behind), behind, tail.endswith(b"\n"))
        if start == 0:
            return Head(remains=tail, line_ended=tail.endswith(b"\n"))
        length = min(size, length * 4)


def holds(descriptor: int, size: int, sequence: int, digest: str) -> bool:
    """Return whether the file accounts for this entry.

    True if the entry is in the file, or directly precedes the first entry of the file, or is named as missing by a `Gap`.
    """
    following: bytes | None = None
    for line in _backwards(descriptor, size):
        try:
            number, entry_hash, _ = place(line)
        except ValueError:
            continue  # torn, or empty at the end
        if number == sequence:
            return entry_hash == digest
        if number < sequence:
            break
        following = line
    if following is None:
        return False
    entry = decode(following)
    named = entry.event.hash if isinstance(entry.event, Gap) else entry.previous
    return entry.sequence == sequence + 1 and named == digest


def _backwards(descriptor: int, size: int) -> Iterator[bytes]:
    """Yield the lines of a file, last one first."""
    rest, end, step = b"", size, _STEP
    while end > 0:
        start = max(0, end - step)
        rest, *lines = (os.pread(descriptor, end - start, start) + rest).split(b"\n")
        yield from reversed(lines)
        end, step = start, step * 2
    yield rest


def verify(path: str | os.PathLike[str]) -> Verified:
    """Check the hash chain of one file.

    Raises `LedgerBroken` naming the first entry that is changed, missing, repeated or out of place.
    """
    count, head, torn, unsealed = 0, START, 0, 0
    with open(path, "rb") as file:
        for item in walk(file):
            if isinstance(item, Entry):
                count, head, torn = item.sequence, item.hash, torn + isinstance(item.event, Torn)
            else:
                unsealed = item
    return Verified(count, head, torn, unsealed)


def walk(lines: Iterable[bytes], before: Entry | None = None, *, offset: int = 0) -> Iterator[Entry | int]:
    """Check the lines of one file. Yields each entry and, at the end, the length of an unsealed torn write, if there is one.

    `before` is the entry before the first line, if known. `offset` is where the first line begins in the file. Raises `LedgerBroken` at the
    first fault.
    """
    debris, length = list[bytes](), 0
    for line in lines:
        try:
            entry = _entry(line.removesuffix(b"\n"))
        except UnknownForm:
            raise broken(_next(before), "was written by another version, in a form that this one does not know") from None
        if entry is None:
            if looks_whole(line.removesuffix(b"\n")):
                raise broken(_next(before), "was changed")
            debris.append(line)
            length += len(line)
        else:
            if problem := _misfit(entry, before):
                raise broken(_next(before), problem)
            if debris and not _seals(entry, offset - length, b"".join(debris)):
                raise broken(_next(before), "follows bytes that are no entry and that it does not seal")
            if not debris and (isinstance(entry.event, Torn) or (isinstance(entry.event, Gap) and entry.event.torn)):
                raise broken(_next(before), "seals a torn write that is not there")
            debris, length, before = [], 0, entry
            yield entry
        offset += len(line)
    if debris:
        yield length


def broken(sequence: int, what: str) -> LedgerBroken:
    """Return the error for a fault at this entry."""
    return LedgerBroken(f"the ledger is broken: entry {sequence} {what}", hint=HINT)


def _next(before: Entry | None) -> int:
    return before.sequence + 1 if before else 1


def _misfit(entry: Entry, before: Entry | None) -> str:
    """Return why `entry` cannot follow the entry `before`; empty if it can."""
    out_of_place = f"is missing or out of place: entry {entry.sequence} stands there"
    if isinstance(entry.event, Gap) and entry.sequence != entry.event.last + 1:
        return "names other entries as missing than those before it"
    if before is None:
        # A file begins with the very first entry, or with one that states what came before it.
        first = (entry.sequence, entry.previous) == (1, START)
        return "" if first or isinstance(entry.event, Rotated) or _bridges(entry, 0) else out_of_place
    if _bridges(entry, before.sequence):
        # In a file that was started afresh, `previous` is the hash of the last missing entry.
        return "" if entry.previous in (before.hash, entry.event.hash) else out_of_place  # type: ignore[union-attr]
    return "" if (entry.sequence, entry.previous) == (before.sequence + 1, before.hash) else out_of_place


def _bridges(entry: Entry, last: int) -> bool:
    return isinstance(entry.event, Gap) and entry.event.last > last


def _seals(entry: Entry, offset: int, debris: bytes) -> bool:
    # The newline after the debris was written by the sealer.
    expected = torn_at(offset, debris)
    return entry.event == expected or (isinstance(entry.event, Gap) and entry.event.torn == vars(expected))


def torn_at(offset: int, debris: bytes) -> Torn:
    """Return the `Torn` event that seals these bytes of a torn write, which begin at this offset of the file."""
    torn = debris.removesuffix(b"\n")
    return Torn(offset, len(torn), sha256(torn).hexdigest())


def _entry(line: bytes) -> Entry | None:
    try:
        return decode(line)
    except UnknownForm:
        raise
    except ValueError:
        return None


@dataclass(frozen=True)
class Closed:
    """A closed file of a ledger: the number of its first entry, its path and its length."""

    first: int
    path: str
    size: int


def closed_directory(path: str) -> str:
    """Return the directory of a ledger's closed files."""
    return f"{os.path.splitext(path)[0]}.closed"


def closed_name(path: str, first: int) -> str:
    """Return the path of the closed file whose first entry has this number."""
    return os.path.join(closed_directory(path), f"{first:0{_DIGITS}}.jsonl")


def closed(path: str) -> list[Closed]:
    """Return the closed files of a ledger, oldest first. Other files in their directory are ignored."""
    segments: list[Closed] = []
    with suppress(FileNotFoundError), os.scandir(closed_directory(path)) as entries:
        for entry in entries:
            number, dot, ending = entry.name.partition(".")
            if number.isdigit() and len(number) == _DIGITS and dot + ending == ".jsonl":
                with suppress(FileNotFoundError):  # removed meanwhile
                    segments.append(Closed(int(number), entry.path, entry.stat(follow_symlinks=False).st_size))
    return sorted(segments, key=lambda each: each.first)


def files(path: str) -> list[str]:
    """Return the paths of all files of a ledger, oldest first.

    A process that dies while it closes a file may leave the file with two names. Such a file is listed once.
    """
    before = [each.path for each in closed(path)]
    with suppress(FileNotFoundError):  # there is no current file, or old ones are being removed right now
        if before and os.path.samefile(before[-1], path):
            before.pop()
    return [*before, path] if os.path.exists(path) else before


def entries(path: str) -> Iterator[Entry]:
    """Yield every entry that is kept, from all files of a ledger.

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
    """Open all files of a ledger; None if the set of files changed meanwhile."""
    names = files(path)
    with ExitStack() as stack, suppress(FileNotFoundError):
        open_files: list[BinaryIO] = [stack.enter_context(open(each, "rb")) for each in names]  # noqa: SIM115
        is_current = not open_files or names[-1] != path or os.path.samestat(os.fstat(open_files[-1].fileno()), os.stat(path))
        if is_current and files(path) == names:
            stack.pop_all()
            return open_files
    return None


def first_sequence(path: str) -> int:
    """Return the number of the first entry of a file, which may begin with a torn write. Raises `LedgerBroken` if it has no entry."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                return place(line.removesuffix(b"\n"))[0]
    raise LedgerBroken(f"the ledger {path} holds no entry", hint=HINT)


def kept(path: str, limit: int) -> tuple[int, list[str]]:
    """Return the number of the first entry to keep, and the paths of the closed files to remove.

    All closed files together may take `limit` bytes. The file that was closed last always stays.
    """
    total, oldest, gone = 0, 0, list[str]()
    for each in reversed(closed(path)):
        total += each.size
        if total > limit and oldest:
            gone.append(each.path)
        else:
            oldest = each.first
    return oldest, gone
