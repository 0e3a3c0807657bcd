"""Helpers for the steps of a mount plan: mount points in the view, private copies of mounts, overlays.

The current directory is the staging tmpfs (see `mount_plan`). Everything here runs with the privilege to mount, before the guest exists.
"""

from __future__ import annotations

import errno
import os
import stat

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mask_layers import MaskLayers, look_like, make_layer
from agent_sandbox.kernel.mount_plan import DIGEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent_sandbox.kernel.loop import MountedImage

QUIET = sc.MS_NOSUID | sc.MS_NODEV
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class MountedBelow(OSError):
    """Raised if something is mounted below a directory that was planned as one layer."""


@dataclass(frozen=True)
class Scene:
    """A writable overlay of a run with checkpoints, whose upper layer is exchanged at each of them."""

    key: str
    target: str
    lowers: tuple[str, ...]  # without frozen layers
    base: str  # parent of its generations: "u" for what a caller may read back, "s" for scratch directories


@dataclass
class Site:
    """The state of a mount plan while its steps are carried out. `shift` is added to every user and group id."""

    userns: int | None  # maps the machine's ids to the guest's, for idmapped mounts; None keeps ids
    shift: int
    userxattr: bool  # the mounts belong to a user namespace: overlay stores its marks in user.* attributes
    notes: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)  # executable files of the view, if the rest is not executable
    count: int = 0
    step: int = 0  # number of the step that is being carried out
    executable: bool = True  # whether files on the mounts can be executed
    uppers: str = "u"  # parent of the upper layers
    fresh: bool = False  # the upper layers are made for this run, in memory
    frozen: tuple[str, ...] = ()  # parents of the upper layers of earlier generations, uppermost first
    masks: MaskLayers = field(default_factory=MaskLayers)
    shares_proc: bool = False  # whether /proc is that of the machine, because a new one was refused
    scenes: list[Scene] | None = None  # of a run with checkpoints
    image: MountedImage | None = None  # the image of the layers, if it was mounted before the plan was known

    def number(self) -> int:
        """Return a fresh number for a layer directory."""
        self.count += 1
        return self.count

    @property
    def flags(self) -> int:
        """The mount flags that every mount of the view has."""
        return QUIET if self.executable else QUIET | sc.MS_NOEXEC

    @property
    def opaque_attribute(self) -> str:
        """The extended attribute that makes a directory hide the layers below it."""
        return "user.overlay.opaque" if self.userxattr else "trusted.overlay.opaque"


@contextmanager
def directory_for(target: str) -> Iterator[str]:
    """Yield a path for mounting on a directory of the view, creating the directory if missing. Raises OSError.

    The walk takes one component at a time and follows no link: an earlier run may have left links in its layers, and here they would lead
    to the real machine, with our privileges. The path names an open descriptor, so nothing can be swapped under it.
    """
    fd = _walk(target)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@contextmanager
