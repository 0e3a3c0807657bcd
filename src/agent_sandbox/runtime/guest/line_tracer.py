"""A tracer of the lines that a turn executes, in its own functions and in those of earlier turns. Libraries are not traced line by line.

A line in a loop is reported the first times, and then ever more seldom: every second time, every fourth, every eighth… So the number of
reports grows with the logarithm of the work.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

MOST_LINES = 1000  # reports of a turn
_FIRST = 16  # executions of a line that are all reported, and reports whenever their number doubles


class LineTracer:
    """Reports lines of one turn, before they are executed. In the block `with tracer:` it is in force, unless another tracer is."""

    def __init__(self, report: Callable[[FrameType], None]) -> None:
        self._report = report
        self._counts: dict[tuple[int, int], int] = {}
        self._left = MOST_LINES
        self._begun = False  # the first line is that of the statement, which is a step anyway
        self._on = False

    def __enter__(self) -> None:
        if sys.gettrace() is None:
            self._begun, self._on = False, True
            sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        if self._on and sys.gettrace() == self._call:  # the program may have set one of its own
            sys.settrace(None)
        self._on = False

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if self._left and frame.f_code.co_filename.startswith("<turn ") else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            if self._begun:
                self._count(frame)
            self._begun = True
        return self._line

    def _count(self, frame: FrameType) -> None:
        place = (id(frame.f_code), frame.f_lineno)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if self._left and not count % (1 << max(0, count.bit_length() - _FIRST.bit_length())):
            self._left -= 1
            self._report(frame)
