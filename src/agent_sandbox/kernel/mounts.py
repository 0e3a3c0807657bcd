"""The mount plan: what a guest will see, as values that can be printed, sent and then carried out.

`workspace.view` makes a plan, `describe()` shows it (`run --explain`), and the stage performs it in a fresh mount namespace, before the
guest exists. The steps work in a staging tmpfs with short names, so that neither the 256 bytes of an fsconfig value nor colons and commas
in paths matter:

    r/        the guest's future root          l/N  a private copy of a host mount, lower layer of overlay N
    u/        upper and work directories        m/N  the mask layer of overlay N: whiteouts, opaque directories, copied files

Host directories are never bound into the view, only seen through an overlay: every write is captured, a mask holds by name even if the host
renames over the file, and host unix sockets cannot be connected to. Single regular files (an interpreter's binary) may be bound, read-only.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.placing import (
    QUIET,
    Mask,
    Site,
    attach_clone,
    copy_entry,
    directory_for,
    file_for,
    fill_mask_layer,
    make_layer,
    mount_overlay,
)
from agent_sandbox.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import Any, ClassVar

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# What containers mask too: files of /proc that tell of, or act on, the host as a whole.
PROC_MASKED = (
    "acpi",
    "asound",
    "kcore",
    "keys",
    "latency_stats",
    "timer_list",
    "timer_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "kmsg",
)
PROC_READONLY = ("bus", "fs", "irq", "sys")


@dataclass(frozen=True)
class ThrowAway:
    """Upper layers on a tmpfs of their own, which is the disk limit, and gone with the run."""

    size_bytes: int

    def describe(self) -> str:
        return f"layers on a tmpfs of {self.size_bytes >> 20} MiB, thrown away"

    def perform(self, site: Site) -> None:
        sc.mount("layers", "u", "tmpfs", QUIET, f"size={self.size_bytes},mode=700")
        if site.userxattr:
            try:
                os.setxattr("u", "user.try", b"")
                os.removexattr("u", "user.try")
            except OSError:
                why = "tmpfs takes no user attributes on this kernel (they came with Linux 6.6)"
                site.notes.append(f"{why}: in a throw-away sandbox a directory that was removed cannot be made again")


@dataclass(frozen=True)
class OnDisk:
    """Upper layers in a directory that outlives the run.

    Not idmapped: as root the files in it belong to the guest's own, unused ids, so that a setuid file a guest leaves there is nobody's.
    """

    path: str

    def describe(self) -> str:
        return f"layers kept in {self.path}"

    def perform(self, site: Site) -> None:
        attach_clone(self.path, "u", None, writable=True)


@dataclass(frozen=True)
class Overlay:
    """A copy-on-write view of one directory tree of one filesystem. Does not cross mounts."""

    kind: ClassVar[str] = "overlay"
    source: str
    target: str
    key: str  # names its upper layer
    masks: tuple[Mask, ...] = ()  # wider ones first
    places: tuple[str, ...] = ()  # directories below masked ones that must exist, to mount on
    files: tuple[str, ...] = ()  # the same for single files
    stand_ins: tuple[str, ...] = ()  # directories of others in which the guest may write; see `workspace.view`
    writable: bool = True
    required: bool = True  # when it cannot be mounted: fail, or show an empty directory and say so

    def describe(self) -> str:
        hidden = f", hiding {', '.join(mask.path + ('/*' if mask.keep else '') for mask in self.masks)}" if self.masks else ""
        return f"overlay {self.source} on {self.target} [{'copy-on-write' if self.writable else 'read-only'}]{hidden}"

    def perform(self, site: Site) -> None:
        number = site.number()
        lower, mask_layer = f"l/{number}", f"m/{number}"
        try:
            os.mkdir(lower)
            attach_clone(self.source, lower, site.userns, writable=False)
            lowers = [lower]
            if self.masks or self.stand_ins or not self.writable:  # an overlay without an upper wants two layers
                make_layer(mask_layer, lower)
                fill_mask_layer(mask_layer, lower, self.masks, site, stand_ins=self.stand_ins)
                for place in (*self.places, *map(os.path.dirname, self.files)):
                    os.makedirs(f"{mask_layer}/{place}", exist_ok=True)
                for place in self.files:
                    os.mknod(f"{mask_layer}/{place}", 0o755 | stat.S_IFREG)
                lowers.insert(0, mask_layer)
            mount_overlay(lowers, self.key, self.target, self.writable, site)
        except OSError as error:
            if self.required:
                raise
            site.notes.append(f"not shown: {self.target}: {error.strerror}")


@dataclass(frozen=True)
class Copies:
    """A directory filled with copies of chosen entries: for patterns that an overlay cannot express.

    Does not follow reality during the run.
    """

    kind: ClassVar[str] = "copies"
    source: str
    target: str
    key: str
    entries: tuple[str, ...] = ()  # relative paths, parents first; directories, regular files and symlinks
    writable: bool = True
    contents: tuple[tuple[str, bytes], ...] = ()  # small files made beside them

    def describe(self) -> str:
        return f"copy {len(self.entries)} entries of {self.source} to {self.target} [{'copy-on-write' if self.writable else 'read-only'}]"

    def perform(self, site: Site) -> None:
        number = site.number()
        layer, spare = f"m/{number}", f"l/{number}"
        make_layer(layer, self.source, site.shift)
        os.mkdir(spare)
        source = sc.openat2(sc.AT_FDCWD, self.source, os.O_PATH | os.O_DIRECTORY, resolve=sc.RESOLVE_NO_SYMLINKS)
        try:
            for entry in self.entries:
                with suppress(PermissionError, FileNotFoundError):  # closed to us, as it would be to the guest, or gone meanwhile
                    copy_entry(source, entry, f"{layer}/{entry}", site.shift)
        finally:
            os.close(source)
        for name, content in self.contents:
            with suppress(FileExistsError), open(f"{layer}/{name}", "xb") as file:
                file.write(content)
                os.fchown(file.fileno(), site.shift or -1, site.shift or -1)
        mount_overlay([layer, spare], self.key, self.target, self.writable, site)


@dataclass(frozen=True)
class Bind:
    """One regular file of the machine, read-only."""

    kind: ClassVar[str] = "bind"
    source: str
    target: str

    def describe(self) -> str:
        return f"bind file {self.source} on {self.target} [read-only]"

    def perform(self, site: Site) -> None:
        if not stat.S_ISREG(os.stat(self.source).st_mode):  # a directory or socket bound in would be a hole
            raise OSError(errno.EINVAL, "only regular files are bound", self.source)
        with file_for(self.target) as place:
            attach_clone(self.source, place, site.userns, writable=False)


@dataclass(frozen=True)
class Tmpfs:
    """A private, sized, empty directory."""

    kind: ClassVar[str] = "tmpfs"
    target: str
    size_bytes: int
    mode: int = 0o755

    def describe(self) -> str:
        return f"private directory {self.target} [{self.size_bytes >> 20} MiB]"

    def perform(self, site: Site) -> None:
        owner = f",uid={site.shift},gid={site.shift}" if site.shift else ""
        with directory_for(self.target) as place:
            sc.mount("private", place, "tmpfs", QUIET, f"size={self.size_bytes},mode={self.mode:o}{owner}")


@dataclass(frozen=True)
class Directory:
    """An empty directory in the root the view stands on."""

    kind: ClassVar[str] = "directory"
    target: str

    def describe(self) -> str:
        return f"directory {self.target}"

    def perform(self, site: Site) -> None:
        with directory_for(self.target):
            pass


@dataclass(frozen=True)
class Symlink:
    """A symbolic link in the root the view stands on."""

    kind: ClassVar[str] = "symlink"
    target: str
    to: str

    def describe(self) -> str:
        return f"link {self.target} to {self.to}"

    def perform(self, site: Site) -> None:
        with directory_for(os.path.dirname(self.target)) as parent, suppress(FileExistsError):
            os.symlink(self.to, f"{parent}/{os.path.basename(self.target)}")


@dataclass(frozen=True)
class File:
    """A small file with given content in the root the view stands on."""

    kind: ClassVar[str] = "file"
    target: str
    content: bytes

    def describe(self) -> str:
        return f"file {self.target} [{len(self.content)} bytes]"

    def perform(self, site: Site) -> None:
        with file_for(self.target) as place, open(place, "wb") as file:
            file.write(self.content)
            os.fchmod(file.fileno(), 0o644)


@dataclass(frozen=True)
class SkeletonRoot:
    """A root of our own for views that do not show the machine's `/` as one overlay. Sealed read-only at the end."""

    kind: ClassVar[str] = "skeleton"

    def describe(self) -> str:
        return "empty root directory"

    def perform(self, site: Site) -> None:
        sc.mount("root", "r", "tmpfs", QUIET, "size=16m,mode=755")
        if site.shift:
            os.chown("r", site.shift, site.shift)


