"""The decoder of a guest's system calls: read the arguments from the guest's memory, and return the paths and addresses they name.

All input is hostile: an address may be unmapped, a name may have no end, a descriptor may be anything. Unreadable arguments are not
reported; the kernel will refuse them, too. Paths are normalised without looking at the view: `..` removes the component before it, even if
that is a symbolic link. The guest waits meanwhile, so the code on the path of every call is simple.
"""

from __future__ import annotations

import os
import posixpath
import socket
import struct
from collections.abc import Iterator

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.doors import RESOLVER_PORT
from agent_sandbox.kernel.notify import EXECUTES, OPENS, Call
from agent_sandbox.runtime.observe import CONNECT, EXECUTE, LISTEN, READ, WRITE
from agent_sandbox.runtime.observe.fake_dns import FakeDns

Found = tuple[str, str, str, bool]  # the fields of a `Seen`

_PAGE = 4096
_USUAL_PATH, _LONGEST_PATH = 256, 4096  # bytes read first, and at most
_LARGEST_ADDRESS = 128  # struct sockaddr_storage
_MOST_MESSAGES = 64  # decoded of one sendmmsg
_MESSAGE, _MESSAGE_OF_SEVERAL = 56, 64  # bytes of struct msghdr and struct mmsghdr; the first two fields are the address and its length
_MOST_PROGRAMS = 4096  # threads whose executable is cached
_WRITES, _EMPTIES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC, os.O_TRUNC | os.O_EXCL | (os.O_TMPFILE & ~os.O_DIRECTORY)

