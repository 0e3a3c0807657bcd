"""Observation of a guest: some of its system calls, its DNS queries, and the files it opens.

System calls: the guest installs a notifying seccomp filter once and hands the listener to the supervisor, keeping no copy. `NotifyListener`
is the supervisor's end. DNS queries: before it drops its privileges, init opens sockets on port 53 of the guest's own network, which has no
way out. The supervisor answers on these sockets.

Observation is not a wall. The memory behind a call's arguments is read while the call waits, and read again by the kernel when it
continues: another thread may have changed it in between. Nothing is refused here, and no protection may depend on the observation. Only
`REACHING` calls are refused, by register arguments, which nobody can change meanwhile.

Opened files: fanotify(7), as root. The mark is on the filesystem, so it covers all its mounts in every namespace: on a guest's overlay it
reports this guest's opens and nothing else. An event carries a fresh descriptor of the file; its path comes from /proc. Regular files only,
as far as possible: directories are not reported unless requested, and a reported FIFO is opened without waiting for its other end.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import seccomp, syscall_rules
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.doors import OWN_ADDRESS, RESOLVER_PORT, give_loopback
from agent_sandbox.kernel.syscalls import AT_FDCWD, check, libc
from agent_sandbox.kernel.wire import HEARD, LISTENING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
else:
    from agent_sandbox._fast import sockets as socket

# Observed: calls that open, execute, connect, bind, send to an address, or change a file by name. Not `stat`, `access` and `readlink`: they
# are most of a program's calls and return no content. Not calls on an open file: the open was observed.
OPENS = ("open", "openat", "openat2", "creat")
EXECUTES = ("execve", "execveat")
ADDRESSES = ("connect", "bind", "sendto", "sendmsg", "sendmmsg")
_CHANGES = """
    unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir symlink symlinkat link linkat truncate chmod fchmodat fchmodat2 chown
    lchown fchownat mknod mknodat utime utimes utimensat futimesat setxattr lsetxattr removexattr lremovexattr setxattrat removexattrat
