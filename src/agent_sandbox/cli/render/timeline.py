"""The timeline of a session for people: a tree of steps, a table of variables, and the frames of an error. Nothing is escaped here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.cli.render.messages import counted, human_size

if TYPE_CHECKING:
    from agent_sandbox.cli.commands.inspect import FrameFacts, VariableFacts
    from agent_sandbox.cli.commands.timeline import HeldFacts, TimelineStep

_TEXT = 72  # characters of a statement
_VALUE = 60  # characters of a value in a table
_ERROR = 100  # characters of an error in a tree
_NAME, _TYPE = 24, 20
_LOCALS = 8  # variables of a frame
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")


def kept_for(seconds: float) -> str:
    """Return a length of time in words.

    >>> kept_for(3600), kept_for(600), kept_for(86400), kept_for(90)
    ('1 hour', '10 minutes', '1 day', '90 seconds')
    """
    for unit, word in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit and seconds % unit == 0:
            return counted(int(seconds // unit), word)
    return counted(int(seconds), "second")


def session_line(session: HeldFacts) -> str:
    """Return one line about a session."""
    parts = [f"{session.script} in {session.project}", counted(session.steps, "step")]
    if session.parent is not None:
        parts.append(f"forked from {session.parent} before step {session.parent_step}")
    if session.failed is not None:
        parts.append(f"error at step {session.failed}")
    if session.ended is not None:
        parts.append(f"ended: {session.ended}")
    elif session.busy:
        parts.append("running")
    parts.append(
        f"begun {time.strftime('%H:%M:%S', time.localtime(session.since))}, kept {kept_for(session.kept_seconds)} after its last use"
    )
    return f"{session.id}  {' · '.join(parts)}"


def step_title(step: TimelineStep) -> str:
    """Return a step in words: its number, and the first line of its statement."""
    first = step.text.splitlines()[0] if step.text else f"end of turn {step.turn}"
    return f"step {step.number}: {first[:_TEXT]}"


def tree_lines(steps: Sequence[TimelineStep], present: int) -> Iterator[str]:
    """Yield a line for each step. A branch is indented below the step that it left; the newest one goes on at the left.

    `>` marks the present state, `*` the steps that led to it, `✗` an error, and `-` a state that is not kept.
    """
    children: dict[int, list[TimelineStep]] = {}
    for step in steps:
        children.setdefault(step.parent, []).append(step)
    numbers = {step.number for step in steps}
    waiting = [(step, 0) for step in reversed(steps) if step.parent not in numbers]  # the first one, or one whose parent is not listed
    while waiting:
        step, depth = waiting.pop()
        yield _step_line(step, depth, present)
        after = children.get(step.number, [])
        waiting += [(each, depth + (at < len(after) - 1)) for at, each in reversed([*enumerate(after)])]


def _step_line(step: TimelineStep, depth: int, present: int) -> str:
    first = step.text.splitlines()[0] if step.text else f"(end of turn {step.turn})"
    more = " …" if step.text and (len(step.text.splitlines()) > 1 or len(first) > _TEXT) else ""
    marks = ">" if step.number == present else "*" if step.present else " "
    marks += "✗" if step.error else " "
    marks += " " if step.kept else "-"
    about = [_one_line(step.error, _ERROR)] if step.error else []
    if step.files:
        about.append(f"files: {', '.join(step.files)}")
    elif step.files_changed:
        about.append("files changed")
    about += [f"without {each}" for each in step.lost]
    about += [f"not kept: {step.why}"] if step.why else []
    return f"{marks}{step.number:4}  {step.at:8.2f} s  {'  ' * depth}{first[:_TEXT]}{more}" + (f"   # {'; '.join(about)}" if about else "")


def variable_lines(variables: Iterable[VariableFacts]) -> Iterator[str]:
    """Yield the lines of a table of variables: name, type, size and value. A table shows its shape, columns and first rows."""
    listed = tuple(variables)
    rows = [(each.name, each.type.rpartition(".")[2], human_size(each.bytes)) for each in listed]
    widths = [min(most, max((len(row[column]) for row in rows), default=0)) for column, most in ((0, _NAME), (1, _TYPE), (2, 12))]
    for (name, kind, size), variable in zip(rows, listed, strict=True):
        head = f"{name[:_NAME]:<{widths[0]}}  {kind[:_TYPE]:<{widths[1]}}  {size:>{widths[2]}}  "
        if variable.shape:
            columns = f": {', '.join(variable.columns)}" if variable.columns else ""
            yield f"{head}{' × '.join(map(str, variable.shape))}{columns}"
            yield from (f"    {line}" for line in variable.repr.splitlines())
        else:
            yield head + _one_line(variable.repr)


def frame_lines(frames: Sequence[FrameFacts]) -> Iterator[str]:
    """Yield the frames of an error, outermost first, each with its local variables.

    Those of the module are the variables themselves. Of frames in libraries only the last has them, where the error was raised.
    """
    for number, frame in enumerate(frames, 1):
        yield f"{frame.file}:{frame.line} in {frame.function}"
        if frame.function == "<module>" or (number < len(frames) and any(part in frame.file for part in _LIBRARIES)):
            continue
        named = [each for each in frame.variables if not each.name.startswith(".")]  # a comprehension has one that is not
        for line in variable_lines(named[:_LOCALS]):
            yield f"    {line}"
        if len(named) > _LOCALS:
            yield f"    and {len(named) - _LOCALS} more"


def _one_line(text: str, most: int = _VALUE) -> str:
    first = text.splitlines()[0] if text else ""
    return first if first == text and len(text) <= most else f"{first[: most - 1]}…"
