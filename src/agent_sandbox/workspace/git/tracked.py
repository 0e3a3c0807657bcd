"""The files that the commit HEAD of a real repository tracks. Read from the objects themselves: no git is run, and no index is trusted.

Only the repository on the machine is read, never one in a sandbox's layers. For a repository that cannot be read (SHA-256 objects,
reftables, damage) `UnknownHead` is raised: the caller then knows nothing about the files, and hides them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection

from agent_sandbox.workspace.git.objects import ObjectFiles, hash_name
from agent_sandbox.workspace.git.packs import Damaged, entries_of
from agent_sandbox.workspace.git.repository import read_packed

LARGEST = 32 << 20  # bytes of one commit or tree
_LONGEST_REF = 4096
_MOST_HOPS = 5  # symbolic refs in a row, as in git
_HEX = frozenset("0123456789abcdef")


class UnknownHead(Exception):
    """The repository cannot be read, so the tracked files are not known."""


def tracked_blobs(project: str, among: Collection[str]) -> dict[str, str]:
    """Return the object id of each path in `among`, relative to `project`, that is a regular file in HEAD. Raises `UnknownHead`."""
    found = _repository(project)
    if found is None or not among:
        return {}
    repository, inside = found
    with repository:
        return {name: blob for name in among if (blob := repository.blob((*inside, *name.split("/")))) is not None}


def head_of(project: str) -> str:
    """Return the commit id of HEAD; empty without a repository or before the first commit. Raises `UnknownHead`."""
    found = _repository(project)
    return "" if found is None else found[0].head()


def blob_id(content: bytes) -> str:
    """Return the object id that git gives this content."""
    return hash_name("blob", content, "sha1")


def _repository(project: str) -> tuple[_Repository, tuple[str, ...]] | None:
    """Return the repository that a directory belongs to, and the names on the way from its top to the directory; None without one."""
    top, inside = os.path.realpath(project), []
    while not os.path.lexists(os.path.join(top, ".git")):
        top, name = os.path.split(top)
        if not name:
            return None
        inside.append(name)
    place = os.path.join(top, ".git")
    if not os.path.isdir(place):  # a linked worktree or a submodule
        place = os.path.join(top, _line(place).removeprefix("gitdir:").strip())
    common = os.path.join(place, "commondir")
    shared = os.path.join(place, _line(common)) if os.path.exists(common) else place
    return _Repository(place, shared), tuple(reversed(inside))


class _Repository:
    """The objects and references of a repository. A context manager."""

    def __init__(self, own: str, shared: str) -> None:
        self._own, self._shared = own, shared
        self._objects = ObjectFiles(os.path.join(shared, "objects"))
        self._trees: dict[str, dict[str, tuple[bytes, str]]] = {}

    def __enter__(self) -> _Repository:
        return self

    def __exit__(self, *ended: object) -> None:
        self._objects.__exit__(None, None, None)

    def head(self) -> str:
        """Return the commit id of HEAD; empty before the first commit."""
        name, text = "HEAD", ""
        for _ in range(_MOST_HOPS):
            text = self._ref(name)
            if not text.startswith("ref:"):
                break
            name = text[4:].strip()
            if not name.startswith("refs/") or ".." in name.split("/"):
                raise UnknownHead(f"HEAD names {name!r}")
            if name == "refs/heads/.invalid":
                raise UnknownHead("its refs are stored as a reftable")
        if text and (len(text) != 40 or not _HEX.issuperset(text)):
            raise UnknownHead("HEAD is no SHA-1 commit id")
        return text

    def blob(self, names: tuple[str, ...]) -> str | None:
        """Return the object id of a regular file in HEAD; None if there is none at this path."""
        directory = self._directory(names[:-1])
        mode, object_id = self._tree(directory).get(names[-1], (b"", "")) if directory is not None else (b"", "")
        return object_id if mode.startswith(b"100") else None

    def _directory(self, names: tuple[str, ...]) -> str | None:
        commit = self.head()
        if not commit:
            return None
        first = self._object(commit, "commit").partition(b"\n")[0]
        if not first.startswith(b"tree ") or len(first) != 45:
            raise UnknownHead("its commit cannot be read")
        tree = first[5:].decode("ascii", "replace")
        for name in names:
            mode, tree = self._tree(tree).get(name, (b"", ""))
            if mode != b"40000":
                return None
        return tree

    def _tree(self, object_id: str) -> dict[str, tuple[bytes, str]]:
        if object_id not in self._trees:
            try:
                entries = entries_of(self._object(object_id, "tree"), self._objects.width)
            except Damaged as error:
                raise UnknownHead(f"one of its trees is damaged: {error}") from error
            self._trees[object_id] = {os.fsdecode(name): (mode, target.hex()) for mode, name, target in entries}
        return self._trees[object_id]

    def _ref(self, name: str) -> str:
        for directory in dict.fromkeys((self._own, self._shared)):
            place = os.path.join(directory, name)
            if os.path.isfile(place):
                return _line(place)
        packed = os.path.join(self._shared, "packed-refs")
        return read_packed(_content(packed)).get(name, "") if os.path.isfile(packed) else ""

    def _object(self, object_id: str, kind: str) -> bytes:
        try:
            found = self._objects.read(object_id)
        except (OSError, Damaged) as error:
            raise UnknownHead(f"an object cannot be read: {error}") from error
        if found is None or found[0] != kind:
            raise UnknownHead(f"there is no {kind} {object_id}")
        return found[1]


def _line(path: str) -> str:
    try:
        return os.fsdecode(_content(path, _LONGEST_REF).partition(b"\n")[0]).strip()
    except OSError as error:
        raise UnknownHead(f"{path!r} cannot be read: {error.strerror}") from error


def _content(path: str, most: int = LARGEST) -> bytes:
    """Return the first `most` bytes of a regular file. Raises OSError for anything else, and never waits for a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(most)
