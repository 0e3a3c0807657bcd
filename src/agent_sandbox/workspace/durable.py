"""Write small files of our own atomically: a crash leaves the old file or the new file. Explain errors of the disk."""

from __future__ import annotations

import errno
import os

from agent_sandbox._fast.contexts import contextmanager
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_REMEDIES = {
    errno.EROFS: "the filesystem is read-only: point XDG_STATE_HOME to a directory that can be written",
    errno.ENOSPC: "the disk is full: free some space, or point XDG_STATE_HOME to another disk",
    errno.EDQUOT: "your disk quota is used up: free some space, or point XDG_STATE_HOME to another disk",
    errno.EACCES: "you may not write there: point XDG_STATE_HOME to a directory of your own",
    errno.ENOTDIR: "something on the way is a file: point XDG_STATE_HOME to a directory",
}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a `WorkspaceError` that says which action failed (`what`) and what to do."""
    try:
        yield
    except OSError as error:
        hint = _REMEDIES.get(error.errno or 0, "check the directory and the disk it is on")
        raise WorkspaceError(f"cannot {what}: {error.strerror or error}", hint=hint) from error


def write_atomically(path: str, content: str | bytes, *, sync: bool = True) -> None:
    """Replace a file's content in one step, so that the file always has all of its old or all of its new content. Raises OSError.

    Without `sync`, a crash of the machine may leave a torn file. Leave `sync` out only for content that can be checked and made again.
    """
    new = path + ".new"  # fixed name: a leftover from a crash is overwritten next time
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.rename(new, path)
    if sync:
        sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Sync the names in a directory to disk. Call it after a rename, and before a step that depends on the new name."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def boot_id() -> str:
    """Return the id that tells one boot of the machine from the next. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
