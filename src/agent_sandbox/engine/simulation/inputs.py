"""What a simulated command read of the project: a plan rests on it as much as on what it changed.

Where somebody watched, each file of the real project that was opened for reading is remembered by the digest of its content. When one of
them is another, the command might do something else now, and its plan is not good any more. Files that were looked for and not found, and
those outside the project, are not remembered: there nobody works meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from agent_sandbox.engine.simulation.plan import Input
from agent_sandbox.spelling import sha256
from agent_sandbox.values import TYPE_CHECKING
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import covers

if TYPE_CHECKING:
    from agent_sandbox.runtime.observe.events import Observed

MOST_FILES = 5_000
MOST_BYTES = 256 << 20
NOT_ALL = "it read more of the project than is remembered: whether that is still the same is not looked at when the plan is carried out"
_CHUNK = 1 << 20


def inputs_of(observed: Iterable[Observed], project: str, *, since_ns: int, besides: Collection[str]) -> tuple[tuple[Input, ...], bool]:
    """What was read, and whether that is all of it. What changed after `since_ns`, when the run began, has no digest.

    `besides` are paths that the plan changes: those are compared with reality anyway.
    """
    found: list[Input] = []
    room = MOST_BYTES
    with _opened(project) as top:
        for path in dict.fromkeys(each.target for each in observed if each.kind == "read" and each.allowed):
            if path in besides or not covers(project, path):
                continue
            seen = _look(top, path, project, room)
            if seen is None:
                continue
            size, changed_ns, digest = seen
            room -= size
            if room < 0 or len(found) == MOST_FILES:
                return tuple(found), False
            found.append(Input(path, digest if changed_ns <= since_ns else ""))
    return tuple(found), True


def moved(inputs: Iterable[Input], project: str) -> Iterator[str]:
    """The paths of those that are not what they were."""
    with _opened(project) as top:
        for each in inputs:
            seen = _look(top, each.path, project, MOST_BYTES)
            if seen is None or not each.sha256 or seen[2] != each.sha256:
                yield each.path


@contextmanager
def _opened(project: str) -> Iterator[int]:
    top = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield top
    finally:
        os.close(top)


def _look(top: int, path: str, project: str, most: int) -> tuple[int, int, str] | None:
    """Size, time of the last change and digest of a real file; None for what is no regular file, cannot be read, or lies behind a link."""
    try:
        fd = beneath.open_file(top, path[len(project.rstrip("/")) :].lstrip("/"), one_filesystem=False)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        made = sha256()
        while status.st_size <= most and (piece := os.read(fd, _CHUNK)):
            made.update(piece)
        return status.st_size, status.st_ctime_ns, made.hexdigest()
    finally:
        os.close(fd)
