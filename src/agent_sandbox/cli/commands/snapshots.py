"""`snapshot`, `rollback` and `snapshots`: save the sandbox's state, go back to it, and list what was saved."""

from __future__ import annotations

import time

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.context import ProjectSandbox, current_and_whole
from agent_sandbox.cli.options import SandboxOptions
from agent_sandbox.cli.render.messages import Console, counted, shown
from agent_sandbox.cli.results import PathName, VerbResult, declined
from agent_sandbox.workspace.layers.history import Snapshot, tree
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class SandboxFacts:
    """The project and the sandbox that a result is about."""

    inline = True

    project: PathName
    sandbox: str


@dataclass(frozen=True)
class SnapshotFacts:
    """A snapshot. `parent` is the id of the snapshot before it. An `automatic` snapshot was not requested by the user."""

    id: int
    label: str
    parent: int | None
    created: float
    automatic: bool

    @property
    def name(self) -> str:
        """The number and label of the snapshot, for people."""
        return f"{self.id} {shown(self.label)}" if self.label else str(self.id)


@dataclass(frozen=True)
class ListedSnapshot(SnapshotFacts):
    """A snapshot in the tree of snapshots. `head` marks the snapshot on which the sandbox's present state is based."""

    head: bool
    depth: int


@dataclass(frozen=True)
class SnapshotResult(VerbResult):
    """A snapshot that was made."""

    kind = "snapshot"

    about: SandboxFacts
    snapshot: SnapshotFacts

    def text(self, console: Console) -> None:
        print(self.snapshot.id)
        console.note(f"saved as snapshot {self.snapshot.name} · agent-sandbox rollback {self.snapshot.id}")


@dataclass(frozen=True)
class RollbackResult(VerbResult):
    """The snapshot that the sandbox went back to (`to`), and the snapshot that saved unsaved changes before that (`kept`)."""

    kind = "rollback"

    about: SandboxFacts
    to: SnapshotFacts
    kept: SnapshotFacts | None

    def text(self, console: Console) -> None:
        saved = f"; the state before is snapshot {self.kept.id}" if self.kept else ""
        console.note(f"the sandbox is back at snapshot {self.to.name}{saved}")


@dataclass(frozen=True)
class SnapshotsResult(VerbResult):
    """All snapshots, each after its parent. `used` says whether the sandbox has changed since the snapshot that it is based on."""

    kind = "snapshots"

    about: SandboxFacts
    snapshots: tuple[ListedSnapshot, ...]
    used: bool
    forgotten: tuple[SnapshotFacts, ...]

    def text(self, console: Console) -> None:
        for each in self.forgotten:
            console.note(f"forgot snapshot {each.name}")
        here = " <- the sandbox, with changes since" if self.used else " <- the sandbox"
        for listed in self.snapshots:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.created))
            print(f"{'  ' * listed.depth}{listed.name}  {when}{here if listed.head else ''}")
        if not self.snapshots and not self.forgotten:
            console.note("this sandbox has no snapshots; make one: agent-sandbox snapshot LABEL")


def snapshot(options: SandboxOptions) -> SnapshotResult:
    """Save the sandbox's state."""
    sandbox = current_and_whole(options.project, options.policy)
    return SnapshotResult(_about(sandbox), snapshot_facts(Stored(sandbox.state).snapshot(*options.names)))


def rollback(options: SandboxOptions) -> RollbackResult:
    """Go back to a snapshot."""
    sandbox = current_and_whole(options.project, options.policy)
    done = Stored(sandbox.state).rollback(*options.names)
    return RollbackResult(_about(sandbox), snapshot_facts(done.to), snapshot_facts(done.kept) if done.kept else None)


def snapshots(options: SandboxOptions, console: Console) -> VerbResult:
    """Remove the snapshots that the options name, and list the others. Removal is asked about at a terminal, and needs --yes elsewhere."""
    sandbox = current_and_whole(options.project, options.policy)
    stored = Stored(sandbox.state)
    if options.names:
        question = f"Forget {counted(len(options.names), 'snapshot')}: {', '.join(map(shown, options.names))}?"
        if no := declined("snapshots --forget", question, console, yes=options.yes):
            return no
    forgotten = tuple(snapshot_facts(stored.forget(name)) for name in options.names)
    history = stored.snapshots()
    listed = (
        ListedSnapshot(each.id, each.label, each.parent, each.created, each.automatic, each.id == history.head, depth)
        for depth, each in tree(history)
    )
    return SnapshotsResult(_about(sandbox), tuple(listed), history.used, forgotten)


def _about(sandbox: ProjectSandbox) -> SandboxFacts:
    return SandboxFacts(PathName(sandbox.project.path), sandbox.state.id)


def snapshot_facts(snapshot: Snapshot) -> SnapshotFacts:
    """Return the facts about a snapshot."""
    return SnapshotFacts(snapshot.id, snapshot.label, snapshot.parent, snapshot.created, snapshot.automatic)
