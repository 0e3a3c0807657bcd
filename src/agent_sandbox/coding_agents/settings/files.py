"""Read a settings file of the user, and replace it whole.

A file is replaced by renaming a complete new one over it, so that after a crash there is the old text or the new one. Files that are not
plainly the user's own are refused: a symlink may lead to a file that others share or that a tool writes, and another owner's file is not
ours to change.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from agent_sandbox.errors import PolicyError

_LARGEST = 64 << 20  # bytes: one of these files holds the history of the program


@dataclass(frozen=True)
class OwnFile:
    """A settings file: its text, or None if there is none, and its mode."""

    text: str | None
    mode: int = 0o600


def read(path: str) -> OwnFile:
    """Read a settings file. Raises `PolicyError` for one that must not be changed."""
    _check_directory(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return OwnFile(None)
    except OSError as error:
        if os.path.islink(path):
            hint = f"name the file itself, or change {os.path.realpath(path)} by hand"
            raise PolicyError(f"{path} is a symlink: nothing was changed", hint=hint) from error
        raise PolicyError(f"cannot read {path}: {error.strerror}", hint="see its owner and its mode") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path} is not a file: nothing was changed", hint="move it away")
        if status.st_uid != os.geteuid():
            raise PolicyError(f"{path} belongs to another user: nothing was changed", hint="do this as its owner")
        if status.st_nlink > 1:
            raise PolicyError(f"{path} has a second name (a hard link): nothing was changed", hint="copy it, and put the copy in its place")
        if status.st_size > _LARGEST:
            raise PolicyError(f"{path} is too large for a settings file: nothing was changed", hint="see what it holds")
        with os.fdopen(os.dup(file), "rb") as stream:
            data = stream.read()
    finally:
        os.close(file)
    try:
        return OwnFile(data.decode(), stat.S_IMODE(status.st_mode))
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8: nothing was changed", hint="mend it first") from None


def _check_directory(path: str) -> None:
    """Raise `PolicyError` if the directory of a file is a symlink or another user's. It need not exist."""
    directory = os.path.dirname(path)
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PolicyError(f"cannot use {directory}: {error.strerror}", hint="see its owner and its mode") from error
    if stat.S_ISLNK(status.st_mode):
        raise PolicyError(
            f"{directory} is a symlink: nothing was changed", hint=f"change the files in {os.path.realpath(directory)} by hand"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise PolicyError(f"{directory} is not a directory: nothing was changed", hint="move it away")
    if status.st_uid not in (0, os.geteuid()):
        raise PolicyError(f"{directory} belongs to another user: nothing was changed", hint="do this as its owner")


def write(path: str, text: str, mode: int) -> None:
    """Replace a file by this text; make its directory if there is none. Raises `PolicyError` if it cannot be written."""
    directory = os.path.dirname(path)
    fresh = f"{path}.agent-sandbox-{os.getpid()}"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(text.encode())
                os.fchmod(stream.fileno(), mode)
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
        _sync(directory)
    except OSError as error:
        raise PolicyError(f"cannot write {path}: {error.strerror}", hint="see the owner and the mode of its directory") from error


def remove(path: str) -> None:
    """Remove a file. Raises `PolicyError` if it cannot be removed."""
    try:
        os.unlink(path)
        _sync(os.path.dirname(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise PolicyError(f"cannot remove {path}: {error.strerror}", hint="see the owner and the mode of its directory") from error


def _sync(directory: str) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
