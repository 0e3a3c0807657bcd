"""Memory: map an image once, move it into place in each fork without copying, and measure the memory available now."""

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
_LIMITS = (  # limit and usage of our cgroup, where a container shows it as the root
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_privately(fd: int, size: int) -> int:
    """Map a file privately for reading and return the address. Costs nothing until touched. Raises OSError.

    The mapping is not writable yet: the kernel would charge a writable mapping in full, as data, to every fork (RLIMIT_DATA).
    """
    address: int | None = _libc.mmap(None, size, _PROT_READ, _MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
    return _place(address, "mmap")


def move_over(address: int, size: int, memory: Any) -> None:
    """Move a mapping over the first `size` bytes of `memory`, a page-aligned ctypes array, and make it writable.

    The old content is lost, and the old address is unmapped. Raises ValueError if `memory` is smaller than `size`, and OSError.
    """
    place = ctypes.addressof(memory)
    if size > ctypes.sizeof(memory):
        raise ValueError("the image is larger than what it is to replace")
    moved: int | None = _libc.mremap(address, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, place)
    _place(moved, "mremap")
    sc.check(_libc.mprotect(place, size, _PROT_READ | _PROT_WRITE), "mprotect")


def read_at(address: int, size: int) -> bytes:
    """Return a copy of the bytes at an address that is mapped in this process. The caller vouches for it."""
    return ctypes.string_at(address, size)


def _place(address: int | None, what: str) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return address


def available_memory() -> int | None:
    """Return the bytes available without evicting other memory; None if unknown."""
    free = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")), "")
    amounts = [int(free.split()[1]) << 10] if free else []
    for limit, used in _LIMITS:
        most, now = _read(limit).strip(), _read(used).strip()
        if most.isdigit() and now.isdigit():
            amounts.append(max(0, int(most) - int(now)))
    return min(amounts, default=None)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
