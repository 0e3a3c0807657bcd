"""The mount plan: the guest's view of the file system, as values that can be printed, sent and carried out.

`workspace.view` makes a plan, `describe()` shows it (`run --explain`), and `mount_steps` performs it in a fresh mount namespace, before
the guest exists. The steps work in a staging tmpfs with short names, so that neither the 256-byte limit of an fsconfig value nor colons
and commas in paths matter:

    r/        the guest's future root          l/N  a private copy of a host mount, lower layer of overlay N
    u/        upper and work directories        m/N  the mask layer of step N: whiteouts, opaque directories
    c/N       copied files                      f/N  links to frozen layers, so that names of any length fit into one page of mount options

Host directories are never bound into the view, only shown through an overlay: every write is captured, a mask holds by name even if the
host renames over the file, and host unix sockets cannot be connected to. Single regular files (an interpreter's binary) may be bound,
read-only.
"""

from __future__ import annotations

import marshal
import os

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import Any, ClassVar

# Major and minor numbers: assigned by the kernel, the same on every machine.
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_LONGEST_NAME = 255
DIGEST = "~"  # prefix of the digest that replaces a longer name; a quoted path begins with %2F instead


@dataclass(frozen=True)
class PathMask:
    """A path to hide in an overlay's lower layer, even if it is created later. With `keep`, the directory is shown, but empty."""

    path: str  # relative to the overlay
    keep: bool = False


@dataclass(frozen=True)
class ThrowAway:
    """Upper layers on a tmpfs that is gone after the run. The size of the tmpfs is the disk limit."""

    size_bytes: int

    def describe(self) -> str:
        return f"layers on a tmpfs of {self.size_bytes >> 20} MiB, thrown away"


@dataclass(frozen=True)
class OnDisk:
    """Upper layers in a directory that outlives the run.

    Not idmapped: as root, its files belong to the guest's otherwise unused ids, so a setuid file left by a guest belongs to no user.
    """

    path: str
    generation: str = ""  # subdirectory that this run writes to; empty for the directory itself

    def describe(self) -> str:
        return f"layers kept in {os.path.join(self.path, self.generation)}"


@dataclass(frozen=True)
class InImage:
    """Upper layers in an attached image. The run writes to the newest generation of layers; earlier generations are frozen.

    The space in the image is the disk limit. Files in the image belong to the same ids as in `OnDisk`.
    """

    path: str  # of the image, for display
    device: str  # the loop device
    backing: tuple[int, int]  # device and inode of the image, to which the loop device must be attached
    generation: str
    frozen: tuple[str, ...] = ()  # uppermost first
    limit_bytes: int | None = None

    def describe(self) -> str:
        below = f" over {len(self.frozen)} frozen" if self.frozen else ""
        return f"layers kept in generation {self.generation}{below} of the image {self.path}"


Layers = ThrowAway | OnDisk | InImage


def quote_target(target: str) -> str:
    """Return the name of the upper layer for a target, an absolute path. Raises ValueError for any other path.

    >>> quote_target("/home/a b")
    '%2Fhome%2Fa%20b'
    """
    raw = os.fsencode(target)
    if not raw.startswith(b"/"):
        raise ValueError(f"not an absolute path: {target!r}")
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    return quoted if len(quoted) <= _LONGEST_NAME else DIGEST + sha256(raw).hexdigest()