@dataclass(frozen=True)
class SealRoot:
    """Make the skeleton read-only."""

    kind: ClassVar[str] = "seal"

    def describe(self) -> str:
        return "root directory read-only"

    def perform(self, site: Site) -> None:
        sc.mount("", "r", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | QUIET)


@dataclass(frozen=True)
class Devices:
    """A minimal /dev: the harmless six, a devpts of its own, private shared memory."""

    kind: ClassVar[str] = "devices"
    shm_bytes: int

    def describe(self) -> str:
        return f"minimal /dev [{' '.join(DEVICES)} pts shm]"

    def perform(self, site: Site) -> None:
        with directory_for("/dev") as place:
            sc.mount("dev", place, "tmpfs", sc.MS_NOSUID | sc.MS_NOEXEC, "size=64k,mode=755")
        with directory_for("/dev") as dev:
            self._fill(dev)

    def _fill(self, dev: str) -> None:
        for name in DEVICES:
            # The host's own node is bound: a guest's user namespace may not make device nodes. The type is checked on what was opened.
            fd = sc.open_tree(f"/dev/{name}", sc.OPEN_TREE_CLONE)
            if not stat.S_ISCHR(os.fstat(fd).st_mode):
                raise OSError(errno.ENODEV, "not a character device", f"/dev/{name}")
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
            sc.move_mount(fd, f"{dev}/{name}")
            os.close(fd)
        for name, to in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")):
            os.symlink(to, f"{dev}/{name}")
        os.mkdir(f"{dev}/pts")
        sc.mount("devpts", f"{dev}/pts", "devpts", sc.MS_NOSUID | sc.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=64")
        os.mkdir(f"{dev}/shm")
        sc.mount("shm", f"{dev}/shm", "tmpfs", QUIET, f"size={self.shm_bytes},mode=1777")
        sc.mount("", dev, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)


@dataclass(frozen=True)
class Proc:
    """The guest's own /proc: its processes only, nothing of it writable that reaches the host."""

    kind: ClassVar[str] = "proc"

    def describe(self) -> str:
        return "own /proc, /proc/sys read-only"

    def perform(self, site: Site) -> None:
        with directory_for("/proc") as place:
            sc.mount("proc", place, "proc", QUIET | sc.MS_NOEXEC)
        with directory_for("/proc") as proc:
            self._seal(proc)

    def _seal(self, proc: str) -> None:
        for name in PROC_READONLY:
            if os.path.isdir(f"{proc}/{name}"):
                sc.mount(f"{proc}/{name}", f"{proc}/{name}", None, sc.MS_BIND)
                sc.mount("", f"{proc}/{name}", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | QUIET | sc.MS_NOEXEC)
        for name in PROC_MASKED:
            if os.path.isdir(f"{proc}/{name}"):
                sc.mount("masked", f"{proc}/{name}", "tmpfs", QUIET | sc.MS_NOEXEC | sc.MS_RDONLY, "size=0,mode=000")
            elif os.path.exists(f"{proc}/{name}"):
                sc.mount("/dev/null", f"{proc}/{name}", None, sc.MS_BIND)


Step = Overlay | Copies | Bind | Tmpfs | Directory | Symlink | File | SkeletonRoot | SealRoot | Devices | Proc
_KINDS: dict[str, Any] = {
    step.kind: step for step in (Overlay, Copies, Bind, Tmpfs, Directory, Symlink, File, SkeletonRoot, SealRoot, Devices, Proc)
}


@dataclass(frozen=True)
class MountPlan:
    """What a guest will see. Nothing has happened yet when you hold one."""

    layers: ThrowAway | OnDisk
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # what this host or policy made weaker or left out, for people

    def describe(self) -> list[str]:
        """One line per step, in the order of their doing."""
        return [self.layers.describe(), *(step.describe() for step in self.steps)]

    def perform(self, site: Site) -> None:
        """Carry the plan out. The current directory is the staging tmpfs."""
        for name in ("r", "u", "l", "m"):
            os.mkdir(name)
        self.layers.perform(site)
        for step in self.steps:
            step.perform(site)


def encode(plan: MountPlan) -> tuple[Any, ...]:
    """The plan as plain tuples, for marshal."""
    layers = plan.layers.path if isinstance(plan.layers, OnDisk) else plan.layers.size_bytes
    return layers, [(step.kind, _plain(vars(step))) for step in plan.steps]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: [(m.path, m.keep) for m in value] if name == "masks" else value for name, value in values.items()}


def decode(message: tuple[Any, ...]) -> MountPlan:
    """The inverse of `encode`."""
    layers, steps = message
    made = []
    for kind, values in steps:
        if "masks" in values:
            values["masks"] = tuple(Mask(*mask) for mask in values["masks"])
        made.append(_KINDS[kind](**values))
    return MountPlan(OnDisk(layers) if isinstance(layers, str) else ThrowAway(layers), tuple(made))
