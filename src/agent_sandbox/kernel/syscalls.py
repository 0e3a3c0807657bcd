"""System calls, one function each, named as in section 2 of the manual.

Plain on purpose: no cleverness between the caller and the kernel, errno checked in one place, constants named as in the headers. Contains
only calls that Python's `os`, `signal` and `socket` lack. Every function raises OSError if the kernel refuses, except `close_range`.
"""

from __future__ import annotations

import ctypes
import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # without the enumerations of `signal`

libc = ctypes.CDLL(None, use_errno=True)
# Found now, in the keeper, and not by each init again. Declared types spare a call the making of objects for its arguments.
_mount, _prctl, _umount2, _unshare = libc.mount, libc.prctl, libc.umount2, libc.unshare
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
getattr(libc, "syscall")  # noqa: B009  an attribute that nobody uses looks like a mistake
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # the same, without releasing the GIL during the call

# Numbers above 423 are the same on every architecture; older ones are not.
MACHINE = os.uname().machine
_OLD_NUMBERS = {
    "x86_64": {
        "clone": 56,
        "pivot_root": 155,
        "capget": 125,
        "capset": 126,
        "seccomp": 317,
        "rt_sigaction": 13,
        "renameat2": 316,
        "finit_module": 313,
    },
    "aarch64": {
        "clone": 220,
        "pivot_root": 41,
        "capget": 90,
        "capset": 91,
        "seccomp": 277,
        "rt_sigaction": 134,
        "renameat2": 276,
        "finit_module": 273,
    },
}
_NUMBERS = _OLD_NUMBERS.get(MACHINE, {})
SYS_open_tree, SYS_move_mount, SYS_fsopen, SYS_fsconfig, SYS_fsmount = 428, 429, 430, 431, 432
SYS_close_range, SYS_openat2, SYS_pidfd_getfd, SYS_mount_setattr, SYS_listxattrat = 436, 437, 438, 442, 465
SYS_landlock_create_ruleset, SYS_landlock_add_rule, SYS_landlock_restrict_self = 444, 445, 446

# clone(2), unshare(2)
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00008000, 0x00200000, 0x01000000

# mount(2), umount2(2)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME = 1024
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

# open_tree(2), move_mount(2), mount_setattr(2)
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_SYMLINKS = 1, os.O_CLOEXEC, 4, 0x10
MOVE_MOUNT_T_EMPTY_PATH, MOVE_MOUNT_BENEATH = 0x40, 0x200
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_IDMAP = 1, 2, 4, 8, 0x00100000
MOUNT_ATTR_NOATIME = 0x10

# fsopen(2), fsconfig(2), fsmount(2)
FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC = 1, 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6

# openat2(2)
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 1, 2, 4, 8, 16

# renameat2(2)
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2

# ioctl_ficlone(2)
FICLONE = 0x40049409

# name_to_handle_at(2)
MAX_HANDLE_SZ = 128

# statx(2)
STATX_BTIME, STATX_SIZE_BYTES, STATX_BTIME_OFFSET = 0x800, 256, 80

# xattr(7)
XATTR_LIST_MAX = 65536

# prctl(2)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 23, 24, 28, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_GET_TID_ADDRESS = 40

# seccomp(2)
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV = 8, 32


def check(result: int, what: str) -> int:
    """Return the result. If it is negative, raise an OSError with the current errno and the name of the call."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _number(name: str) -> int:
    if name not in _NUMBERS:
        raise OSError(38, f"{name}: no system call number known for {MACHINE}")
    return _NUMBERS[name]


class _MountAttr(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _OpenHow(ctypes.Structure):
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _FileHandle(ctypes.Structure):
    """struct file_handle, with room for a handle of any size."""

    _fields_ = (("handle_bytes", ctypes.c_uint), ("handle_type", ctypes.c_int), ("f_handle", ctypes.c_ubyte * MAX_HANDLE_SZ))


# Called for every file of a listing. Declaring the types beforehand halves the time.
_listxattrat = libc["syscall"]
_listxattrat.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t)


class _IoVec(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


# Called for every observed system call.
_process_vm_readv = libc["process_vm_readv"]
_process_vm_readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
_process_vm_readv.restype = ctypes.c_ssize_t


class _CapHeader(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    """struct __user_cap_data_struct; version 3 takes two."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def unshare(flags: int) -> None:
    """unshare(2)."""
    check(_unshare(flags), "unshare")


def setns(namespace: int, kind: int) -> None:
    """setns(2). `kind` is the CLONE_NEW… flag of the namespace."""
    check(libc.setns(namespace, kind), "setns")


