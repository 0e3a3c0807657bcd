"""What there is to show, and which of it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox import places
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import matches, parse
from agent_sandbox.surfaces.arguments import Request, UsageError
from agent_sandbox.surfaces.pending import Sorted, sort
from agent_sandbox.values import dataclass
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.preview.compare import DEFAULT, EVERYTHING, Effort, Limits, Preview, compare
from agent_sandbox.workspace.preview.sources import Machine

FORMS = ("--json", "--stat", "--side-by-side", "--patch", "--name-only")


@dataclass(frozen=True)
class Material:
    """The changes that were asked for, sorted, and where their content is."""

    project: str
    files: Sorted
    contents: Contents
    machine: Machine
    everything: bool
    limits: Limits
    effort: Effort

    def preview(self, change: Change) -> Preview:
        """Both sides of a change, compared."""
        return compare(change, self.contents, self.machine, limits=self.limits, effort=self.effort)

    def one_by_one(self, change: Change) -> tuple[Change, ...]:
        """A change, and what goes with it when it is a directory."""
        return self.machine.one_by_one(change, self.limits.inside)

    def name(self, change: Change) -> str:
        """How it is called: in the project relative to it, elsewhere in full. Not escaped."""
        inside = self.project.rstrip("/") + "/"
        return change.path.removeprefix(inside) if change.path.startswith(inside) else change.path


def gather(request: Request, project: str, changes: ChangeSet, contents: Contents) -> Material:
    """The material for a request. Raises `PolicyError` for a pattern that cannot be understood."""
    everything = request.has("--all")
    chosen = only(changes, request.values("--only"), project)
    limits = EVERYTHING if everything else DEFAULT
    return Material(project, sort(chosen, project), contents, Machine(), everything, limits, Effort())


def only(changes: ChangeSet, patterns: tuple[str, ...], project: str) -> ChangeSet:
    """Those at paths that one of the patterns covers; all of them when there is no pattern."""
    if not patterns:
        return changes
    covered = covering(patterns, project)
    return ChangeSet(tuple(change for change in changes if covered(change)))


def covering(patterns: tuple[str, ...], project: str) -> Callable[[Change], bool]:
    """Whether one of the patterns covers the path of a change. Relative ones are of the project."""
    absolute = [text if text.startswith(("/", "~", "**/")) else f"{project.rstrip('/')}/{text.removeprefix('./')}" for text in patterns]
    parsed = [parse(text, home=places.home()) for text in absolute]
    return lambda change: any(matches(pattern, change.path) for pattern in parsed)


def check(request: Request) -> None:
    """Refuse what does not go together, before anything is run or read. Raises `UsageError` or `PolicyError`."""
    forms = [form for form in FORMS if request.has(form)]
    if len(forms) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} are two forms of the same", hint="choose one")
    if request.has("--raw") and not request.has("--patch"):
        raise UsageError("--raw is for --patch", hint="see: agent-sandbox help diff")
    if any(not text for text in request.values("--only")):
        raise PolicyError("--only is empty", hint="name a file, a directory or a pattern such as 'src/*.py'")
