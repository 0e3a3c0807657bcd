"""Show changes as a unified or side-by-side diff, a summary, a list of names, a patch, or data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Literal

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import SortedChanges, sort
from agent_sandbox.cli.options import ShowOptions
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.messages import Console, counted
from agent_sandbox.cli.results import OMITTED, Omitted
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.mount_plan import IMAGES
from agent_sandbox.policy.paths import contains, covering
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
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
    pair_renames,
)
from agent_sandbox.workspace.diff.formats import (
    ADDED,
    FACT,
    HEADING,
    LETTERS,
    REMOVED,
    SAME,
    WARNING,
    Hunk,
    Row,
    hunks,
    measured,
    ours,
    side_by_side,
    summary,
    unified,
)
from agent_sandbox.workspace.diff.patch import NotInPatch, write_patch
from agent_sandbox.workspace.escape import named
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from agent_sandbox.engine.simulation.risk import Risk


@dataclass(frozen=True)
class Material:
    """The selected changes, sorted by place, and the sources of their old and new content."""

    project: str
    files: SortedChanges
    contents: Contents
    former: FormerContents
    renamed: Mapping[str, str]  # where the content of a deleted path is now
    machine: MachineFiles
    everything: bool
    limits: DiffLimits
    effort: Effort
    digests: Mapping[str, str]  # of new content, as far as they are known, by path
    progress: Progress = NO_PROGRESS

    def preview(self, change: Change) -> Preview:
        """Compare the old and new content of a change. For a path that was renamed, give the new path instead."""
        self.progress.advance(files=1)
        if change.kind is Kind.DELETED and change.path in self.renamed:
            return Preview(change, (*facts(change), f"renamed to {named(self.renamed[change.path])}"))
        return compare(change, self.contents, self.former, limits=self.limits, effort=self.effort, digests=self.digests)

    def one_by_one(self, change: Change) -> tuple[Change, ...]:
        """Return a change and, for a removed directory, the changes of the entries below it."""
        return self.machine.one_by_one(change, self.limits.inside)

    def name(self, change: Change) -> str:
        """Return the path of a change: relative inside the project, else absolute. Control characters are not escaped."""
        inside = self.project.rstrip("/") + "/"
        return change.path.removeprefix(inside) if change.path.startswith(inside) else change.path


def gather(
    show: ShowOptions,
    project: str,
    changes: ChangeSet,
    contents: Contents,
    former: FormerContents | None = None,
    digests: Mapping[str, str] | None = None,
    progress: Progress = NO_PROGRESS,
) -> Material:
    """Select the changes to show with these options. `former` supplies their old content; without it, the machine's present files do.

    A rename is shown as one only if both of its paths are shown in full: the other half would not be promoted.
    """
    everything = show.everything
    covered = choice_of(show.only, project)
    # A file is promoted with the new directories that it lies in. A list of names has the names that were asked for.
    chosen = ChangeSet(tuple(filter(covered, changes))) if show.form == "name-only" else changes.chosen(covered)
    files = sort(pair_renames(chosen), project)
    if not everything:
        files = replace(files, project=pair_renames(ChangeSet(files.project)).changes)
    in_full = (*files.project, *files.elsewhere, *files.noise) if everything else files.project
    renamed = {change.renamed_from: change.path for change in in_full if change.renamed_from}
    limits, machine = EVERYTHING if everything else DEFAULT, MachineFiles()
    return Material(project, files, contents, former or machine, renamed, machine, everything, limits, Effort(), digests or {}, progress)


def choice_of(patterns: tuple[str, ...], project: str) -> Callable[[Change], bool]:
    """Return a function that tells whether a change matches one of the patterns. Without patterns every change does.

    Raises `PolicyError` for an invalid pattern.
    """
    covered = covering(patterns, project=project, home=here().host.home)
    return lambda change: not patterns or covered(change.path)


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Raise `PolicyError` for an invalid pattern, before anything is run or read."""
    choice_of(patterns, "/")


def show(options: ShowOptions, material: Material, write: Callable[[bytes], object], console: Console, history: Iterable[str] = ()) -> bool:
    """Write changes in the format that the options select. Returns False for a patch that lacks content.

    `history` are sentences about commits and branches. They are written in the formats for people, except for names alone.
    """
    if options.form != "stat" and sys.stdout.isatty():  # the diff itself shows how far it is
        material = replace(material, progress=NO_PROGRESS)
    if options.form == "json":
        from agent_sandbox.cli.render.json import write_changes  # only with --json

        write_changes(write, shown_changes(material))
        return True
    if options.form == "patch":
        return patch(material, write, console)
    painter = Painter(console.style.colours)
    _write_lines(map(painter.line, rows(options, material, columns=_columns(), words=painter.colours)), write)
    for words in history if options.form != "name-only" else ():
        write(f"{painter.line(ours(HEADING, f'# {words}'))}\n".encode())
    return True


