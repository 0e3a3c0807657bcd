"""`diff --patch`: raw bytes for `git apply`, so not for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from agent_sandbox.errors import PolicyError
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.messages import remark
from agent_sandbox.surfaces.preview.material import Material
from agent_sandbox.surfaces.quantities import counted
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.diff.patch import LeftOut, write_patch

_NAMED = 10  # of what a patch cannot carry, one by one
_MOST_ENTRIES = 1_000_000  # of a directory that goes away: git has to be told each


def refuse_on_a_terminal(request: Request) -> None:
    """What a guest wrote is in a patch as it is, escape sequences too. Raises `PolicyError`."""
    if request.has("--patch") and sys.stdout.isatty() and not request.has("--raw"):
        raise PolicyError(
            "a patch holds what the program wrote as it is, and a terminal would act on it",
            hint="send it to a file or to git: agent-sandbox diff --patch | git apply; or see it escaped: agent-sandbox diff",
        )


def patch(material: Material, write: Callable[[bytes], object], *, quiet: bool = False) -> int:
    """Write it, say what it lacks, and return the exit code: 1 when content of the project is missing that git cannot be given."""
    files = material.files
    caches = tuple(change for change in files.noise if covers(material.project, change.path))
    inside = sorted((*files.project, *(caches if material.everything else ())), key=lambda change: change.path)
    changes = (each for change in inside for each in material.machine.one_by_one(change, _MOST_ENTRIES))
    left = write_patch(changes, material.contents, material.former, project=material.project, write=write)
    if not quiet:
        _say(left)
        if caches and not material.everything:
            remark(f"not in the patch: {counted(len(caches), 'change')} in caches of the project (--all adds them)")
        if outside := len(files.elsewhere):
            remark(f"not in the patch: {counted(outside, 'change')} elsewhere on the machine")
    return 1 if any(each.content for each in left) else 0


def _say(left: tuple[LeftOut, ...]) -> None:
    for each in left[:_NAMED]:
        remark(f"not in the patch: {each.path}: {each.what}")
    if len(left) > _NAMED:
        remark(f"not in the patch, either: {counted(len(left) - _NAMED, 'more such thing')}")
