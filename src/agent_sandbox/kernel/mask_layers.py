"""Mask layers of a view, and how the runs of one plan share them.

A mask layer takes two hundred system calls to make and as many inodes to take apart. It is a function of the plan, and of what was found
on the machine: which parents of masked paths exist, with which mode and owner. So if a plan is used again, its mask layers are made on a
tmpfs of their own. The supervisor gets a descriptor of a detached, read-only mount of it, with the *findings*. It gives both to the next
init of the same keeper, which looks again and uses a layer only if every finding is the same: then its own would be the same, too.

A guest cannot reach the layers but through its overlay: they are attached nowhere, and init closes the descriptor before the guest exists.
Kernels before 6.15 refuse a detached mount as a layer. Then each run makes its own.
"""

from __future__ import annotations

import errno
import os
import stat

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.kernel import syscalls as sc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_sandbox.kernel.mount_plan import PathMask

Findings = dict[str, tuple[int, int, int] | None]  # by path relative to the overlay: mode and owner; None if nothing was there

# What the supervisor asks of an init, and init's answers. Otherwise the supervisor sends the findings of the layers that it gives, and init
# those of the layers that it made.
MAKE, OUTDATED, REFUSED = "make", "outdated", "refused"
_HOME = "m"  # below the staging directory


@dataclass
class MaskLayers:
    """The mask layers of one run, by the numbers of their steps in the plan."""

    given: int | None = None  # a descriptor of layers that an earlier run made
    known: dict[int, Findings] = field(default_factory=dict)  # what these rest on
    wanted: bool = False  # whether to make layers that can be shared
    made: dict[int, Findings] = field(default_factory=dict)
    answer: str = ""  # OUTDATED or REFUSED, if layers were given and one could not be used

    @classmethod
    def asked(cls, request: str | dict[int, Findings] | None, given: Sequence[int]) -> MaskLayers:
        """Return the mask layers that the supervisor asks for."""
        if isinstance(request, dict) and given:
            return cls(given[0], request)
        return cls(wanted=request == MAKE)

    def prepare(self) -> None:
        """Make the directory for mask layers in the staging directory; if they are to be shared, on a tmpfs of its own. Raises OSError."""
        os.mkdir(_HOME)
        if self.wanted:
            sc.mount("masks", _HOME, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, "size=64m,mode=700")

    def find(self, number: int, lower: str) -> str:
        """Return a path to the given layer of a step, if `lower` is still as it was when the layer was made; else an empty string."""
        if self.given is None:
            return ""
        if number in self.known and all(seen == _look(lower, path)[0] for path, seen in self.known[number].items()):
            return f"/proc/self/fd/{self.given}/{number}"
        self.answer = self.answer or OUTDATED
        return ""

    def note(self, number: int, lower: str, findings: Findings) -> None:
        """Note what a layer made here rests on: the findings of `fill_mask_layer`, and the top of `lower`, which it looks like."""
        if self.wanted:
            self.made[number] = {"": _look(lower, "")[0], **findings}

    def refuse(self) -> None:
        """Do without the given layers: the kernel does not take them."""
        self.close()
        self.answer = REFUSED

    def close(self) -> None:
        """Close the descriptor of the given layers. Idempotent."""
        if self.given is not None:
            os.close(self.given)
            self.given = None

    def hand_over(self) -> int | None:
        """Return a descriptor of a detached, read-only mount of the layers made here; None if they are not to be shared.

        Call it when all layers are made.
        """
        if not self.wanted:
            return None
        try:
            fd = sc.open_tree(_HOME, sc.OPEN_TREE_CLONE)
        except OSError:  # the run has its layers, shared or not
            self.wanted = False
            return None
        quiet = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC
        sc.mount_setattr(fd, set_flags=sc.MOUNT_ATTR_RDONLY | quiet)
        return fd

    def report(self) -> str | dict[int, Findings] | None:
        """Return the answer to the supervisor: the findings of the layers handed over, or why given layers were not used."""
        return self.made if self.wanted else self.answer or None


def make_layer(path: str, like: str, shift: int = 0) -> None:
    """Make an empty layer with the mode and owner of `like`: an overlay shows the mode and owner of its uppermost layer."""
    os.mkdir(path, 0o700)
    look_like(path, os.stat(like), shift)


