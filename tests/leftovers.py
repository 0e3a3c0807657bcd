"""What a run can leave on a machine: mounts, control groups and processes, looked at from outside.

Other sandboxes may be at work on the same machine at the same time, so only what can be laid at our door counts: mounts in our namespace,
control groups that nobody is in any more, processes that descend from us, and orphans that are recognisably ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def traces() -> dict[str, str]:
    """Everything of ours that is on the machine at this moment: what identifies it, and a description for a person."""
    return {**_mounts(), **_empty_cgroups(), **_processes()}


def left_since(before: dict[str, str], *, patience_seconds: float) -> list[str]:
    """Describe what is there now and was not `before`. What is only just ending gets `patience_seconds` to be gone."""
    deadline = time.monotonic() + patience_seconds
    left = {name: words for name, words in traces().items() if name not in before}
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        still = traces()
        left = {name: words for name, words in left.items() if name in still}
    return sorted(left.values())


def _mounts() -> dict[str, str]:
    lines = [line.split() for line in (PROC / "self/mountinfo").read_text().splitlines()]
    return {f"mount {fields[0]}": f"mount on {fields[4]} (id {fields[0]})" for fields in lines}


def _empty_cgroups() -> dict[str, str]:
    """Version 1 has one tree for each controller, version 2 a single one; ours are looked for at any depth of either."""
    names = [name for name, _, _ in os.walk(CGROUPS) if os.path.basename(name).startswith("agent-sandbox")]
    return {name: f"control group {name}" for name in names if _is_empty(name)}


def _is_empty(cgroup: str) -> bool:
    try:
        return not Path(cgroup, "cgroup.procs").read_text()
    except OSError:  # gone since it was listed, which is as it should be
        return False


def _processes() -> dict[str, str]:
    parents = {pid: parent for pid in os.listdir(PROC) if pid.isdecimal() and (parent := _parent(pid))}
    us = str(os.getpid())
    ours = [pid for pid in parents if _descends(pid, us, parents) or (parents[pid] == "1" and _looks_like_ours(pid))]
    return {f"process {pid}": f"process {pid}: {_command(pid) or '(a zombie: nobody waited for it)'}" for pid in ours}


def _looks_like_ours(orphan: str) -> bool:
    """A helper by its command line; a fork of this very process by having the same one; a guest by its user namespace."""
    command = _command(orphan)
    return (
        "agent_sandbox" in command or (command != "" and command == _command("self")) or _user_namespace(orphan) != _user_namespace("self")
    )


def _user_namespace(pid: str) -> str:
    try:
        return os.readlink(PROC / pid / "ns/user")
    except OSError:  # ended, or somebody else's; the second is not a guest of ours
        return os.readlink(PROC / "self/ns/user")


def _descends(pid: str, ancestor: str, parents: Mapping[str, str]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _parent(pid: str) -> str:
    try:
        status = (PROC / pid / "stat").read_text(errors="replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[1]  # the name in parentheses may itself hold spaces and parentheses


def _command(pid: str) -> str:
    try:
        words = (PROC / pid / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()
