"""The circumstances of a process: its user, rights, namespaces, root, limits and priority.

A worker of the daemon performs a command line only for a client with the same circumstances. Otherwise the daemon would lend a process what
it has given up, or spare it what it was put under. Control groups are not compared: what the daemon performs counts as the daemon's.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

Circumstances = tuple[object, ...]
_CREDENTIALS = struct.Struct("3i")
_STATUS = (b"Uid:", b"Gid:", b"Groups:", b"CapPrm:", b"CapEff:", b"CapBnd:", b"CapAmb:", b"NoNewPrivs:", b"Seccomp:")
_SPACES = ("mnt", "user", "pid", "net", "ipc", "uts", "cgroup")


def own_circumstances() -> Circumstances:
    """Return those of this process. Its children have the same."""
    return _circumstances("self")


def is_in(circumstances: Circumstances, client: socket.socket) -> bool:
    """Return whether the process that has connected is of this user, and has these circumstances. False if it has gone."""
    pid, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        return False
    try:
        return _circumstances(str(pid)) == circumstances
    except OSError:
        return False


def _circumstances(process: str) -> Circumstances:
    spaces = [os.stat(f"/proc/{process}/ns/{name}").st_ino for name in _SPACES]
    root = os.stat(f"/proc/{process}/root")
    status = Path(f"/proc/{process}/status").read_bytes().splitlines()
    limits = Path(f"/proc/{process}/limits").read_bytes()
    try:
        label = Path(f"/proc/{process}/attr/current").read_bytes()
    except OSError:  # no security module has labels
        label = b""
    number = 0 if process == "self" else int(process)
    order = os.getpriority(os.PRIO_PROCESS, number), os.sched_getaffinity(number)
    return spaces, (root.st_dev, root.st_ino), [line for line in status if line.startswith(_STATUS)], limits, label, order
