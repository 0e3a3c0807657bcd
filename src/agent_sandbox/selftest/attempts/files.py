"""Attempts on files: read hidden ones, write real ones."""

from __future__ import annotations

import os
import stat
import time

from agent_sandbox.selftest.attempts import Deeds, content, later, write_to

CHANGED = "changed by verify\n"


def nothing(note: str = "") -> Deeds:
    """Return one way that does nothing, for probes that need a run of any kind. The note identifies the run."""
    return {"ran": lambda: note}


def read(paths: list[str]) -> Deeds:
    """Return ways to read each file: by its path, and by reopening an O_PATH descriptor."""
    return {
        **{path: later(content, path) for path in paths},
        **{f"{path} by /proc/self/fd": later(_reopened, path) for path in paths},
    }


def read_through_proc(path: str) -> Deeds:
    """Return ways to read a file through the roots and working directories of processes in /proc."""
    up = "../" * 32
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid()))]
    return {
        **{f"/proc/{who}/root": later(content, f"/proc/{who}/root{path}") for who in ("self", "1", "thread-self")},
        **{f"/proc/{who}/cwd": later(content, f"/proc/{who}/cwd/{up}{path}") for who in ("self", "1")},
        "the root of any other process": later(_first, [f"/proc/{pid}/root{path}" for pid in others]),
    }


def open_only(paths: list[str]) -> Deeds:
    """Return ways to open each file or directory, without reading it."""
    return {path: later(_open, path) for path in paths}


def write(tree: str, directories: list[str], name: str) -> Deeds:
    """Return all ways to change the files in a tree, and to make a file of this name in other directories."""
    return {
        "overwrite": lambda: write_to(f"{tree}/overwrite", CHANGED),
        "append": lambda: _append(f"{tree}/append"),
        "truncate": lambda: os.truncate(f"{tree}/truncate", 0),
        "remove": lambda: os.unlink(f"{tree}/remove"),
        "rename": lambda: os.rename(f"{tree}/rename", f"{tree}/renamed"),
        "mode": lambda: os.chmod(f"{tree}/mode", 0o777),
        "link": lambda: os.link(f"{tree}/append", f"{tree}/linked"),
        "make a directory": lambda: os.mkdir(f"{tree}/made"),
        **{f"new file in {directory}": later(write_to, f"{directory}/{name}", CHANGED) for directory in directories},
    }


def use_devices(paths: list[str]) -> Deeds:
    """Return ways to open devices of the machine, and to make two: a real one, and the one that means a deletion to overlayfs."""
    return {**{path: later(_open, path) for path in paths}, "mknod 1:3": later(_device, 1, 3), "mknod 0:0": later(_device, 0, 0)}


def plant(paths: list[str]) -> Deeds:
    """Return ways to leave a file at each path."""
    return {path: later(write_to, path, CHANGED) for path in paths}


def fill(path: str, megabytes: int, seconds: float) -> Deeds:
    """Return a way to write this many megabytes to a file, spread over this many seconds, and to remove the file."""
    return {"write": lambda: _fill(path, megabytes, seconds)}


def _reopened(path: str) -> str:
    named = os.open(path, os.O_PATH)
    try:
        return content(f"/proc/self/fd/{named}")
    finally:
        os.close(named)


def _first(paths: list[str]) -> str:
    for path in paths:
        try:
            return content(path)
        except OSError:
            continue
    raise OSError(2, "none leads there")


def _open(path: str) -> str:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISDIR(os.fstat(opened).st_mode) and not os.listdir(opened):
            raise FileNotFoundError(2, "an empty directory stands there")
    finally:
        os.close(opened)
    return "opened"


def _append(path: str) -> None:
    with open(path, "a") as file:
        file.write(CHANGED)


def _device(major: int, minor: int) -> str:
    os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(major, minor))
    os.unlink("device")
    return "made"


def _fill(path: str, megabytes: int, seconds: float) -> str:
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(megabytes):
                file.write(b"x" * (1 << 20))
                time.sleep(seconds / megabytes)
    finally:
        os.unlink(path)
    return f"{megabytes} MiB"
