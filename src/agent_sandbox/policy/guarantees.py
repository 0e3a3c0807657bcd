"""What a policy can ask for and a runtime can enforce: one name for each protection.

A runtime that cannot give a required guarantee refuses to start and says which one is missing. Nothing is silently weaker.
"""

from __future__ import annotations

from enum import Enum


class Guarantee(Enum):
    """A protection. The value is its name in messages, in JSON and on the command line."""

    FILES_CONFINED = "files-confined"  # only the view is reachable, and every write is captured
    NO_NETWORK = "no-network"  # no interface but its own loopback
    NO_NEW_PROCESSES = "no-new-processes"  # threads remain
    PROGRAMS_CONFINED = "programs-confined"  # no program can be executed but those that are allowed, by any child and by any spelling
    PROCESSES_INVISIBLE = "processes-invisible"  # sees, signals and traces only its own
    SYSCALLS_FILTERED = "syscalls-filtered"  # default-deny filter
    MEMORY_WATCHED = "memory-watched"  # rlimit and a watcher: may overshoot for an instant
    MEMORY_HARD = "memory-hard"  # cgroup: cannot overshoot
    CPU_LIMITED = "cpu-limited"
    FUEL_LIMITED = "fuel-limited"  # what it executes is counted, and ends at a number
    DISK_LIMITED = "disk-limited"
    NOT_HOST_ROOT = "not-host-root"  # never host uid 0, whoever started it
    SEPARATE_KERNEL = "separate-kernel"
    DETERMINISTIC = "deterministic"  # the same output, changes and fuel whenever the input is the same
