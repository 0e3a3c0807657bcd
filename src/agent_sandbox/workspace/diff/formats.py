"""Diffs as rows for people: unified, side by side, and a summary.

A row of guest content always begins with a sign (a blank, `-` or `+`), and no row of the program's own text does. So no content can pass
for a heading, the start of a hunk or a remark.

The unified form is close to git's. It has no `---` and `+++` lines: a removed line that begins with two dashes would look the same. Patches
for `git apply` come from `patch`. Side by side, a line wider than its column continues in the next row. The summary puts the numbers before
the name: a name may hold any printable text, and could otherwise add numbers of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.diff.compare import DEFAULT, Binary, DiffLimits, Preview, counted_bytes
from agent_sandbox.workspace.escape import escapes, named, visible, width
from agent_sandbox.workspace.merge.text import Edit, find_edits
from agent_sandbox.workspace.nodes import EntryType

TITLE, FACT, HUNK, NOTE, HEADING, WARNING = "title", "fact", "hunk", "note", "heading", "warning"  # ours
SAME, REMOVED, ADDED = "same", "removed", "added"  # the guest's
SIGNS = {SAME: " ", REMOVED: "-", ADDED: "+"}
BETWEEN = " │ "
AROUND = 3  # lines of context
_PRINTABLE = bytes(range(0x20, 0x7F)) + b"\n"
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_LONGEST = 500  # characters; longer lines are not compared
_STEPS = 20_000

Marks = tuple[tuple[int, int], ...]
_MOST_PAIRS = 100
NO_NEWLINE = "\\ No newline at end of file"
NARROWEST = 40  # columns of both sides together
_CONTINUED = "↳"
LETTERS = {Kind.ADDED: "A", Kind.DELETED: "D", Kind.RETYPED: "T", Kind.MODIFIED: "M", Kind.MODE: "m", Kind.OWNER: "o", Kind.XATTR: "x"}
_LONGEST_BARS = 30  # columns
_SHORTEST_BARS = 5
_SHORT_DIGEST = 16  # hexadecimal digits of a digest in the summary


@dataclass(frozen=True)
class Cell:
    """A part of a row, with one style (`kind`). `lead` is a prefix of ours, such as the sign and the line number.

    `marks` are the stretches of `text` that differ from the other side.
    """

    kind: str
    text: str
    lead: str = ""
    marks: tuple[tuple[int, int], ...] = ()
    pad: int = 0  # blanks up to the next cell

    # Written out, like `Change.__init__`, because there is one for each line of a diff.
    def __init__(self, kind: str, text: str, lead: str = "", marks: tuple[tuple[int, int], ...] = (), pad: int = 0) -> None:
        values = self.__dict__
        values["kind"], values["text"], values["lead"], values["marks"], values["pad"] = kind, text, lead, marks, pad


@dataclass(frozen=True)
class Row:
    """One line of output. `path` is the file whose content the row shows."""

    cells: tuple[Cell, ...]
    path: str = ""
    between: str = BETWEEN

    def __init__(self, cells: tuple[Cell, ...], path: str = "", between: str = BETWEEN) -> None:
        values = self.__dict__
        values["cells"], values["path"], values["between"] = cells, path, between

    @property
    def plain(self) -> str:
        """The row as it is printed without colours."""
        if len(self.cells) == 1 and not self.cells[0].pad:
            return self.cells[0].lead + visible(self.cells[0].text)
        return self.between.join(f"{cell.lead}{visible(cell.text)}{' ' * cell.pad}" for cell in self.cells)


@dataclass(frozen=True)
class Block(Row):
    """Several lines as one row, for output without colours. Every line of content in it is printable ASCII, and has its sign."""

    @property
    def plain(self) -> str:
        """The lines as they are printed."""
        return self.cells[0].text


def ours(kind: str, text: str) -> Row:
    """Return a row with text of the program's own, not of the guest."""
    return Row((Cell(kind, text),))


def decoded(line: bytes) -> str:
    """Decode a line, without its newline. Bytes that are not UTF-8 become surrogate escapes."""
    return line.removesuffix(b"\n").decode(errors="surrogateescape")


