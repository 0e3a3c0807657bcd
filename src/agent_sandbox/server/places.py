"""The places of holders: directories of state, each for one process that holds sessions (`timelines/<id>/`) or a detached sandbox
(`detached/<id>/`, see `server.detached_places`).

    lock      locked by the holder while it lives; the kernel's lock is the truth
    socket    where commands reach it
    log       what it complained about, which is nothing as a rule

They belong to the user alone, and no view of a sandbox shows them. A place of sessions whose lock nobody holds is what a killed holder
left, and the next command that looks for sessions removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import SandboxError
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.store import Holder, Store, hold

MOST_HOLDERS = 8
FORK = "."  # between the id of a holder and the number of a fork
_LOCK, SOCKET, LOG = "lock", "socket", "log"


@dataclass(frozen=True)
class Place:
    """The place of one holder."""

    path: str

    @property
    def id(self) -> str:
        """The id of the holder, and of its first session."""
        return os.path.basename(self.path)

    @contextmanager
    def address(self) -> Iterator[str]:
        """Yield the address of the socket. The path itself may be longer than an address can be."""
        directory = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{SOCKET}"
        finally:
            os.close(directory)

    def listen(self) -> socket.socket:
        """Return a socket that listens in this place, for this user alone."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with self.address() as address:
                listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(16)
        return listener

    def connect(self) -> socket.socket:
        """Return a connection to the holder. Raises OSError if there is none."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self.address() as address:
                link.connect(address)
        except BaseException:
            link.close()
            raise
        return link

    @property
    def is_held(self) -> bool:
        """Whether a holder lives here."""
        try:
            lock = os.open(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


class Places:
    """The places of all holders of sessions of this user. Other kinds of places are subclasses."""

    folder, letter, what = "timelines", "t", "the sessions"

    def __init__(self, store: Store) -> None:
        self._path = os.path.join(store.path, self.folder)

    def make(self) -> tuple[Place, int]:
        """Make a place for a new holder. Return it, and its lock as a descriptor. Raises `SandboxError` if there are too many."""
        with self._alone():
            self._admit(len(self._swept()))
            while True:
                place = Place(os.path.join(self._path, f"{self.letter}{secrets.token_hex(3)}"))
                with suppress(FileExistsError), explained(f"make a place for a session in {self._path!r}"):
                    os.mkdir(place.path, 0o700)
                    lock = os.open(os.path.join(place.path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place, lock

    def _admit(self, living: int) -> None:
        if living >= MOST_HOLDERS:
            why = f"{living} sessions with a timeline are held already, which is the most"
            raise SandboxError(why, hint="end one: agent-sandbox timeline --end ID; see: agent-sandbox timeline --all")

    def living(self) -> tuple[Place, ...]:
        """Return the places whose holders live. Those of dead ones are removed."""
        if not os.path.isdir(self._path):
            return ()
        with self._alone():
            return self._swept()

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the places briefly against other processes that make or sweep them."""
        with explained(f"use {self._path!r}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
        return hold(os.path.join(self._path, ".lock"), Holder(os.getpid(), self.folder, time.time()), wait=True, what=self.what)

    def _swept(self) -> tuple[Place, ...]:
        living = []
        for name in sorted(os.listdir(self._path)):
            place = Place(os.path.join(self._path, name))
            if name.startswith("."):
                continue
            if place.is_held:
                living.append(place)
            else:
                self._clear(place)
        return tuple(living)

    def _clear(self, place: Place) -> None:
        """Remove what a dead holder left."""
        place.remove()
