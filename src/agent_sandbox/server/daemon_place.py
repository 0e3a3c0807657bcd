"""The place of a user's daemon, in the directory of state: its lock, its sockets, what it says of itself, and how it is stopped."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from agent_sandbox.cli.errand import PLACE
from agent_sandbox.errors import Busy, WorkspaceError

LOCK, STATE_SOCKET, HTTP_SOCKET = "lock", "state", "http"
_ANSWER_SECONDS = 10.0


@dataclass
class Counts:
    """Counts of a daemon: command lines since it began, and those of now. `state_of` returns those of a daemon that runs."""

    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=time.time)
    performed: int = 0  # command lines that have ended
    refused: int = 0  # there were too many
    handed_back: int = 0  # the client had to perform it itself
    lost: int = 0  # ended with their client, which was killed
    performing: int = 0
    waiting: int = 0
    ready: int = 0  # workers that wait for a command line
    held: int = 0  # detached sandboxes, and processes with sessions, that it owns
    held_ended: int = 0  # those that have ended


def state_of(state: str) -> Counts | None:
    """Return what the daemon of a directory of state says of itself; None if none runs. Raises `WorkspaceError` if it does not answer."""
    try:
        with _connection(Path(state, PLACE), STATE_SOCKET) as link:
            link.settimeout(_ANSWER_SECONDS)
            told = b""
            while part := link.recv(4096):
                told += part
            return Counts(**json.loads(told))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise WorkspaceError(f"the daemon does not answer: {error}", hint="stop it with: agent-sandbox serve --stop") from error


def stop(state: str) -> bool:
    """End the daemon of a directory of state, and wait until it has ended. False if none runs. What it performs has some time to end.

    Raises `WorkspaceError` if the place is not of this user alone: the number in its lock could be of any process.
    """
    lock = Path(state, PLACE, LOCK)
    try:
        _check_place(lock.parent)
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False  # nobody holds it
            except BlockingIOError:
                pass
            process = os.pidfd_open(int(file.read()))
            try:
                signal.pidfd_send_signal(process, signal.SIGTERM)
                signal.pidfd_send_signal(process, signal.SIGCONT)  # it may be stopped
                fcntl.flock(file, fcntl.LOCK_SH)  # until it has ended
            finally:
                os.close(process)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError) as error:
        raise WorkspaceError(f"the daemon cannot be stopped: {error}", hint=f"look at {lock}") from error
    return True


def locked(place: Path) -> int:
    """Return the lock that tells a second daemon that there is one. The kernel gives it back with its holder."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_place(place)
        lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Busy("a daemon of this user runs already", hint="stop it with: agent-sandbox serve --stop") from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock
    except OSError as error:
        raise WorkspaceError(f"the daemon cannot use {place}: {error.strerror}", hint="look at that directory") from error


def _check_place(place: Path) -> None:
    """Raise `WorkspaceError` unless a place is a directory of this user alone, and OSError if it does not exist."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise WorkspaceError(f"{place} is not a directory of yours alone", hint=f"if it is yours: chmod 700 {place}")


def listening(place: Path, name: str, *, blocking: bool = False) -> socket.socket:
    """Return a socket that only this user can connect to. One that a killed daemon has left is replaced: we have its lock."""
    try:
        (place / name).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{name}")  # the path itself may be longer than an address can be
        finally:
            os.close(directory)
        os.chmod(place / name, 0o600)
        listener.listen(1024)
        listener.setblocking(blocking)
        return listener
    except OSError as error:
        raise WorkspaceError(f"the daemon cannot listen in {place}: {error.strerror}", hint="look at that directory") from error


def _connection(place: Path, name: str) -> socket.socket:
    directory = os.open(place, os.O_PATH | os.O_DIRECTORY)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(f"/proc/self/fd/{directory}/{name}")
    except BaseException:
        link.close()
        raise
    finally:
        os.close(directory)
    return link