@dataclass(frozen=True)
class Hunk:
    """Edits that stand close together, with the lines of context before the first and after the last."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int
    edits: tuple[Edit, ...]

    def __init__(self, old_from: int, old_to: int, new_from: int, new_to: int, edits: tuple[Edit, ...]) -> None:
        values = self.__dict__
        values["old_from"], values["old_to"], values["new_from"], values["new_to"] = old_from, old_to, new_from, new_to
        values["edits"] = edits

    def title(self, lines_before: int = 0) -> str:
        """Return the standard `@@` line that begins the hunk. `lines_before` is added to its line numbers."""
        old = _range(self.old_from, self.old_to, lines_before)
        return f"@@ -{old} +{_range(self.new_from, self.new_to, lines_before)} @@"

    def stretches(self) -> Iterator[tuple[tuple[int, int], Edit | None]]:
        """Yield each stretch of unchanged old lines with the edit that follows it. The last stretch has no edit: None."""
        at = self.old_from
        for edit in self.edits:
            yield (at, edit.old_from), edit
            at = edit.old_to
        yield (at, self.old_to), None


def hunks(edits: Sequence[Edit], old_length: int) -> Iterator[Hunk]:
    """Yield the hunks of a list of edits, for a file with `old_length` old lines."""
    group: list[Edit] = []
    for edit in edits:
        if group and edit.old_from - group[-1].old_to > 2 * AROUND:
            yield _hunk(group, old_length)
            group = []
        group.append(edit)
    if group:
        yield _hunk(group, old_length)


def _hunk(group: list[Edit], old_length: int) -> Hunk:
    first, last = group[0], group[-1]
    before, after = min(AROUND, first.old_from), min(AROUND, old_length - last.old_to)
    return Hunk(first.old_from - before, last.old_to + after, first.new_from - before, last.new_to + after, tuple(group))


def _range(start: int, stop: int, offset: int) -> str:
    length = stop - start
    first = offset + start + 1 if length else offset + start
    return f"{first}" if length == 1 else f"{first},{length}"


def differing(old: str, new: str) -> tuple[Marks, Marks]:
    """Return the stretches that differ in each of two lines; none if the lines have too little in common for marks to help."""
    if max(len(old), len(new)) > _LONGEST:
        return (), ()
    before, after = _WORD.findall(old), _WORD.findall(new)
    edits = find_edits([_raw(word) for word in before], [_raw(word) for word in after], steps=_STEPS)
    gone = _stretches(before, [(edit.old_from, edit.old_to) for edit in edits])
    come = _stretches(after, [(edit.new_from, edit.new_to) for edit in edits])
    kept = len(old.strip()) - sum(stop - start for start, stop in gone)
    return (gone, come) if kept * 3 >= max(len(old.strip()), len(new.strip())) else ((), ())


def _raw(word: str) -> bytes:
    return word.encode(errors="surrogateescape")


def _stretches(words: list[str], edited: list[tuple[int, int]]) -> Marks:
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return tuple((offsets[start], offsets[stop]) for start, stop in edited if start < stop)


def unified(
    preview: Preview, *, relative_to: str = "/", limits: DiffLimits = DEFAULT, words: bool = False, blocks: bool = False
) -> Iterator[Row]:
    """Yield the rows of one change as a unified diff. `words` marks the parts of a line that differ. `blocks` puts plain lines together.

    Names are shown relative to `relative_to`, a directory that contains the change.
    """
    path = preview.change.path
    if blocks and (text := _new_plain_file(preview, relative_to, limits)):
        yield Block((Cell(ADDED, text),), path)
        return
    yield from opening(preview, relative_to)
    room = limits.added
    for hunk in hunks(preview.edits, len(preview.old)):
        yield ours(HUNK, hunk.title(preview.lines_before))
        for (start, stop), edit in hunk.stretches():
            yield from _contents(SAME, preview.old[start:stop], path, {}, start, blocks=blocks)
            if edit is None:
                continue
            gone, come = paired_marks(preview, edit) if words else ({}, {})
            yield from _contents(REMOVED, preview.old[edit.old_from : edit.old_to], path, gone, edit.old_from, blocks=blocks)
            shown = min(edit.new_to, edit.new_from + room)
            room -= shown - edit.new_from
            lines = preview.new[edit.new_from : shown]
            yield from _contents(ADDED, lines, path, come, edit.new_from, limits.columns, blocks=blocks)
            if shown < edit.new_to:
                yield ours(WARNING, f"\\ {edit.new_to - shown:,} more added lines are not shown (--all shows them)")
    yield from closing(preview)


def _new_plain_file(preview: Preview, relative_to: str, limits: DiffLimits) -> str:
    """Return the whole diff of a new file of plain text; "" for any other change. There may be tens of thousands of such files.

    It is the text of the rows that `unified` yields otherwise.
    """
    new = preview.new
    if preview.old or preview.change.before is not None or preview.change.renamed_from or not 0 < len(new) <= limits.added:
        return ""
    if preview.cut or preview.warnings or preview.binary or preview.unshown or preview.more_bytes or not _is_plain(new, limits.columns):
        return ""
    name = _name(preview.change.path, relative_to)
    content = b"".join(new)[:-1].decode("ascii").replace("\n", "\n+")
    facts = "".join(f"{visible(fact)}\n" for fact in preview.facts)
    return f"diff --git {named(f'a/{name}')} {named(f'b/{name}')}\n{facts}@@ -0,0 +{_range(0, len(new), 0)} @@\n+{content}"


def opening(preview: Preview, relative_to: str) -> Iterator[Row]:
    """Yield the rows before the content: the file name, other differences, warnings, and a sentence about binary content."""
    new = _name(preview.change.path, relative_to)
    old = _name(preview.change.renamed_from, relative_to) if preview.change.renamed_from else new
    yield ours(TITLE, f"diff --git {named(f'a/{old}')} {named(f'b/{new}')}")
    for fact in preview.facts:
        yield ours(FACT, fact)
    for warning in preview.warnings:
        yield ours(WARNING, warning)
    if preview.binary is not None:
        yield ours(FACT, summed_up(preview.binary, preview.change))


def closing(preview: Preview) -> Iterator[Row]:
    """Yield the rows after the content, which describe the parts that are not shown."""
    if preview.more_bytes:
        yield ours(WARNING, f"\\ {preview.more_bytes:,} more bytes are added, too much to show")
    for why in preview.unshown:
        yield ours(WARNING, why)
    if preview.cut and preview.change.after is not None:
        size = counted_bytes(preview.change.after.size)
        if preview.sha256:
            yield ours(FACT, f"new content: {size}, sha256 {preview.sha256}")
        else:
            yield ours(WARNING, f"new content: {size}, not hashed: it cannot be read, or is too large for a diff")


def summed_up(binary: Binary, change: Change) -> str:
    """Describe a change of binary content in one sentence."""
    old = "text" if binary.old_size is None else f"{binary.old_size:,} bytes of {binary.old_sort}"
    new = "text" if binary.new_size is None else f"{binary.new_size:,} bytes of {binary.new_sort}"
    if change.before is None:
        return f"Binary content: {new}"
    if change.after is None:
        return f"Binary content deleted: {old}"
    return f"Binary contents differ: {old} → {new}, first at byte {binary.first_difference:,}"


def _name(path: str, relative_to: str) -> str:
    inside = relative_to.rstrip("/") + "/"
    return path.removeprefix(inside) if path.startswith(inside) else path.lstrip("/")


def paired_marks(preview: Preview, edit: Edit) -> tuple[dict[int, Marks], dict[int, Marks]]:
    """Return the stretches to mark in the old and in the new lines of an edit, by line number.

    Old and new lines are paired in order. A large edit has no marks, because its pairs mean nothing.
    """
    if edit.old_to - edit.old_from > _MOST_PAIRS or edit.new_to - edit.new_from > _MOST_PAIRS:
        return {}, {}
    gone: dict[int, Marks] = {}
    come: dict[int, Marks] = {}
    for old, new in zip(range(edit.old_from, edit.old_to), range(edit.new_from, edit.new_to), strict=False):
        gone[old], come[new] = differing(decoded(preview.old[old]), decoded(preview.new[new]))
    return gone, come


def _contents(
    kind: str, lines: Sequence[bytes], path: str, marks: Mapping[int, Marks], first: int, columns: int | None = None, *, blocks: bool
) -> Iterator[Row]:
    """Yield the rows of neighbouring lines. `marks` are the stretches to mark in a line, by its number; `first` is that of the first."""
    if blocks and len(lines) > 1 and _is_plain(lines, columns):
        sign = SIGNS[kind]
        text = sign + b"".join(lines)[:-1].decode("ascii").replace("\n", f"\n{sign}")
        yield Block((Cell(kind, text),), path)
        return
    for number, line in enumerate(lines, first):
        yield from _content(kind, line, path, marks.get(number, ()), columns)


def _is_plain(lines: Sequence[bytes], columns: int | None) -> bool:
    """Return whether each line ends with a newline, has no other character that must be escaped, and need not be cut."""
    content = b"".join(lines)
    if not content.endswith(b"\n") or content.translate(None, _PRINTABLE):
        return False
    return columns is None or len(content) <= columns or max(map(len, lines)) <= columns


def _content(kind: str, line: bytes, path: str, marks: Marks = (), columns: int | None = None) -> list[Row]:
    text = decoded(line)
    cut = len(text) - columns if columns is not None else 0
    rows = [Row((Cell(kind, text[:columns] if cut > 0 else text, SIGNS[kind], marks),), path)]
    if cut > 0:
        rows.append(ours(WARNING, f"\\ {cut:,} more characters of this line are not shown (--all shows them)"))
    if not line.endswith(b"\n"):
        rows.append(ours(NOTE, NO_NEWLINE))
    return rows


@dataclass(frozen=True)
class _Line:
    """A line of one side of a side-by-side diff; `at` is its index among the lines of the preview."""

    kind: str
    at: int
    text: str
    marks: Marks = ()
    more: int = 0  # characters left out
    ended: bool = True

    @classmethod
    def of(cls, kind: str, at: int, content: bytes, marks: Marks = (), columns: int | None = None) -> _Line:
        text = decoded(content)
        more = max(0, len(text) - columns) if columns is not None else 0
        return cls(kind, at, text[:columns] if more else text, marks, more, content.endswith(b"\n"))


def side_by_side(
    preview: Preview, columns: int, *, relative_to: str = "/", limits: DiffLimits = DEFAULT, words: bool = False
) -> Iterator[Row]:
    """Yield the rows of one change side by side, in `columns` columns of a terminal."""
    yield from opening(preview, relative_to)
    layout = _Layout(preview, max(columns, NARROWEST))
    room = limits.added
    for hunk in hunks(preview.edits, len(preview.old)):
        yield ours(HUNK, hunk.title(preview.lines_before))
        shift = hunk.new_from - hunk.old_from
        for (start, stop), edit in hunk.stretches():
            for number in range(start, stop):
                line = _Line.of(SAME, number, preview.old[number])
                yield from layout.rows(line, replace(line, at=number + shift))
            if edit is None:
                continue
            gone, come = paired_marks(preview, edit) if words else ({}, {})
            shown = min(edit.new_to, edit.new_from + room)
            room -= shown - edit.new_from
            left = [_Line.of(REMOVED, at, preview.old[at], gone.get(at, ())) for at in range(edit.old_from, edit.old_to)]
            right = [_Line.of(ADDED, at, preview.new[at], come.get(at, ()), limits.columns) for at in range(edit.new_from, shown)]
            for old, new in zip_longest(left, right):
                yield from layout.rows(old, new)
            if shown < edit.new_to:
                yield ours(WARNING, f"\\ {edit.new_to - shown:,} more added lines are not shown (--all shows them)")
            shift = edit.new_to - edit.old_to
    yield from closing(preview)


class _Layout:
    def __init__(self, preview: Preview, columns: int) -> None:
        self._path = preview.change.path
        self._offset = preview.lines_before + 1
        self._digits = len(str(preview.lines_before + max(len(preview.old), len(preview.new))))
        self._text = max(1, (columns - len(BETWEEN)) // 2 - self._digits - 2)

    def rows(self, left: _Line | None, right: _Line | None) -> Iterator[Row]:
        """Yield two lines next to each other, in as many rows as the longer one takes."""
        for number, (old, new) in enumerate(zip_longest(self._pieces(left), self._pieces(right))):
            yield Row((self._cell(left, old, number), self._cell(right, new, number, last=True)), self._path)
        if right and right.more:
            yield ours(WARNING, f"\\ {right.more:,} more characters of the new line are not shown (--all shows them)")
        for line, side in ((left, "old"), (right, "new")):
            if line and not line.ended:
                yield ours(NOTE, f"{NO_NEWLINE} ({side})")

    def _cell(self, line: _Line | None, piece: tuple[int, int, int] | None, number: int, *, last: bool = False) -> Cell:
        if line is None or piece is None:
            return Cell(SAME, "") if last else Cell(SAME, "", " " * (self._digits + 2), pad=self._text)
        start, stop, taken = piece
        label = _CONTINUED if number else str(line.at + self._offset)
        marks = tuple((max(a, start) - start, min(b, stop) - start) for a, b in line.marks if a < stop and b > start)
        return Cell(
            line.kind, line.text[start:stop], f"{SIGNS[line.kind]}{label:>{self._digits}} ", marks, 0 if last else self._text - taken
        )

    def _pieces(self, line: _Line | None) -> Sequence[tuple[int, int, int]]:
        """Break a line into pieces that fit the column. Return the start, end and width of each piece."""
        if line is None:
            return ()
        text = line.text
        if text.isascii() and text.isprintable():  # the common case: one column per character
            starts = range(0, len(text) or 1, self._text)
            return [(start, min(start + self._text, len(text)), min(self._text, len(text) - start)) for start in starts]
        pieces: list[tuple[int, int, int]] = []
        start = taken = 0
        for at, (character, escape) in enumerate(zip(text, escapes(text), strict=True)):
            wide = len(escape) or width(character)
            if taken + wide > self._text and taken:
                pieces.append((start, at, taken))
                start, taken = at, 0
            taken += wide
        return [*pieces, (start, len(text), min(taken, self._text))]


@dataclass(frozen=True)
class Measured:
    """A change with its numbers of added and removed lines. `more` is set if some of them were not counted."""

    change: Change
    name: str
    added: int = 0
    removed: int = 0
    sizes: str = ""  # of binary content
    more: bool = False
    look: tuple[str, ...] = ()  # differences besides content
    sha256: str = ""  # of content that is not shown in full


def measured(preview: Preview, name: str) -> Measured:
    """Return the numbers of added and removed lines of a change, for the summary. `name` is the file name to show."""
    binary = preview.binary
    sizes = ""
    if binary is not None:
        before, after = preview.change.before, preview.change.after
        sizes = f"{before.size if before else 0:,} → {after.size if after else 0:,} bytes"
    more, sha256 = bool(preview.more_bytes or preview.unshown), preview.sha256 if preview.cut else ""
    return Measured(preview.change, name, preview.added, preview.removed, sizes, more, tuple(_look(preview.change)), sha256)


def _look(change: Change) -> Iterator[str]:
    """Yield a new type, mode and link target in a few words. The usual mode of a new entry is not mentioned."""
    before, after = change.before, change.after
    if after is None:
        return
    if before is not None and before.type is not after.type:
        yield f"was a {before.type.value}, is a {after.type.value}"
    if after.type is EntryType.SYMLINK:
        yield f"link to {named(after.target)}"
    elif before is not None and before.type is after.type:
        if before.mode != after.mode:
            yield f"mode {before.mode:04o}, now {after.mode:04o}"
    elif after.mode & 0o7000 or (after.type is EntryType.FILE and after.mode & 0o111):
        yield f"mode {after.mode:04o}"
    if change.xattrs:
        yield f"{len(change.xattrs):,} extended {'attribute differs' if len(change.xattrs) == 1 else 'attributes differ'}"


def summary(files: Sequence[Measured], columns: int) -> Iterator[Row]:
    """Yield a row for each change, with bars on a common scale, and the total."""
    added = max((len(f"{each.added:,}") for each in files), default=1)
    removed = max((len(f"{each.removed:,}") for each in files), default=1)
    room = min(_LONGEST_BARS, max(_SHORTEST_BARS, columns // 3 - added - removed))
    most = max((each.added + each.removed for each in files), default=0)
    room = min(room, most)
    for each in files:
        plus, minus = _bars(each.added, each.removed, most, room)
        numbers = f"{LETTERS[each.change.kind]} {f'+{each.added:,}':>{added + 1}} {f'-{each.removed:,}':>{removed + 1}} "
        cells = (Cell(FACT, numbers), Cell(ADDED, "+" * plus), Cell(REMOVED, "-" * minus, pad=room - plus - minus + 1))
        yield Row((*cells, Cell(FACT, f"{named(each.name)}{_remarks(each)}")), between="")
    if files:
        lines = f"+{sum(each.added for each in files):,} -{sum(each.removed for each in files):,} lines"
        binaries = sum(bool(each.sizes) for each in files)
        others = f", {binaries:,} of them not text" if binaries else ""
        uncounted = "; more where it says so" if any(each.more for each in files) else ""
        yield ours(HEADING, f"# {len(files):,} {'change' if len(files) == 1 else 'changes'}{others}: {lines}{uncounted}")


def _remarks(each: Measured) -> str:
    remarks = [each.sizes] if each.sizes else []
    if each.sha256:
        remarks.append(f"sha256 {each.sha256[:_SHORT_DIGEST]}…")
    remarks += each.look
    if each.change.inside:
        remarks.append(f"and {each.change.inside:,} below it")
    if each.change.renamed_from:
        remarks.append("renamed")
    if each.more:
        remarks.append("and more, not counted")
    return f" ({'; '.join(remarks)})" if remarks else ""


def _bars(added: int, removed: int, most: int, room: int) -> tuple[int, int]:
    """Return the lengths of the `+` bar and the `-` bar. A bar that is not empty has at least one sign.

    The longest change of the summary has `most` lines and fills `room` columns.
    """
    if most <= room:
        return added, removed
    plus = max(1, added * room // most) if added else 0
    minus = max(1, removed * room // most) if removed else 0
    return min(plus, room - minus) if minus else plus, minus