def clone(flags: int, thread_id_at: int = 0) -> int:
    """clone(2) as fork(2) with flags: returns 0 in the child. The child's end sends SIGCHLD. Only for a process with one thread.

    Neither hooks of Python nor of C libraries run in the child. Without the address where the C library keeps the number of the thread, the
    child's main thread cannot be signalled by its other threads: such a child must not run foreign code.
    """
    flags |= signal.SIGCHLD | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if thread_id_at else 0)
    at = ctypes.c_void_p(thread_id_at)  # the fourth or the fifth argument, by architecture; the other one is not looked at
    return check(_libc_with_gil.syscall(_number("clone"), ctypes.c_ulong(flags), None, None, at, at), "clone")


def thread_id_address() -> int:
    """Return the address where the C library keeps the number of this thread; 0 if the kernel does not know it."""
    address = ctypes.c_ulong(0)
    return address.value if _prctl(_PR_GET_TID_ADDRESS, ctypes.addressof(address), 0, 0, 0) == 0 else 0


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _mount(
        os.fsencode(source), os.fsencode(target), kind.encode() if kind else None, flags, os.fsencode(options) if options else None
    )
    check(result, f"mount {kind or ''} {source} on {target} [{options}]")


def load_module(module: int, name: str) -> None:
    """finit_module(2), without parameters."""
    check(libc.syscall(_number("finit_module"), module, b"", 0), f"load {name}")


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    check(_umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    check(libc.syscall(_number("pivot_root"), os.fsencode(new), os.fsencode(old)), "pivot_root")


def open_tree(path: str, flags: int, *, directory: int = AT_FDCWD) -> int:
    """open_tree(2): return a descriptor; with OPEN_TREE_CLONE, of a detached copy of the mount."""
    return check(libc.syscall(SYS_open_tree, directory, os.fsencode(path), flags | OPEN_TREE_CLOEXEC), f"open_tree {path}")


def move_mount(fd: int, target: str) -> None:
    """move_mount(2): attach a detached mount at a path, following links as mount(2) does."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS
    check(libc.syscall(SYS_move_mount, fd, b"", AT_FDCWD, os.fsencode(target), flags), f"move_mount {target}")


def move_mount_beneath(fd: int, top: int) -> None:
    """move_mount(2): attach a detached mount beneath the mount whose root is `top` (Linux 6.5)."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH | MOVE_MOUNT_BENEATH
    check(libc.syscall(SYS_move_mount, fd, b"", top, b"", flags), "move_mount beneath")


def move_mount_onto(fd: int, top: int) -> None:
    """move_mount(2): attach a detached mount on the mount whose root is `top`."""
    check(libc.syscall(SYS_move_mount, fd, b"", top, b"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH), "move_mount onto")


def fsopen(kind: str) -> int:
    """fsopen(2): return a descriptor for configuring a filesystem of this kind."""
    return check(libc.syscall(SYS_fsopen, kind.encode(), FSOPEN_CLOEXEC), f"fsopen {kind}")


def fsconfig(fd: int, command: int, key: str | None = None, value: str | None = None) -> None:
    """fsconfig(2) for flags, strings and commands."""
    name, text = (None if each is None else os.fsencode(each) for each in (key, value))
    check(libc.syscall(SYS_fsconfig, fd, command, name, text, 0), f"fsconfig {key or command}")


def fsmount(fd: int, attributes: int) -> int:
    """fsmount(2): return an O_PATH-like descriptor of a detached mount, which ends when nothing uses it any more."""
    return check(libc.syscall(SYS_fsmount, fd, FSMOUNT_CLOEXEC, attributes), "fsmount")


def mount_setattr(fd: int, *, set_flags: int = 0, clear_flags: int = 0, userns: int = 0, recursive: bool = False) -> None:
    """mount_setattr(2) on a mount descriptor; `userns` is used with MOUNT_ATTR_IDMAP."""
    attr = _MountAttr(set_flags, clear_flags, 0, userns)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    check(libc.syscall(SYS_mount_setattr, fd, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr)), "mount_setattr")


def openat2(directory: int, path: str, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return check(libc.syscall(SYS_openat2, directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)), f"openat2 {path}")


def renameat2(old_directory: int, old: str, new_directory: int, new: str, flags: int) -> None:
    """renameat2(2)."""
    number = _number("renameat2")
    check(libc.syscall(number, old_directory, os.fsencode(old), new_directory, os.fsencode(new), flags), f"renameat2 {old} {new}")


def syncfs(fd: int) -> None:
    """syncfs(2): flush the whole filesystem of the descriptor."""
    check(libc.syncfs(fd), "syncfs")


def name_to_handle_at(directory: int, name: str) -> tuple[int, bytes]:
    """name_to_handle_at(2): return type and bytes of an inode's handle, which no other inode ever has. Does not follow a link."""
    handle = _FileHandle(MAX_HANDLE_SZ, 0)
    mount = ctypes.c_int()
    result = libc.name_to_handle_at(directory, os.fsencode(name), ctypes.byref(handle), ctypes.byref(mount), 0)
    check(result, f"name_to_handle_at {name}")
    return handle.handle_type, bytes(handle.f_handle[: handle.handle_bytes])


def born_ns(fd: int) -> int | None:
    """statx(2): return when an inode was made, by the same clock as its other times. None if the filesystem does not record it."""
    found = ctypes.create_string_buffer(STATX_SIZE_BYTES)
    check(libc.statx(fd, b"", AT_EMPTY_PATH, STATX_BTIME, found), f"statx {fd}")
    seconds, nanoseconds = struct.unpack_from("qI", found, STATX_BTIME_OFFSET)
    return seconds * 10**9 + nanoseconds if struct.unpack_from("I", found)[0] & STATX_BTIME else None


def listxattrat(directory: int, path: str, flags: int) -> list[str]:
    """listxattrat(2), since Linux 6.13: return the names of the extended attributes."""
    raw = os.fsencode(path)
    if _listxattrat(SYS_listxattrat, directory, raw, flags, None, 0) == 0:  # the common case: no attributes
        return []
    names = ctypes.create_string_buffer(XATTR_LIST_MAX)
    size = check(_listxattrat(SYS_listxattrat, directory, raw, flags, names, XATTR_LIST_MAX), f"listxattrat {path}")
    return [os.fsdecode(name) for name in names.raw[:size].split(b"\0") if name]


def close_range(first: int, last: int) -> None:
    """close_range(2), or a loop on kernels older than 5.9."""
    if libc.syscall(SYS_close_range, ctypes.c_uint(first), ctypes.c_uint(last), 0) < 0:
        os.closerange(first, min(last, os.sysconf("SC_OPEN_MAX")))


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    """prctl(2) for the options that take numbers."""
    result: int = _prctl(option, value, third, 0, 0)
    return result if result >= 0 else check(result, f"prctl {option}")


def capset(permitted: int, *, inheritable: int = 0) -> None:
    """capset(2) for the calling thread; `permitted` becomes the effective set too."""
    header = _CapHeader(0x20080522, 0)
    data = (_CapData * 2)(
        *(
            _CapData(permitted >> shift & 0xFFFFFFFF, permitted >> shift & 0xFFFFFFFF, inheritable >> shift & 0xFFFFFFFF)
            for shift in (0, 32)
        )
    )
    check(libc.syscall(_number("capset"), ctypes.byref(header), ctypes.byref(data)), "capset")


def capget() -> int:
    """capget(2) of the calling thread: return the union of its effective, permitted and inheritable sets."""
    header = _CapHeader(0x20080522, 0)
    data = (_CapData * 2)()
    check(libc.syscall(_number("capget"), ctypes.byref(header), ctypes.byref(data)), "capget")
    low, high = (part.effective | part.permitted | part.inheritable for part in data)
    return int(low | high << 32)


def rt_sigaction_default(number: int) -> None:
    """rt_sigaction(2): reset a signal to its default, also a signal that the C library reserves and hides from programs."""
    nothing = (ctypes.c_ulong * 8)()  # the kernel's struct sigaction, all zero: SIG_DFL
    check(libc.syscall(_number("rt_sigaction"), number, ctypes.byref(nothing), None, ctypes.c_size_t(8)), "rt_sigaction")


def seccomp(operation: int, flags: int, argument: int) -> int:
    """seccomp(2); `argument` is the address of the operation's argument."""
    return check(libc.syscall(_number("seccomp"), operation, flags, ctypes.c_void_p(argument)), "seccomp")


def process_vm_readv(pid: int, address: int, size: int) -> bytes:
    """process_vm_readv(2) of one range; may return less if the range crosses a page. Raises OSError if nothing is mapped there."""
    buffer = (ctypes.c_char * size)()
    ours, theirs = _IoVec(ctypes.addressof(buffer), size), _IoVec(address, size)
    got = _process_vm_readv(pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
    return buffer.raw[: check(got, "process_vm_readv")]


def pidfd_getfd(pidfd: int, number: int) -> int:
    """pidfd_getfd(2): return a close-on-exec copy of a descriptor of another process."""
    return check(libc.syscall(SYS_pidfd_getfd, pidfd, number, 0), "pidfd_getfd")


def landlock_create_ruleset(attributes: int, size: int, flags: int) -> int:
    """landlock_create_ruleset(2); `attributes` is an address, or 0 to query the ABI."""
    return check(
        libc.syscall(SYS_landlock_create_ruleset, ctypes.c_void_p(attributes), ctypes.c_size_t(size), flags), "landlock_create_ruleset"
    )


def landlock_add_rule(ruleset: int, kind: int, rule: int) -> None:
    """landlock_add_rule(2); `rule` is an address."""
    check(libc.syscall(SYS_landlock_add_rule, ruleset, kind, ctypes.c_void_p(rule), 0), "landlock_add_rule")


def landlock_restrict_self(ruleset: int) -> None:
    """landlock_restrict_self(2)."""
    check(libc.syscall(SYS_landlock_restrict_self, ruleset, 0), "landlock_restrict_self")
