"""Two trees, the changes between them, and a way to say whether a third is exactly one or the other."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType, Node, describe
from agent_sandbox.workspace.promotion.inspect import look_at
from agent_sandbox.workspace.promotion.plan import Plan, plan
from agent_sandbox.workspace.promotion.promote import Promotion, promote
from agent_sandbox.workspace.promotion.undo import undo
from agent_sandbox.workspace.store import Holder

ME = Holder(os.getpid(), "test", 0.0)


class Shown(NamedTuple):
    """All that is promised of an entry."""

    type: EntryType
    mode: int
    owner: tuple[int, int]
    content: bytes
    xattrs: tuple[tuple[str, bytes], ...]
    mtime_ns: int  # of files


def shown(tree: Path) -> dict[str, Shown]:
    """Everything in a tree, by relative path."""
    found = {}
    for top, folders, files in os.walk(tree):
        for name in (*folders, *files):
            path = os.path.join(top, name)
            found[os.path.relpath(path, tree)] = _show(path)
    return found


def _show(path: str) -> Shown:
    status = os.lstat(path)
    kind = EntryType.of(status.st_mode)
    content = b""
    if kind is EntryType.FILE:
        content = Path(path).read_bytes()
    elif kind is EntryType.SYMLINK:
        content = os.fsencode(os.readlink(path))
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user.")]
    xattrs = tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))
    time = status.st_mtime_ns if kind is EntryType.FILE else 0
    return Shown(kind, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), content, xattrs, time)


class Edited:
    """A project, and the same as a guest has left it: `after` holds the new tree, as a layer would. Implements `Contents`."""

    def __init__(self, scratch: Path, make: Callable[[Path], None], edit: Callable[[Path], None]) -> None:
        self.project, self.after, self.promotions = scratch / "project", scratch / "after", scratch / "promotions"
        self.project.mkdir()
        make(self.project)
        shutil.copytree(self.project, self.after, symlinks=True)
        edit(self.after)
        self.changes = changes_between(self.project, self.after)
        self._after = os.open(self.after, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        os.close(self._after)

    def open_file(self, change: Change) -> int:
        return beneath.open_file(self._after, os.path.relpath(change.path, self.project))

    def plan(self, *, classes: Mapping[str, frozenset[str]] | None = None, approved: frozenset[str] = frozenset()) -> Plan:
        root = str(self.project)
        return plan(self.changes, look_at(root, self.changes), root=root, classes=classes or {}, approved=approved)

    def promote(self, made: Plan | None = None) -> Promotion:
        return promote(made or self.plan(), self, str(self.promotions), holder=ME)

    def undo(self) -> Promotion:
        return undo(str(self.promotions), holder=ME)

    def staging(self) -> list[str]:
        """Staging directories that were left."""
        return [name for name in os.listdir(self.project) if name.startswith(".agent-sandbox")]


def changes_between(old: Path, new: Path) -> ChangeSet:
    """What makes the tree `old` the tree `new`, at the paths of the old one."""
    before, after = _nodes(old), _nodes(new)
    found = []
    gone = ""
    for path in sorted({*before, *after}, key=lambda each: each.replace("/", "\0")):
        was, now = before.get(path), after.get(path)
        if now is None and gone and path.startswith(gone):
            continue  # it goes with the directory it is in
        if was is not None and was.type is EntryType.DIRECTORY and (now is None or now.type is not was.type):
            gone = path + "/"
        if path.startswith(gone) and gone:
            was = None if path != gone[:-1] else was
        kind = _kind(was, now, old / path, new / path)
        if kind is not None:
            found.append(Change(f"{old}/{path}", kind, was, now))
    return ChangeSet(tuple(found))


def _nodes(tree: Path) -> dict[str, Node]:
    directory = os.open(tree, os.O_RDONLY)
    try:
        return {
            entry.path: describe(
                entry.directory, entry.name, entry.status, beneath.xattrs(entry.directory, entry.name), own_prefix="trusted.overlay."
            )
            for entry in beneath.walk(directory)
        }
    finally:
        os.close(directory)


def _kind(was: Node | None, now: Node | None, old: Path, new: Path) -> Kind | None:
    if was is None or now is None:
        return Kind.ADDED if was is None else Kind.DELETED
    if was.type is not now.type:
        return Kind.RETYPED
    if was.target != now.target or (was.type is EntryType.FILE and old.read_bytes() != new.read_bytes()):
        return Kind.MODIFIED
    if was.mode != now.mode:
        return Kind.MODE
    return Kind.XATTR if was.xattrs != now.xattrs else None


def make_mixed(tree: Path) -> None:
    """A small tree with one of everything that a promotion can meet."""
    for directory in ("src", "gone/deep", "to-file", "kept", "attributed"):
        (tree / directory).mkdir(parents=True)
    for name in ("src/app.py", "src/delete-me", "gone/one", "gone/deep/two", "to-file/inner", "to-dir", "to-link", "same", "script"):
        (tree / name).write_text(f"old {name}\n")
    os.symlink("src/app.py", tree / "link")
    os.symlink("same", tree / "link-to-file")
    os.symlink("src", tree / "gone/link")


def edit_mixed(tree: Path) -> None:
    """Change it in every way."""
    (tree / "src/app.py").write_text("new and longer\n")
    (tree / "src/delete-me").unlink()
    (tree / "src/added").write_text("added\n")
    os.utime(tree / "src/added", ns=(1_000_000_007, 1_000_000_007))
    shutil.rmtree(tree / "gone")
    shutil.rmtree(tree / "to-file")
    (tree / "to-file").write_text("now a file\n")
    (tree / "to-dir").unlink()
    (tree / "to-dir/sub").mkdir(parents=True)
    (tree / "to-dir/sub/file").write_text("deep\n")
    (tree / "to-link").unlink()
    os.symlink("same", tree / "to-link")
    (tree / "link").unlink()
    os.symlink("same", tree / "link")
    (tree / "link-to-file").unlink()
    (tree / "link-to-file").write_text("was a link\n")
    (tree / "new/tree").mkdir(parents=True)
    for number in range(3):
        (tree / f"new/tree/{number}").write_text(f"{number}\n")
    os.symlink("tree/1", tree / "new/link")
    (tree / "script").chmod(0o755)
    (tree / "kept").chmod(0o700)
    os.setxattr(tree / "src/added", "user.note", b"mine")
    os.setxattr(tree / "attributed", "user.note", b"on a directory")


def expected_after(edited: Edited) -> dict[str, Shown]:
    """What the project has to look like afterwards: as the guest left it, but with the old times of what stayed the same."""
    before, wanted = shown(edited.project), shown(edited.after)
    changed = {os.path.relpath(change.path, edited.project) for change in edited.changes}
    return {path: entry if path in changed else before[path] for path, entry in wanted.items()}
