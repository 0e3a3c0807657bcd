"""`status` and `reset`: what the current sandbox is, and the end of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from agent_sandbox.cli.change_list import Pending, current_and_whole, sort, stored
from agent_sandbox.cli.context import Current, policy_of
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.messages import at_a_terminal, remark, says_yes, shown
from agent_sandbox.cli.render.quantities import counted, human_size
from agent_sandbox.errors import Busy, SandboxError
from agent_sandbox.kernel import usage
from agent_sandbox.workspace.drift import DriftReport
from agent_sandbox.workspace.stored_sandbox import Stored

_LISTED = 10  # of what has moved on; what the sandbox changed too comes first


def status(request: Request) -> int:
    """The verb `status`."""
    found = current_and_whole(request)
    policy = policy_of(request, found.project)
    pending = stored(found, policy)
    files = sort(pending.changes, found.project.path)
    size, holder, created = _size(found), _holder(found), found.state.created()
    drift = _drift(found, pending, [mask.path for mask in policy.files.masks])
    if request.has("--json"):
        from agent_sandbox.cli.render.json import path_fields, print_document

        print_document(
            "status",
            {
                **path_fields("project", found.project.path),
                "sandbox": found.state.id,
                "exists": found.state.exists,
                "created": created,
                "changes": {"project": len(files.project), "elsewhere": len(files.elsewhere), "noise": len(files.noise)},
                "problem": pending.problem or None,
                "layers_bytes": size,
                "in_use_by": holder or None,
                "drift": _drift_document(drift),
                "state_dir": found.state.store.path,
            },
        )
        return 0
    print(f"project   {shown(found.project.path)}{f' (marked by {found.project.marker})' if found.project.marker else ''}")
    print(f"sandbox   {found.state.id}{'' if found.state.exists else ' (nothing has run in it yet)'}")
    if created is not None:
        print(f"since     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(created))}")
    print(f"changes   {_changes(pending, found)}")
    if drift is not None:
        print(f"drift     {drift.sentence()}")
        for line in _moved(drift, found.project.path, everything=request.has("--all")):
            print(f"          {line}")
    amount = human_size(size) if size < usage.UNCOUNTABLE else "more than can be counted"
    print(f"size      {amount} in {shown(found.state.store.path)}")
    print(f"in use    {shown(holder) if holder else 'no'}")
    return 0


def _changes(pending: Pending, found: Current) -> str:
    if pending.problem:
        return shown(pending.problem)
    files = sort(pending.changes, found.project.path)
    parts = [f"{len(files.project):,} in the project", f"{len(files.elsewhere):,} elsewhere"]
    return ", ".join([*parts, f"{len(files.noise):,} in caches"] if files.noise else parts)


def _drift(found: Current, pending: Pending, masks: list[str]) -> DriftReport | None:
    """What has moved on in reality since the clone was made; None when there is none, or it cannot be told."""
    if not found.state.exists:
        return None
    try:
        return Stored(found.state).drift(pending.changes, masks)
    except (OSError, SandboxError) as error:
        remark(f"what has moved on in the project cannot be told: {error}")
        return None


def _moved(drift: DriftReport, project: str, *, everything: bool) -> Iterator[str]:
    entries = sorted(drift.entries, key=lambda entry: not entry.yours)
    for entry in entries if everything else entries[:_LISTED]:
        more = f" ({counted(entry.files, 'file')})" if entry.files > 1 else ""
        yours = ", and the sandbox changed it" if entry.yours else ", and a run read it" if entry.read else ""
        yield f"{entry.kind.value:9}{shown(entry.path.removeprefix(project.rstrip('/') + '/'))}{more}{yours}"
    if len(entries) > _LISTED and not everything:
        yield f"and {counted(len(entries) - _LISTED, 'more', 'more')}, shown with --all"
    yield from map(shown, drift.untold)


def _drift_document(drift: DriftReport | None) -> dict[str, object] | None:
    from agent_sandbox.cli.render.json import path_fields

    if drift is None:
        return None
    entries = [
        {**path_fields("path", each.path), "kind": each.kind.value, "yours": each.yours, "read": each.read, "files": each.files}
        for each in drift.entries
    ]
    return {"age_seconds": round(drift.age_seconds, 3), "sentence": drift.sentence(), "moved": entries, "untold": list(drift.untold)}


def _size(found: Current) -> int:
    """What it takes of the disk: as an image all that was reserved for it."""
    if not found.state.exists:
        return 0
    directory = os.open(found.state.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return usage.disk_bytes(directory)
    finally:
        os.close(directory)


def _holder(found: Current) -> str:
    """Who has the sandbox at this moment: the lock itself is asked, and held for no longer than that takes."""
    try:
        with found.state.lock(command="status"):
            return ""
    except Busy as busy:
        return busy.message


def reset(request: Request) -> int:
    """The verb `reset`."""
    found = current_and_whole(request)
    pending = stored(found, policy_of(request, found.project))
    known, existed = len(pending.changes), found.state.exists
    asking = existed and not request.has("--yes") and not request.has("--json") and at_a_terminal()
    if asking and not says_yes(f"Forget {counted(known, 'change')} in this sandbox?"):
        remark("nothing was forgotten")
        return 1
    found.state.reset()
    if request.has("--json"):
        from agent_sandbox.cli.render.json import path_fields, print_document

        forgotten = None if pending.problem else known
        print_document("reset", {**path_fields("project", found.project.path), "sandbox": found.state.id, "forgotten": forgotten})
    elif not request.has("--quiet"):
        what = "everything" if pending.problem else counted(known, "change")
        remark(f"forgot {what} in the sandbox of {found.project.path}" if existed else "there was nothing to forget")
    return 0
