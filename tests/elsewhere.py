"""Another system, as far as it can be had here: this interpreter, without what that system does not have. Run as a program:

    python -m tests.elsewhere darwin|win32 CODE

What it started with is loaded before, because the standard library, too, asks which system it is on. What it starts is what there is.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import builtins
import concurrent.futures  # noqa: F401
import ctypes
import importlib.metadata  # noqa: F401
import json  # noqa: F401
import os
import platform
import secrets  # noqa: F401
import select
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import types
from typing import Any

NOT_LINUX = """
    memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open setns unshare sched_setscheduler sched_param SCHED_IDLE O_PATH O_TMPFILE pipe2
    getrandom splice copy_file_range eventfd getxattr setxattr listxattr removexattr posix_fallocate sched_getaffinity
"""
NOT_POSIX = """
    fork geteuid getuid getgid getegid register_at_fork uname sysconf O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_NONBLOCK statvfs mkfifo chown
    fchown fchmod posix_spawn POSIX_SPAWN_DUP2 POSIX_SPAWN_OPEN setsid nice getpgid killpg WNOHANG openpty tcgetpgrp set_blocking
    pread pwrite
"""
MODULES = frozenset({"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty"})
AN_ORDINARY_USER = 501


def _take_away(module: types.ModuleType, names: str) -> None:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def become(system: str) -> None:
    """Take away what it has not."""
    sys.platform = system
    _take_away(os, NOT_LINUX)
    _take_away(select, "epoll")
    platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}[system]
    real = builtins.__import__

    def without(name: str, given: Any = None, *more: Any, **named: Any) -> Any:
        if system == "win32" and name.partition(".")[0] in MODULES and str((given or {}).get("__name__", "")).startswith("agent"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, given, *more, **named)

    def no_library(*_: object, **__: object) -> None:
        raise OSError("there is no such library here")

    builtins.__import__ = without  # type: ignore[assignment]
    ctypes.CDLL = no_library  # type: ignore[misc,assignment]
    real_open = builtins.open

    def no_proc(path: Any, *more: Any, **named: Any) -> Any:
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real_open(path, *more, **named)

    builtins.open = no_proc  # type: ignore[assignment]
    if system == "win32":
        _take_away(os, NOT_POSIX)
        _take_away(select, "poll")
        _take_away(socket, "AF_UNIX")
        _take_away(signal, "SIGHUP SIGKILL SIGQUIT SIGALRM setitimer ITIMER_REAL")
    elif os.geteuid() == 0:  # anybody else is an ordinary user already, and owns what was compiled
        os.geteuid = lambda: AN_ORDINARY_USER


if __name__ == "__main__":
    become(sys.argv[1])
    exec(sys.argv[2])
