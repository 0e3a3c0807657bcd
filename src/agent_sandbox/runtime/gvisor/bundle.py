"""The OCI configuration of a gVisor container: the view as its root, nothing of the machine besides, no capability. Pure."""

from __future__ import annotations

import json

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_VERSION = "1.0.2"
_CAPABILITY_SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")
_QUIET = ["nosuid", "nodev", "noexec"]


@dataclass(frozen=True)
class Container:
    """A container: its root directory, its first program, and the sizes of what the user-space kernel keeps in memory.

    `shown` are directories of the root that `runsc` would otherwise cover with an unlimited file system of its own, as it does /tmp.
    """

    root: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    hostname: str
    shm_bytes: int
    limits: Mapping[str, int | None]  # by the names of OCI
    shown: tuple[str, ...] = ()


def configuration(container: Container) -> bytes:
    """Return the content of `config.json`.

    /proc, /sys and /dev are made by the user-space kernel and show nothing of the machine. All else is the root. User 0 without
    capabilities is the owner of the view: as root the guest's root, and without root the user who started it.
    """
    return json.dumps(
        {
            "ociVersion": _VERSION,
            "hostname": container.hostname,
            "root": {"path": container.root, "readonly": False},
            "process": _process(container),
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc", "options": _QUIET},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*_QUIET, "ro"]},
                {"destination": "/dev", "type": "dev", "source": "dev"},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec"]},
                {
                    "destination": "/dev/shm",
                    "type": "tmpfs",
                    "source": "shm",
                    "options": ["nosuid", "nodev", "mode=1777", f"size={container.shm_bytes}"],
                },
                *(
                    {"destination": path, "type": "bind", "source": container.root + path, "options": ["rbind", "rw"]}
                    for path in container.shown
                ),
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
        }
    ).encode()


def _process(container: Container) -> dict[str, Any]:
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": list(container.argv),
        "env": [f"{name}={value}" for name, value in container.env.items()],
        "cwd": "/",
        "noNewPrivileges": True,
        "capabilities": {name: [] for name in _CAPABILITY_SETS},
        "rlimits": [{"type": name, "soft": most, "hard": most} for name, most in container.limits.items() if most is not None],
    }
