"""Where filesystems are mounted, as values.

The view of a guest is planned from this, so it has to agree with what a path lookup in the kernel would find: which mount is on top, which
is hidden, and under which other names the same object can be reached. Reading is one function, `read`; the rest is pure. Nothing here
follows symbolic links: paths are absolute and already resolved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from agent_sandbox._fast.values import dataclass

# Filesystems that hold no files of the machine: what they show is made up by the kernel when it is read.
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
    """One line of mountinfo; proc_pid_mountinfo(5) names the fields. Bytes that are not UTF-8 are kept as `os.fsdecode` keeps them."""

    id: int
    parent: int
    device: str  # "major:minor"
    root: str  # which directory or file of the filesystem is mounted here
    target: str
    options: frozenset[str]
    propagation: tuple[str, ...]  # "shared:7", "master:2", …; empty when private
    fstype: str
    source: str
    super_options: tuple[str, ...]


def read(path: str = "/proc/self/mountinfo") -> tuple[Mount, ...]:
    """The mounts of this process, in the kernel's order."""
    with open(path, "rb") as file:
        return parse(file.read())


def parse(content: bytes) -> tuple[Mount, ...]:
    """Mounts from the bytes of a mountinfo file. Raises ValueError on a line that is none: a guess here would plan a wrong view."""
    return tuple(_line(line) for line in content.split(b"\n") if line)


def visible(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """The mounts that a path still leads to: on top of their stack, and not below a later mount on a parent directory."""
    known = tuple(mounts)
    lookup = _Lookup(known)
    return tuple(mount for mount in known if lookup.walk(mount.target) is mount)


def containing(mounts: Iterable[Mount], path: str) -> Mount:
    """The mount that `path` lies on. Raises LookupError when none does, as in a chroot whose root is no mount point."""
    found = _Lookup(tuple(mounts)).walk(path)
    if found is None:
        raise LookupError(f"no visible mount contains {path}")
    return found


def aliases(mounts: Iterable[Mount], path: str) -> list[str]:
    """Other paths that lead to what is at `path`, or to a part of it, because its filesystem is mounted a second time.

    With `/` from device 254:0 and `/srv/u` from directory /home/u of the same device, `/home/u/.ssh` is also `/srv/u/.ssh`. When only
    /home/u/.ssh/keys is mounted again, that place is an alias too, and so is every second place of a filesystem mounted below `path`.

    Not found: hard links, the layer directories of another overlay, and copies that a network or FUSE server exports under another device.
    """
    known = tuple(mounts)
    lookup = _Lookup(known)
    here = lookup.walk(path)
    if here is None:
        return []
    reachable = [mount for mount in known if lookup.walk(mount.target) is mount]
    objects = [(here.device, _join(here.root, _below(here.target, path) or ""))]
    objects += [(mount.device, mount.root) for mount in reachable if _below(path, mount.target)]
    found: dict[str, None] = {}  # a set that keeps its order
    for mount in reachable:
        for device, inside in objects:
            if mount.device != device:
                continue
            rest = _below(mount.root, inside)
            if rest is not None:
                alias = _join(mount.target, rest)
            elif _below(inside, mount.root) is not None:
                alias = mount.target
            else:
                continue
            # What lies at or below the path itself is no other path, and a name covered by another mount leads elsewhere.
            if _below(path, alias) is None and lookup.walk(alias) is mount:
                found[alias] = None
    return list(found)


class _Lookup:
    """The kernel's own rule: standing on a mount, at a directory, step onto the mount whose parent and target these are; repeat."""

    def __init__(self, mounts: tuple[Mount, ...]) -> None:
        ids = {mount.id for mount in mounts}
        # The mount below the root is not listed (or is its own parent): None stands for it.
        self._children = {
            (mount.parent if mount.parent in ids and mount.parent != mount.id else None, mount.target): mount for mount in mounts
        }

    def walk(self, path: str) -> Mount | None:
        parts = _parts(path)
        current: Mount | None = None
        for depth in range(len(parts) + 1):
            prefix = "/" + "/".join(parts[:depth])
            while (above := self._children.get((current.id if current else None, prefix))) is not None:
                current = above
        return current


def _parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {path!r}")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"not a resolved path: {path!r}")
    return parts


def _below(parent: str, path: str) -> str | None:
    """`path` relative to `parent`, by whole components: "" when equal, None when it is not below."""
    if parent == path:
        return ""
    prefix = parent.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _join(parent: str, rest: str) -> str:
    return os.path.join(parent, rest) if rest else parent


def _line(line: bytes) -> Mount:
    # Exactly one space each: a source may be empty, and the kernel writes every space inside a field as \040.
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
    """What followed a backslash: three octal digits and the rest. The kernel writes its own backslashes so; others stay as they are."""
    digits = part[:3]
    octal = len(digits) == 3 and digits[0] in b"0123" and all(digit in b"01234567" for digit in digits)
    return bytes((int(digits, 8),)) + part[3:] if octal else b"\\" + part
