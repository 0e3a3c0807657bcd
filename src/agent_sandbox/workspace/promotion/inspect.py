"""Inspect the tree before a promotion: its real state now, and the tree as it would be afterwards.

`look_at` reads the real state, including everything in directories that would be removed. `NewTree` answers the questions of `protected`
about the new tree: where links lead, which names exist, and the text of files. `judge_changes` puts the answers together.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.policy.paths import Beneath, Glob, Tree, ancestors, contains, matches
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.aliases import LinkedNames, is_link
from agent_sandbox.workspace.beneath import walk
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.dependencies import Manifests
from agent_sandbox.workspace.git import settings
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals.runs import file_clock_ns
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion.plan import Expected, relative, seen_from, split
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.protected import DEPENDENCY, GIT, SECRETS, UNEXAMINED, classes_of_all
from agent_sandbox.workspace.reality import Fingerprint, digest_of, is_settled, look

if TYPE_CHECKING:
    from agent_sandbox.policy.model import FileRules

_LARGEST_TEXT = 1 << 20  # bytes, where the text of a file decides; a larger file counts as protected whatever its text
MOST_ENTRIES = 1_000_000  # of the project, which is searched for links
_MOST_BELOW_A_LINK = 100_000  # entries of a directory that a link leads to, where patterns hide some
_RECENT_NS = 2_000_000_000
_NONE: frozenset[str] = frozenset()
_NEW_DEPENDENCY = frozenset({DEPENDENCY})
_LISTING = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SKIPPED = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)  # not there for us, or another mount


def look_at(root: str, changes: ChangeSet) -> dict[str, Fingerprint | None]:
    """Return the present real state of the changed paths, and of everything below directories that would be removed.

    A file that changed a moment ago also gets a digest, because a further change may leave its times as they are. Paths that are not plain
    paths below the root are left out. Raises OSError, and `WorkspaceError` if the root cannot be opened.
    """
    states: dict[str, Fingerprint | None] = {}
    with TargetTree(root) as anchor:
        missing = "\0"  # the last missing path, with a slash: below it nothing exists either
        for change in changes:
            try:
                path = relative(change.path, root)
            except ValueError:
                continue
            if path.startswith(missing):
                states[change.path] = None
                continue
            seen = _seen(anchor, path)
            states[change.path] = seen
            if seen is None:
                missing = path + "/"
            elif seen.node.type is EntryType.DIRECTORY and (change.after is None or change.after.type is not EntryType.DIRECTORY):
                _below(anchor.directory(path), change.path, states)
    return states


def _seen(anchor: TargetTree, path: str) -> Fingerprint | None:
    if path == "":
        return _root(anchor)
    parent, name = split(path)
    try:
        return seen_at(anchor.directory(parent), name)
    except Surprise:
        return None


def _root(anchor: TargetTree) -> Fingerprint:
    status = os.fstat(anchor.root)
    attributes = {name: os.getxattr(anchor.root, name) for name in os.listxattr(anchor.root) if name.startswith("user.")}
    node = Node(EntryType.DIRECTORY, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, xattrs=attributes)
    return seen_from(status, node, now_ns=file_clock_ns())


def seen_at(directory: int, name: str, *, content: bool = False) -> Fingerprint | None:
    """Return the fingerprint of an entry as it is now; None if the entry is missing. Raises OSError.

    The fingerprint has a digest if `content` is set, or if another change could leave the times as they are. A small file that changed in
    the last seconds has one, too: then it can be told later that only its times have changed.
    """
    now = file_clock_ns()
    seen = look(directory, name, now_ns=now)
    if seen is None or seen.node.type is not EntryType.FILE:
        return seen
    recent = seen.node.size <= _LARGEST_TEXT and seen.ctime_ns + _RECENT_NS >= now
    if is_settled(seen.ctime_ns, now) and not recent and not content:
        return seen
    return replace(seen, digest=digest_of(directory, name))


def _below(directory: int, path: str, states: dict[str, Fingerprint | None]) -> None:
    for entry in walk(directory, unlock=False):
        states[f"{path}/{entry.path}"] = seen_at(entry.directory, entry.name)


@dataclass(frozen=True)
class TreeContext:
    """The facts that changes are judged by: the project, the user's home, and the paths that are hidden from the sandbox."""

    project: str = ""  # it is searched for links, unless it is /; empty means the root of the tree
    home: str = ""
    hidden: Callable[[str], bool] = lambda path: False  # whether a path is hidden, or lies in a hidden directory
    masks: tuple[str, ...] = ()  # hidden paths
    patterns: tuple[Glob, ...] = ()  # of further hidden paths

    @classmethod
    def of(cls, project: str, files: FileRules, home: str = "") -> TreeContext:
        """Return the context of a project, with the paths that these file rules hide."""
        denied = [pattern.path for pattern in files.denied if isinstance(pattern, Tree | Beneath)]
        patterns = tuple(pattern for pattern in files.denied if isinstance(pattern, Glob))
        return cls(project, home, files.bars, (*(mask.path for mask in files.masks), *denied), patterns)


