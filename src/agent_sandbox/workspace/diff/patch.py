"""Write a patch for `git apply`: exact bytes, escaped only as git itself escapes them.

A patch carries content, the executable bit, links and renames in the project, with names relative to the project. Everything that a patch
cannot carry is reported. `git apply` compares a patch with the real files, and refuses it if they have changed meanwhile.
"""

from __future__ import annotations

import os
import zlib
from base64 import b85encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha1
from itertools import chain

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.changes import Change, Contents, Kind
from agent_sandbox.workspace.diff.compare import Effort, FormerContents
from agent_sandbox.workspace.diff.formats import hunks
from agent_sandbox.workspace.escape import components
from agent_sandbox.workspace.merge.text import split_lines
from agent_sandbox.workspace.nodes import EntryType, Node

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+/=@,%^~")
_ESCAPES = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
_LARGEST = 256 << 20  # bytes of one side
_CARRIED = (EntryType.FILE, EntryType.SYMLINK)


def git_mode(node: Node) -> int:
    """Return the mode that git stores for an entry."""
    if node.type is EntryType.SYMLINK:
        return 0o120000
    return 0o040000 if node.type is EntryType.DIRECTORY else 0o100755 if node.mode & 0o100 else 0o100644


def blob_name(content: bytes, node: Node | None) -> bytes:
    """Return git's object name of content; zeros if there is no file. Git refuses a binary patch without object names."""
    if node is None:
        return b"0" * 40
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest().encode()


def literal(content: bytes) -> Iterator[bytes]:
    """Yield content in git's binary form: lines of at most 52 bytes, each after a letter that encodes its length."""
    yield b"literal %d\n" % len(content)
    packed = zlib.compress(content)
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        count = len(piece)
        yield bytes((64 + count if count <= 26 else 70 + count,)) + b85encode(piece, pad=True) + b"\n"
    yield b"\n"


def quoted(name: bytes) -> bytes:
    """Return a file name as git writes it in a patch: plain names unchanged, all others in quotes."""
    if all(byte in _PLAIN for byte in name):
        return name
    escaped = (_ESCAPES.get(byte) or (bytes((byte,)) if 0x20 <= byte < 0x7F else b"\\%03o" % byte) for byte in name)
    return b'"%s"' % b"".join(escaped)


def is_gits(path: str) -> bool:
    """Return whether a name in the path means `.git` on some filesystem. Git refuses a whole patch that contains such a path."""
    return ".git" in components(path)


@dataclass(frozen=True)
class NotInPatch:
    """A part of a change that a patch cannot carry. `content` is set if the patch lacks a change of content, and so is incomplete."""

    path: str
    what: str
    content: bool = False


def write_patch(
    changes: Iterable[Change], contents: Contents, former: FormerContents, *, project: str, write: Callable[[bytes], object]
) -> tuple[NotInPatch, ...]:
    """Write the changes in the project as a patch. Return the parts that it leaves out.

    The entries of a removed directory must be given one by one. Changes outside the project are ignored.
    """
    inside = [change for change in changes if contains(project, change.path) and change.path != project]
    return _Patch(contents, former, project.rstrip("/") + "/", write).all(inside)


