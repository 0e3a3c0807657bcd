"""Operations of the caller on files in a sandbox: read, write, list, and so on, each an action of its own.

The operation is done by a small program inside the sandbox (`runtime.guest.file_operations`), never by the host. So links, devices and
everything else that a guest may have left there meet no more power than the guest's own, and hidden files are as absent as for the guest.
The gate judges the operation and its path, and the ledger records them. Of content it records size and digest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import SandboxError
from agent_sandbox.policy.action import UseFile
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.guest import file_operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from agent_sandbox.engine.run import Session
    from agent_sandbox.runtime.base import Guest, Launch

LARGEST = 64 << 20  # bytes of a file that is read, unless the caller asks for more
MOST_ENTRIES = 100_000  # in one listing
PIECE = 8 << 20  # bytes in one turn of a session, whose messages are limited
_STATUS = re.compile(r"(done|error|large|kind)(?: (\w{1,20}))?")
_ENTRY = re.compile(r"(\w+) (\d{1,20}) (\d{1,5}) (-?\d{1,20}) ([0-9a-f]*)\. ([0-9a-f]*)\.")
_KINDS = frozenset({"file", "directory", "link", "fifo", "device", "socket", "unknown"})


@dataclass(frozen=True)
class FileRequest:
    """One operation on a file. `path` is absolute. `content` is what is written; None for other operations."""

    operation: str
    path: str
    content: bytes | None = None
    limit: int = LARGEST  # bytes to read, or entries to list
    recursive: bool = False
    follow: bool = False  # describe what a link leads to, not the link

    def action(self) -> UseFile:
        """Return the action that is judged and recorded. Raises `PolicyError` for an invalid path."""
        return UseFile.of(self.operation, self.path, self.content)

    def words(self, offset: int, count: int) -> dict[str, Any]:
        """Return the request as data for the program inside. Of content, only `count` bytes from `offset` on are read or written."""
        path = self.action().path
        about: dict[str, Any] = {"operation": self.operation, "path": path, "limit": self.limit}
        about |= {"recursive": self.recursive, "follow": self.follow}
        return {**about, "offset": offset, "count": count}

    def details(self) -> str:
        """Return the request as text for an approver."""
        action = self.action()
        written = f", {action.size} bytes with the digest {action.content_sha256}" if self.content is not None else ""
        return f"{action.operation} {action.path!r}{written}"


@dataclass(frozen=True)
class FoundEntry:
    """An entry of a directory, as the program inside describes it."""

    name: str
    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: str


@dataclass(frozen=True)
class FileAnswer:
    """The answer to a request. `status` is the first word of the status and `detail` the second: see `runtime.guest.file_operations`."""

    status: str
    detail: str = ""
    content: bytes = b""

    @property
    def number(self) -> int:
        """The detail as a number; -1 if it is none."""
        return int(self.detail) if self.detail.isascii() and self.detail.isdigit() else -1

    def entries(self) -> tuple[FoundEntry, ...]:
        """Return the content as entries. Raises `SandboxError` if it is malformed."""
        return tuple(map(_entry, self.content.decode("ascii", "replace").splitlines()))


class _Room(Attachment):
    """Lets the program inside write as much as was asked for: the limit on output is for programs of the guest."""

    def __init__(self, size: int) -> None:
        self._size = size

    def before(self, launch: Launch) -> Launch:
        """Return the launch with a limit on output that fits the answer."""
        return replace(launch, limits=replace(launch.limits, output_bytes=self._size))


def access_by_run(
    session: Session,
    request: FileRequest,
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    on_start: Callable[[Guest], None] | None = None,
    ends: float | None = None,
) -> FileAnswer:
    """Do an operation in a run of its own. Raises as `Session.run` does, and `SandboxError` if the run came to no answer."""
    work = Work(
        Code("python", _source(request, "perform_as_program", 0, request.limit + 1)),
        env,
        cwd=cwd,
        stdin=request.content or b"",
        on_start=on_start,
        ends=ends,
        attachments=(_Room(request.limit + 1 if request.operation == "read" else LARGEST),),
    )
    outcome = session.run(work, request.action())
    end = outcome.exit
    if end.reason is not ExitReason.EXITED or end.code or outcome.refused:
        why = outcome.refused or f"{end.reason.value}, exit code {end.code}"
        raise SandboxError(f"{request.operation} of {request.path!r} came to no end in the sandbox: {why}", hint=_remedy(end.reason))
    if "output" in end.limits_hit and request.operation != "read":
        return FileAnswer("large", str(len(outcome.stdout)))
    return _checked(request, outcome.stderr.decode("ascii", "replace"), outcome.stdout)


def access_by_turns(request: FileRequest, take: Callable[[str, bytes], Any]) -> FileAnswer:
    """Do an operation in the interpreter of a session. `take` runs a turn with this code and input, and returns its value.

    Content is passed in pieces, a turn for each. Raises `SandboxError` if the interpreter gives no valid answer.
    """
    content = b"" if request.content is None else request.content
    pieces: list[bytes] = []
    size, answer = 0, FileAnswer("done")
    for offset, count in _pieces(request):
        value = take(_source(request, "perform_in_turn", offset, count), content[offset : offset + count])
        if not (isinstance(value, dict) and isinstance(value.get("status"), str) and isinstance(value.get("content"), bytes)):
            raise SandboxError(f"{request.operation} of {request.path!r} came to no answer in the session", hint="open another session")
        answer = _checked(request, value["status"], value["content"])
        if answer.status != "done":
            return answer
        pieces.append(answer.content)
        size += len(answer.content)
        if request.operation == "read" and (len(answer.content) < count or size > request.limit):
            break
    return _checked(request, f"{answer.status} {answer.detail}".strip(), b"".join(pieces))


def _pieces(request: FileRequest) -> Iterator[tuple[int, int]]:
    """Yield the offset and size of each piece of a request's content. One byte more than the limit is read, to notice more."""
    whole = request.limit + 1 if request.operation == "read" else len(request.content or b"")
    yield 0, min(whole, PIECE)
    yield from ((offset, min(whole - offset, PIECE)) for offset in range(PIECE, whole, PIECE))


