"""Copy entries of layers: into another layer with all their metadata, or into a promotion with a digest of the content.

Content is cloned where the filesystem shares blocks. `copy_file` otherwise copies inside the kernel, and `copy` through memory, because it
computes the digest; both keep holes. Attributes that a plain user may not set, such as a program's capabilities, are left out: they had no
effect for that user.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib  # OpenSSL's is several times faster than the interpreter's own, and files may have gigabytes
import os
import stat
from collections.abc import Mapping

from agent_sandbox.kernel.syscalls import FICLONE
from agent_sandbox.workspace.nodes import next_extent
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion.target import Surprise

_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_CHUNK = 1 << 20
_SYNCED = 256 << 20
_SMALL = 1 << 16  # read in one piece
_ZEROS = bytes(_CHUNK)


def copy_file(old: int, name: str, into: int, status: os.stat_result, attributes: Mapping[str, bytes]) -> None:
    """Create the file `name` in `into` as a copy of the open file `old`, with the metadata in `status` and `attributes`. Raises OSError."""
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=into)
    try:
        _copy_content(old, new, status.st_size)
        dress(new, status, attributes)
    finally:
        os.close(new)


def copy_special(source: int, name: str, into: int, status: os.stat_result, attributes: Mapping[str, bytes]) -> None:
    """Create a copy of a link, FIFO, socket or device of `source` in `into`, under the same name. The original is not opened."""
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=into)
    else:
        os.mknod(name, stat.S_IFMT(status.st_mode) | 0o600, status.st_rdev, dir_fd=into)
    here = f"/proc/self/fd/{into}/{name}"  # no call below follows a link here
    _own(here, status, os.lstat(here))
    _attribute(here, attributes)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(here, stat.S_IMODE(status.st_mode))
    os.utime(here, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def dress(fd: int, status: os.stat_result, attributes: Mapping[str, bytes]) -> None:
    """Give an open file or directory of ours the owner, mode and times in `status`, and set the extended `attributes`."""
    _own(fd, status, os.fstat(fd))  # first: chown clears set-user-id bits and capabilities
    _attribute(fd, attributes)
    os.fchmod(fd, stat.S_IMODE(status.st_mode))  # after the attributes: setting them needs write permission
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def _own(place: int | str, wanted: os.stat_result, now: os.stat_result) -> None:
    if (wanted.st_uid, wanted.st_gid) != (now.st_uid, now.st_gid):
        if isinstance(place, int):
            os.fchown(place, wanted.st_uid, wanted.st_gid)
        else:
            os.lchown(place, wanted.st_uid, wanted.st_gid)


def _attribute(place: int | str, attributes: Mapping[str, bytes]) -> None:
    for name, value in attributes.items():
        try:
            os.setxattr(place, name, value, follow_symlinks=isinstance(place, int))
        except PermissionError:
            if os.geteuid() == 0:
                raise


def cloned(old: int, new: int) -> bool:
    """Make an empty file share the blocks of another file. Returns False, having done nothing, if the filesystem cannot do that."""
    try:
        fcntl.ioctl(new, FICLONE, old)
    except OSError:  # another filesystem, or one that does not share blocks
        return False
    return True


def _copy_content(old: int, new: int, size: int) -> None:
    if cloned(old, new):
        return
    position = 0
    while position < size:
        position, end = next_extent(old, position, size)
        while position < end:
            copied = _copy_range(old, new, position, end - position)
            if not copied:
                raise OSError(errno.EIO, "a file of the sandbox became shorter while it was copied")
            position += copied
    os.ftruncate(new, size)


def _copy_range(old: int, new: int, position: int, length: int) -> int:
    try:
        return os.copy_file_range(old, new, length, position, position)
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
    os.lseek(new, position, os.SEEK_SET)
    return os.sendfile(new, old, position, length)


def copy(source: int, target: int, size: int, *, path: str, progress: Progress = NO_PROGRESS) -> str:
    """Copy the first `size` bytes of `source` into `target` and return their digest. Content of a large file goes to disk on the way.

    Raises OSError, and `Surprise` when the source is not exactly `size` bytes long.
    """
    if size <= _SMALL:
        content = os.pread(source, size + 1, 0)
        if len(content) != size:
            raise Surprise(path, "the file in the sandbox has changed since it was looked at")
        write_all(target, content, 0)
        progress.advance(size=size)
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    shared = cloned(source, target)
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at = unsynced = 0
    while at < size:
        data, end = next_extent(source, at, size)
        while at < data:  # keep the hole: write nothing
            length = min(_CHUNK, data - at)
            digest.update(_ZEROS[:length])
            at += length
            progress.advance(size=length)
        while at < end:
            content = os.pread(source, min(_CHUNK, end - at), at)
            if not content:
                raise Surprise(path, "the file in the sandbox has become shorter since it was looked at")
            digest.update(content)
            if not shared:
                write_all(target, content, at)
                unsynced += len(content)
                if unsynced >= _SYNCED:  # otherwise the sync at the end takes minutes, and nobody can tell how far it is
                    os.fdatasync(target)
                    unsynced = 0
            at += len(content)
            progress.advance(size=len(content))
    if os.pread(source, 1, size):
        raise Surprise(path, "the file in the sandbox has become longer since it was looked at")
    os.ftruncate(target, size)
    return digest.hexdigest()


def write_all(fd: int, content: bytes, at: int) -> None:
    """Write content to an open file, from the offset `at` on. Raises OSError."""
    while content:
        written = os.pwrite(fd, content, at)
        content, at = content[written:], at + written