@dataclass(frozen=True)
class Protection:
    """The protected classes of changes, by path, and remarks on the changes for the person who approves them."""

    classes: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def by_class(self) -> dict[str, tuple[str, ...]]:
        """Return the changed paths of each protected class."""
        paths: dict[str, list[str]] = {}
        for path, names in self.classes.items():
            for name in names:
                paths.setdefault(name, []).append(path)
        return {name: tuple(paths[name]) for name in sorted(paths)}


def protected_classes(
    changes: ChangeSet, expected: Expected, contents: Contents, *, root: str, around: TreeContext | None = None
) -> dict[str, frozenset[str]]:
    """Return the protected classes of each change that has any, by path. Raises OSError."""
    return dict(judge_changes(changes, expected, contents, root=root, around=around).classes)


def judge_changes(
    changes: ChangeSet,
    expected: Expected,
    contents: Contents,
    *,
    root: str,
    around: TreeContext | None = None,
    progress: Progress = NO_PROGRESS,
) -> Protection:
    """Return the protected classes of changes and remarks on them, judged by the real tree and the new content. Raises OSError."""
    progress.begin("judging the changes", len(changes))
    around = around or TreeContext()
    with NewTree(root, changes, contents) as tree:
        complete, links = tree.all_links(around.project or root)
        linked = LinkedNames(root, links, tree.entries, tree.real_end)
        manifests = Manifests(tree.texts, linked.called)
        judges = (
            *((linked.classes, _HiddenFiles(linked, around).classes) if links or any(map(is_link, changes)) else ()),
            _GitSettings(changes, linked, around.project or root, around.home).classes,
            lambda change: _NEW_DEPENDENCY if manifests.remarks(change) else _NONE,
        )
        classes = classes_of_all(
            changes,
            root,
            gone=expected,
            links=tree.link,
            names=tree.names,
            texts=tree.texts,
            judges=judges,
            repositories=[end for path in tree.repositories for end in (path, linked.follow(path).path) if end],
            also=linked.called,
            progress=progress,
        )
        if not (complete and linked.complete):
            classes[root] = classes.get(root, frozenset()) | {UNEXAMINED}
        remarks = {change.path: manifests.remarks(change) for change in changes if DEPENDENCY in classes.get(change.path, ())}
        return Protection(classes, remarks)


class _GitSettings:
    """Recognises changes of files that git's real configuration names, in every repository that a changed path lies in."""

    def __init__(self, changes: ChangeSet, linked: LinkedNames, project: str, home: str) -> None:
        self._files: set[str] = set()  # that count themselves
        self._directories: set[str] = set()  # of which the entries right in them count
        self._trees: set[str] = set()
        for worktree in _worktrees(changes, project):
            for named in settings.named_paths(worktree, home=home):
                if not contains(project, named.path):
                    continue
                end = linked.follow(named.path)
                self._files |= end.via
                kept = self._files if named.exact else self._directories if named.flat else self._trees
                kept |= {named.path, end.path or named.path}

    def classes(self, change: Change) -> frozenset[str]:
        """Return git's protected class if the configuration names the changed path, or a directory above it."""
        if not (self._files or self._directories or self._trees):
            return _NONE
        path = change.path
        found = path in self._files or path in self._directories or os.path.dirname(path) in self._directories
        return frozenset({GIT} if found or (self._trees and not self._trees.isdisjoint(ancestors(path))) else ())


