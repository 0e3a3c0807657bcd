"""How much memory can be had just now, for who is about to take a lot of it."""

from __future__ import annotations

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
