"""Read both sides of a change into a `Preview`, the value that every form of a diff is made from.

A preview also holds the facts besides content, in sentences with escaped names, and the sort of binary content. The sort is a remark for
people; nothing depends on it.

Time and memory are bounded whatever a guest wrote. Beyond a bound, lines count as replaced instead of being compared, and added content
may be left out, which is counted. Removed content is not left out; if the real file cannot be read or is too large, the preview says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_sandbox._fast.values import Protocol, dataclass, replace
from agent_sandbox.workspace.changes import Change, Contents, Kind
from agent_sandbox.workspace.diff.window import Window, read_window
from agent_sandbox.workspace.escape import lookalike, named
from agent_sandbox.workspace.merge.edits import STEPS, Edit, find_edits
from agent_sandbox.workspace.nodes import EntryType, Node

_BITS = {EntryType.FILE: 0o100000, EntryType.SYMLINK: 0o120000, EntryType.DIRECTORY: 0o040000}
_MAGIC = (
    (b"\x7fELF", "ELF program"),
    (b"MZ", "Windows program"),
    (b"\xcf\xfa\xed\xfe", "Mach-O program"),
    (b"\0asm", "WebAssembly module"),
    (b"\x89PNG\r\n\x1a\n", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"\0\0\x01\0", "icon"),
    (b"%PDF-", "PDF document"),
    (b"PK\x03\x04", "ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\0", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"7z\xbc\xaf\x27\x1c", "7z archive"),
    (b"!<arch>\n", "archive or Debian package"),
    (b"SQLite format 3\0", "SQLite database"),
    (b"\xca\xfe\xba\xbe", "Java class or Mach-O program"),
    (b"OggS", "Ogg media"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"wOF2", "WOFF2 font"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_INSIDE = ((257, b"ustar", "tar archive"), (8, b"WEBP", "WebP image"), (4, b"ftyp", "MP4 media"))
_PLAIN = bytes(byte for byte in range(256) if byte >= 0x20 and byte != 0x7F) + b"\t\n\r\f"


def facts(change: Change) -> tuple[str, ...]:
    """Return the differences besides content as sentences, in the order in which they are shown."""
    before, after = change.before, change.after
    lines: list[str] = []
    if before is None and after is not None:
        lines.append(f"new {after.type.value} mode {_mode(after)}")
    elif after is None and before is not None:
        lines.append(f"deleted {before.type.value} mode {_mode(before)}")
    elif before and after:
        if before.type is not after.type:
            lines.append(f"was a {before.type.value}, is a {after.type.value}")
        if before.mode != after.mode:
            lines += [f"old mode {_mode(before)}", f"new mode {_mode(after)}"]
        if (before.uid, before.gid) != (after.uid, after.gid):
            lines.append(f"owner {before.uid}:{before.gid} is now {after.uid}:{after.gid}")
    if change.renamed_from:
        lines.append(f"renamed from {named(change.renamed_from)}")
    if change.link_of:
        lines.append(f"the same file as {named(change.link_of)}")
    lines += [f"extended attribute {named(name)} differs" for name in change.xattrs]
    if change.inside:
        lines.append(f"and {change.inside:,} {'entry' if change.inside == 1 else 'entries'} below it")
    return tuple(lines)


def warnings(change: Change) -> tuple[str, ...]:
    """Return the warnings that a reader of the change must not miss."""
    lines: list[str] = []
    if change.masks_real:
        lines.append("a real file that was hidden from the sandbox is here")
    if change.unread:
        lines.append("not everything here could be read, so it is taken as changed")
    if change.after is not None and (remark := lookalike(change.path)):
        lines.append(remark)
    return tuple(lines)


def _mode(node: Node) -> str:
    return f"{_BITS.get(node.type, 0) | node.mode:06o}"


def is_binary(content: bytes) -> bool:
    """Return whether content is mostly not text: more than a fifth is control characters or invalid UTF-8.

    A few odd bytes, or a NUL, do not hide a text. UTF-8 without a NUL is text, whatever else is in it.
    """
    odd = len(content.translate(None, _PLAIN))
    broken = 0
    if not content.isascii():
        text = content.decode(errors="surrogateescape")
        broken = len(text) - len(text.encode(errors="ignore").decode())
    return (odd + broken) * 5 > len(content) and (broken > 0 or b"\0" in content)


def sort_of(start: bytes) -> str:
    """Return the format that the magic number of the content names; "data" if it is none of the commonest."""
    for mark, sort in _MAGIC:
        if start.startswith(mark):
            return sort
    return next((sort for offset, mark, sort in _INSIDE if start[offset : offset + len(mark)] == mark), "data")


class FormerContents(Protocol):
    """A source of the old content of changed files: the machine as it is, or the kept originals."""

    def open_old(self, change: Change) -> int:
        """Return a descriptor to read the old content of a regular file; the caller closes it. Raises OSError."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits on how much of one change is compared and shown. `added` and `columns` do not apply to removed lines."""

    bytes: int = 16 << 20  # of each side, compared line by line
    lines: int = 1_000_000  # likewise
    added: int = 2_000  # added lines shown
    columns: int = 2_000  # characters of an added line
    inside: int = 200  # entries below a removed directory, shown one by one


DEFAULT = Limits()
EVERYTHING = Limits(bytes=64 << 20, lines=4_000_000, added=4_000_000, columns=64 << 20, inside=100_000)