def _write_lines(lines: Iterator[str], write: Callable[[bytes], object]) -> None:
    """Write lines, many at a time: a call of the kernel for each of 400,000 lines takes seconds. The first lines are written soon."""
    most = 1
    while batch := list(islice(lines, most)):
        batch.append("")
        write("\n".join(batch).encode())
        most = min(2 * most, _BATCH)


def rows(show: ShowOptions, material: Material, *, columns: int, words: bool) -> Iterator[Row]:
    """Return the rows of a diff, summary or list of names for people. `words` marks the differences inside lines."""
    if show.form == "name-only":
        return _names(material)
    if show.form == "stat":
        return _sections(material, lambda changes: _summary(material, changes, columns))

    def in_full(changes: Iterable[Change]) -> Iterator[Row]:
        changes = tuple(changes)
        material.progress.begin("comparing", len(changes))
        for whole in changes:
            for change in material.one_by_one(whole):
                preview = material.preview(change)
                if show.form == "side-by-side":
                    yield from side_by_side(preview, columns, relative_to=material.project, limits=material.limits, words=words)
                else:
                    yield from unified(preview, relative_to=material.project, limits=material.limits, words=words, blocks=not words)
                if change.inside and not material.everything:
                    yield ours(WARNING, "\\ its contents are listed with --all")

    return _sections(material, in_full)


def _sections(material: Material, in_full: Callable[[Iterable[Change]], Iterator[Row]]) -> Iterator[Row]:
    files, everything = material.files, material.everything
    yield from in_full(files.project)
    of_image = tuple(change for change in files.elsewhere if change.path.startswith(IMAGES))
    titles = ("Elsewhere on the machine: {}", tuple(change for change in files.elsewhere if change not in of_image))
    for title, changes in (titles, ("In the files of the image: {}, which stay in the sandbox", of_image)):
        if changes:
            yield from _heading(title.format(counted(len(changes), "change")), after=bool(files.project))
            yield from in_full(changes) if everything else map(listed, changes)
    if files.noise:
        folded = "" if everything else ", promoted with --caches, shown with --all"
        title = f"Caches and scratch files: {counted(len(files.noise), 'change')}{folded}"
        yield from _heading(title, after=bool(files.project or files.elsewhere))
        # A cache file that existed before the run is named: it is more than a by-product of the run.
        yield from in_full(files.noise) if everything else map(listed, (each for each in files.noise if each.before is not None))


def _summary(material: Material, changes: Iterable[Change], columns: int) -> Iterator[Row]:
    changes = tuple(changes)
    material.progress.begin("comparing", len(changes))
    files = [measured(material.preview(each), material.name(each)) for change in changes for each in material.one_by_one(change)]
    material.progress.end()
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
    """Return a change as one row, without content."""
    more = f" and {counted(change.inside, 'entry', 'entries')} below it" if change.inside else ""
    renamed = f" renamed from {named(change.renamed_from)}" if change.renamed_from else ""
    hidden = " (a real file that was hidden from the sandbox is here)" if change.masks_real else ""
    return ours(FACT, f"{LETTERS[change.kind]} {named(change.path)}{more}{renamed}{hidden}")


_BATCH = 500  # lines that are written at a time
_COLUMNS = 120  # where there is no terminal to ask
_NAMED = 10  # entries that a patch lacks, one by one
_MOST_ENTRIES = 1_000_000  # of a deleted directory: a git patch must name each


def refuse_on_a_terminal(show: ShowOptions) -> None:
    """Raise `PolicyError` for a patch on a terminal, because a patch contains the guest's bytes unescaped."""
    if show.form == "patch" and sys.stdout.isatty() and not show.raw:
        raise PolicyError(
            "a patch holds the program's bytes unchanged, and a terminal would act on them",
            hint="send it to a file or to git: agent-sandbox diff --patch | git apply; or see it escaped: agent-sandbox diff",
        )


def patch(material: Material, write: Callable[[bytes], object], console: Console) -> bool:
    """Write a git patch, and print the changes that it cannot express. Returns whether the patch is complete."""
    files = material.files
    caches = tuple(change for change in files.noise if contains(material.project, change.path))
    inside = sorted((*files.project, *(caches if material.everything else ())), key=lambda change: change.path)
    changes = (each for change in inside for each in material.machine.one_by_one(change, _MOST_ENTRIES))
    left_out = write_patch(changes, material.contents, material.former, project=material.project, write=write)
    for line in _lacking(left_out):
        console.note(line)
    if caches and not material.everything:
        console.note(f"not in the patch: {counted(len(caches), 'change')} in caches of the project (--all adds them)")
    if outside := len(files.elsewhere):
        console.note(f"not in the patch: {counted(outside, 'change')} elsewhere on the machine")
    return not any(each.content for each in left_out)


def _lacking(left_out: tuple[NotInPatch, ...]) -> Iterator[str]:
    for each in left_out[:_NAMED]:
        yield f"not in the patch: {each.path}: {each.what}"
    if len(left_out) > _NAMED:
        yield f"not in the patch: {len(left_out) - _NAMED:,} more like these"


