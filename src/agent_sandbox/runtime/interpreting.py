"""What a system call of a guest means: read its arguments out of the guest's memory, and say what they name.

Hostile throughout: an address may lead nowhere, a name may have no end, a descriptor may be anything. What cannot be read is not told; the
kernel will refuse it likewise. Names are resolved as far as that can be done without looking at the view: `..` is taken to undo the name
before it, also where that is a link.
"""

from __future__ import annotations

import os
import posixpath
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.observing import EXECUTES, OPENS, OWN_ADDRESS, RESOLVER_PORT, Call
from agent_sandbox.runtime.naming import Names
from agent_sandbox.runtime.observed import CONNECT, EXECUTE, LISTEN, READ, WRITE, Seen

_PAGE = 4096
_USUAL_PATH, _LONGEST_PATH = 256, 4096  # bytes: what is read first, and at most
_LARGEST_ADDRESS = 128  # struct sockaddr_storage
_MOST_MESSAGES = 64  # of one sendmmsg that are looked at
_MESSAGE, _MESSAGE_OF_SEVERAL = 56, 64  # bytes of struct msghdr and struct mmsghdr; the first two fields are the address and its length
_MOST_PROGRAMS = 4096  # whose names are remembered

# By call: what it does, and to which names. Each is the argument with the directory (None: the working directory) and that with the name.
_FIRST, _AT = ((None, 0),), ((0, 1),)
_CHANGED: dict[str, tuple[tuple[int | None, int], ...]] = {
    **dict.fromkeys(("unlink", "mkdir", "rmdir", "truncate", "chmod", "chown", "lchown", "mknod", "utime", "utimes"), _FIRST),
    **dict.fromkeys(("setxattr", "lsetxattr", "removexattr", "lremovexattr"), _FIRST),
    **dict.fromkeys(("unlinkat", "mkdirat", "fchmodat", "fchmodat2", "fchownat", "mknodat", "utimensat", "futimesat"), _AT),
    **dict.fromkeys(("setxattrat", "removexattrat"), _AT),
    "rename": ((None, 0), (None, 1)),
    **dict.fromkeys(("renameat", "renameat2"), ((0, 1), (2, 3))),
    "symlink": ((None, 1),),
    "symlinkat": ((1, 2),),
    "link": ((None, 1),),
    "linkat": ((2, 3),),
}
_LINKED: dict[str, tuple[int | None, int]] = {"link": (None, 0), "linkat": (0, 1)}  # what a second name gives access to


class Interpreter:
    """Of the calls of one run. `python` is what to call the interpreter that code runs in."""

    def __init__(self, python: str, names: Names) -> None:
        self._python = python
        self._names = names
        self._programs: dict[int, str] = {}  # by thread, until anything is executed
        self.asking = ""  # the program that turned to the resolver last

    def seen(self, call: Call) -> list[Seen]:
        """What the call names; nothing where that cannot be told."""
        with suppress(OSError, ValueError):  # it points nowhere, or the process has gone
            program = self._program(call.pid)
            if call.name in EXECUTES:
                self._programs.clear()
            return [Seen(kind, target, program, there) for kind, target, there in self._told(call, program)]
        return []

    def _told(self, call: Call, program: str) -> Iterator[tuple[str, str, bool]]:
        name = call.name
        if name in OPENS:
            kind = self._opening(call)
            if kind:
                yield kind, _path(call, (None, 0) if name in ("open", "creat") else (0, 1)), True
        elif name in EXECUTES:
            target = _path(call, (None, 0) if name == "execve" else (0, 1))
            yield EXECUTE, target, _is_there(call.pid, target)
        elif name in _CHANGED:
            if name in _LINKED:
                yield READ, _path(call, _LINKED[name]), True
            for place in _CHANGED[name]:
                yield WRITE, _path(call, place), True
        else:
            for address in _addresses(call):
                yield from self._reached(call, address, program)

    def _opening(self, call: Call) -> str:
        """Whether a file is opened to be read or to be written; empty where only its place is marked."""
        if call.name == "creat":
            return WRITE
        flags = call.arguments[1 if call.name == "open" else 2]
        if call.name == "openat2":
            (flags,) = struct.unpack("=Q", sc.process_vm_readv(call.pid, flags, 8))
        if flags & os.O_PATH:
            return ""
        return WRITE if flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC) else READ

    def _reached(self, call: Call, address: bytes, program: str) -> Iterator[tuple[str, str, bool]]:
        family = int.from_bytes(address[:2], "little") if len(address) >= 2 else 0
        if family == socket.AF_UNIX:
            name = address[2:].partition(b"\0")[0]
            if name:  # one with a name in the view; others are the guest's own
                kind = WRITE if call.name == "bind" else READ
                yield kind, _absolute(name, f"/proc/{call.pid}/cwd"), True
            return
        if family == socket.AF_INET and len(address) >= 8:
            host = socket.inet_ntop(socket.AF_INET, address[4:8])
        elif family == socket.AF_INET6 and len(address) >= 24:
            host = socket.inet_ntop(socket.AF_INET6, address[8:24])
        else:
            return
        port = int.from_bytes(address[2:4], "big")
        if call.name == "bind":
            yield LISTEN, _place(host, port), True
        elif port == RESOLVER_PORT:
            self.asking = program  # what it asks for is told by itself
        elif port and host != OWN_ADDRESS:  # without a port nothing is sent: it is asked which address would be ours
            yield CONNECT, _place(self._names.named(host), port), True

    def _program(self, pid: int) -> str:
        known = self._programs.get(pid)
        if known is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            known = self._programs[pid] = self._executable(pid)
        return known

    def _executable(self, pid: int) -> str:
        try:
            path = os.readlink(f"/proc/{pid}/exe")
        except OSError:  # of one that has become unreadable by executing what may not be read
            with open(f"/proc/{pid}/comm", "rb") as file:
                return os.fsdecode(file.read(64).rstrip(b"\n"))
        return self._python if path.startswith("/memfd:python") else path.removesuffix(" (deleted)")


