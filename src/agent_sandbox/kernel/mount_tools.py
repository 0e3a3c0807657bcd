"""How the steps of a mount plan are carried out: places in the view, private copies of mounts, overlays, mask layers.

The current directory is the staging tmpfs (see `mounts`). Everything here runs with the power to mount, before there is a guest.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mount_plan import Mask

QUIET = sc.MS_NOSUID | sc.MS_NODEV


class MountedBelow(OSError):
    """Something is mounted below a directory that was planned as one layer."""


@dataclass
class Site:
    """Where a plan is carried out: the current directory is the staging tmpfs; `shift` is what ids are moved by (0: not at all)."""

    userns: int | None  # maps the machine's ids to the guest's, for idmapped mounts; None when ids stay
    shift: int
    userxattr: bool  # the mounts belong to a user namespace: overlay keeps its marks in user.* attributes
    notes: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)  # files of the view that can be executed although the rest cannot
    count: int = 0
    executable: bool = True  # whether what the mounts hold can be executed
    uppers: str = "u"  # where upper layers are made
    frozen: tuple[str, ...] = ()  # and where there are such of earlier generations, uppermost first

    def number(self) -> int:
        """A fresh number for a layer directory."""
        self.count += 1
        return self.count

    @property
    def flags(self) -> int:
        """Of every mount of the view."""
        return QUIET if self.executable else QUIET | sc.MS_NOEXEC

    @property
    def opaque_attribute(self) -> str:
        """The attribute that makes a directory hide the layers below it."""
        return "user.overlay.opaque" if self.userxattr else "trusted.overlay.opaque"


@contextmanager
def directory_for(target: str) -> Iterator[str]:
    """A path at which to mount on a directory of the view, made when missing.

    Walked one component at a time and never through a link: an earlier run may have left links in its layers, and followed from here they
    would lead to the real machine, with our power. The path names an open descriptor, so nothing can be swapped under it.
    """
    fd = _walk(target)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@contextmanager
def file_for(target: str) -> Iterator[str]:
    """The same for a file: made empty when missing, a regular file or it is refused."""
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
            with suppress(FileExistsError):
                if make:
                    os.mkdir(part, 0o755, dir_fd=outer)
            fd = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
        except OSError as error:
            raise OSError(error.errno, f"{part} is not a directory in the view", target) from error
        finally:
            os.close(outer)
    return fd


def bind_code(paths: Sequence[str], site: Site) -> Iterator[str]:
    """Bind files of the machine over themselves in the view, so that they can be executed. Yields those whose place was there.

    What an earlier run has removed, or put a link in the place of, is not made anew: that would be a change of its own. Hundreds of files
    lie in a handful of directories, so each of those is walked to once.
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
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # it has changed since the plan was made
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
    """Attach a private copy of one mount, without what is mounted below it; with `userns`, the machine's ids moved to the guest's."""
    with clone_of(source, userns, writable=writable, executable=executable) as fd:
        sc.move_mount(fd, place)


@contextmanager
def clone_of(source: str, userns: int | None, *, writable: bool, executable: bool = True) -> Iterator[int]:
    """A descriptor of such a copy that is not attached yet. Raises `MountedBelow` where the kernel makes none because of that."""
    try:
        fd = sc.open_tree(source, sc.OPEN_TREE_CLONE)
    except OSError as error:
        # In a user namespace what is mounted below is locked: the kernel copies no mount without it, as that would uncover what it hides.
        if error.errno == errno.EINVAL and any(mount.target.startswith(f"{source}/") for mount in mountinfo.read()):
            raise MountedBelow(error.errno, "something has been mounted below it meanwhile", source) from error
        raise
    try:
        flags = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | (0 if writable else sc.MOUNT_ATTR_RDONLY)
        flags |= 0 if executable else sc.MOUNT_ATTR_NOEXEC
        sc.mount_setattr(fd, set_flags=flags)
        if userns is not None:
            _move_ids(fd, userns, source)
        yield fd
    finally:
        os.close(fd)


def _move_ids(fd: int, userns: int, source: str, flags: int = 0) -> None:
    try:
        sc.mount_setattr(fd, set_flags=sc.MOUNT_ATTR_IDMAP | flags, userns=userns)
    except OSError as error:
        # Without this the guest would be the machine's root, or could not read root's files: neither is what was asked for.
        why = f"the filesystem of {source} cannot be idmapped, so a guest of root would be the machine's own root"
        raise OSError(error.errno, f"{why} ({error.strerror}); start it as an ordinary user") from error


