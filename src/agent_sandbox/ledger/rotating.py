"""Close the file of a ledger that has grown large, and go on in a new one.

The order makes every moment safe to die in. The new file is whole, with the entry that continues the chain, before it has the ledger's
name. The old one gets its second name first, so there is no moment without either; if the process dies between the two, the next writer
finds the file too large and does the same again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from agent_sandbox.ledger.chain import Head
from agent_sandbox.ledger.encoding import encode
from agent_sandbox.ledger.event import Rotated
from agent_sandbox.ledger.keys import make_private, sync_directory
from agent_sandbox.ledger.segments import closed_directory, closed_name, first_sequence, kept
from agent_sandbox.spelling import Seal

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


def rotate(path: str, descriptor: int, head: Head, now: float, seal: Seal, *, kept_bytes: int) -> tuple[int, Head] | None:
    """Put a new file in the place of the one that is open and locked as `descriptor`. Returns the new one's descriptor, locked, and its
    head; None on a filesystem where a file has one name only, where the old one grows on. Raises OSError."""
    os.fsync(descriptor)
    first = first_sequence(path)
    make_private(closed_directory(path))
    if not _name_again(path, closed_name(path, first)):
        return None
    oldest, gone = kept(path, kept_bytes)
    line, digest, mark = encode(head.sequence + 1, now, head.hash, Rotated(first, head.end, oldest), seal)
    new = os.open(f"{path}.new", _FLAGS, 0o600)
    try:
        fcntl.flock(new, fcntl.LOCK_EX)  # before anybody can find it
        os.write(new, line)
        os.fsync(new)
        os.rename(f"{path}.new", path)
        sync_directory(closed_directory(path))
        sync_directory(os.path.dirname(path))
        for each in gone:
            with suppress(FileNotFoundError):
                os.unlink(each)
    except BaseException:
        os.close(new)
        raise
    return new, Head(head.sequence + 1, digest, mark, len(line))


def _name_again(path: str, name: str) -> bool:
    """Whether the file has its second name."""
    try:
        os.link(path, name)
    except FileExistsError:
        if not os.path.samefile(path, name):  # of another ledger that was here
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True