def _path(call: Call, place: tuple[int | None, int]) -> str:
    """The absolute name of what a call is about. Raises OSError or ValueError where there is none."""
    directory, named = place
    number = sc.AT_FDCWD if directory is None else _signed(call.arguments[directory])
    name = _string(call.pid, call.arguments[named]) if call.arguments[named] else b""
    if number == sc.AT_FDCWD and not name:
        raise ValueError("no name")
    return _absolute(name, f"/proc/{call.pid}/cwd" if number == sc.AT_FDCWD else f"/proc/{call.pid}/fd/{number}")


def _absolute(name: bytes, where: str) -> str:
    """A name, if it is a relative one looked up where a link in /proc leads to, without detours."""
    directory = "" if name.startswith(b"/") else os.readlink(where).removesuffix(" (deleted)")
    if directory and not directory.startswith("/"):
        raise ValueError("a pipe, or a socket")
    return "/" + posixpath.normpath(f"{directory}/{os.fsdecode(name)}").lstrip("/")


def _is_there(pid: int, path: str) -> bool:
    """Whether the guest's view has something of this name. It is neither opened nor followed out of the view."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(sc.openat2(root, path, os.O_PATH, resolve=sc.RESOLVE_IN_ROOT | sc.RESOLVE_NO_MAGICLINKS))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # through /proc/self, say: that is the guest's, and not ours to look through
        return True
    finally:
        os.close(root)
    return True


def _addresses(call: Call) -> Iterator[bytes]:
    """The socket addresses that a call names."""
    pid, arguments = call.pid, call.arguments
    if call.name in ("connect", "bind"):
        yield _address(pid, arguments[1], arguments[2])
    elif call.name == "sendto":
        yield _address(pid, arguments[4], arguments[5])
    else:
        several = call.name == "sendmmsg"
        count, size = (min(arguments[2] & 0xFFFFFFFF, _MOST_MESSAGES), _MESSAGE_OF_SEVERAL) if several else (1, _MESSAGE)
        for place in range(count):
            name, length = struct.unpack("=QI", _memory(pid, arguments[1] + place * size, 12))
            if name:
                yield _address(pid, name, length)


def _address(pid: int, where: int, length: int) -> bytes:
    length &= 0xFFFFFFFF
    return _memory(pid, where, min(length, _LARGEST_ADDRESS)) if 2 <= length <= 0x7FFFFFFF else b""


def _memory(pid: int, where: int, size: int) -> bytes:
    """So many bytes of a guest's memory, in two steps where a page ends between. Raises OSError."""
    first = min(size, _PAGE - where % _PAGE)
    data = sc.process_vm_readv(pid, where, first)
    return data if first == size else data + sc.process_vm_readv(pid, where + first, size - first)


def _string(pid: int, where: int) -> bytes:
    """A name in a guest's memory. Raises ValueError for one that has no end within what a name may have, OSError where nothing is."""
    text, step = b"", _USUAL_PATH
    while len(text) < _LONGEST_PATH:
        piece = sc.process_vm_readv(pid, where + len(text), min(step, _PAGE - (where + len(text)) % _PAGE))
        name, end, _ = piece.partition(b"\0")
        text += name
        if end:
            return text
        if not piece:
            break
        step = _PAGE
    raise ValueError("a name without an end")


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