def mount_overlay(lowers: list[str], key: str, target: str, writable: bool, site: Site) -> None:
    """Mount an overlay at a target of the guest's root."""
    lowers = [*_frozen(key, site), *lowers]
    options = f"lowerdir={':'.join(lowers)}"
    if writable:
        home = f"{site.uppers}/{key}"
        upper, work = f"{home}/upper", f"{home}/work"
        if not os.path.isdir(upper):
            os.makedirs(home, mode=0o700, exist_ok=True)
            with open(f"{home}/target", "wb") as file:  # keys of long targets are digests
                file.write(os.fsencode(target))
            _make_upper(upper, lowers[0])
        os.makedirs(work, mode=0o700, exist_ok=True)
        # Without "volatile" the end of every run, killed ones too, waits until all that anybody has written to the disk of the layers is on
        # it: seconds, on a busy one. The kernel marks such layers and mounts them again only when the mark has been taken away.
        with suppress(FileNotFoundError):
            os.unlink(f"{work}/work/incompat/volatile/dirty")
            os.rmdir(f"{work}/work/incompat/volatile")
        options += f",upperdir={upper},workdir={work},volatile"
    # Nothing a layer says about other layers is followed: a guest may have written it.
    options += ",userxattr" if site.userxattr else ",index=off,metacopy=off,redirect_dir=nofollow,xino=off"
    with directory_for(target) as place:
        sc.mount("overlay", place, "overlay", site.flags | (0 if writable else sc.MS_RDONLY), options)


def _frozen(key: str, site: Site) -> list[str]:
    """Links to the frozen layers of an overlay, uppermost first: the kernel takes one page of options, and a key may be long."""
    found = []
    for generation in site.frozen:
        if os.path.isdir(f"{generation}/{key}/upper"):
            link = f"f/{site.number()}"
            os.symlink(f"../{generation}/{key}/upper", link)
            found.append(link)
    return found


def _make_upper(upper: str, like: str) -> None:
    """Under its name only when it is complete: who is killed half-way leaves no layer that looks otherwise than what it lies on."""
    new = f"{upper}.new"
    with suppress(FileNotFoundError):
        os.rmdir(new)
    make_layer(new, like)
    os.rename(new, upper)


def make_layer(path: str, like: str, shift: int = 0) -> None:
    """An empty layer whose top directory looks like another: overlay shows the mode and owner of the uppermost one."""
    os.mkdir(path, 0o700)
    look_like(path, os.stat(like), shift)


def fill_mask_layer(layer: str, lower: str, masks: Sequence[Mask], site: Site, *, stand_ins: Sequence[str] = ()) -> None:
    """Put a whiteout, or an empty opaque directory, for each mask into a mask layer, with parents that look like the real ones.

    Where a parent does not exist it is the topmost missing one that is whited out: a directory that is not there must not appear. There
    may be hundreds of masks and most of what they name does not exist, so each parent is looked at once. Wider masks come before narrower
    ones.
    """
    parents: dict[str, bool] = {"": True}  # made in the layer; False: hidden as a whole, or not a directory

    def parent(path: str) -> bool:
        if path not in parents:
            parents[path] = parent(os.path.dirname(path)) and _make_parent(layer, lower, path)
        return parents[path]

    for mask in masks:
        if not parent(os.path.dirname(mask.path)) or mask.path in parents:
            if parents.get(mask.path):
                raise OSError(errno.ENOTEMPTY, "a wider mask must come before the narrower ones in it", mask.path)
            continue
        place, real = f"{layer}/{mask.path}", f"{lower}/{mask.path}"
        if mask.keep and os.path.isdir(real) and not os.path.islink(real):
            os.mkdir(place)
            look_like(place, os.lstat(real))
            os.setxattr(place, site.opaque_attribute, b"y")
        else:
            os.mknod(place, stat.S_IFCHR, os.makedev(0, 0))
        parents[mask.path] = False
    for path in stand_ins:
        parent(path)


def _make_parent(layer: str, lower: str, path: str) -> bool:
    try:
        real = os.lstat(f"{lower}/{path}")
    except FileNotFoundError:
        os.mknod(f"{layer}/{path}", stat.S_IFCHR, os.makedev(0, 0))
        return False
    if not stat.S_ISDIR(real.st_mode):
        if stat.S_ISLNK(real.st_mode):  # plans name resolved paths; a link here means that the machine has changed since
            raise OSError(errno.ELOOP, "a link has taken the place of a directory with something to hide", path)
        return False  # a file: there can be nothing below it, now or later
    os.mkdir(f"{layer}/{path}", 0o700)
    look_like(f"{layer}/{path}", real)
    return True


def copy_entry(source: int, entry: str, place: str, shift: int) -> None:
    """Copy one directory (empty), regular file or symlink from below a directory, never through a link: names may change under us."""
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


def look_like(path: str, real: os.stat_result, shift: int = 0) -> None:
    """Give a directory or file of a layer the mode and owner of a real one, as far as we may."""
    mode = stat.S_IMODE(real.st_mode) & 0o1777
    try:
        os.chown(path, real.st_uid + shift, real.st_gid + shift)
    except OSError:
        # Rootless, another's directory cannot be given to its owner: we own this copy, so its owner may what others may with the real one.
        # One of ours that only has a group that is not ours stays as it is.
        if real.st_uid != os.geteuid():
            mode = mode & 0o1077 | (mode & 0o7) << 6
    os.chmod(path, mode)