class _Patch:
    def __init__(self, contents: Contents, former: FormerContents, prefix: str, write: Callable[[bytes], object]) -> None:
        self._contents, self._former, self._prefix, self._write = contents, former, prefix, write
        self._effort = Effort()
        self._left: list[NotInPatch] = []

    def all(self, changes: Sequence[Change]) -> tuple[NotInPatch, ...]:
        gone = {change.path: change for change in changes if change.kind is Kind.DELETED}
        renames = {source.path: change for change in reversed(changes) if (source := self._source(change, gone)) is not None}
        filled = {change.path.rpartition("/")[0] for change in changes if change.after is not None}
        for change in changes:
            if change.kind is Kind.DELETED and change.path in renames:
                continue
            self._note_losses(change, empty=change.path not in filled)
            if _has_unlisted_entries(change):
                self._left.append(
                    NotInPatch(change.path, "a directory that goes away with something in it that cannot be told", content=True)
                )
            elif is_gits(change.path.removeprefix(self._prefix)):
                self._left.append(NotInPatch(change.path, "git takes no patch for what is its own", content=True))
            elif renames.get(change.renamed_from) is change and self._same(gone[change.renamed_from], change):
                self._write(self._rename(gone[change.renamed_from], change))
            else:
                if renames.get(change.renamed_from) is change:
                    self._one(gone[change.renamed_from])
                self._one(change)
        return tuple(self._left)

    def _source(self, change: Change, gone: Mapping[str, Change]) -> Change | None:
        """Return the deletion of the path that `change` renames, if git can express the rename; otherwise None."""
        source = gone.get(change.renamed_from)
        if source is None or source.before is None or change.after is None or not _carried(change.after):
            return None
        own = any(is_gits(each.path.removeprefix(self._prefix)) for each in (change, source))
        return source if source.before.type is change.after.type and not own else None

    def _note_losses(self, change: Change, *, empty: bool) -> None:
        before, after = change.before, change.after
        if after is not None and not _carried(after) and after.type is not EntryType.DIRECTORY:
            self._left.append(NotInPatch(change.path, f"a {after.type.value}", content=True))
        elif change.kind is Kind.ADDED and after is not None and after.type is EntryType.DIRECTORY and empty:
            self._left.append(NotInPatch(change.path, "an empty directory"))
        if change.xattrs:
            self._left.append(NotInPatch(change.path, "extended attributes"))
        if before and after and (before.uid, before.gid) != (after.uid, after.gid):
            self._left.append(NotInPatch(change.path, "its owner"))
        if change.link_of:
            self._left.append(NotInPatch(change.path, "that it is a hard link"))
        if after is not None and after.type is not EntryType.SYMLINK and (before is None or before.mode != after.mode):
            usual = (0o644, 0o755) if after.type is EntryType.FILE else (0o755,)
            if after.mode not in usual and (before is None or git_mode(before) == git_mode(after)):
                self._left.append(NotInPatch(change.path, f"its mode {after.mode:04o}"))

    def _one(self, change: Change) -> None:
        old = change.before if _carried(change.before) else None
        new = change.after if _carried(change.after) else None
        if old is None and new is None:
            return
        try:
            before = self._content(old, lambda: self._former.open_old(change))
            after = self._content(new, lambda: self._contents.open_file(change))
        except OSError as error:
            self._left.append(NotInPatch(change.path, f"cannot be read: {error.strerror}", content=True))
            return
        name = os.fsencode(change.path.removeprefix(self._prefix))
        if old and new and old.type is not new.type:
            self._write(self._sides(name, old, None, before, b"") + self._sides(name, None, new, b"", after))
        else:
            self._write(self._sides(name, old, new, before, after))

    def _content(self, node: Node | None, open_it: Callable[[], int]) -> bytes:
        if node is None:
            return b""
        if node.type is EntryType.SYMLINK:
            return os.fsencode(node.target)
        with open(open_it(), "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OSError(0, f"it has more than {_LARGEST >> 20} MiB")
        return content

    def _same(self, gone: Change, come: Change) -> bool:
        """Return whether two sides of a rename have the same content. Git renames the file at the old name without comparing it."""
        try:
            old = self._content(gone.before, lambda: self._former.open_old(gone))
            return old == self._content(come.after, lambda: self._contents.open_file(come))
        except OSError:
            return False

    def _rename(self, gone: Change, come: Change) -> bytes:
        old, new = (os.fsencode(change.path.removeprefix(self._prefix)) for change in (gone, come))
        lines = [b"diff --git %s %s\n" % (quoted(b"a/" + old), quoted(b"b/" + new))]
        if gone.before and come.after and git_mode(gone.before) != git_mode(come.after):
            lines.append(b"old mode %06o\nnew mode %06o\n" % (git_mode(gone.before), git_mode(come.after)))
        lines.append(b"similarity index 100%%\nrename from %s\nrename to %s\n" % (quoted(old), quoted(new)))
        return b"".join(lines)

    def _sides(self, name: bytes, old: Node | None, new: Node | None, before: bytes, after: bytes) -> bytes:
        from_name, to_name = quoted(b"a/" + name), quoted(b"b/" + name)
        lines: list[bytes] = []
        if old is None and new is not None:
            lines.append(b"new file mode %06o\n" % git_mode(new))
        elif new is None and old is not None:
            lines.append(b"deleted file mode %06o\n" % git_mode(old))
        elif old and new and git_mode(old) != git_mode(new):
            lines.append(b"old mode %06o\nnew mode %06o\n" % (git_mode(old), git_mode(new)))
        if before != after or old is None or new is None:
            lines.append(b"index %s..%s\n" % (blob_name(before, old), blob_name(after, new)))
        if before != after:
            if b"\0" in before or b"\0" in after:
                lines += [b"GIT binary patch\n", *literal(after), *literal(before)]
            else:
                lines.append(b"--- %s\n+++ %s\n" % (from_name if old else b"/dev/null", to_name if new else b"/dev/null"))
                lines += self._text(list(split_lines(before)), list(split_lines(after)))
        return b"".join([b"diff --git %s %s\n" % (from_name, to_name), *lines]) if lines else b""

    def _text(self, old: list[bytes], new: list[bytes]) -> Iterator[bytes]:
        for hunk in hunks(self._effort.find(old, new), len(old)):
            yield hunk.title().encode() + b"\n"
            for (start, stop), edit in hunk.stretches():
                yield from _signed(b" ", old[start:stop])
                if edit is not None:
                    yield from chain(_signed(b"-", old[edit.old_from : edit.old_to]), _signed(b"+", new[edit.new_from : edit.new_to]))


def _signed(sign: bytes, lines: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield sign + line if line.endswith(b"\n") else sign + line + b"\n\\ No newline at end of file\n"


def _has_unlisted_entries(change: Change) -> bool:
    """Return whether a removed directory has entries that the changes do not list. Git removes only files that a patch names."""
    stays = change.after is not None and change.after.type is EntryType.DIRECTORY
    return change.before is not None and change.before.type is EntryType.DIRECTORY and not stays and change.inside > 0


def _carried(node: Node | None) -> bool:
    return node is not None and node.type in _CARRIED
