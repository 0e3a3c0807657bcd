"""The forms for people: unified, side by side, a summary, names alone. The project first, then the rest, by-products folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.preview.material import Material
from agent_sandbox.surfaces.quantities import counted
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.diff.formats import LETTERS, measured, side_by_side, summary, unified
from agent_sandbox.workspace.diff.rows import FACT, HEADING, WARNING, Row, ours
from agent_sandbox.workspace.escape import named


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
