"""`status` and `reset`: describe the project's sandbox, and drop its changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.context import Pending, ProjectSandbox, current_and_whole, pending_in, policy_of, sort
from agent_sandbox.cli.options import SandboxOptions
from agent_sandbox.cli.render.messages import Console, counted, human_size, remark, shown
from agent_sandbox.cli.results import PathName, VerbResult, declined
from agent_sandbox.engine.plan_launch import remarks_on
from agent_sandbox.errors import Busy, SandboxError
from agent_sandbox.kernel import usage
from agent_sandbox.workspace.stored_sandbox import Stored

_LISTED = 10  # drifted paths; those that the sandbox changed too come first


@dataclass(frozen=True)
class PlaceCounts:
    """The number of changes in the project, elsewhere on the machine, and in caches."""

    project: int
    elsewhere: int
    noise: int


@dataclass(frozen=True)
class MovedFacts:
    """A real path that changed since the clone. `yours`: the sandbox changed it too; `read`: a run in the sandbox read it."""

    path: PathName
    kind: str
    yours: bool
    read: bool | None  # null if reads were not tracked
    files: int


@dataclass(frozen=True)
class DriftFacts:
    """Changes of real files since the clone was made."""

    age_seconds: float
    sentence: str
    moved: tuple[MovedFacts, ...]
    untold: tuple[str, ...]


@dataclass(frozen=True)
class StatusResult(VerbResult):
    """The state of the project's sandbox."""

    kind = "status"

    project: PathName
    sandbox: str
    exists: bool
    created: float | None
    changes: PlaceCounts
    problem: str | None
    layers_bytes: int
    in_use_by: str | None
    drift: DriftFacts | None
    state_dir: PathName
    marker: str | None  # by which the project was found

    def text(self, console: Console) -> None:
        print(f"project   {shown(self.project)}{f' (marked by {self.marker})' if self.marker else ''}")
        print(f"sandbox   {self.sandbox}{'' if self.exists or self.problem else ' (nothing has run in it yet)'}")
        if self.created is not None:
            print(f"since     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.created))}")
        caches = f", {self.changes.noise:,} in caches" if self.changes.noise else ""
        counts = f"{self.changes.project:,} in the project, {self.changes.elsewhere:,} elsewhere{caches}"
        print(f"changes   {shown(self.problem) if self.problem else counts}")
        for number, line in enumerate(self._drift(None if console.everything else _LISTED)):
            print(f"          {line}" if number else f"drift     {line}")
        amount = human_size(self.layers_bytes) if self.layers_bytes < usage.UNCOUNTABLE else "more than can be counted"
        print(f"size      {amount} in {shown(self.state_dir)}")
        print(f"in use    {shown(self.in_use_by) if self.in_use_by else 'no'}")

    def _drift(self, most: int | None) -> Iterator[str]:
        if self.drift is None:
            return
        yield self.drift.sentence
        entries = sorted(self.drift.moved, key=lambda entry: not entry.yours)
        for entry in entries[:most]:
            more = f" ({counted(entry.files, 'file')})" if entry.files > 1 else ""
            yours = ", and the sandbox changed it" if entry.yours else ", and a run read it" if entry.read else ""
            yield f"{entry.kind:9}{shown(entry.path.removeprefix(self.project.rstrip('/') + '/'))}{more}{yours}"
        if most is not None and len(entries) > most:
            yield f"and {counted(len(entries) - most, 'more', 'more')}, shown with --all"
        yield from map(shown, self.drift.untold)


@dataclass(frozen=True)
class ResetResult(VerbResult):
    """A sandbox whose changes were dropped: how many, or null if they could not be counted."""

    kind = "reset"

    project: PathName
    sandbox: str
    forgotten: int | None
    existed: bool

    def text(self, console: Console) -> None:
        what = "everything" if self.forgotten is None else counted(self.forgotten, "change")
        console.note(f"forgot {what} in the sandbox of {self.project}" if self.existed else "there was nothing to forget")


def status(options: SandboxOptions) -> StatusResult:
    """Describe the project's sandbox."""
    sandbox = current_and_whole(options.project, options.policy)
    policy = policy_of(options.policy, sandbox.project)
    for sentence in remarks_on(policy.files.masks):
        remark(sentence)
    pending = pending_in(sandbox, policy)
    files = sort(pending.changes, sandbox.project.path)
    return StatusResult(
        PathName(sandbox.project.path),
        sandbox.state.id,
        sandbox.state.exists,
        sandbox.state.created(),
        PlaceCounts(len(files.project), len(files.elsewhere), len(files.noise)),
        pending.problem or None,
        _size(sandbox),
        _holder(sandbox) or None,
        _drift(sandbox, pending, [mask.path for mask in policy.files.masks]),
        PathName(sandbox.state.store.path),
        sandbox.project.marker or None,
    )


def _drift(sandbox: ProjectSandbox, pending: Pending, masks: list[str]) -> DriftFacts | None:
    """Return the changes of real files since the clone was made; None if there is no clone, or if they cannot be determined."""
    if not sandbox.state.exists:
        return None
    try:
        drift = Stored(sandbox.state).drift(pending.changes, masks)
    except (OSError, SandboxError) as error:
        remark(f"drift cannot be determined: {error}")
        return None
    moved = tuple(MovedFacts(PathName(each.path), each.kind.value, each.yours, each.read, each.files) for each in drift.entries)
    return DriftFacts(round(drift.age_seconds, 3), drift.sentence(), moved, tuple(drift.untold))


def _size(sandbox: ProjectSandbox) -> int:
    """Return the disk usage of the sandbox. For an image, this includes all blocks reserved for it."""
    if not sandbox.state.exists:
        return 0
    directory = os.open(sandbox.state.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return usage.disk_bytes(directory)
    finally:
        os.close(directory)


def _holder(sandbox: ProjectSandbox) -> str:
    """Return a description of the process that uses the sandbox now; empty if none does. Tries the sandbox's lock for a moment."""
    try:
        with sandbox.state.lock(command="status"):
            return ""
    except Busy as busy:
        return busy.message


def reset(options: SandboxOptions, console: Console) -> VerbResult:
    """Drop all changes and snapshots of the sandbox. At a terminal, ask first; elsewhere --yes is needed."""
    sandbox = current_and_whole(options.project, options.policy)
    pending = pending_in(sandbox, policy_of(options.policy, sandbox.project))
    known, existed = len(pending.changes), sandbox.state.exists
    if existed and (no := declined("reset", f"Forget {counted(known, 'change')} in this sandbox?", console, yes=options.yes)):
        return no
    sandbox.state.reset()
    return ResetResult(PathName(sandbox.project.path), sandbox.state.id, None if pending.problem else known, existed)
