"""A lock that names its holder.

The kernel's lock on the open file is authoritative; it ends with its holder, however that ends. The text in the file only names the holder
to a process that is refused, so text left by a dead holder never blocks anyone.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import Busy
from agent_sandbox.workspace.durable import explained


@dataclass(frozen=True)
class Holder:
    """The holder of a sandbox: its process, its command, and since when (seconds since the epoch)."""

    pid: int
    command: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} ({self.command or 'no command given'}), since {since}"


@contextmanager
def hold(path: str, holder: Holder, *, wait: bool, what: str = "this sandbox") -> Iterator[None]:
    """Hold the lock at `path` for the duration of the block. Without `wait`, raises `Busy`, naming the holder, when it is taken.

    The descriptor is closed on exec. A child forked without exec has to close it, or it keeps the lock.
    """
    with explained(f"open the lock {path!r}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with explained(f"take the lock {path!r}"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Busy(f"{what} is in use by {_holder(descriptor) or 'another run'}", hint="wait for it, or end that process") from None
        with suppress(OSError):  # on a full disk the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, as_json(vars(holder)).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> Holder | None:
    """Read the holder from the file; None if that process is dead. Just after a change of hands it still names the previous one."""
    from json import loads  # imported here: needed only when the lock is refused

    try:
        fields = loads(os.pread(descriptor, 1 << 16, 0))
        holder = Holder(int(fields["pid"]), str(fields["command"]), float(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder if os.path.exists(f"/proc/{holder.pid}") else None