def fill_mask_layer(layer: str, lower: str, masks: Sequence[PathMask], opaque_attribute: str, *, stand_ins: Sequence[str] = ()) -> Findings:
    """Fill a mask layer: a whiteout or an empty opaque directory per mask, and parents with the mode and owner of the real parents.

    If parents are missing, the topmost missing parent gets the whiteout: a directory that does not exist must not appear. Most of the
    hundreds of masked paths do not exist, so each parent is examined once. Wider masks must come before narrower masks. `stand_ins` are
    directories to make in the layer as well. Returns what was found at `lower`: while it is the same, so is the layer. Raises OSError if
    the order is wrong, or if a link has taken the place of a parent.
    """
    parents: dict[str, bool] = {"": True}  # True: made in the layer; False: hidden as a whole, or not a directory
    findings: Findings = {}

    def examine(path: str) -> os.stat_result | None:
        findings[path], status = _look(lower, path)
        return status

    def make_parent(path: str) -> bool:
        real, found = examine(path), findings[path]
        if real is None and found is not None:
            raise OSError(found[0], os.strerror(found[0]), path)
        return _make_parent(f"{layer}/{path}", real, path)

    def parent(path: str) -> bool:
        if path not in parents:
            parents[path] = parent(os.path.dirname(path)) and make_parent(path)
        return parents[path]

    for mask in masks:
        path = mask.path
        if not parent(os.path.dirname(path)) or path in parents:
            if parents.get(path):
                raise OSError(errno.ENOTEMPTY, "a wider mask must come before the narrower ones in it", path)
            continue
        if mask.keep and (real := examine(path)) is not None and stat.S_ISDIR(real.st_mode):
            os.mkdir(f"{layer}/{path}")
            look_like(f"{layer}/{path}", real)
            os.setxattr(f"{layer}/{path}", opaque_attribute, b"y")
        else:
            os.mknod(f"{layer}/{path}", stat.S_IFCHR, 0)
        parents[path] = False
    for path in stand_ins:
        parent(path)
    return findings


def _look(lower: str, path: str) -> tuple[tuple[int, int, int] | None, os.stat_result | None]:
    """Return the finding at a path, and the status that it comes from. Follows no link. If there is an error, its number is the finding."""
    try:
        status = os.lstat(f"{lower}/{path}" if path else lower)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return (error.errno or errno.EIO, -1, -1), None
    return (status.st_mode, status.st_uid, status.st_gid), status


def _make_parent(place: str, real: os.stat_result | None, path: str) -> bool:
    if real is None:
        os.mknod(place, stat.S_IFCHR, 0)
        return False
    if not stat.S_ISDIR(real.st_mode):
        if stat.S_ISLNK(real.st_mode):  # plans contain resolved paths, so the machine has changed since
            raise OSError(errno.ELOOP, "a link has taken the place of a directory with something to hide", path)
        return False  # a file: nothing can be below it, now or later
    os.mkdir(place, 0o700)
    look_like(place, real)
    return True


def link_over(place: str, real: str, to: str, shift: int) -> None:
    """Make a link in a mask layer that covers a regular file. A file that has gone, or is hidden by a mask, is left as it is."""
    with suppress(FileNotFoundError, FileExistsError, NotADirectoryError):
        if stat.S_ISREG(os.lstat(real).st_mode):
            os.symlink(to, place)
            if shift:
                os.lchown(place, shift, shift)


def link_instead(place: str, to: str, shift: int) -> None:
    """Make a link in a mask layer that covers a file, whether a mask hides it or not. Nothing appears in a directory that is hidden."""
    with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        with suppress(FileNotFoundError):
            os.unlink(place)  # the whiteout
        os.symlink(to, place)
        if shift:
            os.lchown(place, shift, shift)


def look_like(path: str, real: os.stat_result, shift: int = 0) -> None:
    """Give a directory or file of a layer the mode and owner of a real directory or file, as far as permitted."""
    mode = stat.S_IMODE(real.st_mode) & 0o1777
    me, given = os.geteuid(), False
    if me in (0, real.st_uid):
        with suppress(OSError):
            os.chown(path, real.st_uid + shift, real.st_gid + shift)
            given = True
    if not given and real.st_uid != me:
        # Without root we cannot give a copy to another owner. We own the copy, so its owner gets the permissions that others have on the
        # real one. If the real one is ours and only its group is foreign, the mode stays.
        mode = mode & 0o1077 | (mode & 0o7) << 6
    os.chmod(path, mode)