def _worktrees(changes: ChangeSet, project: str) -> Iterator[str]:
    """Yield each directory with a real `.git` entry that changed paths lie in, and the nearest one at or above the project."""
    seen: set[str] = set()
    for directory in dict.fromkeys(change.path.rpartition("/")[0] or "/" for change in changes):
        while contains(project, directory) and directory != project and directory not in seen:
            seen.add(directory)
            if os.path.lexists(os.path.join(directory, ".git")):
                yield directory
            directory = os.path.dirname(directory)
    directory = project
    while not os.path.lexists(os.path.join(directory, ".git")) and directory != "/":
        directory = os.path.dirname(directory)
    if os.path.lexists(os.path.join(directory, ".git")):
        yield directory


class _HiddenFiles:
    """Recognises changed links that lead to a hidden file, or to a directory with a hidden file in it."""

    def __init__(self, linked: LinkedNames, around: TreeContext) -> None:
        self._linked = linked
        self._hidden = around.hidden
        self._known: dict[str, bool] = {}
        self._real_masks = tuple(mask for mask in around.masks if os.path.lexists(mask))
        self._patterns = around.patterns

    def classes(self, change: Change) -> frozenset[str]:
        """Return the protected class of secrets if a changed link, or a link that leads through it, ends at or above a hidden file."""
        if change.after is None or change.after.type is not EntryType.SYMLINK:
            return frozenset()
        found = any(self._shows(path) for path in (change.path, *self._linked.through(change.path)))
        return frozenset({SECRETS} if found else ())

    def _shows(self, link: str) -> bool:
        """Return whether the end of a link is hidden, or has something hidden in it."""
        if link not in self._known:
            end = self._linked.follow(link)
            reached = [path for path in (end.path, end.outside) if path]
            self._known[link] = any(
                self._hidden(path) or any(contains(path, mask) for mask in self._real_masks) or self._holds_match(path) for path in reached
            )
        return self._known[link]

    def _holds_match(self, directory: str) -> bool:
        """Return whether a pattern hides a real entry in a directory, or too many entries are there to tell."""
        near = [each for each in self._patterns if contains(directory, each.directory) or contains(each.directory, directory)]
        count = 0
        for above, directories, files in os.walk(directory) if near else ():
            count += len(directories) + len(files)
            if count > _MOST_BELOW_A_LINK:
                return True
            if any(matches(each, os.path.join(above, name)) for each in near for name in (*directories, *files)):
                return True
        return False