def _source(request: FileRequest, function: str, offset: int, count: int) -> str:
    """Return the program as one expression, which leaves no name behind in the interpreter of a session."""
    words = ascii(request.words(offset, count))
    return f"(lambda names: (exec({_text()!r}, names), names[{function!r}]({words}))[1])({{'__name__': 'file_operations'}})"


@lru_cache(maxsize=1)
def _text() -> str:
    with open(file_operations.__file__, encoding="utf-8") as file:
        return file.read()


def _checked(request: FileRequest, status: str, content: bytes) -> FileAnswer:
    """Return the answer of the program inside, which may be anything. Raises `SandboxError` if it is malformed."""
    match = _STATUS.fullmatch(status)
    if match is None:
        raise SandboxError(f"{request.operation} of {request.path!r} came to no valid answer in the sandbox", hint="use another sandbox")
    if request.operation == "read" and len(content) > request.limit:
        return FileAnswer("large", str(len(content)))
    return FileAnswer(match[1], match[2] or "", content)


def _entry(line: str) -> FoundEntry:
    match = _ENTRY.fullmatch(line)
    if match is None or match[1] not in _KINDS or len(match[5]) % 2 or len(match[6]) % 2:
        raise SandboxError("a listing in the sandbox came to no valid answer", hint="use another sandbox")
    name, target = (bytes.fromhex(part).decode("utf-8", "surrogateescape") for part in match.group(5, 6))
    return FoundEntry(name, match[1], int(match[2]), int(match[3]), int(match[4]), target)


def _remedy(reason: ExitReason) -> str:
    return {
        ExitReason.TIMED_OUT: "allow it more time (timeout_seconds)",
        ExitReason.OUT_OF_MEMORY: "allow it more memory (max_memory_mb)",
        ExitReason.DISK_LIMIT: "allow it more disk (max_disk_mb)",
    }.get(reason, "try it again")
