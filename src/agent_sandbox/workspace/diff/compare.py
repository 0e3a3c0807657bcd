"""Read both sides of a change into a `Preview`, the value that every form of a diff is made from.

A preview also holds the differences other than content, as sentences with escaped names, and the format of binary content. The format is a
remark for people; nothing depends on it. The old side is on the machine or in the kept originals; the new side is in the layers
(`layers.stack`).

Time and memory are bounded whatever a guest wrote. Beyond a bound, lines count as replaced instead of being compared. Added content may be
left out; then the preview counts the bytes left out and has the digest of the whole file. Binary content is never shown, and always has its
digest. Removed content is not left out; if the real file cannot be read or is too large, the preview says so.

A file may change while it is read: sizes are taken once, and the bytes that were read are shown (`window`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import Protocol, dataclass, field, replace
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.contents import SMALLEST_UNREMEMBERED, Mixed
from agent_sandbox.workspace.diff.window import Window, read_window
from agent_sandbox.workspace.digests import MOST_HASHED, content_digest
from agent_sandbox.workspace.escape import lookalike, named
from agent_sandbox.workspace.merge.text import STEPS, Edit, find_edits, split_lines
from agent_sandbox.workspace.nodes import EntryType, Node, describe
from agent_sandbox.workspace.originals.files import in_memory
from agent_sandbox.workspace.reality import Base, Bases, Fingerprint, digest_of_open

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
    """Return the differences other than content, as sentences in the order of display."""
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
    lines += [_attribute(name, after.xattrs.get(name) if after else None) for name in change.xattrs]
    if change.inside:
        lines.append(f"and {change.inside:,} {'entry' if change.inside == 1 else 'entries'} below it")
    return tuple(lines)


def _attribute(name: str, value: bytes | None) -> str:
    """Describe an extended attribute that differs, by the size and digest of its new value."""
    now = "removed" if value is None else f"now {counted_bytes(len(value))}, sha256 {sha256(value).hexdigest()}"
    return f"extended attribute {named(name)} differs: {now}"


def counted_bytes(size: int) -> str:
    """Return a size in bytes with its unit."""
    return f"{size:,} {'byte' if size == 1 else 'bytes'}"


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
    """Return whether content is binary: more than a fifth of it is control characters or invalid UTF-8.

    A text with a few odd bytes is still a text. Valid UTF-8 without a NUL is always text.
    """
    if content.isascii() and b"\0" not in content:
        return False
    odd = len(content.translate(None, _PLAIN))
    broken = 0
    if not content.isascii():
        text = content.decode(errors="surrogateescape")
        broken = len(text) - len(text.encode(errors="ignore").decode())
    return (odd + broken) * 5 > len(content) and (broken > 0 or b"\0" in content)


def sort_of(start: bytes) -> str:
    """Return the file format that the magic number at the start of the content names; "data" if it names none."""
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
class DiffLimits:
    """Limits on how much of one change is compared and shown. `added` and `columns` do not apply to removed lines."""

    bytes: int = 16 << 20  # of each side, compared line by line
    lines: int = 1_000_000  # likewise
    added: int = 2_000  # added lines shown
    columns: int = 2_000  # characters of an added line
    inside: int = 200  # entries below a removed directory, shown one by one


DEFAULT = DiffLimits()
EVERYTHING = DiffLimits(bytes=64 << 20, lines=4_000_000, added=4_000_000, columns=64 << 20, inside=100_000)


class Effort:
    """A budget for all files of a diff: `left` comparison steps, and a number of bytes to be hashed."""

    def __init__(self, steps: int = 30_000_000, hashed: int = MOST_HASHED) -> None:
        self.left = steps
        self._hashed = hashed

    def digest(self, change: Change, contents: Contents) -> str:
        """Return the digest of new content; "" if it cannot be read, or is more than the bytes that are left."""
        size = change.after.size if change.after is not None else 0
        if size > self._hashed:
            return ""
        self._hashed -= size
        try:
            return content_digest(change, contents)
        except OSError:
            return ""

    def find(self, old: Sequence[bytes], new: Sequence[bytes]) -> list[Edit]:
        """Return the edits between two lists of lines. The search takes no more steps than are left."""
        steps = max(0, min(STEPS, self.left))
        edits = find_edits(old, new, steps=steps)
        number = sum(edit.old_to - edit.old_from + edit.new_to - edit.new_from for edit in edits)
        self.left -= min(steps, number * number // 2)
        return edits


@dataclass(frozen=True)
class Binary:
    """A change with binary content: the size and format of each binary side, and the offset of the first difference.

    The size of a side that is text is None.
    """

    old_size: int | None
    new_size: int | None
    old_sort: str = ""
    new_sort: str = ""
    first_difference: int | None = None


@dataclass(frozen=True)
class Preview:
    """One change, ready to be shown. `old` and `new` hold lines with their newlines, after `lines_before` lines that both files share."""

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
    cut: bool = False  # the new content is not shown in full
    sha256: str = ""  # of the whole new content, if it is known; always if `cut`, unless it cannot be read or is too large

    # Written out, like `Change.__init__`, because there is one for each change.
    def __init__(
        self,
        change: Change,
        facts: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
        old: tuple[bytes, ...] = (),
        new: tuple[bytes, ...] = (),
        edits: tuple[Edit, ...] = (),
        lines_before: int = 0,
        binary: Binary | None = None,
        unshown: tuple[str, ...] = (),
        more_bytes: int = 0,
        cut: bool = False,
        sha256: str = "",
    ) -> None:
        values = self.__dict__
        values["change"], values["facts"], values["warnings"], values["old"], values["new"] = change, facts, warnings, old, new
        values["edits"], values["lines_before"], values["binary"], values["unshown"] = edits, lines_before, binary, unshown
        values["more_bytes"], values["cut"], values["sha256"] = more_bytes, cut, sha256

    @property
    def removed(self) -> int:
        """The number of removed lines."""
        return sum(edit.old_to - edit.old_from for edit in self.edits)

    @property
    def added(self) -> int:
        """The number of added lines, among those that were compared."""
        return sum(edit.new_to - edit.new_from for edit in self.edits)


class _Unreadable(Exception):
    """Raised if one side cannot be read, so that lines cannot be compared."""


def compare(
    change: Change,
    contents: Contents,
    former: FormerContents,
    *,
    limits: DiffLimits = DEFAULT,
    effort: Effort | None = None,
    digests: Mapping[str, str] | None = None,
) -> Preview:
    """Return the preview of a change. Read errors are described in the preview, never raised.

    A renamed file is compared with the content of its old path. If the old path cannot be read, the file is shown whole, so that a rename
    hides no edit. `digests` are digests of new content that are known already, by path.
    """
    effort = effort or Effort()
    preview = _compared(change, contents, former, limits, effort)
    known, cut = (digests or {}).get(change.path, ""), _is_cut(preview, limits)
    if cut and not known:
        known = effort.digest(change, contents)
    return _with(preview, cut=cut, sha256=known) if cut or known else preview


def _with(preview: Preview, **values: object) -> Preview:
    """Return a preview with these fields changed. As `replace`, and four times as fast: there are several of these for each change."""
    result = object.__new__(Preview)
    result.__dict__.update(preview.__dict__)
    result.__dict__.update(values)
    return result


def _is_cut(preview: Preview, limits: DiffLimits) -> bool:
    """Return whether a part of the new content is not shown."""
    change = preview.change
    if change.after is None or change.after.type is not EntryType.FILE or change.kind not in (Kind.ADDED, Kind.MODIFIED, Kind.RETYPED):
        return False
    if preview.more_bytes or preview.unshown or (preview.binary is not None and preview.binary.new_size is not None):
        return True
    if preview.added > limits.added:
        return True
    return any(max(map(len, preview.new[edit.new_from : edit.new_to]), default=0) > limits.columns for edit in preview.edits)


def _compared(change: Change, contents: Contents, former: FormerContents, limits: DiffLimits, effort: Effort) -> Preview:
    preview = Preview(change, facts(change), warnings(change))
    if change.before and change.after and change.kind not in (Kind.MODIFIED, Kind.RETYPED):
        return preview  # the same content
    renamed = bool(change.renamed_from) and change.kind is Kind.ADDED
    origin = replace(change, path=change.renamed_from, before=change.after) if renamed else change
    if (window := _small_window(change, origin, contents, former, limits.bytes)) is not None:
        return _add_content(preview, window, limits, effort)
    opened: list[int] = []
    unshown: list[str] = []
    try:
        try:
            old = _open(origin.before, "old", lambda: former.open_old(origin), opened, unshown)
        except _Unreadable:
            if not renamed:
                raise
            old = None
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
    return _add_content(replace(preview, unshown=tuple(unshown)) if unshown else preview, window, limits, effort)


def _small_window(change: Change, origin: Change, contents: Contents, former: FormerContents, most: int) -> Window | None:
    """Return both files whole if the new one is in memory and the old one is missing or small. Return None if both must be opened."""
    read = contents.recall(change.path) if isinstance(contents, Mixed) else None
    if read is None or change.after is None or change.after.type is not EntryType.FILE or len(read.content) > most:
        return None
    if origin.before is None:
        return Window(b"", read.content)
    if origin.before.type is not EntryType.FILE:
        return None
    old = former.read_old(origin) if isinstance(former, Formerly) else None
    old = _read_small(former, origin) if old is None else old
    return Window(old, read.content) if old is not None and len(old) <= most else None


def _read_small(former: FormerContents, change: Change) -> bytes | None:
    """Return the old content of a small file that can be read, and does not change meanwhile; None for any other."""
    try:
        fd = former.open_old(change)
    except OSError:
        return None
    try:
        stamp = _stamp(fd)
        if stamp[0] >= SMALLEST_UNREMEMBERED:
            return None
        content = os.pread(fd, stamp[0], 0)
        return content if _stamp(fd) == stamp and len(content) == stamp[0] else None
    except OSError:
        return None
    finally:
        os.close(fd)


def pair_renames(changes: ChangeSet) -> ChangeSet:
    """Clear `renamed_from` in each change if no change removes that old path. The new file is then shown whole."""
    gone = {change.path for change in changes if change.before is not None and change.after is None}

    def goes(path: str) -> bool:
        while path and path not in gone:
            path = path.rpartition("/")[0]
        return bool(path)

    if all(goes(change.renamed_from) for change in changes if change.renamed_from):
        return changes
    return ChangeSet(tuple(change if goes(change.renamed_from) else replace(change, renamed_from="") for change in changes))


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


def _add_content(preview: Preview, window: Window, limits: DiffLimits, effort: Effort) -> Preview:
    """Return the preview with the lines of the window and their edits.

    A text side is shown even if the other side is binary, so that making a file binary does not hide its old text.
    """
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
        preview = _with(preview, binary=binary)
    old_lines, new_lines = split_lines(old) if old else (), split_lines(new) if new else ()
    if (window.old_left and not old_binary) or len(old_lines) > limits.lines:
        size = len(window.old) + window.old_left
        why = f"old: {size:,} bytes from line {window.lines + 1:,} on are replaced or go away: too much to show"
        return replace(preview, unshown=(*preview.unshown, why))
    more = 0 if new_binary else window.new_left
    if (more or len(new_lines) > limits.lines) and new_lines:
        kept = new_lines[: limits.lines] if len(new_lines) > limits.lines else new_lines[:-1]  # the last line may be cut
        more += sum(map(len, new_lines[len(kept) :]))
        new_lines = kept
    return _with(
        preview,
        old=old_lines,
        new=new_lines,
        edits=tuple(effort.find(old_lines, new_lines)),
        lines_before=window.lines,
        more_bytes=more,
    )


@dataclass(frozen=True)
class MachineFiles:
    """The old content of files, read from the machine as it is now. Links are not followed, because the overlay follows none either."""

    root: str = "/"

    def open_old(self, change: Change) -> int:
        """Open the old content; see `FormerContents`."""
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return beneath.open_file(root, change.path.lstrip("/"), one_filesystem=False)
        finally:
            os.close(root)

    def below(self, change: Change, limit: int) -> tuple[Change, ...]:
        """Return a deletion for each entry below a removed directory.

        Empty if there are more than `limit` entries or if they cannot be read. Also empty if something in the directory was hidden from the
        guest: the guest cannot have meant to remove an entry that it did not see.
        """
        was_directory = change.before is not None and change.before.type is EntryType.DIRECTORY
        still_directory = change.after is not None and change.after.type is EntryType.DIRECTORY
        if not was_directory or still_directory or not 0 < change.inside <= limit or change.masks_real:
            return ()
        try:
            return tuple(self._walk(change, limit))
        except (OSError, WorkspaceError):
            return ()

    def _walk(self, change: Change, limit: int) -> Iterator[Change]:
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = beneath.open_directory(root, change.path.lstrip("/"), one_filesystem=False)
        finally:
            os.close(root)
        try:
            for entry in beneath.walk(top, limit=limit, unlock=False):
                attributes = beneath.xattrs(entry.directory, entry.name)
                node = describe(entry.directory, entry.name, entry.status, attributes, own_prefix="trusted.overlay.")
                yield Change(f"{change.path}/{entry.path}", Kind.DELETED, node, None, change.target)
        finally:
            os.close(top)

    def one_by_one(self, change: Change, limit: int) -> tuple[Change, ...]:
        """Return the change, followed by a deletion for each entry below it, if there are at most `limit` and they can be read."""
        below = self.below(change, limit) if change.inside else ()
        return (replace(change, inside=0), *below) if below else (change,)


@dataclass(frozen=True)
class Formerly(MachineFiles):
    """The content of files from before a sandbox first changed them: the kept copy, or the real file if it has not changed since."""

    bases: Bases = field(default_factory=dict)
    read_base: Callable[[Base], bytes] | None = None

    def read_old(self, change: Change) -> bytes | None:
        """Return the old content if it was kept; None if the file must be opened."""
        base = self.bases.get(change.path)
        if base is None or not base.known or base.seen is None or not base.kept or self.read_base is None:
            return None
        try:
            return self.read_base(base)
        except WorkspaceError:
            return None

    def open_old(self, change: Change) -> int:
        """Open the old content; see `FormerContents`. Raises OSError if it was not kept and the real file has changed since."""
        if (content := self.read_old(change)) is not None:
            return in_memory(content)
        base = self.bases.get(change.path)
        if base is None or not base.known or base.seen is None:
            return super().open_old(change)
        fd = super().open_old(change)
        if not _is_still(base.seen, fd):
            os.close(fd)
            raise OSError(errno.ESTALE, "the real file has changed since, and what it held before was not kept", change.path)
        return fd


def _is_still(seen: Fingerprint, fd: int) -> bool:
    status = os.fstat(fd)
    if (seen.device, seen.inode, seen.ctime_ns) == (status.st_dev, status.st_ino, status.st_ctime_ns):
        return True
    return bool(seen.digest) and digest_of_open(fd) == seen.digest
