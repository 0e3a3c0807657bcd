"""What runs used, as limits: times a factor, rounded up, and never more than was there to use."""

from __future__ import annotations

from agent_sandbox.policy.limits import MIB, Limits
from agent_sandbox.policy.proposal import Line
from agent_sandbox.values import dataclass


@dataclass(frozen=True)
class Spent:
    """What the runs used at most; 0 where nothing counts it."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    disk_bytes: int = 0


def amount_lines(spent: Spent, limits: Limits, left_out: list[str]) -> list[Line]:
    """Limits that leave room for what was used. What nothing counts here is left out."""
    if not spent.processes:
        left_out.append("processes.max: nothing counts them here")
    wall, cpu = round(spent.wall_seconds, 1), round(spent.cpu_seconds, 1)
    memory, disk = _mib(spent.memory_bytes), _mib(spent.disk_bytes)
    counted = _amount("processes.max", spent.processes, "at once", factor=4, least=32, most=limits.processes)
    return [
        *(counted if spent.processes else ()),
        *_amount("limits.timeout_seconds", wall, "s", factor=10, least=60, most=limits.wall_seconds),
        *_amount("limits.cpu_seconds", cpu, "s", factor=10, least=60, most=limits.cpu_seconds),
        *_amount("limits.memory_mb", memory, "MiB", factor=4, least=256, most=_in_mib(limits.memory_bytes)),
        *_amount("limits.disk_mb", disk, "MiB left at the end", factor=4, least=256, most=_in_mib(limits.disk_bytes)),
    ]


def _amount(key: str, used: float, unit: str, *, factor: int, least: int, most: float | None) -> list[Line]:
    """A power of two times the least that is ever proposed, so that the next run of the same does not propose another."""
    value = least
    while value < used * factor:
        value *= 2
    if most is not None and value >= most:  # what is above says so already
        return []
    return [Line(key, value, f"{used} {unit} were used; {factor} times that, rounded up, and at least {least}")]


def _mib(count: int) -> int:
    return -(-count // MIB)


def _in_mib(count: int | None) -> int | None:
    return None if count is None else count // MIB
