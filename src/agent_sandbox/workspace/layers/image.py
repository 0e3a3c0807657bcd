"""The image of a sandbox of root: an ext4 filesystem in one file.

The image is the disk quota, and the separate filesystem that stacked layers need.

    <generation>/<key>/{upper,work,target}     see `layers.history`
    trash/                                     generations being removed
    ballast, spare                             see `kernel.loop`

The content of an image was written by the kernel through the filesystem, never raw, whatever the guest did. An image is attached only once.
The first process locks the file, the loop device keeps that lock until it is detached, and later processes share the device. Two devices on
one file would destroy it. Processes come through a gate one after the other, and whoever is in it may take as long as the work takes.

While nobody uses an image, the disk holds only its content: see `kernel.image_space`. Whoever attaches it reserves the rest first. If the
disk has too little left, less can be written; if it has nothing left, the image can only be read. A run leaves the disk more than our own
work does, which is short: a full disk must not keep anybody from promoting.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.kernel import image_space, loop
from agent_sandbox.kernel.image_space import NO_FILESYSTEM, SOUND
from agent_sandbox.workspace.durable import explained, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = 256 << 20  # free space when a run starts, and the size of one growth; at least half of it should always be free during a run
LEAST_CAPACITY, LARGEST_CAPACITY = 8 << 30, 64 << 30  # minimum capacity of an image; and capacity without a limit
LEAVE_THE_DISK = 256 << 20  # kept free by runs on the disk that holds the images
_LEAVE_A_LITTLE = 16 << 20  # kept free by our own work, which needs directories and returns the rest at once
TRASH = "trash"
_LEAST_ROOM, _LEAST_STEP, _LITTLE = 32 << 20, 1 << 20, 64 << 10
_INODES = 1 << 18  # 256 bytes each, which the disk has to reserve while the image is in use
_JOURNAL_MIB = 8  # always reserved
_LOOK_AGAIN_SECONDS = 0.001
_STILL_WRITING = 60_000  # looks at an image that is locked outside the gate: its device is being detached, or somebody reads it
_SILENT_LOOKS = 3_000  # looks before a person is told
_SEARCH = ("/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin")
# All features are listed, so that the machine's configuration cannot add one that another kernel does not know.
_FEATURES = (
    "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,"
    "large_file,huge_file,dir_nlink,extra_isize,metadata_csum"
)
_LOST = ".lost"  # flag file beside the image, until the user has been told


_TOO_LITTLE = "the disk of the state directory has too little room for an image"
_NO_ROOM = "the disk of the state directory has too little room to write to this sandbox"
_FREE_SOME = "free some space, then: agent-sandbox reset"


class NoImage(WorkspaceError):
    """Raised if this machine cannot make or attach images."""


class NoRoom(WorkspaceError):
    """Raised if the disk has too little room to write to an image."""


@dataclass(frozen=True)
class Image:
    """An attached image. `lost` says that the machine stopped while the image was in use, and that the user has not been told yet."""

    path: str
    file: int
    loop: loop.LoopDevice
    lost: bool = False
    read_only: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of the image file, by which its loop device is found."""
        status = os.fstat(self.file)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Close the descriptors. The image stays attached while something is mounted from it."""
        os.close(self.loop.fd)
        os.close(self.file)


def make(path: str, limit_bytes: int | None) -> None:
    """Create the image at `path` atomically. Raises `NoImage` where that is not possible, also on a full disk."""
    capacity = LARGEST_CAPACITY if limit_bytes is None else max(limit_bytes, LEAST_CAPACITY) // 4096 * 4096
    formatter = find_tool("mkfs.ext4")
    if formatter is None:
        raise NoImage("there is no mkfs.ext4 on this machine", hint="install e2fsprogs")
    new = path + ".new"  # fixed name: a leftover from a crash is replaced
    with explained(f"make the image {path!r}"):
        room = _room_on_disk(path)
        try:
            with suppress(FileNotFoundError):
                os.unlink(new)
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, capacity)
                _run(formatter, *_formatting(capacity), new)
                _reserve(file, capacity, room)
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(new, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
        sync_directory(os.path.dirname(path))


def _room_on_disk(path: str) -> int:
    space = os.statvfs(os.path.dirname(path))
    room = min(ROOM, (space.f_bavail * space.f_frsize - LEAVE_THE_DISK) // 2)
    if room < _LEAST_ROOM:
        raise NoImage(_TOO_LITTLE, hint=_FREE_SOME)
    return room


def _formatting(capacity: int) -> tuple[str, ...]:
    # Discard and zero nothing: the file is new and reads as zeros.
    extended = "nodiscard,lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    sizes = ("-b", "4096", "-I", "256", "-N", str(_INODES), "-m", "0", "-J", f"size={_JOURNAL_MIB}")
    return ("-F", "-q", "-O", _FEATURES, *sizes, "-E", extended)


def _reserve(file: int, capacity: int, room: int) -> None:
    """Put a ballast file on all but `room` bytes of a new image, and allocate the disk blocks of what is in use outside it."""
    top = _mounted_for_us(file)
    try:
        os.mkdir(TRASH, 0o700, dir_fd=top)
        outside = loop.fill(top, capacity, room)
    finally:
        os.close(top)
    parts = image_space.unused(file)
    holes = [loop.Extent(start, start, length) for start, length in (*parts.tables, *parts.free)]
    ballast = [
        loop.Extent(start, start, length) for start, length in loop.complement([loop.Extent(0, *each) for each in outside], capacity)
    ]
    try:
        enough = image_space.reserve(file, tuple(loop.complement([*holes, *ballast], capacity)), LEAVE_THE_DISK)
    except OSError as error:
        raise NoImage(
            f"the disk of the state directory cannot reserve blocks: {error.strerror}", hint="see: agent-sandbox doctor"
        ) from error
    if not enough:
        raise NoImage(_TOO_LITTLE, hint=_FREE_SOME)


def _mounted_for_us(file: int) -> int:
    """Attach and mount an image. Return a descriptor of its top directory; the image is detached when that is closed."""
    attached = _attach(file)
    try:
        return loop.mount_detached(attached.device)
    except OSError as error:
        raise NoImage(f"an image cannot be mounted here: {error.strerror}", hint="see: agent-sandbox doctor") from error
    finally:
        os.close(attached.fd)


def _attach(file: int, *, read_only: bool = False) -> loop.LoopDevice:
    try:
        return loop.attach(file, read_only=read_only)
    except OSError as error:
        raise NoImage(f"no loop device can be had: {error.strerror}", hint="load the module: modprobe loop") from error


def attach(path: str, *, reading: bool = False, leave_bytes: int = LEAVE_THE_DISK) -> Image:
    """Attach an image of ours to a loop device, or share the device that it is attached to. Raises `WorkspaceError` if it is unusable.

    Damage from a power cut is repaired first, by the journal or by `e2fsck -p`. Then the disk blocks are reserved that can be written, as
    long as the disk keeps `leave_bytes`. Without room for them, the image is attached read-only if it is only for `reading`, else `NoRoom`
    is raised.

    Waits for a process that is in the gate, however long its work takes. Raises `Busy` if the image stays locked by anything else.
    """
    with explained(f"open the image {path!r}"):
        file = _open(path)
        try:
            with _locked_or_shared(file, path, reading=reading) as shared:
                if shared is not None:
                    return Image(path, file, shared, os.path.exists(path + _LOST), loop.is_read_only(shared))
                least = image_space.LEAST_HOLE
                if (condition := _condition(file, path)) != SOUND:
                    # Set the flag before the repair: the first process to open the image may not be one that tells the user.
                    os.close(os.open(path + _LOST, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
                    _put_in_order(file, path, condition)
                    least = 1  # the disk may have lost that blocks were reserved, and any of them may be free now
                read_only = not _reserve_the_rest(file, least, leave_bytes)
                if read_only and not reading:
                    raise NoRoom(_NO_ROOM, hint="free some space on that disk; agent-sandbox prune removes sandboxes that are not needed")
                return Image(path, file, _attach(file, read_only=read_only), os.path.exists(path + _LOST), read_only)
        except BaseException as error:
            os.close(file)
            if isinstance(error, NoRoom):
                rest(path)  # what was reserved before the disk had no more
            raise


def _reserve_the_rest(file: int, least: int, leave_bytes: int) -> bool:
    """Reserve the disk blocks of all that can be written. Return False if the disk has too little room even for the inodes.

    If far too many blocks are free, or more than the disk can reserve, the ballast takes them first.
    """
    for keep, left in ((ROOM, LEAVE_THE_DISK), (0, LEAVE_THE_DISK), (None, leave_bytes)):
        parts = image_space.unused(file, least=least, initialised=False)
        if not image_space.reserve(file, parts.tables, leave_bytes):
            return False
        too_many = keep == ROOM and sum(length for _, length in parts.free) > 2 * ROOM
        if not too_many and image_space.reserve(file, parts.free, left):
            return True
        if keep is not None:
            top = _mounted_for_us(file)
            try:
                loop.keep_free(top, keep)
                loop.release_ballast(top, file)
            finally:
                os.close(top)
    return False


def acknowledge_loss(image: Image) -> None:
    """Clear the data-loss flag once the user has been told that the last writes may be lost."""
    with explained(f"clear the data-loss flag of {image.path!r}"):
        os.unlink(image.path + _LOST)


def _open(path: str) -> int:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        os.close(file)
        raise WorkspaceError(f"{path!r} is not an image of ours, or others can write to it", hint="check who put it there")
    return file


@contextmanager
def _locked_or_shared(file: int, path: str, *, reading: bool) -> Iterator[loop.LoopDevice | None]:
    """Hold the gate for the length of a block. Yields None if the image was locked, or the loop device that it is attached to.

    The lock proves that no device is attached. A read-only device is shared only for `reading`; else wait for its end.
    """
    status = os.fstat(file)
    why = ""
    for _ in range(_STILL_WRITING):
        gate = _entered(file)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shared, found = None, True
            except BlockingIOError:
                shared = loop.find((status.st_dev, status.st_ino))
                found = shared is not None
                why = f"{path!r} is locked by another process"
                if shared is not None and not reading and loop.is_read_only(shared):
                    os.close(shared.fd)
                    found, why = False, f"{path!r} is being read, and the disk had no room to open it for writing"
            if found:
                yield shared
                return
        finally:
            os.close(gate)
        time.sleep(_LOOK_AGAIN_SECONDS)
    raise Busy(why, hint="find out by which process with: lslocks")


def _entered(file: int) -> int:
    """Wait for the gate of an open image. Return the descriptor that holds it."""
    gate = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        looks = 0
        while not image_space.enter_gate(gate):
            looks += 1
            if looks == _SILENT_LOOKS:
                _tell("waiting for another process of agent-sandbox, which checks the image of this sandbox or returns its disk space")
            time.sleep(_LOOK_AGAIN_SECONDS)
    except BaseException:
        os.close(gate)
        raise
    return gate


def _tell(message: str) -> None:
    import logging  # slow to load, and nearly nobody ever waits for so long

    logging.getLogger("agent_sandbox").warning("agent-sandbox: %s", message)


def _condition(file: int, path: str) -> str:
    """Return `SOUND` or what is wrong with the image. Raises `WorkspaceError` if it holds no filesystem."""
    if (found := image_space.condition(file)) == NO_FILESYSTEM:
        raise _unusable(path, found)
    return found


def _put_in_order(file: int, path: str, condition: str) -> None:
    """Repair an image. The kernel replays its journal; if that is not enough, `e2fsck -p` makes the repairs that need no decision."""
    attached = _attach(file)
    try:
        os.close(loop.mount_detached(attached.device))
    except OSError as error:
        condition = error.strerror or str(error)
    finally:
        os.close(attached.fd)
    if _condition(file, path) == SOUND:
        return
    if (checker := find_tool("e2fsck")) is None:
        raise _unusable(path, f"{condition}, and there is no e2fsck on this machine")
    try:
        _run(checker, "-p", path, fine=(0, 1))
    except OSError:
        raise _unusable(path, condition) from None


def _unusable(path: str, why: str) -> WorkspaceError:
    return WorkspaceError(
        f"the image {path!r} cannot be used: {why}",
        hint=f"nothing was deleted; try e2fsck -f {path} on a copy of it, or drop the sandbox with: agent-sandbox reset",
    )


@contextmanager
def opened(path: str, *, reading: bool = False) -> Iterator[tuple[Image, int]]:
    """Attach an image for our own work in a block. Yields the image and a descriptor of its top directory. See `attach`.

    A guest may have filled the image, so the spare gives our work its room, unless it is only `reading`.
    """
    image = attach(path, reading=reading, leave_bytes=LEAVE_THE_DISK if reading else _LEAVE_A_LITTLE)
    try:
        top = _mounted(image)
        try:
            if not reading:
                loop.make_room_for_directories(top)
            yield image, top
        finally:
            if not reading:
                loop.take_spare(top)
            os.close(top)
    finally:
        image.close()
        rest(path)


def rest(path: str) -> None:
    """Return the disk blocks without content to the disk. Does nothing if the image is in use: whoever is last does it."""
    with suppress(OSError):  # then they stay reserved until the image is used next
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            image_space.rest(file)
        finally:
            os.close(file)


def _mounted(image: Image) -> int:
    try:
        return loop.mount_detached(image.loop.device, read_only=image.read_only)
    except OSError as error:
        raise _unusable(image.path, error.strerror or str(error)) from error


class Growth:
    """Grows the image of a running sandbox when little space is left. A caller calls it again and again during the run."""

    def __init__(self, image: Image, limit_bytes: int | None) -> None:
        self._image = image
        self._limit = limit_bytes
        self._free_before: int | None = None
        self.refused = ""  # why it could not grow, in words for a person

    def check(self, top: int) -> None:
        """Raise `WorkspaceError` if a directory is not in the image. The guest's side sent it, and files are made and removed in it."""
        if os.fstat(top).st_dev != os.fstat(self._image.loop.fd).st_rdev:
            raise WorkspaceError(f"the layers of this run are not in {self._image.path!r}", hint="please report this")

    def __call__(self, top: int) -> None:
        """Grow the image if little space is left. `top` is the image's top directory.

        The faster the guest writes, the more the image grows at a time. Raises `WorkspaceError` as `check` does.
        """
        self.check(top)
        space = os.fstatvfs(top)
        free = space.f_bavail * space.f_frsize
        taken = max(0, (self._free_before or free) - free)
        self._free_before = free
        if free >= max(ROOM // 2, 4 * taken) or self.refused:
            return
        try:
            room = max(ROOM, 8 * taken)
            if self._limit is not None:
                room = min(room, self._limit - loop.used_bytes(top) - free)
            if room < _LITTLE:
                return
            disk = os.fstatvfs(self._image.file)
            room = min(room, disk.f_bavail * disk.f_frsize - LEAVE_THE_DISK)
            if room < _LEAST_STEP:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            given = loop.give(top, self._image.file, room)
            self._free_before += given
            if not given:
                self.refused = "this sandbox was made to hold no more; one with a larger limit is made after: agent-sandbox reset"
        except OSError as error:
            self.refused = f"the sandbox could not be given more room on the disk of {self._image.path}: {error.strerror}"

    def put_back(self, top: int) -> None:
        """Return the disk blocks under a ballast that grew at the start of the run. Raises OSError, and `WorkspaceError` as `check` does.

        The ballast does not grow over what the run has freed: that is returned at rest, beside the caller, and whoever opens the image next
        takes it back if it is too much. Here the caller would wait for it, and then for the kernel to write all that the guest wrote.
        """
        self.check(top)
        loop.release_ballast(top, self._image.file)


def find_tool(name: str) -> str | None:
    """Return the path of a filesystem tool in the usual directories; None if it is not installed."""
    return next((path for place in _SEARCH if os.access(path := f"{place}/{name}", os.X_OK)), None)


def _run(program: str, *arguments: str, fine: tuple[int, ...] = (0,)) -> None:
    """Run a system program silently on a file of ours. Raises OSError unless its exit code is in `fine`.

    The program sees guest data only as the kernel wrote it.
    """
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    pid = os.posix_spawn(program, [program, *arguments], {"PATH": ":".join(_SEARCH)}, file_actions=quiet)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the application ignores SIGCHLD; a later mount will show whether it worked
        return
    if code not in fine:
        raise OSError(errno.EIO, f"{program} ended with {code}")