"""
CALLS = (*OPENS, *EXECUTES, *ADDRESSES, *_CHANGES.split())
# Calls that reach another process by its number. In a run with checkpoints the supervisor answers them; see `checkpoint_guard`.
REACHING = (
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "setpgid", "prlimit64", "setpriority", "ioprio_set"),
    *("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "process_madvise"),
    "clone",  # only the one that makes a fork of a state
)

_RESOLV_CONF = "/etc/resolv.conf"
_MOST_NAMESERVERS = 3  # as in the C library

# linux/seccomp.h: struct seccomp_notif including struct seccomp_data, struct seccomp_notif_resp, and their ioctls
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_RECV, _SEND, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
_CONTINUE = 1
_SYNC_WAKE_UP = 1


# A waiting call: its notification id, the thread id as seen from here, the name of the call, and its six register arguments. A plain tuple,
# for speed: the guest waits while it is built.
Call = tuple[int, int, str, list[int]]
FAN_CLOEXEC, FAN_NONBLOCK, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x10
FAN_MARK_ADD, FAN_MARK_FILESYSTEM = 0x1, 0x100
FAN_OPEN, FAN_Q_OVERFLOW = 0x20, 0x4000
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_VERSION = 3
_BUFFER = 64 << 10
# O_NONBLOCK: a FIFO must not block us. O_NOATIME: watching must not change access times. O_LARGEFILE is missing from `os` where it is 0.
_EVENT_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0)


@dataclass(frozen=True)
class Nameservers:
    """Descriptors of the sockets that receive DNS queries, and the search domains that the C library appends."""

    sockets: tuple[int, ...] = ()
    search: tuple[str, ...] = ()


def begin(payload: socket.socket, calls: tuple[str, ...] = CALLS) -> None:
    """In the guest: install a filter that notifies of these calls.

    Return once the supervisor holds the listener and this process has closed its own. Raises EOFError if the supervisor has gone.
    """
    listener = seccomp.install_observer(seccomp.compile_observer(calls))
    # Only write and read, which are not observed. Sending the descriptor itself (sendmsg) would wait for a listener that has no holder yet.
    os.write(payload.fileno(), LISTENING + listener.to_bytes(4, "big"))
    heard = os.read(payload.fileno(), 1)
    os.close(listener)
    if heard != HEARD:
        raise EOFError("the supervisor has gone")


def take_listener(pid: int, number: int) -> int:
    """In the supervisor: return a copy of the listener, which is descriptor `number` of a guest that waits in `begin`.

    Raises OSError if the host forbids it.
    """
    handle = os.pidfd_open(pid)
    try:
        listener = sc.pidfd_getfd(handle, number)
    except OSError as error:
        raise OSError(error.errno, f"this host does not let a run be observed: {error.strerror}") from error
    finally:
        os.close(handle)
    # Caller and listener take turns, so the kernel may keep both on one core (Linux 6.6). Without this flag every call takes longer.
    with suppress(OSError):
        fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)
    return listener


class NotifyListener:
    """The supervisor's end of the listener, which receives a guest's system calls. Used by one thread only."""

    def __init__(self, fd: int, calls: tuple[str, ...] = CALLS) -> None:
        self.fd = fd
        self._names = {number: name for name, number in syscall_rules.numbers(sc.MACHINE).items() if name in calls}
        self._buffer = bytearray(_NOTIFICATION.size)
        self._nothing = bytes(_NOTIFICATION.size)

    def next(self) -> Call | None:
        """Return a waiting call; None if its caller has gone meanwhile. Call it when `poll` reports the descriptor."""
        self._buffer[:] = self._nothing  # the kernel requires a zeroed buffer
        try:
            fcntl.ioctl(self.fd, _RECV, self._buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.ENOTCONN):
                return None
            raise
        cookie, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(self._buffer)
        return cookie, pid, self._names.get(number, ""), arguments

    def go_on(self, call: Call) -> bool:
        """Let the call continue. Return False if its caller has gone or was interrupted.

        If False, discard what was read from the memory of the call's pid: it may belong to another process.
        """
        try:
            fcntl.ioctl(self.fd, _SEND, _ANSWER.pack(call[0], 0, 0, _CONTINUE))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def refuse(self, call: Call, error: int) -> None:
        """Let the call fail with this error."""
        with suppress(OSError):  # its caller has gone
            fcntl.ioctl(self.fd, _SEND, _ANSWER.pack(call[0], 0, -error, 0))

    def close(self) -> None:
        """Close the listener. If processes of the guest remain, their observed calls then fail."""
        os.close(self.fd)


def open_nameservers(notes: list[str]) -> Nameservers:
    """In init: open sockets on the name servers that programs of the view use. A failure adds a note to `notes`."""
    servers, search = configured()
    sockets: list[int] = []
    try:
        give_loopback(OWN_ADDRESS)
        for address in dict.fromkeys(("127.0.0.1", *servers)):
            with suppress(OSError):  # an address family that this kernel lacks
                sockets.append(_listen_at(address))
    except OSError as error:
        notes.append(f"names that the program asks for are not seen, only addresses: {error.strerror}")
    return Nameservers(tuple(sockets), search)


def _listen_at(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if not address.startswith("127."):
        give_loopback(address)
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind((address, RESOLVER_PORT))
    except OSError:
        sock.close()
        raise
    return sock.detach()


def configured() -> tuple[list[str], tuple[str, ...]]:
    """Return the name servers and search domains of the view's resolv.conf.

    A guest may have written that file, so the read is bounded and does not block. Empty if it cannot be read.
    """
    try:
        fd = sc.openat2(sc.AT_FDCWD, _RESOLV_CONF, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, resolve=sc.RESOLVE_NO_MAGICLINKS)
    except OSError:
        return [], ()
    try:
        text = os.read(fd, 8192).decode("ascii", "replace")
    except OSError:
        return [], ()
    finally:
        os.close(fd)
    lines = [line.split() for line in text.splitlines()]
    servers = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver" and _is_address(words[1])]
    search = next((words[1:] for words in reversed(lines) if len(words) > 1 and words[0] in ("search", "domain")), [])
    return servers[:_MOST_NAMESERVERS], tuple(domain.strip(".").lower() for domain in search[:8] if domain.strip("."))


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            return bool(socket.inet_pton(family, text))
    return False


class Overflow(Exception):
    """Raised if events about opened files were lost."""


def watch_opens(path: str) -> int:
    """Return a descriptor that reports each file of the filesystem at `path` opened from now on. The caller closes it. Raises OSError."""
    flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE
    group = check(libc.fanotify_init(ctypes.c_uint(flags), ctypes.c_uint(_EVENT_FLAGS)), "fanotify_init")
    try:
        how, what = ctypes.c_uint(FAN_MARK_ADD | FAN_MARK_FILESYSTEM), ctypes.c_uint64(FAN_OPEN)
        check(libc.fanotify_mark(group, how, what, AT_FDCWD, os.fsencode(path)), f"fanotify_mark {path}")
    except BaseException:
        os.close(group)
        raise
    return group


def opened(group: int) -> Iterator[str]:
    """Yield the paths of files opened since the last call, as named in the opener's namespace, until none is left.

    A deleted file has its last path. Raises `Overflow` if events were lost: the kernel's queue was full, or we had no descriptor left.
    """
    while True:
        try:
            buffer = os.read(group, _BUFFER)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise Overflow from error
            if error.errno in (errno.ENXIO, errno.EACCES, errno.EPERM, errno.ETXTBSY, errno.ENOENT):
                continue  # this file cannot be opened again, and its event is already consumed
            raise
        yield from _paths(buffer)


def _paths(buffer: bytes) -> Iterator[str]:
    at = 0
    found: list[int] = []
    lost = False
    while at < len(buffer):
        length, version, _, _, mask, fd, _ = _EVENT.unpack_from(buffer, at)
        if version != _VERSION or length < _EVENT.size:
            raise Overflow
        at += length
        lost = lost or bool(mask & FAN_Q_OVERFLOW)
        if fd >= 0:
            found.append(fd)
    try:
        while found:
            if (path := _path(found.pop())) is not None:
                yield path
    finally:
        for fd in found:
            os.close(fd)
    if lost:
        raise Overflow


def _path(fd: int) -> str | None:
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    finally:
        os.close(fd)
