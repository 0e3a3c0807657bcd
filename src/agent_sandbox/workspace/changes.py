"""What a sandbox would change on the machine, as values. `readback` makes them from its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from agent_sandbox._fast.values import TYPE_CHECKING, Protocol, dataclass

if TYPE_CHECKING:
    from agent_sandbox.workspace.nodes import Node


class Kind(Enum):
    """What happened to a path. The strongest is named; `before` and `after` tell the rest."""

    ADDED = "added"
    DELETED = "deleted"
    RETYPED = "retyped"
    MODIFIED = "modified"  # content, link target or device number
    MODE = "mode"
    OWNER = "owner"
    XATTR = "xattr"


@dataclass(frozen=True)
class Change:
    """One path that would be different. `path` is absolute, with bytes that are not UTF-8 kept as `os.fsdecode` keeps them."""

    path: str
    kind: Kind
    before: Node | None
    after: Node | None
    target: str = "/"  # of the overlay whose layer holds it
    xattrs: tuple[str, ...] = ()  # names of the extended attributes that differ
    inside: int = 0  # real entries below a directory that go with it
    masks_real: bool = False  # something real, hidden from the guest, is at this path or below it
    unread: bool = False  # content could not be read or compared in full, so it is taken as changed
    renamed_from: str = ""  # of an added entry: the deleted path whose content it has
    link_of: str = ""  # of a file: the first path in the change set that is the same inode, if that is another

    # Written out because there may be a hundred thousand, and the shared one takes three times as long.
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
    """Whatever holds the new content of changed files: the layers of a sandbox, or what an undo has kept."""

    def open_file(self, change: Change) -> int:
        """A descriptor to read the new content of a regular file; the caller closes it. Raises OSError."""
        ...


@dataclass(frozen=True)
class ChangeSet:
    """Changes in the order of their paths, each directory right before what is in it."""

    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", tuple(sorted(self.changes, key=lambda change: change.path.replace("/", "\0"))))

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def within(self, directory: str) -> ChangeSet:
        """Those at or below a directory."""
        return ChangeSet(tuple(change for change in self if covers(directory, change.path)))

    def outside(self, directory: str) -> ChangeSet:
        """Those that are not."""
        return ChangeSet(tuple(change for change in self if not covers(directory, change.path)))

    def chosen(self, wanted: Callable[[Change], bool]) -> ChangeSet:
        """Those that are wanted, and the new directories that they are in: a file cannot be carried over without its place."""
        from agent_sandbox.workspace.nodes import EntryType

        made = {
            each.path for each in self if each.kind in (Kind.ADDED, Kind.RETYPED) and each.after and each.after.type is EntryType.DIRECTORY
        }
        taken = {change.path for change in self if wanted(change)}
        for change in self if made else ():
            above = change.path.rpartition("/")[0] if change.path in taken and change.after is not None else ""
            while above in made and above not in taken:
                taken.add(above)
                above = above.rpartition("/")[0]
        return ChangeSet(tuple(change for change in self if change.path in taken))

    def counts(self) -> dict[Kind, int]:
        """How many there are of each kind that occurs."""
        kinds = [change.kind for change in self]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def covers(directory: str, path: str) -> bool:
    """Whether an absolute path is at or below another."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