class Effort:
    """The comparison steps that are left for all files together."""

    def __init__(self, steps: int = 30_000_000) -> None:
        self.left = steps

    def find(self, old: list[bytes], new: list[bytes]) -> list[Edit]:
        """Return the edits between two lists of lines, within the steps that are left."""
        steps = max(0, min(STEPS, self.left))
        edits = find_edits(old, new, steps=steps)
        number = sum(edit.old_to - edit.old_from + edit.new_to - edit.new_from for edit in edits)
        self.left -= min(steps, number * number // 2)
        return edits


@dataclass(frozen=True)
class Binary:
    """Content that is not text: size and sort of each side, and where they first differ. A size is None for text or nothing."""

    old_size: int | None
    new_size: int | None
    old_sort: str = ""
    new_sort: str = ""
    first_difference: int | None = None


@dataclass(frozen=True)
class Preview:
    """One change, ready to be shown. Lines keep their newline; `lines_before` lines of the file precede them."""

    change: Change
    facts: tuple[str, ...] = ()  # differences besides content, in sentences
    warnings: tuple[str, ...] = ()  # must not be missed
    old: tuple[bytes, ...] = ()
    new: tuple[bytes, ...] = ()
    edits: tuple[Edit, ...] = ()
    lines_before: int = 0
    binary: Binary | None = None
    unshown: tuple[str, ...] = ()  # parts that cannot be shown, and why
    more_bytes: int = 0  # of added content that was not compared

    @property
    def removed(self) -> int:
        """The number of removed lines."""
        return sum(edit.old_to - edit.old_from for edit in self.edits)

    @property
    def added(self) -> int:
        """The number of added lines, among those that were compared."""
        return sum(edit.new_to - edit.new_from for edit in self.edits)


class _Unreadable(Exception):
    """One side cannot be read, so lines cannot be compared."""


def compare(
    change: Change, contents: Contents, former: FormerContents, *, limits: Limits = DEFAULT, effort: Effort | None = None
) -> Preview:
    """Return the preview of a change. Read errors are reported in the value, never raised."""
    preview = Preview(change, facts(change), warnings(change))
    same_content = change.before and change.after and change.kind not in (Kind.MODIFIED, Kind.RETYPED)
    if same_content or (change.renamed_from and change.kind is Kind.ADDED):
        return preview
    opened: list[int] = []
    unshown: list[str] = []
    try:
        old = _open(change.before, "old", lambda: former.open_old(change), opened, unshown)
        new = _open(change.after, "new", lambda: contents.open_file(change), opened, unshown)
        stamps = [_stamp(fd) for fd in opened]
        window = read_window(old, new, limits.bytes)
        if stamps != [_stamp(fd) for fd in opened]:
            unshown.append("it changed while it was being read: this may be a mixture")
    except _Unreadable as error:
        return replace(preview, unshown=(*unshown, str(error)))
    except OSError as error:
        return replace(preview, unshown=(*unshown, f"cannot be read: {error.strerror}"))
    finally:
        for fd in opened:
            os.close(fd)
    if change.before and change.before.type is EntryType.SYMLINK:
        window = replace(window, old=os.fsencode(change.before.target))
    if change.after and change.after.type is EntryType.SYMLINK:
        window = replace(window, new=os.fsencode(change.after.target))
    return _add_content(replace(preview, unshown=tuple(unshown)), window, limits, effort or Effort())


def _open(node: Node | None, side: str, open_it: Callable[[], int], opened: list[int], unshown: list[str]) -> int | None:
    if node is None or node.type in (EntryType.DIRECTORY, EntryType.SYMLINK):
        return None
    if node.type is not EntryType.FILE:
        unshown.append(f"{side}: a {node.type.value}, which is not opened")
        return None
    try:
        opened.append(open_it())
    except OSError as error:
        raise _Unreadable(f"{side}: cannot be read: {error.strerror}") from error
    return opened[-1]


def _stamp(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _add_content(preview: Preview, window: Window, limits: Limits, effort: Effort) -> Preview:
    """Add the content. A text side is shown even if the other is binary: making a file binary must not hide its old text."""
    if window.old == window.new and not window.old_left and not window.new_left:
        return preview
    old, new = window.old, window.new
    if old_binary := is_binary(old):
        old = b""
    if new_binary := is_binary(new):
        new = b""
    if old_binary or new_binary:
        binary = Binary(
            len(window.old) + window.old_left + window.start if old_binary else None,
            len(window.new) + window.new_left + window.start if new_binary else None,
            sort_of(window.old) if old_binary else "",
            sort_of(window.new) if new_binary else "",
            window.first_difference if preview.change.before and preview.change.after else None,
        )
        preview = replace(preview, binary=binary)
    old_lines, new_lines = lines_of(old), lines_of(new)
    if (window.old_left and not old_binary) or len(old_lines) > limits.lines:
        size = len(window.old) + window.old_left
        why = f"old: {size:,} bytes from line {window.lines + 1:,} on are replaced or go away: too much to show"
        return replace(preview, unshown=(*preview.unshown, why))
    more = 0 if new_binary else window.new_left
    if (more or len(new_lines) > limits.lines) and new_lines:
        kept = new_lines[: limits.lines] if len(new_lines) > limits.lines else new_lines[:-1]  # the last line may be cut
        more += sum(map(len, new_lines[len(kept) :]))
        new_lines = kept
    return replace(
        preview,
        old=tuple(old_lines),
        new=tuple(new_lines),
        edits=tuple(effort.find(old_lines, new_lines)),
        lines_before=window.lines,
        more_bytes=more,
    )


def lines_of(content: bytes) -> list[bytes]:
    """Split at newlines only. The last line may lack its newline.

    `splitlines` would also split at carriage returns and vertical tabs.
    """
    lines = content.split(b"\n")
    last = lines.pop()
    ended = [line + b"\n" for line in lines]
    return [*ended, last] if last else ended
