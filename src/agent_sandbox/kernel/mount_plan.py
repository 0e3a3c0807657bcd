"""The mount plan: what a guest will see, as values that can be printed, sent and then carried out.

`workspace.view` makes a plan, `describe()` shows it (`run --explain`), and `mount_steps` performs it in a fresh mount namespace, before
the guest exists. The steps work in a staging tmpfs with short names, so that neither the 256 bytes of an fsconfig value nor colons
and commas in paths matter:

    r/        the guest's future root          l/N  a private copy of a host mount, lower layer of overlay N
    u/        upper and work directories        m/N  the mask layer of overlay N: whiteouts, opaque directories, copied files
    f/N       links to frozen layers, so that names of any length fit into one page of mount options

Host directories are never bound into the view, only seen through an overlay: every write is captured, a mask holds by name even if the host
renames over the file, and host unix sockets cannot be connected to. Single regular files (an interpreter's binary) may be bound, read-only.
"""

from __future__ import annotations

import marshal
import os

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import Any, ClassVar

# Major and minor: the kernel's own, and the same on every machine.
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


@dataclass(frozen=True)
class Mask:
    """Hide a name of an overlay's lower layer, now and if it appears later. `keep` leaves the directory itself, empty."""

    path: str  # relative to the overlay
    keep: bool = False


@dataclass(frozen=True)
class ThrowAway:
    """Upper layers on a tmpfs of their own, which is the disk limit, and gone with the run."""

    size_bytes: int

    def describe(self) -> str:
        return f"layers on a tmpfs of {self.size_bytes >> 20} MiB, thrown away"


@dataclass(frozen=True)
class OnDisk:
    """Upper layers in a directory that outlives the run.

    Not idmapped: as root the files in it belong to the guest's own, unused ids, so that a setuid file a guest leaves there is nobody's.
    """

    path: str
    generation: str = ""  # the directory in it that this run writes to; empty for itself

    def describe(self) -> str:
        return f"layers kept in {os.path.join(self.path, self.generation)}"


@dataclass(frozen=True)
class InImage:
    """Upper layers in an attached image, which is the disk limit: one generation is written, those below it are frozen.

    Files in it belong to the same ids as in `OnDisk`.
    """

    path: str  # of the image, for people
    device: str  # the loop device
    backing: tuple[int, int]  # the image's device and inode: what the loop device must be attached to
    generation: str
    frozen: tuple[str, ...] = ()  # uppermost first
    limit_bytes: int | None = None

    def describe(self) -> str:
        below = f" over {len(self.frozen)} frozen" if self.frozen else ""
        return f"layers kept in generation {self.generation}{below} of the image {self.path}"


Layers = ThrowAway | OnDisk | InImage


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
    links: tuple[tuple[str, str], ...] = ()  # and for links, with where they lead
    stand_ins: tuple[str, ...] = ()  # directories of others in which the guest may write; see `workspace.view.plan`
    writable: bool = True
    required: bool = True  # when it cannot be mounted: fail, or show an empty directory and say so; or nothing, when it has gone by then

    def describe(self) -> str:
        hidden = f", hiding {', '.join(mask.path + ('/*' if mask.keep else '') for mask in self.masks)}" if self.masks else ""
        return f"overlay {self.source} on {self.target} [{'copy-on-write' if self.writable else 'read-only'}]{hidden}"


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
    places: tuple[str, ...] = ()  # directories that must exist, to mount on

    def describe(self) -> str:
        return f"copy {len(self.entries)} entries of {self.source} to {self.target} [{'copy-on-write' if self.writable else 'read-only'}]"


@dataclass(frozen=True)
class Bind:
    """One regular file of the machine, read-only."""

    kind: ClassVar[str] = "bind"
    source: str
    target: str
    required: bool = True  # when it has gone by then: fail, or do without

    def describe(self) -> str:
        return f"bind file {self.source} on {self.target} [read-only]"


