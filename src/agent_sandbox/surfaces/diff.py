"""`diff`: what the sandbox would change. The project in full, the rest of the machine as a list, by-products counted."""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.engine.session import changes_in
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.current import Current, current, policy_of
from agent_sandbox.surfaces.messages import shown
from agent_sandbox.surfaces.pending import Sorted, opened, sort
from agent_sandbox.surfaces.quantities import counted
from agent_sandbox.surfaces.style import Style
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.textdiff import unified_diff

_LETTERS = {Kind.ADDED: "A", Kind.DELETED: "D", Kind.RETYPED: "T", Kind.MODIFIED: "M", Kind.MODE: "m", Kind.OWNER: "o", Kind.XATTR: "x"}


def diff(request: Request) -> int:
    """The verb `diff`. It exits with 0, whether there are changes or not."""
    found = current(request)
    with opened(found.state) as layers:
        changes = ChangeSet() if layers is None else changes_in(layers, policy_of(request, found.project))
        files = sort(changes, found.project.path)
        if request.has("--json"):
            _print_document(found, files, layers)
            return 0
        style = Style.of_stdout()
        lines = _stat(found, files, layers, request) if request.has("--stat") else _full(found, files, layers, request)
        for line in lines:
            print(style.diff(line))
    return 0


def _full(found: Current, files: Sorted, layers: int | None, request: Request) -> Iterator[str]:
    assert layers is not None or not (files.project or files.elsewhere or files.noise)
    everything = request.has("--all")
    for change in files.project:
        yield from unified_diff(change, layers or 0, relative_to=found.project.path)
    if files.elsewhere:
        yield from _heading(f"Elsewhere on the machine: {counted(len(files.elsewhere), 'change')}", after=bool(files.project))
        for change in files.elsewhere:
            yield from unified_diff(change, layers or 0) if everything else (listed(change),)
    yield from _noise(files, everything)


def _stat(found: Current, files: Sorted, layers: int | None, request: Request) -> Iterator[str]:
    for change in files.project:
        lines = unified_diff(change, layers or 0, relative_to=found.project.path)
        added, removed = counts(lines)
        name = shown(change.path[len(found.project.path.rstrip("/")) + 1 :])
        yield f"{_LETTERS[change.kind]} {name} +{added} -{removed}"
    if files.elsewhere:
        yield from _heading(f"Elsewhere on the machine: {counted(len(files.elsewhere), 'change')}", after=bool(files.project))
        yield from map(listed, files.elsewhere)
    yield from _noise(files, request.has("--all"))


def _noise(files: Sorted, everything: bool) -> Iterator[str]:
    if not files.noise:
        return
    yield from _heading(
        f"Caches and scratch files: {counted(len(files.noise), 'change')}{'' if everything else ', shown with --all'}",
        after=bool(files.project or files.elsewhere),
    )
    if everything:
        yield from map(listed, files.noise)


def _heading(text: str, *, after: bool) -> Iterator[str]:
    if after:
        yield ""
    yield f"# {text}"


def listed(change: Change) -> str:
    """One change on one line."""
    more = f" and {counted(change.inside, 'entry', 'entries')} below it" if change.inside else ""
    hidden = " (something real that was hidden from the sandbox is here)" if change.masks_real else ""
    return f"{_LETTERS[change.kind]} {shown(change.path)}{more}{hidden}"


def counts(lines: list[str]) -> tuple[int, int]:
    """How many lines a diff adds and removes: what is marked after the first line that begins a hunk."""
    start = next((number for number, line in enumerate(lines) if line.startswith("@@")), len(lines))
    return sum(line.startswith("+") for line in lines[start:]), sum(line.startswith("-") for line in lines[start:])


def _print_document(found: Current, files: Sorted, layers: int | None) -> None:
    from agent_sandbox.surfaces.documents import change_document, path_fields, print_document

    changes = []
    for place, group in (("project", files.project), ("elsewhere", files.elsewhere), ("noise", files.noise)):
        for change in group:
            text = unified_diff(change, layers or 0, relative_to=found.project.path) if place == "project" else None
            changes.append({**change_document(change), "place": place, "diff": text})
    print_document("diff", {**path_fields("project", found.project.path), "sandbox": found.state.id, "changes": changes})
