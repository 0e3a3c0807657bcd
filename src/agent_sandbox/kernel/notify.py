"""Tell the supervisor what a guest is about to do: a listener for some of its system calls, and somebody to ask for names.

Two halves. In the guest, once: put it under a filter that tells of calls, and have the supervisor take the listener, of which the guest
keeps no copy. In init, while it still may: sockets on port 53 of the guest's own network, which has no way out, and on which the supervisor
answers. `Listener` is the supervisor's end.

It observes and is no wall. What a call's arguments point to is read while the call waits, and read again by the kernel when it goes on:
another thread may have changed it in between. Nothing is ever refused here, and nothing may rest on what is seen.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.kernel import seccomp, syscall_rules
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.wire import HEARD, LISTENING

# What opens, executes, connects, binds, sends to an address, or changes a file by its name. `stat`, `access` and `readlink` are not among
# them: they are most of the calls that a program makes, and bring no content. Calls on an open file are those of who opened it.
OPENS = ("open", "openat", "openat2", "creat")
EXECUTES = ("execve", "execveat")
ADDRESSES = ("connect", "bind", "sendto", "sendmsg", "sendmmsg")
_CHANGES = """
    unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir symlink symlinkat link linkat truncate chmod fchmodat fchmodat2 chown
    lchown fchownat mknod mknodat utime utimes utimensat futimesat setxattr lsetxattr removexattr lremovexattr setxattrat removexattrat
"""
CALLS = (*OPENS, *EXECUTES, *ADDRESSES, *_CHANGES.split())

RESOLVER_PORT = 53
OWN_ADDRESS = "198.18.0.1"  # so that a program that asks for the kinds of addresses the machine has is told of one
_RESOLV_CONF = "/etc/resolv.conf"
_MOST_NAMESERVERS = 3  # as the C library takes

# linux/seccomp.h: struct seccomp_notif with the struct seccomp_data in it, struct seccomp_notif_resp, and the calls that take them
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_RECV, _SEND, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
_CONTINUE = 1
_SYNC_WAKE_UP = 1


# A call that waits: its number among those, who makes it (a thread, as numbered here), which one, and its six arguments as they are in the
# registers. A plain tuple, because a guest waits while it is made.
Call = tuple[int, int, str, list[int]]


@dataclass(frozen=True)
class Nameservers:
    """Descriptors of sockets on which names are asked for, and what the C library appends to names."""

    sockets: tuple[int, ...] = ()
    search: tuple[str, ...] = ()


def begin(payload: socket.socket) -> None:
    """In the guest: be observed from here on. Returns when the supervisor listens, and this process does not any more."""
    listener = seccomp.install_observer(seccomp.compile_observer(CALLS))
    # By these two calls, which nobody is told of: to send the descriptor itself would wait for who does not have it yet.
    os.write(payload.fileno(), LISTENING + listener.to_bytes(4, "big"))
    heard = os.read(payload.fileno(), 1)
    os.close(listener)
    if heard != HEARD:
        raise EOFError("the supervisor has gone")


def take_listener(pid: int, number: int) -> int:
    """In the supervisor: a copy of the listener of a guest that waits in `begin`. Raises OSError where the host does not let us."""
    handle = os.pidfd_open(pid)
    try:
        listener = sc.pidfd_getfd(handle, number)
    except OSError as error:
        raise OSError(error.errno, f"this host does not let a run be observed: {error.strerror}") from error
    finally:
        os.close(handle)
    # Who makes the call and who hears of it take turns, so the kernel may keep both on one core (6.6); slower without.
    with suppress(OSError):
        fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)
    return listener


class Listener:
    """The supervisor's end. One thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._names = {number: name for name, number in syscall_rules.numbers(sc.MACHINE).items() if name in CALLS}
        self._buffer = bytearray(_NOTIFICATION.size)
        self._nothing = bytes(_NOTIFICATION.size)

    def next(self) -> Call | None:
        """A call that waits, when `poll` says that there is one; None when who made it has gone meanwhile."""
        self._buffer[:] = self._nothing  # as the kernel demands
        try:
            fcntl.ioctl(self.fd, _RECV, self._buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.ENOTCONN):
                return None
            raise
        cookie, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(self._buffer)
        return cookie, pid, self._names.get(number, ""), arguments

    def go_on(self, call: Call) -> bool:
        """Let it be made. False when who made it has gone or was interrupted: then what was read of `pid` may be another's."""
        try:
            fcntl.ioctl(self.fd, _SEND, _ANSWER.pack(call[0], 0, 0, _CONTINUE))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def close(self) -> None:
        """Whoever is left waits for nobody: its calls fail."""
        os.close(self.fd)


def open_nameservers(notes: list[str]) -> Nameservers:
    """In init, in the guest's network and view: listen wherever programs of this view ask for names. What fails is noted."""
    servers, search = configured()
    sockets: list[int] = []
    try:
        _give_loopback(OWN_ADDRESS)
        for address in dict.fromkeys(("127.0.0.1", *servers)):
            with suppress(OSError):  # one that cannot be ours: an address of a kind that this kernel lacks
                sockets.append(_listen_at(address))
    except OSError as error:
        notes.append(f"names that the program asks for are not seen, only addresses: {error.strerror}")
    return Nameservers(tuple(sockets), search)


def _listen_at(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if not address.startswith("127."):
        _give_loopback(address)
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind((address, RESOLVER_PORT))
    except OSError:
        sock.close()
        raise
    return sock.detach()


def _give_loopback(address: str) -> None:
    """Give the loopback device this one address: rtnetlink(7), RTM_NEWADDR. Nothing beyond it becomes reachable."""
    family, length = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
    raw = socket.inet_pton(family, address)
    body = struct.pack("=BBBBI", family, length, 0, 0, socket.if_nametoindex("lo"))
    body += b"".join(struct.pack("=HH", 4 + len(raw), kind) + raw for kind in (1, 2))  # IFA_ADDRESS, IFA_LOCAL
    # RTM_NEWADDR; NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE
    header = struct.pack("=IHHII", 16 + len(body), 20, 0x1 | 0x4 | 0x400, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.send(header + body)
        (code,) = struct.unpack_from("=i", link.recv(4096), 16)
    if code not in (0, -errno.EEXIST):
        raise OSError(-code, os.strerror(-code))


def configured() -> tuple[list[str], tuple[str, ...]]:
    """Where the view's own settings say that names are asked for. A guest may have written them: a little is read, and not waited for."""
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
