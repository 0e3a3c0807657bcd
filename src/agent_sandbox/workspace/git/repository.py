"""The files of a repository: where they are, the references in them, and the sandbox's changes to them.

A repository is read three times: as it was when the sandbox first covered its files (the base), as the sandbox sees it, and as it really is
now. A reference may be a file of its own or a line of `packed-refs`, so only its value is compared, not its file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Self

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.git import settings
from agent_sandbox.workspace.git.packs import Damaged
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.reality import Base, Bases, Reality, look

_MOST_REFERENCES = 200_000
_LARGEST = 256 << 20  # bytes of one file that is read here: an index of two million files
_LARGEST_SETTINGS = 1 << 20
_SAFE = frozenset("!#$%&'()+,-./0123456789;<=>@ABCDEFGHIJKLMNOPQRSTUVWXYZ]_`abcdefghijklmnopqrstuvwxyz{|}\"")


@dataclass(frozen=True)
class RepositoryPlace:
    """A repository: its own git directory, the one that it shares with linked worktrees, and the top of its checked-out files.

    `worktree` is "" for a bare repository.
    """

    directory: str
    common: str
    worktree: str
    algorithm: str = "sha1"

    @property
    def objects(self) -> str:
        """The directory of objects."""
        return f"{self.common}/objects"

    def history_of(self, path: str) -> str:
        """Return the path of a history file, relative to its git directory; "" for any other path.

        History files are objects, references, HEAD, the index and logs. Git runs nothing of them.
        """
        for top, names in ((self.common, _SHARED), (self.directory, _OWN)):
            below = path[len(top) + 1 :] if path.startswith(f"{top}/") else ""
            first = below.partition("/")[0]
            if (first in names or below == "info/refs") and below not in _NEVER_HISTORY:
                return below
        return ""


_SHARED = frozenset({"objects", "refs", "packed-refs", "logs"})
_OWN = frozenset({"HEAD", "index", "logs", "refs", "ORIG_HEAD", "COMMIT_EDITMSG", "FETCH_HEAD", "gc.log", "gc.pid"})
_NEVER_HISTORY = frozenset({"objects/info/alternates", "objects/info/http-alternates"})


class RealFiles:
    """Reads the real files of the machine. No link is followed. A context manager."""

    def __init__(self) -> None:
        self._reality = Reality("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._reality.__exit__(None, None, None)

    def node(self, path: str) -> Node | None:
        """Return the real entry at a path; None if there is none, or if it cannot be examined."""
        directory = self._reality.directory(os.path.dirname(path).lstrip("/"))
        if directory is None:
            return None
        try:
            seen = look(directory, os.path.basename(path), now_ns=0)
        except OSError:
            return None
        return seen.node if seen else None

    def real(self, path: str) -> bytes | None:
        """Return the content of a real file; None if there is no such file."""
        directory = self._reality.directory(os.path.dirname(path).lstrip("/"))
        if directory is None:
            return None
        try:
            return _whole(beneath.open_file(directory, os.path.basename(path), one_filesystem=False))
        except OSError:
            return None


class Files(RealFiles):
    """Reads files in three versions: real, as the sandbox sees them, and as they were before it changed them. A context manager."""

    def __init__(self, changes: ChangeSet, contents: Contents, bases: Bases | None, open_base: Callable[[Base], int]) -> None:
        super().__init__()
        self._changes = {change.path: change for change in changes}
        self._contents, self._bases, self._open_base = contents, bases, open_base

    def change(self, path: str) -> Change | None:
        """Return the sandbox's change at a path; None if there is none."""
        return self._changes.get(path)

    def is_directory(self, path: str) -> bool:
        """Return whether there is a directory at a path: a real one or, where nothing real is, one in the sandbox."""
        change = self._changes.get(path)
        node = self.node(path) or (change.after if change is not None else None)
        return node is not None and node.type is EntryType.DIRECTORY

    def guest(self, path: str) -> bytes | None:
        """Return the content of a file as the sandbox sees it; None if it sees none."""
        if (change := self._changes.get(path)) is not None:
            if change.after is None or change.after.type is not EntryType.FILE:
                return None
            try:
                return _whole(self._contents.open_file(change))
            except OSError as error:
                raise Damaged(f"{path!r} cannot be read in the sandbox: {error.strerror}") from error
        return None if self._is_gone(path) else self.real(path)

    def base(self, path: str) -> bytes | None:
        """Return the content of a file when the sandbox first covered it; None if there was none. Raises LookupError if it is not known."""
        if self._bases is None:
            return self.real(path)
        base = self._bases.get(path)
        if base is None:
            if path in self._changes and self._changes[path].before is None:
                return None
            if path in self._changes or self._is_gone(path):
                raise LookupError(path)
            return self.real(path)
        if base.known and base.seen is None:
            return None
        try:
            if base.known and base.kept:
                return _whole(self._open_base(base))
        except (OSError, WorkspaceError):
            pass
        raise LookupError(path)

    def files_below(self, directory: str) -> set[str]:
        """Return the paths of all files below a directory: real ones, and those that the sandbox has changed."""
        found = {path for path, change in self._changes.items() if contains(directory, path) and _is_file(change)}
        todo = [directory]
        while todo:
            above = todo.pop()
            for name in self._reality.names(above.lstrip("/")):
                path = f"{above}/{name}"
                status = self._reality.status(above.lstrip("/"), name)
                if status is None:
                    continue
                if (status.st_mode & 0o170000) == 0o040000:
                    todo.append(path)
                elif (status.st_mode & 0o170000) == 0o100000:
                    found.add(path)
                if len(found) + len(todo) > _MOST_REFERENCES:
                    raise Damaged(f"there are too many files in {directory!r}")
        return found

    def _is_gone(self, path: str) -> bool:
        """Return whether the sandbox removed or replaced a directory above a path."""
        above = os.path.dirname(path)
        while len(above) > 1:
            change = self._changes.get(above)
            if change is not None and (change.after is None or change.after.type is not EntryType.DIRECTORY):
                return True
            above = os.path.dirname(above)
        return False


