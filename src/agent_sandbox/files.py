"""Files in a sandbox, for the program that uses it: read, write, list, and so on.

Every operation is done inside the sandbox, on what a run there sees, with a run's own powers: nothing of the real machine is changed,
hidden files are not there, and a link leads only to what the sandbox shows. The policy judges each operation, and the ledger records it.

What the file system says is raised as an OSError, as for a real file: FileNotFoundError, IsADirectoryError, PermissionError, "no space
left". What the policy refuses raises `Denied`, a path that cannot be raises `PolicyError`, and a sandbox that is closed or comes to no
answer raises `SandboxError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Literal

from agent_sandbox._calls import Run, check_type
from agent_sandbox._fast.values import dataclass
from agent_sandbox.engine.file_access import LARGEST, MOST_ENTRIES, FileAnswer, FileRequest, FoundEntry
from agent_sandbox.errors import SandboxError
from agent_sandbox.options import PathLike
from agent_sandbox.policy.paths import normalise

__all__ = ["FileEntry", "SandboxFiles"]

Kind = Literal["file", "directory", "link", "fifo", "device", "socket", "unknown"]
_ODD = {"fifo": "a FIFO", "device": "a device", "socket": "a socket", "link": "a link"}


@dataclass(frozen=True)
class FileEntry:
    """An entry of a directory in a sandbox. It is what a program there sees, and a hostile program may choose all of it.

    `size` is in bytes, `mode` has the permission bits, `modified` is in seconds since the epoch. `target` is where a link leads; empty for
    everything else. Names that are not UTF-8 are surrogateescape text, as in Python's own functions.
    """

    path: str
    kind: Kind
    size: int
    mode: int
    modified: float
    target: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory itself, and no link to one."""
        return self.kind == "directory"


class FileRequests:
    """Makes the requests of files at one place. Relative paths begin at `base`. Common to `SandboxFiles` and `AsyncFiles`."""

    def __init__(self, base: str, *, unkept: Callable[[str], str] = lambda path: "", instead: str = "") -> None:
        """`unkept` returns why nothing that is written at a path would be kept, or nothing; `instead` is the remedy."""
        self._base, self._unkept, self._instead = base, unkept, instead

    def read(self, path: PathLike, max_bytes: int) -> FileRequest:
        """Return the request to read a file. Raises TypeError and ValueError for an invalid limit."""
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
            raise TypeError(f"max_bytes is an int, not {type(max_bytes).__name__}")
        if max_bytes < 0:
            raise ValueError("max_bytes cannot be negative")
        return FileRequest("read", self._path(path), limit=max_bytes)

    def write(self, path: PathLike, content: str | bytes) -> FileRequest:
        """Return the request to write a file. Raises TypeError for content that is neither text nor bytes."""
        check_type("content", content, str, bytes, bytearray, memoryview)
        data = content.encode() if isinstance(content, str) else memoryview(content).tobytes()
        return FileRequest("write", self._kept(path), data)

    def list(self, path: PathLike) -> FileRequest:
        """Return the request to list a directory."""
        return FileRequest("list", self._path(path), limit=MOST_ENTRIES)

    def plain(self, operation: Literal["exists"], path: PathLike) -> FileRequest:
        """Return a request that needs nothing but a path, and changes nothing."""
        return FileRequest(operation, self._path(path))

    def stat(self, path: PathLike, follow_links: bool) -> FileRequest:
        """Return the request to describe an entry."""
        check_type("follow_links", follow_links, bool)
        return FileRequest("stat", self._path(path), follow=follow_links)

    def mkdir(self, path: PathLike) -> FileRequest:
        """Return the request to make a directory."""
        return FileRequest("mkdir", self._kept(path))

    def remove(self, path: PathLike, recursive: bool) -> FileRequest:
        """Return the request to remove an entry."""
        check_type("recursive", recursive, bool)
        return FileRequest("remove", self._kept(path), recursive=recursive)

    def _path(self, path: PathLike) -> str:
        check_type("path", path, str, bytes, os.PathLike)
        text = os.fsdecode(path)
        return normalise(text if text.startswith("/") or not text else f"{self._base.rstrip('/')}/{text}")

    def _kept(self, path: PathLike) -> str:
        """Return a path at which something will be written. Raises `SandboxError` if it would not be kept."""
        place = self._path(path)
        if why := self._unkept(place):
            raise SandboxError(why, hint=self._instead)
        return place


