"""The window of two files: the lines between their common beginning and end.

Small files are read whole. The common beginning and end of large files are skipped without being kept, so that a line added to a huge log
is shown like any other.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import dataclass

_CHUNK = 1 << 20
_AROUND = 3  # lines of context on either side
_COMPARED = 1 << 30  # bytes from either end; anything beyond counts as different


@dataclass(frozen=True)
class Window:
    """The lines of two files between their common beginning and end. `old_left` and `new_left` count the bytes that did not fit."""

    old: bytes
    new: bytes
    start: int = 0  # offset in both files
    lines: int = 0  # lines before it
    old_left: int = 0
    new_left: int = 0

    # Written out, like `Change.__init__`, because there is one for each change.
    def __init__(self, old: bytes, new: bytes, start: int = 0, lines: int = 0, old_left: int = 0, new_left: int = 0) -> None:
        values = self.__dict__
        values["old"], values["new"], values["start"], values["lines"] = old, new, start, lines
        values["old_left"], values["new_left"] = old_left, new_left

    @property
    def first_difference(self) -> int:
        """The offset of the first byte at which the files differ or one of them ends."""
        return self.start + _common(self.old, self.new)


def read_window(old: int | None, new: int | None, most: int) -> Window:
    """Read the window of two open files, at most `most` bytes of each. A descriptor of None stands for an empty file. Raises OSError."""
    old_size, new_size = _size(old), _size(new)
    start = lines = ending = 0
    if old is not None and new is not None and max(old_size, new_size) > most:
        shorter = min(old_size, new_size)
        same, newlines = _same_beginning(old, new, min(shorter, _COMPARED))
        start = _line_start(new, same, most)
        lines = newlines - _newlines(new, start, same)
        ending = _line_after(new, new_size, _same_end(old, new, old_size, new_size, min(shorter - same, _COMPARED)), most)
    old_end, new_end = old_size - ending, new_size - ending
    before, after = _read(old, start, min(old_end, start + most)), _read(new, start, min(new_end, start + most))
    return Window(before, after, start, lines, max(0, old_end - start - most), max(0, new_end - start - most))


def _size(fd: int | None) -> int:
    return 0 if fd is None else os.fstat(fd).st_size


def _read(fd: int | None, start: int, stop: int) -> bytes:
    pieces: list[bytes] = []
    while fd is not None and start < stop and (piece := os.pread(fd, min(_CHUNK, stop - start), start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common beginning of two byte strings, found by bisection."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same_beginning(old: int, new: int, most: int) -> tuple[int, int]:
    """Return the length of the common beginning of two files, and the number of newlines in it."""
    same = newlines = 0
    while same < most:
        one, other = (_read(fd, same, min(same + _CHUNK, most)) for fd in (old, new))
        common = _common(one, other)
        same += common
        newlines += one.count(b"\n", 0, common)
        if common < _CHUNK:
            break
    return same, newlines


def _same_end(old: int, new: int, old_size: int, new_size: int, most: int) -> int:
    same = 0
    while same < most:
        step = min(_CHUNK, most - same)
        one = _read(old, old_size - same - step, old_size - same)
        other = _read(new, new_size - same - step, new_size - same)
        common = len(one) if one == other else _common(one[::-1], other[::-1]) if len(one) == len(other) else 0
        same += common
        if common < step:
            break
    return same


def _line_start(fd: int, offset: int, most: int) -> int:
    """Return the offset of a line start, a few lines of context before `offset`; 0 if there is none within `most` bytes."""
    wanted, furthest = _AROUND + 1, offset - most
    while offset > max(furthest, 0):
        start = max(0, offset - _CHUNK)
        piece = _read(fd, start, offset)
        at = len(piece)
        while wanted and (at := piece.rfind(b"\n", 0, at)) >= 0:
            wanted -= 1
        if not wanted:
            return start + at + 1
        offset = start
    return 0


def _line_after(fd: int, size: int, ending: int, most: int) -> int:
    """Return how many bytes of the common end (`ending`) to skip, so that its first few lines remain as context.

    Return 0 if these lines are longer than `most` bytes.
    """
    wanted, least = _AROUND + 1, ending - most
    while ending > max(least, 0):
        piece = _read(fd, size - ending, min(size, size - ending + _CHUNK))
        at = -1
        while wanted and (at := piece.find(b"\n", at + 1)) >= 0:
            wanted -= 1
        if not wanted:
            return ending - at - 1
        ending -= len(piece)
        if not piece:
            break
    return 0


def _newlines(fd: int, start: int, stop: int) -> int:
    count = 0
    while start < stop and (piece := _read(fd, start, min(stop, start + _CHUNK))):
        count += piece.count(b"\n")
        start += len(piece)
    return count
