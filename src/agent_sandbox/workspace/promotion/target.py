"""The target tree of a promotion, as descriptors.

The root of the tree is opened once. Every directory of the tree is opened from the root without following a link, crossing a mount or going
up. From then on the descriptor is used, not the name, so that swapped names cannot redirect a write. Before a promotion counts, the names
are compared with the descriptors again.
"""

from __future__ import annotations

import errno
import os
import resource

from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import identity

_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK


class Surprise(Exception):
    """Raised if an entry of the real tree, or of the sandbox, is not as the promotion expects."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class TargetTree:
    """The directory at `root`, an absolute path without links. A context manager.

    The methods take paths relative to the root; "" is the root itself.
    """

    def __init__(self, root: str) -> None:
        self.path = root
        top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            relative = root.strip("/")
            try:
                no_links = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
                self.root = syscalls.openat2(top, relative or ".", _LISTED, resolve=no_links)
            except OSError as error:
                raise WorkspaceError(
                    f"cannot open the directory {root!r}: {os.strerror(error.errno or 0)}",
                    hint="it may have been moved, removed or replaced by a link; nothing was changed",
                ) from error
        finally:
            os.close(top)
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._open: dict[str, int] = {"": self.root}
        self._known: dict[str, tuple[int, int]] = {"": identity(self.root)}

    def __enter__(self) -> TargetTree:
        return self

    def __exit__(self, *ended: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of the root."""
        return self._known[""]

    def directory(self, path: str) -> int:
        """Return a descriptor of a directory, valid until the next call.

        Every call with the same path returns the same directory. Raises `Surprise` if the directory is missing or was replaced, and
        `PolicyError` if it lies on another mount.
        """
        if (known := self._open.get(path)) is not None:
            return known
        fd = self._enter(path)
        found = identity(fd)
        if self._known.setdefault(path, found) != found:
            os.close(fd)
            raise Surprise(path, "another directory is there now")
        if len(self._open) > self._most:
            oldest = next(name for name in self._open if name)
            os.close(self._open.pop(oldest))
        self._open[path] = fd
        return fd

    def expect(self, path: str, known: tuple[int, int]) -> None:
        """Set the device and inode (`known`) that the directory at a path must have, as read from a journal."""
        self._known[path] = known

    def known(self) -> dict[str, tuple[int, int]]:
        """Return the device and inode of every directory that was asked for, by path."""
        return dict(self._known)

    def moved(self) -> list[str]:
        """Return the paths of directories that were moved or replaced since they were opened."""
        paths = []
        for path, known in self._known.items():
            if path == "":
                continue
            try:
                fd = self._enter(path)
            except Surprise:
                paths.append(path)
                continue
            if identity(fd) != known:
                paths.append(path)
            os.close(fd)
        return paths

    def _enter(self, path: str) -> int:
        try:
            return beneath.open_directory(self.root, path)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise PolicyError(
                    f"{os.path.join(self.path, path)!r} lies on another mount than {self.path!r}",
                    hint="leave it out with --skip, and promote what lies there by itself (--project)",
                ) from error
            if error.errno in (*beneath.SWAPPED, errno.EACCES):
                raise Surprise(path, f"it is no directory that can be entered: {os.strerror(error.errno)}") from error
            raise