@dataclass(frozen=True)
class Code:
    """The only files of the view that can be executed, or mapped as code: bound over themselves from the machine, read-only.

    In a plan with this step nothing else that is mounted can be. A file whose place in the view has gone, because an earlier run removed
    it, is left out.
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
    """An empty directory in the root the view stands on."""

    kind: ClassVar[str] = "directory"
    target: str

    def describe(self) -> str:
        return f"directory {self.target}"


@dataclass(frozen=True)
class Symlink:
    """A symbolic link in the root the view stands on."""

    kind: ClassVar[str] = "symlink"
    target: str
    to: str

    def describe(self) -> str:
        return f"link {self.target} to {self.to}"


@dataclass(frozen=True)
class File:
    """A small file with given content in the root the view stands on."""

    kind: ClassVar[str] = "file"
    target: str
    content: bytes

    def describe(self) -> str:
        return f"file {self.target} [{len(self.content)} bytes]"


@dataclass(frozen=True)
class SkeletonRoot:
    """A root of our own for views that do not show the machine's `/` as one overlay. Sealed read-only at the end."""

    kind: ClassVar[str] = "skeleton"

    def describe(self) -> str:
        return "empty root directory"


@dataclass(frozen=True)
class SealRoot:
    """Make the skeleton read-only."""

    kind: ClassVar[str] = "seal"

    def describe(self) -> str:
        return "root directory read-only"


@dataclass(frozen=True)
class Devices:
    """A minimal /dev: the harmless six, a devpts of its own, private shared memory."""

    kind: ClassVar[str] = "devices"
    shm_bytes: int

    def describe(self) -> str:
        return f"minimal /dev [{' '.join(DEVICES)} pts shm]"


@dataclass(frozen=True)
class Proc:
    """The guest's own /proc: its processes only, nothing of it writable that reaches the host."""

    kind: ClassVar[str] = "proc"

    def describe(self) -> str:
        return "own /proc, /proc/sys read-only"


Step = Overlay | Copies | Bind | Code | Tmpfs | Directory | Symlink | File | SkeletonRoot | SealRoot | Devices | Proc
_KINDS: dict[str, Any] = {
    step.kind: step for step in (Overlay, Copies, Bind, Code, Tmpfs, Directory, Symlink, File, SkeletonRoot, SealRoot, Devices, Proc)
}
_LAYERS: dict[str, Any] = {kind.__name__: kind for kind in (ThrowAway, OnDisk, InImage)}


@dataclass(frozen=True)
class MountPlan:
    """What a guest will see. Nothing has happened yet when you hold one."""

    layers: Layers
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # what this host or policy made weaker or left out, for people

    @property
    def code(self) -> Code | None:
        """What can be executed; None where that is whatever is there."""
        return next((step for step in self.steps if isinstance(step, Code)), None)

    def describe(self) -> list[str]:
        """One line per step, in the order of their doing."""
        return [self.layers.describe(), *(step.describe() for step in self.steps)]


def encode(plan: MountPlan) -> bytes:
    """The plan as bytes, made once: a plan is launched many times."""
    made: bytes | None = plan.__dict__.get("_encoded")
    if made is None:
        layers = (type(plan.layers).__name__, _plain(vars(plan.layers)))
        made = plan.__dict__["_encoded"] = marshal.dumps((layers, [(step.kind, _plain(vars(step))) for step in plan.steps]))
    return made


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: [(m.path, m.keep) for m in value] if name == "masks" else value for name, value in values.items()}


def decode(message: bytes) -> MountPlan:
    """The inverse of `encode`."""
    (kind_of_layers, layers), steps = marshal.loads(message)
    made = []
    for kind, values in steps:
        if "masks" in values:
            values["masks"] = tuple(Mask(*mask) for mask in values["masks"])
        made.append(_KINDS[kind](**values))
    return MountPlan(_LAYERS[kind_of_layers](**layers), tuple(made))
