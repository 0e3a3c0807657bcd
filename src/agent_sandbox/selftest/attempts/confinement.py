"""Attempts on single walls of the kernel's confinement: Landlock, the arguments of system calls, other architectures, and init.

A call whose arguments the seccomp filter refuses is made so that the kernel itself would refuse it for another reason, or would do no harm.
Any answer that is not one of the filter's comes from the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import stat

from agent_sandbox.selftest.attempts import Deeds, content, later

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
# getpid by `int 0x80`, the system calls of 32-bit programs: mov eax, 20; int 0x80; ret.
_GETPID_OF_32_BITS = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
_TIOCGWINSZ = 0x5413


def call(calls: dict[str, tuple[int, list[int], list[int]]]) -> Deeds:
    """Return ways to make each system call: its number, up to six words as arguments, and the errors by which the filter refuses it."""
    return {way: later(_answered, *parts) for way, parts in calls.items()}


def call_of_another_architecture() -> Deeds:
    """Return a way to ask for the own process id by the system calls of 32-bit programs, in a child: the filter kills for it."""
    return {"int 0x80": _by_32_bits}


def signal_parent() -> Deeds:
    """Return a way to signal the parent of this process, without effect."""
    return {"signal": lambda: os.kill(os.getppid(), 0)}


def share_session(theirs: int) -> Deeds:
    """Return a way to be in the session of the caller, `theirs`. A session from outside the own processes has the number 0."""
    return {"session": lambda: _session(theirs)}


def read_parent() -> Deeds:
    """Return ways to read the memory, environment and descriptors of the parent of this process."""
    parent = os.getppid()
    return {
        "memory": lambda: os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY)),
        "maps": lambda: content(f"/proc/{parent}/maps")[:40] or _refuse(),
        "environment": lambda: f"{len(content(f'/proc/{parent}/environ'))} characters",
        "descriptors": lambda: f"{len(os.listdir(f'/proc/{parent}/fd'))} listed",
    }


def against_rules(tree: str, scratch: str, pid: int, name: str) -> Deeds:
    """Return ways to do what the rules of Landlock forbid: `tree` is not to be written or executed, `pid` not to be signalled.

    `name` is the name of an abstract socket of another process. MAKE_CHAR makes the device 0:0, which needs no rights.
    """
    program = f"{tree}/program"
    return {
        "WRITE_FILE": lambda: os.write(os.open(f"{tree}/overwrite", os.O_WRONLY), b"changed"),
        "TRUNCATE": lambda: os.truncate(f"{tree}/truncate", 0),
        "REMOVE_FILE": lambda: os.unlink(f"{tree}/remove"),
        "REMOVE_DIR": lambda: os.rmdir(f"{tree}/directory"),
        "MAKE_REG": lambda: os.mknod(f"{tree}/regular", stat.S_IFREG | 0o600),
        "MAKE_DIR": lambda: os.mkdir(f"{tree}/made"),
        "MAKE_FIFO": lambda: os.mkfifo(f"{tree}/fifo"),
        "MAKE_SYM": lambda: os.symlink("x", f"{tree}/link"),
        "MAKE_SOCK": lambda: _bind(f"{tree}/socket"),
        "MAKE_CHAR": lambda: os.mknod(f"{scratch}/device", stat.S_IFCHR | 0o600, 0),
        "MAKE_BLOCK": lambda: os.mknod(f"{scratch}/disk", stat.S_IFBLK | 0o600, os.makedev(7, 0)),
        "REFER": lambda: os.rename(f"{scratch}/moved", f"{tree}/moved"),
        "EXECUTE": lambda: os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn(program, [program], {}), 0)[1]),
        "IOCTL_DEV": lambda: _window(f"{tree}/null"),
        "ABSTRACT_UNIX_SOCKET": lambda: _connect(name),
        "SIGNAL": lambda: os.kill(pid, 0),
    }


def _answered(number: int, words: list[int], refusals: list[int]) -> str:
    if _LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(word) for word in words)) >= 0:
        return "the kernel did it"
    code = ctypes.get_errno()
    if code in refusals:
        raise OSError(code, os.strerror(code))
    return f"the kernel answered {errno.errorcode.get(code, code)}"


def _by_32_bits() -> str:
    # Not fork: where processes are not allowed, this process itself is killed, which the self-test sees as well.
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(_GETPID_OF_32_BITS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    answer = int(ctypes.CFUNCTYPE(ctypes.c_int)(start)())
    if answer != os.getpid():
        raise OSError(errno.ENOSYS, f"it answered {answer}")
    return "it answered"


def _session(theirs: int) -> str:
    own = os.getsid(0)
    if own not in (0, theirs):
        raise OSError(errno.EXDEV, "its own")
    return "that of its caller"


def _refuse() -> str:
    raise PermissionError(errno.EPERM, "empty")


def _bind(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    return "made"


def _connect(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(f"\0{name}")
    return "connected"


def _window(path: str) -> str:
    import fcntl

    terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    try:
        fcntl.ioctl(terminal, _TIOCGWINSZ, b"\0" * 8)
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
    finally:
        os.close(terminal)
    return "the device answered"
