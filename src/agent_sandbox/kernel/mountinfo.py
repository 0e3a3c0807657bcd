"""The mount table as values.

A guest's view is planned from it, so it must agree with the kernel's path lookup: which mount is on top, which is hidden, and under which
other paths the same object can be reached. Only `read` reads; the rest is pure. Nothing here follows symbolic links: paths are absolute and
already resolved.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.functions import cached_property
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Filesystems without files of the machine: the kernel generates their content on reading.
# fmt: off
PSEUDO = frozenset({
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cpuset", "debugfs",
    "devpts", "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nfsd", "nsfs", "pipefs",
    "proc", "pstore", "resctrl", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "sockfs", "sysfs",
    "tracefs",
})
# fmt: on


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo; proc_pid_mountinfo(5) names the fields. Bytes that are not UTF-8 are escaped as by `os.fsdecode`."""

    id: int
    parent: int
    device: str  # "major:minor"
    root: str  # the directory or file of the filesystem that is mounted here
    target: str
    options: frozenset[str]
    propagation: tuple[str, ...]  # "shared:7", "master:2", …; empty if private
    fstype: str
    source: str
    super_options: tuple[str, ...]


def read(path: str = "/proc/self/mountinfo") -> tuple[Mount, ...]:
    """Return the mounts of this process, in the kernel's order. Raises OSError and ValueError."""
    with open(path, "rb") as file:
        return parse(file.read())


def parse(content: bytes) -> tuple[Mount, ...]:
    """Parse the bytes of a mountinfo file. Raises ValueError on a malformed line: a guess here would plan a wrong view."""
    return tuple(_line(line) for line in content.split(b"\n") if line)


