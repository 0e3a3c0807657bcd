"""The private files of a ledger, in a directory of their own away from it: its key and its anchor.

The directory is private to its owner and hidden from every guest. The key is 32 random bytes, made on first use. For each purpose another
key is derived from it. Anyone who can read the key can write a ledger that verifies.

The anchor names the last entry of the ledger. Without the anchor, a ledger that was truncated, or replaced by an earlier copy, looks like a
ledger that was never longer. The anchor is written after each entry. So at any moment the ledger is as long as the anchor says, or longer
by the write that was under way when a writer died.

The anchor has two slots of one disk sector each. The first is written for every entry and, like the entry, handed to the kernel. The second
is written and forced to the disk for entries that were forced to the disk. A slot holds the seal of the entry it names, so nobody can forge
a slot without the key. Anyone who can write to both directories can restore an old anchor together with an old ledger.
"""

from __future__ import annotations

import errno
import os
import stat

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.encoding import Seal
from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.chain import HINT, START, Head, holds, torn_at
from agent_sandbox.ledger.encoding import sealed
from agent_sandbox.ledger.event import Gap

KEY, ANCHOR = "key", "anchor"
_KEY_BYTES = 32
_SLOT = 512  # bytes; one disk sector
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_HINT = "find out what happened to that directory; then move it aside, and with it the ledger and its closed files"


def make_private(directory: str) -> None:
    """Make a directory and its missing parents, accessible to this user only."""
    if not os.path.exists(directory):
        make_private(os.path.dirname(directory))
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def read_private(path: str, most: int) -> bytes:
    """Read at most `most` bytes of a regular file. Raises OSError if others than its owner can access it, or if it is not regular."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_mode & 0o077:  # the owner needs no check: only the owner or root can open it
            raise PermissionError(errno.EPERM, "others can read or change it, so it is no secret", path)
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, which the kernel may take in several parts. Raises OSError."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, data[written:])


def write_once(path: str, content: bytes) -> None:
    """Make a private file with this content, atomically, unless it exists. Raises OSError."""
    new = f"{path}.{os.urandom(8).hex()}.new"  # threads and processes may race
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
        with suppress(FileExistsError):  # another thread or process was first, and its file counts
            os.link(new, path)
    finally:
        os.close(descriptor)
        os.unlink(new)


def sync_directory(path: str) -> None:
    """Force the names in a directory to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_hex(text: str, digits: int) -> bool:
    """Return whether a text is exactly `digits` hexadecimal digits, like the names that we make from random bytes or a digest."""
    return len(text) == digits and not text.strip("0123456789abcdef")


def hex_names(directory: str, digits: int) -> list[str]:
    """Return the names in a directory that are exactly `digits` hexadecimal digits; empty if there is no such directory."""
    try:
        return [name for name in os.listdir(directory) if is_hex(name, digits)]
    except FileNotFoundError:
        return []