class SandboxFiles:
    """The files of a sandbox: `Sandbox.files`, `SandboxSession.files` and `Workspace.files`. Safe to use from many threads.

    Relative paths begin at the working directory of the sandbox, or at the project of a workspace. A path with `..` is refused: what it
    means depends on links inside. Links are followed inside the sandbox. Content passes through memory, at most `max_bytes` of it.

    To copy a file in, write what you have read: `files.write("data.csv", Path("data.csv").read_bytes())`. To copy one out, do the reverse;
    to change a project, use `Workspace.promote`, which shows the changes first.
    """

    def __init__(
        self,
        operate: Callable[[Run, FileRequest], FileAnswer],
        base: str,
        *,
        unkept: Callable[[str], str] = lambda path: "",
        instead: str = "",
    ) -> None:
        self._operate = operate
        self._requests = FileRequests(base, unkept=unkept, instead=instead)

    def read(self, path: PathLike, *, encoding: str = "utf-8", errors: str = "strict", max_bytes: int = LARGEST) -> str:
        """Return the text of a file. Raises as `read_bytes` does, and UnicodeDecodeError if it is no such text."""
        return self.read_bytes(path, max_bytes=max_bytes).decode(encoding, errors)

    def read_bytes(self, path: PathLike, *, max_bytes: int = LARGEST) -> bytes:
        """Return the content of a regular file. Raises OSError for anything else, and for a file of more than `max_bytes`."""
        return self._ask(self._requests.read(path, max_bytes)).content

    def write(self, path: PathLike, content: str | bytes) -> None:
        """Write a file, in place of what it held. Missing directories above it are made; text becomes UTF-8.

        A write that fails, because there is no space left or the sandbox was killed, may leave a part.
        """
        self._ask(self._requests.write(path, content))

    def list(self, path: PathLike = ".") -> tuple[FileEntry, ...]:
        """Return the entries of a directory, by name. Links are not followed. Raises OSError for more than 100,000 entries."""
        request = self._requests.list(path)
        return listed(request, self._ask(request))

    def stat(self, path: PathLike, *, follow_links: bool = False) -> FileEntry:
        """Return one entry: a link itself, or with `follow_links` what it leads to. Raises FileNotFoundError if there is none."""
        request = self._requests.stat(path, follow_links)
        return entry_of(one_entry(self._ask(request)), request.path)

    def exists(self, path: PathLike) -> bool:
        """Return whether there is something at the path, for a program in the sandbox. A link that leads nowhere does not count."""
        return self._ask(self._requests.plain("exists", path)).number == 1

    def mkdir(self, path: PathLike) -> None:
        """Make a directory and those above it. One that is there already is no error."""
        self._ask(self._requests.mkdir(path))

    def remove(self, path: PathLike, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or an empty directory; with `recursive` a directory and all it holds."""
        self._ask(self._requests.remove(path, recursive))

    def _ask(self, request: FileRequest) -> FileAnswer:
        return settled(request, self._operate(Run(), request))


def settled(request: FileRequest, answer: FileAnswer) -> FileAnswer:
    """Return an answer that reports success. Raises OSError for what the file system inside said."""
    match answer.status:
        case "done":
            return answer
        case "large" if request.operation == "read":
            at_least = f"it has {answer.number:,} bytes, and {request.limit:,} were asked for at most (max_bytes)"
            raise OSError(errno.EFBIG, f"the file is too large: {at_least}", request.path)
        case "large":
            raise OSError(errno.EFBIG, f"the directory has more entries than can be listed ({request.limit:,})", request.path)
        case "kind":
            raise OSError(errno.EINVAL, f"it is {_ODD.get(answer.detail, 'something else')}, and no regular file", request.path)
        case _:
            number = next((number for number, name in errno.errorcode.items() if name == answer.detail), errno.EIO)
            raise OSError(number, os.strerror(number), request.path)


def listed(request: FileRequest, answer: FileAnswer) -> tuple[FileEntry, ...]:
    """Return the entries of a listing. Raises `SandboxError` for a name that no entry can have: it would lead elsewhere."""
    found = answer.entries()
    if any("/" in each.name or "\0" in each.name or each.name in ("", ".", "..") for each in found):
        raise SandboxError("a listing in the sandbox came to no valid answer", hint="use another sandbox")
    return tuple(entry_of(each, f"{request.path.rstrip('/')}/{each.name}") for each in found)


def entry_of(found: FoundEntry, path: str) -> FileEntry:
    """Return what the program inside found as an entry at this path."""
    kind: Kind = found.kind  # type: ignore[assignment]  # `engine.file_access` has checked it
    return FileEntry(path, kind, found.size, found.mode, found.mtime_ns / 1e9, found.target)


def one_entry(answer: FileAnswer) -> FoundEntry:
    """Return the only entry of an answer. Raises `SandboxError` if there are none or several."""
    entries = answer.entries()
    if len(entries) != 1:
        raise SandboxError("a file was described by no valid answer in the sandbox", hint="use another sandbox")
    return entries[0]
