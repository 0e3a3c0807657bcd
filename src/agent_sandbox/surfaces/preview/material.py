"""What there is to show, and which of it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox import places
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import covering
from agent_sandbox.surfaces.arguments import Request, UsageError
from agent_sandbox.surfaces.pending import Sorted, sort
from agent_sandbox.values import dataclass
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.diff.compare import DEFAULT, EVERYTHING, Effort, FormerContents, Limits, Preview, compare, facts
from agent_sandbox.workspace.diff.sources import Machine
from agent_sandbox.workspace.escape import named

FORMS = ("--json", "--stat", "--side-by-side", "--patch", "--name-only")


@dataclass(frozen=True)
class Material:
    """The changes that were asked for, sorted, and where their content is."""

    project: str
    files: Sorted
    contents: Contents
    former: FormerContents
    renamed: Mapping[str, str]  # where the content of a deleted path is now
    machine: Machine
    everything: bool
    limits: Limits
    effort: Effort

    def preview(self, change: Change) -> Preview:
        """Both sides of a change, compared. What was renamed does not go away: its new name is told instead."""
        if change.kind is Kind.DELETED and change.path in self.renamed:
            return Preview(change, (*facts(change), f"renamed to {named(self.renamed[change.path])}"))
        return compare(change, self.contents, self.former, limits=self.limits, effort=self.effort)

    def one_by_one(self, change: Change) -> tuple[Change, ...]:
        """A change, and what goes with it when it is a directory."""
        return self.machine.one_by_one(change, self.limits.inside)

    def name(self, change: Change) -> str:
        """How it is called: in the project relative to it, elsewhere in full. Not escaped."""
        inside = self.project.rstrip("/") + "/"
        return change.path.removeprefix(inside) if change.path.startswith(inside) else change.path


def gather(request: Request, project: str, changes: ChangeSet, contents: Contents, former: FormerContents | None = None) -> Material:
    """The material for a request. Without `former`, the old side is the machine as it is now."""
    everything = request.has("--all")
    chosen = sort(only(changes, request.values("--only"), project), project)
    limits = EVERYTHING if everything else DEFAULT
    machine = Machine()
    renamed = {change.renamed_from: change.path for change in changes if change.renamed_from}
    return Material(project, chosen, contents, former or machine, renamed, machine, everything, limits, Effort())


def only(changes: ChangeSet, patterns: tuple[str, ...], project: str) -> ChangeSet:
    """Those at paths that one of the patterns covers; all of them when there is no pattern."""
    if not patterns:
        return changes
    covered = covering(patterns, project=project, home=places.home())
    return ChangeSet(tuple(change for change in changes if covered(change.path)))


def check(request: Request) -> None:
    """Refuse what does not go together, before anything is run or read. Raises `UsageError` or `PolicyError`."""
    forms = [form for form in FORMS if request.has(form)]
    if len(forms) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} are two forms of the same", hint="choose one")
    if request.has("--raw") and not request.has("--patch"):
        raise UsageError("--raw is for --patch", hint="see: agent-sandbox help diff")
    if any(not text for text in request.values("--only")):
        raise PolicyError("--only is empty", hint="name a file, a directory or a pattern such as 'src/*.py'")
    only(ChangeSet(), request.values("--only"), "/")  # for what it refuses
