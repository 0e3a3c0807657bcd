"""The begin and end records of runs, in the format of `files`. Every run imports this module, so it imports none of the others."""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.workspace.durable import explained, sync_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN, DONE = b'{"run":', b'{"done":'
_TAIL = 64  # bytes; a `done` line is shorter
# The kernel stamps file times with a clock that ticks every few milliseconds and lags by up to one tick.
TICK_NS = 20_000_000
_PART_OF_A_TICK = 0.0005  # seconds
_REALTIME_COARSE = 5  # CLOCK_REALTIME_COARSE of linux/time.h: that clock


def file_clock_ns() -> int:
    """Return the time on the clock that the kernel stamps files with.

    A file that changes after this call has this time or a later time as ctime. A file that changed before has an earlier ctime, or the same
    ctime if it changed in the same tick.
    """
    return time.clock_gettime_ns(_REALTIME_COARSE)


def await_file_clock(past_ns: int) -> int:
    """Wait until that clock is past a time, so that everything written by then is older. Return the time on it."""
    while (now := file_clock_ns()) <= past_ns:
        time.sleep(_PART_OF_A_TICK)
    return now


def file_of(directory: str, generation: int) -> str:
    """Return the path of the file with the bases of one generation."""
    return os.path.join(directory, f"{generation}.jsonl")


def begin(directory: str, generations: Sequence[int], *, now_ns: int) -> int:
    """Record that a run begins on these generations, the active one last. Return the time by which the run's bases are judged.

    `now_ns` is a time of the clock that stamps files: see `file_clock_ns`. The result is `now_ns`, unless an earlier run on these
    generations ended before its bases were kept. Then the result is the start of that run, because paths that it first covered cannot be
    told from paths that this run first covers.
    """
    with explained(f"begin a run in {directory!r}"):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
        else:
            sync_directory(os.path.dirname(directory))
        since = min([now_ns, *(left for generation in generations if (left := unfinished(file_of(directory, generation))) is not None)])
        append(directory, generations[-1], spell_run(since), sync=True)
    return since


def end(directory: str, generation: int, since_ns: int) -> None:
    """Record the end of the run that began at `since_ns`, for a run that changed nothing."""
    with explained(f"end a run in {directory!r}"):
        append(directory, generation, spell_done(since_ns))


def has_run(directory: str, generation: int) -> bool:
    """Return whether a run has used a generation since it was made."""
    return any(line.startswith(RUN) for line in read_lines(directory, generation))


def append(directory: str, generation: int, text: str, *, sync: bool = False) -> None:
    """Append lines to the file of a generation. Raises OSError."""
    path = file_of(directory, generation)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + text.encode()  # a line torn by a crash must not swallow the line appended now
        while data:
            data = data[os.write(fd, data) :]
        if sync:
            os.fdatasync(fd)
            if not size:
                sync_directory(directory)
    finally:
        os.close(fd)


def unfinished(path: str) -> int | None:
    """Return the start time of the first run without a `done` line in a file; None if every run has one."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL))
            tail = file.read()
            if tail.endswith(b"}\n") and tail[:-1].rpartition(b"\n")[2].startswith(DONE):
                return None
            file.seek(0)
            return _first_open(whole_lines(file.read()))
    except FileNotFoundError:
        return None


def _first_open(lines: list[bytes]) -> int | None:
    began: int | None = None
    for line in lines:
        if line.startswith(RUN) and began is None:
            began = number_of(line, RUN)
        elif line.startswith(DONE):
            began = None
    return began


def read_lines(directory: str, generation: int) -> list[bytes]:
    """Return the lines in the file of a generation; none if there is no file."""
    try:
        with open(file_of(directory, generation), "rb") as file:
            return whole_lines(file.read())
    except FileNotFoundError:
        return []


def spell_run(since_ns: int) -> str:
    """Return the JSON line which says that a run began."""
    return f'{{"run":{since_ns}}}\n'


def spell_done(since_ns: int) -> str:
    """Return the JSON line which says that a run has all its lines."""
    return f'{{"done":{since_ns}}}\n'


def whole_lines(content: bytes) -> list[bytes]:
    """Return the complete lines. A line torn by a crash is left out, wherever it is."""
    return [line for line in content.split(b"\n")[:-1] if line.startswith(b"{") and line.endswith(b"}")]


def number_of(line: bytes, kind: bytes) -> int | None:
    """Return the time in a `run` or `done` line; None if malformed."""
    digits = line[len(kind) : -1]
    return int(digits) if digits.isdigit() and len(digits) < 20 else None