def size_of(path: str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def load_key(directory: str, *, make: bool = True) -> Seal:
    """Load the key in this directory. If it is missing and `make` is true, make the key and the directory.

    Raises OSError, also if others can access the key file, and FileNotFoundError if it is missing and `make` is false.
    """
    path = os.path.join(directory, KEY)
    try:
        return Seal(_read_key(path))
    except FileNotFoundError:
        if not make:
            raise
    make_private(directory)
    write_once(path, os.urandom(_KEY_BYTES))
    return Seal(_read_key(path))


def _read_key(path: str) -> bytes:
    key = read_private(path, _KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise OSError(errno.EINVAL, "not a key of a ledger", path)
    return key


@dataclass(frozen=True)
class Anchored:
    """One slot of the anchor: number, hash and seal of an entry, the file's length up to the end of the entry, and the boot identifier."""

    sequence: int
    hash: str
    seal: str
    size: int
    boot: str


@dataclass(frozen=True)
class Anchor:
    """The two slots of the anchor: `last` for every entry, `lasting` for entries forced to the disk. None until first written."""

    last: Anchored | None = None
    lasting: Anchored | None = None

    @property
    def furthest(self) -> Anchored | None:
        """The slot that names the later entry: after a power cut this can be either slot."""
        known = [slot for slot in (self.last, self.lasting) if slot is not None]
        return max(known, key=lambda slot: slot.sequence) if known else None


def read_anchor(directory: str) -> Anchor | None:
    """Read the anchor; None if there is none. Raises OSError, and ValueError if a slot is damaged."""
    try:
        content = read_private(os.path.join(directory, ANCHOR), 2 * _SLOT)
    except FileNotFoundError:
        return None
    return Anchor(_slot(content[:_SLOT]), _slot(content[_SLOT:]))


def write_anchor(directory: str, sequence: int, digest: str, seal: str, size: int, boot: str, *, lasting: bool = False) -> None:
    """Write the first slot of the anchor and, for an entry forced to the disk (`lasting`), the second. Raises OSError."""
    descriptor = os.open(f"{directory}/{ANCHOR}", _FLAGS, 0o600)
    try:
        put_anchor(descriptor, sequence, digest, seal, size, boot, lasting=lasting)
    finally:
        os.close(descriptor)


def put_anchor(descriptor: int, sequence: int, digest: str, seal: str, size: int, boot: str, *, lasting: bool) -> None:
    """Write the slots of an anchor that is open as `descriptor`; the second only if `lasting`.

    A slot is one write within one page: a process that dies leaves the old slot or the new one.
    """
    text = b"%-511b\n" % f"{sequence} {digest} {seal} {size} {boot}".encode("ascii")
    _put(descriptor, text, 0)
    if lasting:
        _put(descriptor, text, _SLOT)
        os.fsync(descriptor)


def _begin_anchor(directory: str, digest: str, seal: str, boot: str) -> None:
    """Make the anchor of a ledger that has no entry yet. Raises OSError.

    A new anchor is not empty: it names entry 0, so that an emptied anchor is not taken for a new one.
    """
    make_private(directory)
    write_anchor(directory, 0, digest, seal, 0, boot)


def boot_id() -> str:
    """Return the identifier of the current boot of the machine."""
    try:
        descriptor = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return "unknown"  # no /proc: all boots then look the same, and no loss is explained by a reboot
    try:
        return os.read(descriptor, 64).decode("ascii").strip()
    finally:
        os.close(descriptor)


def _put(descriptor: int, text: bytes, offset: int) -> None:
    if os.pwrite(descriptor, text, offset) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _slot(content: bytes) -> Anchored | None:
    if not content.strip(b"\0"):
        return None
    words = content.decode("ascii").split()
    if len(words) != 5 or not (words[0].isdigit() and words[3].isdigit()) or [len(bytes.fromhex(word)) for word in words[1:3]] != [32, 16]:
        raise ValueError("a slot of the anchor is damaged")
    sequence, digest, seal, size, boot = words
    return Anchored(int(sequence), digest, seal, int(size), boot)


def missing_entries(path: str, directory: str, descriptor: int, size: int, head: Head, boot: str, seal: Seal) -> Gap | None:
    """Compare the end of the ledger with the anchor. Returns a `Gap` to record before any other entry; None if nothing is missing.

    Makes the anchor of a new ledger. Raises `LedgerBroken` if the ledger must not be continued, OSError if the anchor cannot be read or
    made.
    """
    try:
        anchor = read_anchor(directory)
    except ValueError as error:
        raise LedgerBroken(f"the anchor of the ledger {path} cannot be read: {error}", hint=_HINT) from None
    if anchor is None:
        if head.sequence:
            raise LedgerBroken(f"the ledger {path} has entries, and its anchor in {directory} is gone", hint=_HINT)
        _begin_anchor(directory, START, sealed(bytes.fromhex(START), seal), boot)
        return None
    furthest = anchor.furthest
    if furthest is None:
        if head.sequence:
            raise LedgerBroken(f"the ledger {path} has entries, and its anchor in {directory} was emptied", hint=_HINT)
        return None  # the process that made the anchor died before it wrote a slot
    if furthest.seal != sealed(bytes.fromhex(furthest.hash), seal):
        raise LedgerBroken(f"the anchor of the ledger {path} was not written with its key", hint=_HINT)
    if head.sequence >= furthest.sequence:
        if furthest.sequence and not holds(descriptor, size, furthest.sequence, furthest.hash):
            raise LedgerBroken(f"the ledger {path} is another one than before: entry {furthest.sequence} is not the one it had", hint=HINT)
        return None
    return _gap(path, anchor, furthest, size, head, boot)


def _gap(path: str, anchor: Anchor, furthest: Anchored, size: int, head: Head, boot: str) -> Gap:
    torn = vars(torn_at(head.end, head.remains)) if head.remains else {}
    if size == 0:
        return Gap(furthest.sequence, furthest.hash, "the file was not there", torn)
    if boot not in (furthest.boot, "unknown") and (anchor.lasting is None or head.sequence >= anchor.lasting.sequence):
        return Gap(furthest.sequence, furthest.hash, "the machine has started again since", torn)
    raise LedgerBroken(f"the ledger {path} has lost its end: {furthest.sequence - head.sequence} entries are missing", hint=HINT)