# A path argument: the index of the directory descriptor (None: the working directory) and the index of the name. By call, its paths:
_Place = tuple[int | None, int]
_FIRST: tuple[_Place, ...] = ((None, 0),)
_AT: tuple[_Place, ...] = ((0, 1),)
_CHANGED: dict[str, tuple[_Place, ...]] = {
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
_LINKED: dict[str, _Place] = {"link": (None, 0), "linkat": (0, 1)}  # the existing file, to which the new name gives access
_OPENED: dict[str, _Place] = {name: (None, 0) if name in ("open", "creat") else (0, 1) for name in OPENS}


class SyscallDecoder:
    """The decoder for the calls of one run.

    `python` is the path to report for the interpreter that runs code, `servers` are the addresses of our DNS server.
    """

    def __init__(self, python: str, names: FakeDns, servers: frozenset[str]) -> None:
        self._python = python
        self._names = names
        self._servers = servers
        self._programs: dict[int, str] = {}  # executables by thread, until the next execve
        self.asking = ""  # the program that last contacted the resolver

    def seen(self, call: Call) -> list[Found]:
        """Return the files, programs and addresses that a system call names. Raises PermissionError if its memory may not be read."""
        _, pid, name, arguments = call
        try:
            program = self._program(pid)
            if name in _OPENED:
                kinds = _opening(pid, name, arguments)
                target = _path(pid, _OPENED[name], arguments) if kinds else ""
                return [(kind, target, program, True) for kind in kinds]
            if name in EXECUTES:
                self._programs.clear()
                target = _path(pid, (None, 0) if name == "execve" else (0, 1), arguments)
                return [(EXECUTE, target, program, _is_there(pid, target))]
            if name in _CHANGED:
                linked = [(READ, _path(pid, _LINKED[name], arguments), program, True)] if name in _LINKED else []
                return [*linked, *((WRITE, _path(pid, place, arguments), program, True) for place in _CHANGED[name])]
            targets = (self._reached(pid, name, address, program) for address in _addresses(pid, name, arguments))
            return [(*each, program, True) for each in targets if each is not None]
        except PermissionError:  # it executes an unreadable file: the kernel hides its memory from those who may not read the file
            raise
        except (OSError, ValueError):  # an unmapped address, or the process has gone
            return []

    def _reached(self, pid: int, name: str, address: bytes, program: str) -> tuple[str, str] | None:
        family = int.from_bytes(address[:2], "little")
        if family == socket.AF_UNIX:
            path = address[2:].partition(b"\0")[0]  # empty for an abstract or unnamed socket, which the view does not contain
            return (WRITE if name == "bind" else READ, _absolute(path, f"/proc/{pid}/cwd")) if path else None
        if family == socket.AF_INET and len(address) >= 8:
            host = socket.inet_ntop(socket.AF_INET, address[4:8])
        elif family == socket.AF_INET6 and len(address) >= 24:
            host = socket.inet_ntop(socket.AF_INET6, address[8:24])
        else:
            return None
        port = int.from_bytes(address[2:4], "big")
        if name == "bind":
            return LISTEN, _spelt(host, port)
        if port == RESOLVER_PORT and host in self._servers:
            self.asking = program  # the query itself is recorded when it is answered
            return None
        # Port 0 sends nothing: the program only asks which source address it would get.
        return (CONNECT, _spelt(self._names.named(host), port)) if port else None

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
        except OSError:  # the process executes an unreadable file
            with open(f"/proc/{pid}/comm", "rb") as file:
                return os.fsdecode(file.read(64).rstrip(b"\n"))
        return self._python if path.startswith("/memfd:python") else path.removesuffix(" (deleted)")


def _opening(pid: int, name: str, arguments: list[int]) -> tuple[str, ...]:
    """Return READ, WRITE or both for an open call; nothing for O_PATH. A file that is truncated on opening does not count as read."""
    if name == "creat":
        return (WRITE,)
    flags = arguments[1 if name == "open" else 2]
    if name == "openat2":
        (flags,) = struct.unpack("=Q", _memory(pid, flags, 8))
    if flags & os.O_PATH:
        return ()
    if not flags & _WRITES:
        return (READ,)
    return (READ, WRITE) if flags & os.O_ACCMODE == os.O_RDWR and not flags & _EMPTIES else (WRITE,)


def _path(pid: int, place: _Place, arguments: list[int]) -> str:
    """Return the absolute path that a call names. Raises OSError or ValueError if there is none."""
    directory, named = place
    number = sc.AT_FDCWD if directory is None else _signed(arguments[directory])
    name = _string(pid, arguments[named]) if arguments[named] else b""
    if number == sc.AT_FDCWD and not name:
        raise ValueError("no name")
    return _absolute(name, f"/proc/{pid}/cwd" if number == sc.AT_FDCWD else f"/proc/{pid}/fd/{number}")


def _absolute(name: bytes, where: str) -> str:
    """Return a normalised absolute path. `where` is the link in /proc to the directory that a relative name starts from."""
    directory = "" if name.startswith(b"/") else os.readlink(where).removesuffix(" (deleted)")
    if directory and not directory.startswith("/"):
        raise ValueError("a pipe, or a socket")
    whole = f"{directory}/{os.fsdecode(name)}" if directory else os.fsdecode(name)
    if "//" in whole or "/." in whole or whole.endswith("/"):
        return "/" + posixpath.normpath(whole).lstrip("/")
    return whole


def _is_there(pid: int, path: str) -> bool:
    """Return whether the guest's view contains this path. The file is not opened, and no link is followed out of the view."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(sc.openat2(root, path, os.O_PATH, resolve=sc.RESOLVE_IN_ROOT | sc.RESOLVE_NO_MAGICLINKS))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # for instance through /proc/self, which is the guest's and not ours to follow: assume that it exists
        return True
    finally:
        os.close(root)
    return True


def _addresses(pid: int, name: str, arguments: list[int]) -> Iterator[bytes]:
    """Yield the socket addresses that a call names."""
    if name in ("connect", "bind"):
        yield _address(pid, arguments[1], arguments[2])
    elif name == "sendto":
        yield _address(pid, arguments[4], arguments[5])
    elif name in ("sendmsg", "sendmmsg"):
        several = name == "sendmmsg"
        count, size = (min(arguments[2] & 0xFFFFFFFF, _MOST_MESSAGES), _MESSAGE_OF_SEVERAL) if several else (1, _MESSAGE)
        for place in range(count):
            where, length = struct.unpack("=QI", _memory(pid, arguments[1] + place * size, 12))
            if where:
                yield _address(pid, where, length)


def _address(pid: int, where: int, length: int) -> bytes:
    length &= 0xFFFFFFFF
    return _memory(pid, where, min(length, _LARGEST_ADDRESS)) if length >= 2 else b""


def _memory(pid: int, where: int, size: int) -> bytes:
    """Read `size` bytes of a guest's memory, in two steps if they cross a page. Raises OSError."""
    first = min(size, _PAGE - where % _PAGE)
    data = sc.process_vm_readv(pid, where, first)
    return data if first == size else data + sc.process_vm_readv(pid, where + first, size - first)


def _string(pid: int, where: int) -> bytes:
    """Read a string from a guest's memory. Raises ValueError if it does not end within `_LONGEST_PATH`, OSError if nothing is mapped."""
    text, step = b"", _USUAL_PATH
    while len(text) < _LONGEST_PATH:
        at = where + len(text)
        piece = sc.process_vm_readv(pid, at, min(step, _PAGE - at % _PAGE))
        end = piece.find(b"\0")
        if end >= 0:
            return text + piece[:end]
        if not piece:
            break
        text, step = text + piece, _PAGE
    raise ValueError("a name without an end")


def _spelt(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
