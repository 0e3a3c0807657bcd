"""A lock that says who holds it.

The kernel's lock on the open file is the truth; it ends with its holder, however that ends. The text in the file only tells the one who is
refused whom to look for, so text that a dead holder left never blocks anybody.
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
    """Who has a sandbox: a process, what it was asked to do, and since when (seconds since the epoch)."""

    pid: int
    command: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} ({self.command or 'no command given'}), since {since}"


@contextmanager
def hold(path: str, holder: Holder, *, wait: bool, what: str = "this sandbox") -> Iterator[None]:
    """Hold the lock at `path` for the length of the block. Without `wait`, raises `Busy`, naming the holder, when somebody else has it.

    The descriptor is not passed on by exec. A child that is forked without exec has to close it, or it goes on holding the lock.
    """
    with explained(f"open the lock {path!r}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with explained(f"take the lock {path!r}"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Busy(f"{what} is in use by {_holder(descriptor) or 'another run'}", hint="wait for it, or end that process") from None
        with suppress(OSError):  # on a full disk it is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, as_json(vars(holder)).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> Holder | None:
    """What the file says, if that process is alive: for an instant after one took the lock, it still names the one before."""
    from json import loads  # only whoever is refused reads it

    try:
        found = loads(os.pread(descriptor, 1 << 16, 0))
        holder = Holder(int(found["pid"]), str(found["command"]), float(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder if os.path.exists(f"/proc/{holder.pid}") else None