def visible(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts that a path still reaches."""
    return MountTable(mounts).reachable


def containing(mounts: Iterable[Mount], path: str) -> Mount:
    """Return the mount that contains `path`. Raises LookupError if none does, as in a chroot whose root is not a mount point."""
    mount = MountTable(mounts).walk(path)
    if mount is None:
        raise LookupError(f"no visible mount contains {path}")
    return mount


class MountTable:
    """The mounts of a process, prepared for many lookups."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self._known = known = tuple(mounts)
        ids = {mount.id for mount in known}
        # The parent of the root mount is not listed (or is the mount itself): None stands for it.
        self._children = {
            (mount.parent if mount.parent in ids and mount.parent != mount.id else None, mount.target): mount for mount in known
        }

    @cached_property
    def reachable(self) -> tuple[Mount, ...]:
        """The mounts that a path still reaches: on top of their stack, and not below a later mount on a parent directory."""
        return tuple(mount for mount in self._known if self.walk(mount.target) is mount)

    def walk(self, path: str) -> Mount | None:
        """Return the mount that contains `path`, by the kernel's rule; None if none does.

        At each directory of the path, step onto the mount that has the current mount as parent and this directory as target. Repeat this
        there until no such mount exists.
        """
        parts = _parts(path)
        current: Mount | None = None
        for depth in range(len(parts) + 1):
            prefix = "/" + "/".join(parts[:depth])
            while (above := self._children.get((current.id if current else None, prefix))) is not None:
                current = above
        return current

    def aliases(self, path: str) -> list[str]:
        """Return other paths to the object at `path`, or to a part of it, that exist because its filesystem is mounted twice.

        With `/` from device 254:0 and `/srv/u` from directory /home/u of the same device, `/home/u/.ssh` is also `/srv/u/.ssh`. If only
        /home/u/.ssh/keys is mounted again, that mount point is an alias too, and so is every second mount point of a filesystem mounted
        below `path`.

        Not found: hard links, the layer directories of another overlay, and copies that a network or FUSE server exports under another
        device.
        """
        here = self.walk(path)
        if here is None:
            return []
        objects = [(here.device, _join(here.root, _below(here.target, path) or ""))]
        objects += [(mount.device, mount.root) for again in self._mounted_again.values() for mount in again if _below(path, mount.target)]
        found: dict[str, None] = {}  # an ordered set
        for device, inside in objects:
            for mount in self._mounted_again.get(device, ()):
                rest = _below(mount.root, inside)
                if rest is not None:
                    alias = _join(mount.target, rest)
                elif _below(inside, mount.root) is not None:
                    alias = mount.target
                else:
                    continue
                # A path at or below `path` is not another path, and a name covered by another mount leads elsewhere.
                if _below(path, alias) is None and self.walk(alias) is mount:
                    found[alias] = None
        return list(found)

    def aliases_of_entries(self, directory: str) -> list[str] | None:
        """Return the aliases of a directory below which each of its entries has its aliases, and no entry has others.

        None if entries differ, because something is mounted below the directory, or a part of it is mounted elsewhere: ask for each entry.
        Hundreds of paths lie in a handful of directories, so this saves most of the look-ups.
        """
        if directory in self._above_targets:
            return None
        here = self.walk(directory)
        if here is None:
            return []
        if (here.device, _join(here.root, _below(here.target, directory) or "")) in self._above_roots:
            return None
        aliases = self.aliases(directory)
        return None if any(alias in self._above_targets for alias in aliases) else aliases

    @cached_property
    def _mounted_again(self) -> dict[str, list[Mount]]:
        """The reachable mounts of each device that has more than one. Only these have aliases."""
        devices: dict[str, list[Mount]] = {}
        for mount in self.reachable:
            devices.setdefault(mount.device, []).append(mount)
        return {device: mounts for device, mounts in devices.items() if len(mounts) > 1}

    @cached_property
    def _above_targets(self) -> frozenset[str]:
        """The directories below which something is mounted."""
        return frozenset(above for mount in self._known for above in _directories_above(mount.target))

    @cached_property
    def _above_roots(self) -> frozenset[tuple[str, str]]:
        """The directories, each with its device, of which a part is mounted by itself."""
        return frozenset((mount.device, above) for mount in self._known for above in _directories_above(mount.root))


def _directories_above(path: str) -> Iterator[str]:
    if path.startswith("/") and path != "/":  # a namespace that is mounted has a root without any
        yield "/"
    while path := path.rpartition("/")[0]:
        yield path


def _parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {path!r}")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"not a resolved path: {path!r}")
    return parts


def _below(parent: str, path: str) -> str | None:
    """Return `path` relative to `parent`: "" if they are equal, None if `path` is not below `parent`."""
    if parent == path:
        return ""
    prefix = parent.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _join(parent: str, rest: str) -> str:
    return os.path.join(parent, rest) if rest else parent


def _line(line: bytes) -> Mount:
    # Split at single spaces: a source may be empty, and the kernel writes every space inside a field as \040.
    fields = line.split(b" ")
    try:
        dash = fields.index(b"-", 6)
        number, parent, device, root, target, options = fields[:6]
        fstype, source, super_options = fields[dash + 1 :]
        return Mount(
            id=int(number),
            parent=int(parent),
            device=device.decode("ascii"),
            root=_text(root),
            target=_text(target),
            options=frozenset(_text(options).split(",")),
            propagation=tuple(_text(field) for field in fields[6:dash]),
            fstype=_text(fstype),
            source=_text(source),
            super_options=tuple(_text(super_options).split(",")),
        )
    except ValueError as error:
        raise ValueError(f"not a line of mountinfo: {line!r}") from error


def _text(field: bytes) -> str:
    plain, *escaped = field.split(b"\\")
    return os.fsdecode(plain + b"".join(map(_unescaped, escaped)))


def _unescaped(part: bytes) -> bytes:
    """Decode the text after a backslash: three octal digits become one byte. A backslash without three octal digits stays."""
    digits = part[:3]
    octal = len(digits) == 3 and digits[0] in b"0123" and all(digit in b"01234567" for digit in digits)
    return bytes((int(digits, 8),)) + part[3:] if octal else b"\\" + part
