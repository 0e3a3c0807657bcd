"""Limits on the resources of a run. Values only; `kernel` and `runtime` enforce them.

`None` means no limit of that kind. Absurd values are refused on construction, so that later code need not check.
"""

from __future__ import annotations

import math

from agent_sandbox._fast.values import dataclass, fields
from agent_sandbox.errors import PolicyError

MIB = 1 << 20
_LARGEST = 1 << 60  # far above any machine, far below the overflow of a kernel field


@dataclass(frozen=True)
class Limits:
    """Limits on one run, all enforced from outside the guest.

    >>> Limits(wall_seconds=5, memory_bytes=64 * MIB)
    """

    wall_seconds: float | None = 30.0
    cpu_seconds: float | None = None
    memory_bytes: int | None = 256 * MIB
    processes: int | None = 64  # processes and threads together, as the kernel counts them
    open_files: int | None = 1024
    output_bytes: int | None = 100_000  # for each of stdout and stderr; the rest is dropped and the result says so
    disk_bytes: int | None = 256 * MIB
    fuel: int | None = None  # roughly, WebAssembly instructions: the same work always costs the same

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PolicyError(f"{field.name} must be a number, not {value!r}", hint="use a positive number, or None for no limit")
            if not math.isfinite(value) or value <= 0 or value > _LARGEST:
                raise PolicyError(
                    f"{field.name} must be positive and finite, not {value!r}", hint="use a positive number, or None for no limit"
                )
            if not field.name.endswith("_seconds") and value != int(value):
                raise PolicyError(f"{field.name} must be a whole number, not {value!r}", hint="round it")
