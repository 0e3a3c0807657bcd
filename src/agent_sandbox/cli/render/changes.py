"""Select the changes that a request asks for, and show them: unified, side by side, as a summary, or as a patch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.change_list import Sorted, sort
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import covering
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind, covers
from agent_sandbox.workspace.diff.compare import (
    DEFAULT,
    EVERYTHING,
    DiffLimits,
    Effort,
    FormerContents,
    MachineFiles,
    Preview,
    compare,
    facts,
)
from agent_sandbox.workspace.diff.formats import FACT, HEADING, LETTERS, WARNING, Row, measured, ours, side_by_side, summary, unified
from agent_sandbox.workspace.diff.patch import NotInPatch, write_patch
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
    machine: MachineFiles
    everything: bool
    limits: DiffLimits
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
    machine = MachineFiles()
    renamed = {change.renamed_from: change.path for change in changes if change.renamed_from}
    return Material(project, chosen, contents, former or machine, renamed, machine, everything, limits, Effort())


def only(changes: ChangeSet, patterns: tuple[str, ...], project: str) -> ChangeSet:
    """Those at paths that one of the patterns covers; all of them when there is no pattern."""
    if not patterns:
        return changes
    covered = covering(patterns, project=project, home=here().host.home)
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


def rows(request: Request, material: Material, *, columns: int, words: bool) -> Iterator[Row]:
    """The rows of the form that the request names. `words` marks what differs inside lines."""
    if request.has("--name-only"):
        return _names(material)
    if request.has("--stat"):
        return _sections(material, lambda changes: _summary(material, changes, columns))

    def in_full(changes: Iterable[Change]) -> Iterator[Row]:
        for whole in changes:
            for change in material.one_by_one(whole):
                preview = material.preview(change)
                if request.has("--side-by-side"):
                    yield from side_by_side(preview, columns, relative_to=material.project, limits=material.limits, words=words)
                else:
                    yield from unified(preview, relative_to=material.project, limits=material.limits, words=words)
                if change.inside and not material.everything:
                    yield ours(WARNING, "\\ what goes with it is listed with --all")

    return _sections(material, in_full)


def _sections(material: Material, in_full: Callable[[Iterable[Change]], Iterator[Row]]) -> Iterator[Row]:
    files, everything = material.files, material.everything
    yield from in_full(files.project)
    if files.elsewhere:
        yield from _heading(f"Elsewhere on the machine: {counted(len(files.elsewhere), 'change')}", after=bool(files.project))
        yield from in_full(files.elsewhere) if everything else map(listed, files.elsewhere)
    if files.noise:
        folded = "" if everything else ", shown with --all"
        title = f"Caches and scratch files: {counted(len(files.noise), 'change')}{folded}"
        yield from _heading(title, after=bool(files.project or files.elsewhere))
        yield from map(listed, files.noise if everything else ())


def _summary(material: Material, changes: Iterable[Change], columns: int) -> Iterator[Row]:
    files = [measured(material.preview(each), material.name(each)) for change in changes for each in material.one_by_one(change)]
    return summary(files, columns)


def _names(material: Material) -> Iterator[Row]:
    shown = (*material.files.project, *material.files.elsewhere, *(material.files.noise if material.everything else ()))
    for change in shown:
        yield ours(FACT, material.name(change))


def _heading(text: str, *, after: bool) -> Iterator[Row]:
    if after:
        yield ours(HEADING, "")
    yield ours(HEADING, f"# {text}")


def listed(change: Change) -> Row:
    """One change on one line."""
    more = f" and {counted(change.inside, 'entry', 'entries')} below it" if change.inside else ""
    renamed = f" renamed from {named(change.renamed_from)}" if change.renamed_from else ""
    hidden = " (something real that was hidden from the sandbox is here)" if change.masks_real else ""
    return ours(FACT, f"{LETTERS[change.kind]} {named(change.path)}{more}{renamed}{hidden}")


_NAMED = 10  # of what a patch cannot carry, one by one
_MOST_ENTRIES = 1_000_000  # of a directory that goes away: git has to be told each


def refuse_on_a_terminal(request: Request) -> None:
    """Raise `PolicyError` for a patch on a terminal: it holds the guest's bytes unchanged, escape sequences too."""
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


def _say(left: tuple[NotInPatch, ...]) -> None:
    for each in left[:_NAMED]:
        remark(f"not in the patch: {each.path}: {each.what}")
    if len(left) > _NAMED:
        remark(f"not in the patch, either: {counted(len(left) - _NAMED, 'more such thing')}")