@dataclass(frozen=True)
class Overlay:
    """A copy-on-write view of one directory tree of one filesystem. Does not cross mounts."""

    kind: ClassVar[str] = "overlay"
    source: str
    target: str
    key: str  # name of its upper layer: `quote_target(target)`
    masks: tuple[PathMask, ...] = ()  # wider ones first
    places: tuple[str, ...] = ()  # directories below masked ones that must exist as mount points
    files: tuple[str, ...] = ()  # the same for single files
    links: tuple[tuple[str, str], ...] = ()  # and for links, each with its target
    links_over: tuple[tuple[str, str], ...] = ()  # regular files that are shown as links instead, each with its target
    links_instead: tuple[tuple[str, str], ...] = ()  # files that are shown as links even if they are hidden, each with its target
    stand_ins: tuple[str, ...] = ()  # directories of other owners that the guest may write to; see `workspace.view.plan`
    writable: bool = True
    # True: a failed mount fails the plan. False: show an empty directory and note it, or show nothing if the source has gone meanwhile.
    required: bool = True

    def describe(self) -> str:
        hidden = f", hiding {', '.join(mask.path + ('/*' if mask.keep else '') for mask in self.masks)}" if self.masks else ""
        return f"overlay {self.source} on {self.target} [{'copy-on-write' if self.writable else 'read-only'}]{hidden}"


IMAGES = "/dev/image"  # before the path of an image's files: by such a path, which no machine has, their changes are listed


@dataclass(frozen=True)
class ImageRoot:
    """The files of a container image as the root of the view. Only a plan: the runtime that has the image replaces it with an `Overlay`."""

    kind: ClassVar[str] = "image"
    image: str
    writable: bool = True
    target: str = "/"

    def describe(self) -> str:
        return f"image {self.image} on {self.target} [{'copy-on-write' if self.writable else 'read-only'}]"


def place_below(target: str, machine_root: str = "/") -> str:
    """Return the real directory below the overlay with this target: that of the machine, or that of an image.

    >>> place_below("/etc"), place_below("/dev/image/store/1/root")
    ('/etc', '/store/1/root')
    """
    return target.removeprefix(IMAGES) if target.startswith(f"{IMAGES}/") else machine_root.rstrip("/") + target


@dataclass(frozen=True)
class Copies:
    """A directory filled with copies of chosen entries, for patterns that an overlay cannot express.

    Does not follow changes of the originals during the run.
    """

    kind: ClassVar[str] = "copies"
    source: str
    target: str
    key: str
    entries: tuple[str, ...] = ()  # relative paths, parents first; directories, regular files and symlinks
    writable: bool = True
    contents: tuple[tuple[str, bytes], ...] = ()  # small files created beside them
    places: tuple[str, ...] = ()  # directories that must exist as mount points

    def describe(self) -> str:
        return f"copy {len(self.entries)} entries of {self.source} to {self.target} [{'copy-on-write' if self.writable else 'read-only'}]"


@dataclass(frozen=True)
class Bind:
    """One regular file of the machine, read-only."""

    kind: ClassVar[str] = "bind"
    source: str
    target: str
    required: bool = True  # True: a file that has gone meanwhile fails the plan. False: the view does not show it

    def describe(self) -> str:
        return f"bind file {self.source} on {self.target} [read-only]"


@dataclass(frozen=True)
class ExecutableFiles:
    """The only files of the view that can be executed or mapped as code: bound over themselves from the machine, read-only.

    Every other mount of a plan with this step is noexec. A file that an earlier run removed from the view is left out.
    """

    kind: ClassVar[str] = "code"
    programs: tuple[str, ...]
    libraries: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"nothing can be executed but {', '.join(self.programs) or 'nothing'}, with {len(self.libraries)} libraries [read-only]"


@dataclass(frozen=True)
class Tmpfs:
    """A private, sized, empty directory."""

    kind: ClassVar[str] = "tmpfs"
    target: str
    size_bytes: int
    mode: int = 0o755

    def describe(self) -> str:
        return f"private directory {self.target} [{self.size_bytes >> 20} MiB]"


@dataclass(frozen=True)
class Directory:
    """An empty directory in the root of the view."""

    kind: ClassVar[str] = "directory"
    target: str

    def describe(self) -> str:
        return f"directory {self.target}"


@dataclass(frozen=True)
class Symlink:
    """A symbolic link in the root of the view."""

    kind: ClassVar[str] = "symlink"
    target: str
    to: str

    def describe(self) -> str:
        return f"link {self.target} to {self.to}"