class NewTree:
    """The real tree as it would be after the changes. Its methods are arguments for `protected.classes_of_all`. A context manager."""

    def __init__(self, root: str, changes: ChangeSet, contents: Contents) -> None:
        self._root = root
        self._contents = contents
        self._anchor = TargetTree(root)
        self._after = {change.path: change.after for change in changes}
        self._entries: dict[str, frozenset[str]] = {}
        self._changed: dict[str, dict[str, bool]] | None = None
        self.repositories: set[str] = set()  # directories that real files name as git's own; complete after `all_links`

    def __enter__(self) -> NewTree:
        return self

    def __exit__(self, *ended: object) -> None:
        self._anchor.__exit__(None, None, None)

    def link(self, path: str) -> str | None:
        """Return the target of the link that would be at a path; None if there would be no link."""
        if path in self._after:
            node = self._after[path]
            return node.target if node is not None and node.type is EntryType.SYMLINK else None
        above = os.path.dirname(path)
        while len(above) > len(self._root):
            if above in self._after and ((node := self._after[above]) is None or node.type is not EntryType.DIRECTORY):
                return None  # it goes with its directory
            above = os.path.dirname(above)
        try:
            directory, name = self._place(path)
            return os.readlink(name, dir_fd=directory)
        except (OSError, Surprise):
            return None

    def all_links(self, project: str) -> tuple[bool, dict[str, str]]:
        """Return whether the whole project was searched, and the target of every link of the new tree there, by path.

        New links elsewhere are in the result, too. Left out are real directories that cannot be entered, other mounts, and the real
        links of a whole machine, which would take minutes.
        """
        links = {path: node.target for path, node in self._after.items() if node is not None and node.type is EntryType.SYMLINK}
        left = MOST_ENTRIES
        todo = [project] if self._after and project != "/" else []
        while todo:
            directory = todo.pop()
            node = self._after.get(directory)
            if directory in self._after and (node is None or node.type is not EntryType.DIRECTORY):
                continue  # it goes with everything in it
            try:
                entries = self._list(directory, left, links)
            except beneath.TooMany:
                return False, links
            except OSError as error:
                if error.errno not in _SKIPPED:
                    raise
                continue
            todo += [os.path.join(directory, name) for name, kind in entries.items() if kind == stat.S_IFDIR]
            left -= len(entries)
        return True, links

    def _list(self, directory: str, limit: int, links: dict[str, str]) -> dict[str, int]:
        """Return the names in a real directory, with their types, and add its links to `links`. Raises `TooMany` above the limit."""
        below = self._below(directory)
        fd = beneath.open_directory(self._anchor.root, below) if below else os.open(".", _LISTING, dir_fd=self._anchor.root)
        try:
            entries = beneath.names(fd, limit=limit)
            if entries.get(".git") == stat.S_IFREG:
                self.repositories.add(settings.git_directory(directory))
            if "commondir" in entries and "HEAD" in entries:
                self.repositories.add(settings.common_directory(directory))
            for name, kind in entries.items():
                path = os.path.join(directory, name)
                if kind == 0 and path not in self._after:
                    with suppress(OSError):  # a FIFO, a socket or a device; or gone
                        links[path] = os.readlink(name, dir_fd=fd)
            return entries
        finally:
            os.close(fd)

    def entries(self, directory: str) -> Iterable[str]:
        """Return the names that a directory would have after the changes."""
        if directory not in self._entries:
            changed = self._inside().get(directory, {})
            present = {name for name in (*self.names(directory), *changed) if changed.get(name, True)}
            self._entries[directory] = frozenset(present)
        return self._entries[directory]

    def _inside(self) -> dict[str, dict[str, bool]]:
        """Return the names of the changed entries by directory, each with whether the entry would exist after the changes."""
        if self._changed is None:
            self._changed = {}
            for path, node in self._after.items():
                directory, name = os.path.split(path)
                self._changed.setdefault(directory, {})[name] = node is not None
        return self._changed

    def real_end(self, path: str) -> str | None:
        """Return where a real link leads in the end; None for a new link."""
        return None if path in self._after else os.path.realpath(path)

    def names(self, directory: str) -> list[str]:
        """Return the names in a real directory; none if it cannot be listed."""
        try:
            return os.listdir(self._anchor.directory(relative(directory, self._root)))
        except (OSError, Surprise, ValueError):
            return []

    def texts(self, change: Change, largest: int = _LARGEST_TEXT) -> tuple[bytes | None, bytes | None]:
        """Return the text of a file before and after the change; None for a side that has no file.

        Raises ValueError if a text cannot be read in full.
        """
        before = after = None
        if change.before is not None and change.before.type is EntryType.FILE:
            before = _text(lambda: beneath.open_file(*self._place(change.path), one_filesystem=False), largest)
        if change.after is not None and change.after.type is EntryType.FILE:
            after = _text(lambda: self._contents.open_file(change), largest)
        return before, after

    def _place(self, path: str) -> tuple[int, str]:
        """Return a descriptor of the real directory of a path, and the name in it. A name that is too long exists nowhere: OSError."""
        parent, name = split(self._below(path))
        return self._anchor.directory(parent), name

    def _below(self, path: str) -> str:
        """Return a path below the root relative to it. Unlike `relative` it takes any length: a real tree may be deeper than PATH_MAX."""
        return path[len(self._root.rstrip("/")) :].removeprefix("/")


def _text(opened: Callable[[], int], largest: int) -> bytes:
    try:
        with open(opened(), "rb") as file:
            text = file.read(largest + 1)
    except (OSError, Surprise) as error:
        raise ValueError("it cannot be read") from error
    if len(text) > largest:
        raise ValueError("it is too large to be read")
    return text
