"""The changes that a sandbox would make on the machine, as values. `layers.readback` computes them from the layers.

*Noise* is by-products such as caches and scratch files that nobody wants to read one by one. A list counts them, and shows them on demand.
A promotion leaves noise out unless the user asks for it. A guest chooses the names, so an entry that was not shown must not be promoted.
"""

from __future__ import annotations

from itertools import pairwise

from agent_sandbox._fast.values import TYPE_CHECKING, Enum, Protocol, dataclass
from agent_sandbox.policy.paths import contains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_sandbox.workspace.nodes import Node

_DIRECTORIES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".npm", "_cacache"})
_PAIRS = frozenset({("node_modules", ".cache"), (".cache", "pip"), (".cache", "npm"), (".cache", "yarn"), (".cache", "uv")})
_FIRST = frozenset(first for first, _ in _PAIRS)
_SCRATCH = ("/tmp", "/var/tmp", "/run", "/var/run", "/var/cache", "/dev/shm")
_SCRATCH_TREES = tuple(f"{path}/" for path in _SCRATCH)


class Kind(Enum):
    """Kinds of change to a path. A `Change` has only its strongest kind; its `before` and `after` show the weaker differences."""

    ADDED = "added"
    DELETED = "deleted"
    RETYPED = "retyped"
    MODIFIED = "modified"  # content, link target or device number
    MODE = "mode"
    OWNER = "owner"
    XATTR = "xattr"


@dataclass(frozen=True)
class Change:
    """One path that would change. `path` is absolute; bytes that are not UTF-8 are kept as `os.fsdecode` keeps them."""

    path: str
    kind: Kind
    before: Node | None
    after: Node | None
    target: str = "/"  # target of the overlay whose layer holds the change
    xattrs: tuple[str, ...] = ()  # names of the extended attributes that differ
    inside: int = 0  # number of real entries below a directory that are removed with it
    masks_real: bool = False  # a real entry that is hidden from the guest is at this path or below it
    unread: bool = False  # content could not be fully read or compared, so it counts as changed
    renamed_from: str = ""  # for an added entry: the deleted path with the same content
    link_of: str = ""  # for a file: the first path in the change set with the same inode, if not this one

    # Written out because there may be 100,000 changes, and the shared dataclass `__init__` takes three times as long.
    def __init__(
        self,
        path: str,
        kind: Kind,
        before: Node | None,
        after: Node | None,
        target: str = "/",
        xattrs: tuple[str, ...] = (),
        inside: int = 0,
        masks_real: bool = False,
        unread: bool = False,
        renamed_from: str = "",
        link_of: str = "",
    ) -> None:
        values = self.__dict__
        values["path"], values["kind"], values["before"], values["after"] = path, kind, before, after
        values["target"], values["xattrs"], values["inside"], values["masks_real"] = target, xattrs, inside, masks_real
        values["unread"], values["renamed_from"], values["link_of"] = unread, renamed_from, link_of


class Contents(Protocol):
    """The source of the new content of changed files: a sandbox's layers, or the backup of an undo."""

    def open_file(self, change: Change) -> int:
        """Open the new content of a regular file for reading; the caller closes the descriptor. Raises OSError."""
        ...


@dataclass(frozen=True)
class ChangeSet:
    """Changes sorted by path, each directory right before its contents."""

    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", tuple(sorted(self.changes, key=lambda change: change.path.replace("/", "\0"))))

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def within(self, directory: str) -> ChangeSet:
        """Return the changes at or below a directory."""
        inside = directory.rstrip("/") + "/"
        return _sorted(tuple(change for change in self if change.path.startswith(inside) or change.path == directory))

    def outside(self, directory: str) -> ChangeSet:
        """Return the changes that are neither at nor below a directory."""
        return _sorted(tuple(change for change in self if not contains(directory, change.path)))

    def chosen(self, wanted: Callable[[Change], bool]) -> ChangeSet:
        """Return the wanted changes and the new directories they lie in, without which a file cannot be promoted."""
        from agent_sandbox.workspace.nodes import EntryType

        new_directories = {
            each.path for each in self if each.kind in (Kind.ADDED, Kind.RETYPED) and each.after and each.after.type is EntryType.DIRECTORY
        }
        taken = {change.path for change in self if wanted(change)}
        for change in self if new_directories else ():
            above = change.path.rpartition("/")[0] if change.path in taken and change.after is not None else ""
            while above in new_directories and above not in taken:
                taken.add(above)
                above = above.rpartition("/")[0]
        return _sorted(tuple(change for change in self if change.path in taken))

    def counts(self) -> dict[Kind, int]:
        """Return the number of changes of each kind that occurs."""
        kinds = [change.kind for change in self]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _sorted(changes: tuple[Change, ...]) -> ChangeSet:
    """Return the change set of changes that are in order already."""
    result = object.__new__(ChangeSet)
    result.__dict__["changes"] = changes
    return result


def is_noise(path: str) -> bool:
    """Return whether an absolute path is, or lies in, a cache or a scratch directory.

    >>> is_noise("/home/a/app/__pycache__/x.pyc"), is_noise("/home/a/tmp/notes")
    (True, False)
    """
    if path.startswith(_SCRATCH) and f"{path}/".startswith(_SCRATCH_TREES):
        return True
    parts = path.split("/")
    return not _DIRECTORIES.isdisjoint(parts) or (not _FIRST.isdisjoint(parts) and any(pair in _PAIRS for pair in pairwise(parts)))


def place_of(path: str, project: str) -> str:
    """Return the group of a changed path: `project`, `elsewhere` or `noise`. A path in the project is `project`, even below /var/tmp.

    >>> place_of("/var/tmp/app/x", "/var/tmp/app"), place_of("/var/tmp/y", "/var/tmp/app")
    ('project', 'noise')
    """
    inside = contains(project, path)
    noisy = is_noise("/project" + path[len(project.rstrip("/")) :] if inside else path)
    return "noise" if noisy else "project" if inside else "elsewhere"