@dataclass(frozen=True)
class LineFacts:
    """A line of a hunk."""

    kind: str
    text: bytes
    newline: bool | Omitted = OMITTED  # false for a last line without one


@dataclass(frozen=True)
class HunkFacts:
    """A hunk of a diff: lines that differ, with neighbouring lines. `added_left_out` counts added lines beyond the limit."""

    old_start: int
    old_lines: int
    new_start: int
    new_lines: int
    added_left_out: int
    lines: tuple[LineFacts, ...]


@dataclass(frozen=True)
class BinarySide:
    """The size and kind of a content that is not text."""

    bytes: int
    sort: str


@dataclass(frozen=True)
class BinaryFacts:
    """The old and the new side of a changed file that is not text."""

    before: BinarySide | None
    after: BinarySide | None
    first_difference: int | None


@dataclass(frozen=True)
class ContentFacts:
    """The content of a change. If the content is not shown, `hunks` is null and all other fields are omitted."""

    inline = True

    facts: tuple[str, ...] | Omitted = OMITTED
    warnings: tuple[str, ...] | Omitted = OMITTED
    added: int | Omitted = OMITTED
    removed: int | Omitted = OMITTED
    hunks: tuple[HunkFacts, ...] | None = None
    binary: BinaryFacts | Omitted | None = OMITTED
    more_bytes: int | Omitted = OMITTED
    unshown: tuple[str, ...] | Omitted = OMITTED
    content_sha256: str | Omitted = OMITTED  # of the whole new content; always there if the content is not shown in full


@dataclass(frozen=True)
class PlanFacts:
    """An effect plan's facts about one changed path: its risk, and the digest of its new content."""

    inline = True

    sha256: str | None
    risk: Risk


@dataclass(frozen=True)
class ShownChange:
    """A change with its content."""

    change: Change
    place: Literal["project", "elsewhere", "noise"]
    content: ContentFacts
    plan: PlanFacts | Omitted = OMITTED


def shown_changes(material: Material, plans: Mapping[str, PlanFacts] | None = None) -> Iterator[ShownChange]:
    """Return the changes as data. Content is given for the project, and with --all for every change.

    `plans` are keyed by path; an entry below a changed directory has the plan of that directory.
    """
    files = material.files
    places: tuple[tuple[Literal["project", "elsewhere", "noise"], tuple[Change, ...]], ...]
    places = (("project", files.project), ("elsewhere", files.elsewhere), ("noise", files.noise))
    for place, group in places:
        for whole in group:
            in_full = place == "project" or material.everything
            for change in material.one_by_one(whole) if in_full else (whole,):
                content = _content(material.preview(change), material.limits.added) if in_full else ContentFacts()
                yield ShownChange(change, place, content, (plans or {}).get(whole.path, OMITTED))


def _content(preview: Preview, most_added: int) -> ContentFacts:
    all_hunks: list[HunkFacts] = []
    room = most_added
    for hunk in hunks(preview.edits, len(preview.old)):
        one, room = _hunk(preview, hunk, room)
        all_hunks.append(one)
    binary = preview.binary
    return ContentFacts(
        tuple(preview.facts),
        tuple(preview.warnings),
        preview.added,
        preview.removed,
        tuple(all_hunks),
        BinaryFacts(
            None if binary.old_size is None else BinarySide(binary.old_size, binary.old_sort),
            None if binary.new_size is None else BinarySide(binary.new_size, binary.new_sort),
            binary.first_difference,
        )
        if binary is not None
        else None,
        preview.more_bytes,
        tuple(preview.unshown),
        preview.sha256 or OMITTED,
    )


def _hunk(preview: Preview, hunk: Hunk, room: int) -> tuple[HunkFacts, int]:
    lines: list[LineFacts] = []
    left_out = 0
    for (start, stop), edit in hunk.stretches():
        lines += [_line(SAME, line) for line in preview.old[start:stop]]
        if edit is not None:
            lines += [_line(REMOVED, line) for line in preview.old[edit.old_from : edit.old_to]]
            last = min(edit.new_to, edit.new_from + room)
            lines += [_line(ADDED, line) for line in preview.new[edit.new_from : last]]
            room -= last - edit.new_from
            left_out += edit.new_to - last
    first = preview.lines_before + 1
    old_lines, new_lines = hunk.old_to - hunk.old_from, hunk.new_to - hunk.new_from
    return HunkFacts(hunk.old_from + first, old_lines, hunk.new_from + first, new_lines, left_out, tuple(lines)), room


def _line(kind: str, line: bytes) -> LineFacts:
    return LineFacts(kind, line.removesuffix(b"\n"), OMITTED if line.endswith(b"\n") else False)


def _columns() -> int:
    """Return the width of the terminal, or that of $COLUMNS."""
    try:
        return os.get_terminal_size(1).columns or _COLUMNS
    except OSError:
        given = os.environ.get("COLUMNS", "")
        return int(given) if given.isdigit() and len(given) < 5 and int(given) else _COLUMNS
