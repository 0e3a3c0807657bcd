"""Guarantees: one name for each protection that a policy can require and a runtime can enforce.

A runtime that cannot give a required guarantee refuses to start and names the missing one. Nothing is silently weaker.
"""

from __future__ import annotations

from enum import Enum


class Guarantee(Enum):
    """A protection. The value is its name in messages, in JSON and on the command line."""

    FILES_CONFINED = "files-confined"  # only the view is reachable, and every write is captured
    NO_NETWORK = "no-network"  # no interface but its own loopback
    NO_NEW_PROCESSES = "no-new-processes"  # threads are still allowed
    PROGRAMS_CONFINED = "programs-confined"  # only allowed programs can be executed, by any child and under any name
    PROCESSES_INVISIBLE = "processes-invisible"  # sees, signals and traces only its own processes
    SYSCALLS_FILTERED = "syscalls-filtered"  # default-deny seccomp filter
    MEMORY_WATCHED = "memory-watched"  # rlimit and a watcher: may overshoot for an instant
    MEMORY_HARD = "memory-hard"  # cgroup: cannot overshoot
    CPU_LIMITED = "cpu-limited"
    FUEL_LIMITED = "fuel-limited"  # executed instructions are counted, up to a limit
    DISK_LIMITED = "disk-limited"
    NOT_HOST_ROOT = "not-host-root"  # never host uid 0, not even if root started it
    SEPARATE_KERNEL = "separate-kernel"
    DETERMINISTIC = "deterministic"  # same input, same output, changes and fuel