def _is_file(change: Change) -> bool:
    return any(node is not None and node.type is EntryType.FILE for node in (change.before, change.after))


def _whole(fd: int) -> bytes:
    with open(fd, "rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise Damaged("a file of the repository is too large to be read")
    return content


Read = Callable[[str], bytes | None]


def find_repositories(project: str, changes: ChangeSet, files: Files) -> Iterator[RepositoryPlace]:
    """Yield each repository whose history files the sandbox has changed, submodules and linked worktrees included.

    A directory counts if it really is a repository or, where no real repository is, if it is one in the sandbox. A git directory that the
    sandbox removed or replaced does not count: its files are reviewed one by one.
    """
    seen: set[str] = set()
    linked = linked_repository(project)
    for directory in _candidates(project, changes, files):
        if directory in seen:
            continue
        seen.add(directory)
        is_real = files.real(f"{directory}/HEAD") is not None
        read: Read = files.real if is_real else files.guest
        shared = read(f"{directory}/commondir")
        if shared is not None and not is_real:
            continue  # a guest's word must not lead to another repository
        has_objects = shared is not None or files.is_directory(f"{directory}/objects")
        if read(f"{directory}/HEAD") is None or not has_objects or _is_replaced(files.change(directory)):
            continue
        common = os.path.normpath(os.path.join(directory, os.fsdecode(shared.strip()))) if shared else directory
        algorithm = _algorithm(read(f"{common}/config"))
        if algorithm and (contains(project, common) or common == linked):
            yield RepositoryPlace(directory, common, _worktree(directory, project, read), algorithm)


def linked_repository(project: str) -> str:
    """Return the common git directory of the repository that a project is a linked worktree of; "" if the project is no such worktree.

    The repository must name the project as its worktree, too: a `.git` file alone could name any directory.
    """
    with RealFiles() as files:
        directory = _target(files.real(f"{project}/.git") or b"", project)
        if not directory:
            return ""
        back, shared = (os.fsdecode((files.real(f"{directory}/{name}") or b"").strip()) for name in ("gitdir", "commondir"))
    if not back or not shared or os.path.normpath(os.path.join(directory, back)) != f"{project}/.git":
        return ""
    return os.path.normpath(os.path.join(directory, shared))


def _candidates(project: str, changes: ChangeSet, files: Files) -> Iterator[str]:
    """Yield directories that may be repositories: those with changed history files, and the one that the project's `.git` file names."""
    pointer = files.real(f"{project}/.git")
    if pointer is not None and (own := _target(pointer, project)):
        yield own
    for change in changes:
        parent, _, name = change.path.rpartition("/")
        if name in ("HEAD", "index", "packed-refs"):
            yield parent
        for mark in ("/objects/", "/refs/", "/logs/"):
            if mark in change.path:
                yield change.path.partition(mark)[0]
                yield change.path.rpartition(mark)[0]


def _is_replaced(change: Change | None) -> bool:
    return change is not None and (change.after is None or change.after.type is not EntryType.DIRECTORY)


def _target(pointer: bytes, above: str) -> str:
    """Return the directory that a `.git` file in the directory `above` names; "" if it names none."""
    start, _, target = pointer.partition(b":")
    return os.path.normpath(os.path.join(above, os.fsdecode(target.strip()))) if start == b"gitdir" and target.strip() else ""


def _worktree(directory: str, project: str, read: Read) -> str:
    """Return the top directory of the checked-out files of a repository; "" if it is not known."""
    if os.path.basename(directory) == ".git":
        return os.path.dirname(directory)
    if back := read(f"{directory}/gitdir"):  # a linked worktree
        return os.path.dirname(os.path.normpath(os.path.join(directory, os.fsdecode(back.strip()))))
    if place := _settings(read(f"{directory}/config")).get("core.worktree"):  # a submodule
        return os.path.normpath(os.path.join(directory, place))
    return project if _target(read(f"{project}/.git") or b"", project) == directory else ""


def _algorithm(config: bytes | None) -> str:
    """Return the hash algorithm of a repository's object names; "" for a repository of an unsupported format."""
    known = _settings(config)
    if known.get("extensions.refstorage", "files") != "files":
        return ""
    algorithm = known.get("extensions.objectformat", "sha1")
    return algorithm if algorithm in ("sha1", "sha256") else ""


def _settings(config: bytes | None) -> dict[str, str]:
    """Return the settings of a configuration by section and name; none without a configuration. Raises `Damaged` for a huge one."""
    if config is not None and len(config) > _LARGEST_SETTINGS:
        raise Damaged("the configuration of a repository is too large to be read")
    return dict(settings.parse((config or b"").decode("utf-8", "surrogateescape")))


def references(place: RepositoryPlace, read: Read, files: Files) -> dict[str, str]:
    """Return the value of each reference. `read` reads a file. Raises what `read` raises, and `Damaged` for too many files."""
    values = read_packed(read(f"{place.common}/packed-refs") or b"")
    for top in dict.fromkeys((place.common, place.directory)):
        for path in files.files_below(f"{top}/refs"):
            content = read(path)
            if content is not None and not path.endswith(".lock"):
                values[path[len(top) + 1 :]] = content.decode("utf-8", "surrogateescape").strip()
    return values


def read_packed(content: bytes) -> dict[str, str]:
    """Return the references in a `packed-refs` file."""
    values: dict[str, str] = {}
    for line in content.decode("utf-8", "surrogateescape").split("\n"):  # the name of a branch may hold what `splitlines` splits at
        value, _, name = line.partition(" ")
        if name and not line.startswith(("#", "^")):
            values[name] = value
    return values


def without_packed(content: bytes, gone: frozenset[str]) -> bytes:
    """Return the content of a `packed-refs` file without the references in `gone`."""
    kept: list[bytes] = []
    dropping = False
    for line in content.splitlines(keepends=True):
        if not line.startswith((b"#", b"^")):
            dropping = line.strip().partition(b" ")[2].decode("utf-8", "surrogateescape") in gone
        if not dropping or line.startswith(b"#"):
            kept.append(line)
    return b"".join(kept)


def is_reference(name: str) -> bool:
    """Return whether git accepts this name for a reference below `refs/`. Parts that begin with a dash are refused here, too."""
    parts = name.split("/")
    if len(parts) < 2 or parts[0] != "refs" or ".." in name or "@{" in name or name.endswith("."):
        return False
    plain = all(character in _SAFE or ord(character) > 0x7F for character in name)
    return plain and all(part and not part.startswith((".", "-")) and not part.endswith(".lock") for part in parts)


def added_lines(base: bytes, guest: bytes, width: int) -> list[bytes]:
    """Return the valid lines that the sandbox appended to the log of a reference; none if the sandbox rewrote older lines."""
    if not guest.startswith(base):
        return []
    return [line for line in guest[len(base) :].split(b"\n") if _is_log_line(line, width)]


def _is_log_line(line: bytes, width: int) -> bool:
    names = line[: 4 * width + 2].split(b" ")
    hexadecimal = all(len(name) == 2 * width and not name.strip(b"0123456789abcdef") for name in names[:2])
    return len(names) == 3 and hexadecimal and not any(byte < 32 and byte != 9 for byte in line)


def objects_added(place: RepositoryPlace, changes: Mapping[str, Change]) -> Iterator[tuple[str, Change]]:
    """Yield a name and the change of each file with objects that the sandbox added.

    For a single object it is the name of the object; for a pack or its index, the name of the file.
    """
    start = place.objects + "/"
    for path, change in changes.items():
        if not path.startswith(start) or change.after is None or change.after.type is not EntryType.FILE:
            continue
        first, _, rest = path[len(start) :].partition("/")
        name = first + rest
        if len(first) == 2 and not name.strip("0123456789abcdef"):
            with suppress(ValueError):
                bytes.fromhex(name)
                yield name, change
        elif first == "pack" and "/" not in rest and rest.endswith((".pack", ".idx")):
            yield rest, change