def file_for(target: str) -> Iterator[str]:
    """Yield a path for mounting on a file of the view, creating an empty file if missing. Raises OSError if it is not a regular file.

    The walk and the path are as in `directory_for`.
    """
    parent = _walk(os.path.dirname(target))
    try:
        name = os.path.basename(target)
        with suppress(FileExistsError):
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o755, dir_fd=parent))
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file in the view", target)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _walk(target: str, *, make: bool = True) -> int:
    fd = os.open("r", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in target.split("/"):
        if not part:
            continue
        outer = fd
        try:
            fd = _open_directory(part, outer, make=make)
        except OSError as error:
            raise OSError(error.errno, f"{part} is not a directory in the view", target) from error
        finally:
            os.close(outer)
    return fd


def _open_directory(name: str, parent: int, *, make: bool) -> int:
    try:
        return os.open(name, _PLACE, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, _PLACE, dir_fd=parent)


def bind_code(paths: Sequence[str], site: Site) -> Iterator[str]:
    """Bind files of the machine over the same files of the view, to make them executable. Yield the files that exist in the view.

    A file that an earlier run removed or replaced with a link is not restored, because that would change the view; a note names the file.
    Hundreds of files lie in a handful of directories, so each directory is walked once.
    """
    parents: dict[str, int | None] = {}
    try:
        for path in paths:
            directory, name = os.path.split(path)
            if directory not in parents:
                try:
                    parents[directory] = _walk(directory, make=False)
                except OSError:
                    parents[directory] = None
            if (parent := parents[directory]) is not None and _bind_over(path, parent, name, site.userns):
                yield path
            else:
                site.notes.append(f"cannot be executed: {path} is not what it was in this sandbox")
    finally:
        for fd in parents.values():
            if fd is not None:
                os.close(fd)


def _bind_over(source: str, parent: int, name: str, userns: int | None) -> bool:
    try:
        place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return False
        fd = sc.open_tree(source, sc.OPEN_TREE_CLONE)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # changed since planning
                return False
            flags = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_RDONLY
            if userns is not None:
                _move_ids(fd, userns, source, flags)
            else:
                sc.mount_setattr(fd, set_flags=flags)
            sc.move_mount(fd, f"/proc/self/fd/{place}")
        finally:
            os.close(fd)
    finally:
        os.close(place)
    return True


def attach_clone(source: str, place: str, userns: int | None, *, writable: bool, executable: bool = True) -> None:
    """Attach a private copy of the mount at `source`, without its submounts, at `place`. `userns` maps the machine's ids to the guest's."""
    with clone_of(source, userns, writable=writable, executable=executable) as fd:
        sc.move_mount(fd, place)


@contextmanager
def clone_of(source: str, userns: int | None, *, writable: bool, executable: bool = True) -> Iterator[int]:
    """Yield a descriptor of a private copy of one mount, without its submounts and not yet attached.

    Raises `MountedBelow` if the kernel refuses the copy because of submounts.
    """
    try:
        fd = sc.open_tree(source, sc.OPEN_TREE_CLONE)
    except OSError as error:
        # In a user namespace submounts are locked: the kernel copies no mount without them, because that would uncover the files they hide.
        if error.errno == errno.EINVAL and any(mount.target.startswith(f"{source}/") for mount in mountinfo.read()):
            raise MountedBelow(error.errno, "something has been mounted below it meanwhile", source) from error
        raise
    try:
        flags = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | (0 if writable else sc.MOUNT_ATTR_RDONLY)
        flags |= 0 if executable else sc.MOUNT_ATTR_NOEXEC
        if userns is not None:
            _move_ids(fd, userns, source, flags)
        else:
            sc.mount_setattr(fd, set_flags=flags)
        yield fd
    finally:
        os.close(fd)


def _move_ids(fd: int, userns: int, source: str, flags: int = 0) -> None:
    try:
        sc.mount_setattr(fd, set_flags=sc.MOUNT_ATTR_IDMAP | flags, userns=userns)
    except OSError as error:
        # Never go on without the id map: the guest would be the machine's root, or could not read root's files.
        why = f"the filesystem of {source} cannot be idmapped, so a guest of root would be the machine's own root"
        raise OSError(error.errno, f"{why} ({error.strerror}); start it as an ordinary user") from error


def mount_overlay(lowers: list[str], key: str, target: str, writable: bool, site: Site, *, base: str = "u") -> None:
    """Mount an overlay of these lower layers at a target of the guest's root. `key` names its upper layer. Raises OSError."""
    if writable and site.scenes is not None:
        site.scenes.append(Scene(key, target, tuple(lowers), base))
    options = overlay_options(lowers, key, target, writable, site, base=base)
    with directory_for(target) as place:
        sc.mount("overlay", place, "overlay", site.flags | (0 if writable else sc.MS_RDONLY), options)


def overlay_options(lowers: list[str], key: str, target: str, writable: bool, site: Site, *, base: str = "u") -> str:
    """Return the mount options of an overlay, and make its upper layer. `base` is the parent of the layers' generations. Raises OSError."""
    lowers = [*_frozen(key, site, base), *lowers]
    options = f"lowerdir={':'.join(lowers)}"
    if writable:
        home = f"{base}{site.uppers[1:]}/{key}"
        options += f",upperdir={home}/upper,workdir={home}/work" + _make_room(home, key, target, lowers[0], site)
    # Ignore redirects and other references between layers: a guest may have written them.
    return options + (",userxattr" if site.userxattr else ",index=off,metacopy=off,redirect_dir=nofollow,xino=off")


def _make_room(home: str, key: str, target: str, like: str, site: Site) -> str:
    """Make the directories of an upper layer, as far as they are missing. Return the mount options that such a layer needs."""
    upper, work = f"{home}/upper", f"{home}/work"
    if not os.path.isdir(upper):
        with suppress(FileExistsError):
            os.mkdir(home, 0o700)
        if not site.fresh or key.startswith(DIGEST):  # any other key says itself what its target is
            with open(f"{home}/target", "wb") as file:
                file.write(os.fsencode(target))
        (make_layer if site.fresh else _make_upper)(upper, like)
    with suppress(FileExistsError):
        os.mkdir(work, 0o700)
    if site.fresh:  # in memory: there is nothing to sync
        return ""
    # Without "volatile" the end of every run, also of a killed one, syncs the whole filesystem of the layers: seconds on a busy disk.
    # The kernel marks volatile layers and mounts them again only after the mark is removed.
    with suppress(FileNotFoundError):
        os.unlink(f"{work}/work/incompat/volatile/dirty")
        os.rmdir(f"{work}/work/incompat/volatile")
    return ",volatile"


def _frozen(key: str, site: Site, base: str) -> list[str]:
    """Return short symbolic links to the frozen layers of an overlay, uppermost first, because the mount options must fit in one page."""
    paths = []
    for generation in site.frozen:
        layer = f"{base}{generation[1:]}/{key}/upper"
        if os.path.isdir(layer):
            link = f"f/{site.number()}"
            os.symlink(f"../{layer}", link)
            paths.append(link)
    return paths


def _make_upper(upper: str, like: str) -> None:
    """Make an upper directory atomically: a kill half-way leaves no directory whose mode or owner differs from those of `like`."""
    new = f"{upper}.new"
    with suppress(FileNotFoundError):
        os.rmdir(new)
    make_layer(new, like)
    os.rename(new, upper)


def copy_entry(source: int, entry: str, place: str, shift: int) -> None:
    """Copy one entry below a directory: an empty directory, a regular file or a symlink. Follows no link: names may change meanwhile."""
    resolve = sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_NO_MAGICLINKS
    parent = sc.openat2(source, os.path.dirname(entry) or ".", os.O_PATH | os.O_DIRECTORY, resolve=resolve)
    try:
        name = os.path.basename(entry)
        real = os.lstat(name, dir_fd=parent)
        if stat.S_ISDIR(real.st_mode):
            os.mkdir(place)
        elif stat.S_ISLNK(real.st_mode):
            os.symlink(os.readlink(name, dir_fd=parent), place)
            return
        elif stat.S_ISREG(real.st_mode):
            with (
                open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent), "rb") as old,
                open(place, "xb") as new,
            ):
                while chunk := old.read(1 << 20):
                    new.write(chunk)
        else:
            return  # sockets, pipes and devices are not copied
        look_like(place, real, shift)
    finally:
        os.close(parent)