@dataclass(frozen=True)
class NewFile:
    """A small file with given content in the root of the view."""

    kind: ClassVar[str] = "file"
    target: str
    content: bytes

    def describe(self) -> str:
        return f"file {self.target} [{len(self.content)} bytes]"


@dataclass(frozen=True)
class SkeletonRoot:
    """An empty root for views that do not show the machine's `/` as one overlay. Sealed read-only at the end."""

    kind: ClassVar[str] = "skeleton"

    def describe(self) -> str:
        return "empty root directory"


@dataclass(frozen=True)
class SealRoot:
    """The last step of a skeleton root: make it read-only. With an outer program, the guest's root is a directory of the view."""

    kind: ClassVar[str] = "seal"
    target: str = "/"

    def describe(self) -> str:
        return "root directory read-only" if self.target == "/" else f"{self.target} read-only"


@dataclass(frozen=True)
class Devices:
    """A minimal /dev: six harmless devices, its own devpts, private shared memory."""

    kind: ClassVar[str] = "devices"
    shm_bytes: int

    def describe(self) -> str:
        return f"minimal /dev [{' '.join(DEVICES)} pts shm]"


@dataclass(frozen=True)
class Proc:
    """The guest's own /proc: shows its processes only; nothing in it that affects the host is writable.

    One that is not `sealed` is for an outer program, whose guest does not see it: the kernel lets a user namespace mount a new /proc only
    where it already sees one that is not covered. Only the ids of the guest protect the settings in it.
    """

    kind: ClassVar[str] = "proc"
    sealed: bool = True

    def describe(self) -> str:
        return "own /proc, /proc/sys read-only" if self.sealed else "own /proc, for the outer program"


Step = (
    Overlay | ImageRoot | Copies | Bind | ExecutableFiles | Tmpfs | Directory | Symlink | NewFile | SkeletonRoot | SealRoot | Devices | Proc
)
_KINDS: dict[str, Any] = {
    step.kind: step
    for step in (Overlay, Copies, Bind, ExecutableFiles, Tmpfs, Directory, Symlink, NewFile, SkeletonRoot, SealRoot, Devices, Proc)
}
_LAYERS: dict[str, Any] = {kind.__name__: kind for kind in (ThrowAway, OnDisk, InImage)}


@dataclass(frozen=True)
class MountPlan:
    """The layers and mount steps of a view. A value: making one mounts nothing."""

    layers: Layers
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # for users: parts of the view that this host or policy weakened or left out

    @property
    def code(self) -> ExecutableFiles | None:
        """The executable files; None if every file of the view may be executed."""
        return next((step for step in self.steps if isinstance(step, ExecutableFiles)), None)

    def describe(self) -> list[str]:
        """Return one line per step, in order of execution."""
        return [self.layers.describe(), *(step.describe() for step in self.steps)]


def encode(plan: MountPlan) -> bytes:
    """Return the plan as bytes: the same for equal plans. The plan caches them, because one plan is launched many times."""
    encoded: bytes | None = plan.__dict__.get("_encoded")
    if encoded is None:
        layers = (type(plan.layers).__name__, _plain(vars(plan.layers)))
        steps = [(step.kind, _plain(vars(step))) for step in plan.steps]
        # Later versions write an object that others refer to, too, in another way: equal plans would differ by who holds their parts.
        encoded = plan.__dict__["_encoded"] = marshal.dumps((layers, steps), 2)
    return encoded


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: [(m.path, m.keep) for m in value] if name == "masks" else value for name, value in values.items()}


def decode(message: bytes) -> MountPlan:
    """Return the plan encoded by `encode`, without its notes."""
    (kind_of_layers, layers), steps = marshal.loads(message)
    decoded = []
    for kind, values in steps:
        if "masks" in values:
            values["masks"] = tuple(PathMask(*mask) for mask in values["masks"])
        decoded.append(_KINDS[kind](**values))
    return MountPlan(_LAYERS[kind_of_layers](**layers), tuple(decoded))
