"""Memory: how much is available now, and moving mapped pages into a fork without copying them."""

from __future__ import annotations

import ctypes
import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import syscalls as sc

if TYPE_CHECKING:
    from typing import Any

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_PRIVATE, _MAP_NORESERVE = 2, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_privately(fd: int, size: int) -> int:
    """Map a file for reading, as a copy that is the process's own; returns the address. Costs nothing until it is touched.

    Not yet writable: the kernel would count all of it as data of every fork (RLIMIT_DATA).
    """
    address: int | None = _libc.mmap(None, size, _PROT_READ, _MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
    return _place(address, "mmap")


def move_over(address: int, size: int, memory: Any) -> None:
    """Put a mapping in the place of the first `size` bytes of `memory`, a ctypes array that begins at a page, and let it be written.

    What was there is gone, and nothing is left at the old address.
    """
    place = ctypes.addressof(memory)
    if size > ctypes.sizeof(memory):
        raise ValueError("the image is larger than what it is to replace")
    moved: int | None = _libc.mremap(address, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, place)
    _place(moved, "mremap")
    sc.check(_libc.mprotect(place, size, _PROT_READ | _PROT_WRITE), "mprotect")


def _place(address: int | None, what: str) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return address


_LIMITS = (  # of the control group we are in, where a container shows it as its root
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int | None:
    """Bytes that can be had without pushing others out; None where nothing tells."""
    free = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")), "")
    found = [int(free.split()[1]) << 10] if free else []
    for limit, used in _LIMITS:
        most, now = _read(limit).strip(), _read(used).strip()
        if most.isdigit() and now.isdigit():
            found.append(max(0, int(most) - int(now)))
    return min(found, default=None)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
