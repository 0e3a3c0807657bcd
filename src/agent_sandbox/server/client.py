"""The side of a command: start a holder, find the session that is meant, and ask its holder."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.runtime.process.zygote import argv_for
from agent_sandbox.server import messages
from agent_sandbox.server.messages import BrokenMessage, Message
from agent_sandbox.server.places import FORK, LOG, Place, Places
from agent_sandbox.server.timeline_sandbox import SessionRequest

_PROGRAM = "agent_sandbox.server.holder"
_CHOSEN = ("AGENT_SANDBOX_STATE", "AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_SHARED_CACHE")  # directories, which may be relative
_DROPPED = ("AGENT_SANDBOX_CAPABILITY",)  # its value is a permission, and a holder lives long
_LOG_BYTES = 1 << 16


class HolderLink:
    """A connection to a holder."""

    def __init__(self, link: socket.socket, place: Place) -> None:
        self._link = link
        self._place = place
        self._waits = False  # whether a request was sent and not answered yet
        self._interrupts = 0  # that could not be passed on yet

    def close(self) -> None:
        """Close the connection. A turn that is under way is interrupted."""
        self._link.close()

    def ask(self, request: Message, on_output: Callable[[str, bytes], None] | None = None) -> Message:
        """Ask something and return the answer. `on_output` receives the output of a turn. Raises `SandboxError`."""
        with self._explained():
            messages.send(self._link, request)
        self._waits = True
        for _ in range(self._interrupts):
            self.interrupt()
        try:
            while True:
                with self._explained():
                    answer = messages.receive(self._link)
                    if answer is None:
                        raise BrokenMessage("it has ended")
                if "output" in answer:
                    if on_output is not None:
                        on_output(str(answer["output"]), messages.unpacked(answer["data"]))
                    continue
                if "failed" in answer:
                    messages.raise_failure(answer["failed"])
                done: Message = answer["done"]
                return done
        finally:
            self._waits = False

    def interrupt(self) -> None:
        """Interrupt the turn that is asked for. For a handler of signals: it may come while the answer is awaited or passed on."""
        if not self._waits:
            self._interrupts += 1
            return
        with suppress(OSError):  # the answer says that the holder has gone
            messages.send(self._link, {"interrupt": True})

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BrokenMessage) as error:
            why = _last_line(os.path.join(self._place.path, LOG)) or str(error)
            raise SandboxError(f"the process that holds the session has gone: {why}", hint="begin another session") from error


@dataclass(frozen=True)
class FoundSession:
    """A held session: its facts, and the place of its holder."""

    place: Place
    facts: Message
    idle_seconds: float

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.facts["id"])


def start(places: Places, asked: SessionRequest, idle_seconds: float, env: Mapping[str, str]) -> tuple[HolderLink, str]:
    """Start a holder with one session. Return the connection to it, and the session's id. Raises `SandboxError` if that failed.

    The holder is a new process of our interpreter, in a session of its own. It takes nothing from the current directory, which may be an
    agent's.
    """
    place, lock = places.make()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    kept = {name: value for name, value in env.items() if name not in _DROPPED}
    surroundings = {**kept, **{name: os.path.abspath(env[name]) for name in _CHOSEN if env.get(name)}}
    try:
        with open(os.open(os.path.join(place.path, LOG), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as log:
            subprocess.Popen(
                argv_for(_PROGRAM, place.path, str(idle_seconds), str(theirs.fileno()), str(lock)),
                cwd="/",
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        place.remove()
        raise SandboxError(f"the process that would hold the session cannot be started: {error.strerror}") from error
    finally:
        theirs.close()
        os.close(lock)
    link = HolderLink(ours, place)
    try:
        link.ask({"do": "open", "session": asked.message()})
    except BaseException:
        link.close()
        raise
    return link, place.id


@contextmanager
def opened(place: Place) -> Iterator[HolderLink]:
    """Connect to a holder for the length of a block. Raises `SandboxError` if it has ended."""
    try:
        link = place.connect()
    except OSError as error:
        raise SandboxError(f"the session {place.id} has ended", hint="see: agent-sandbox timeline --all") from error
    with link:
        try:
            messages.check_peer(link)
        except OSError as error:
            raise SandboxError(f"the socket of {place.id} is not ours: {error}") from error
        yield HolderLink(link, place)


def sessions(places: Places) -> tuple[FoundSession, ...]:
    """Return all held sessions, oldest first."""
    found: list[FoundSession] = []
    for place in places.living():
        with suppress(SandboxError), opened(place) as link:  # it ends just now
            told = link.ask({"do": "list"})
            found += [FoundSession(place, facts, float(told["idle_seconds"])) for facts in told["sessions"]]
    return tuple(sorted(found, key=lambda each: float(each.facts["since"])))


def session(places: Places, name: str | None) -> tuple[FoundSession, int]:
    """Return the session with this id, or whose id alone begins so; without a name the newest. Also return how many there are.

    Raises `PolicyError` if there is none.
    """
    known = sessions(places)
    begin = "begin one: agent-sandbox run --timeline FILE"
    if not known:
        raise PolicyError(
            "no session with a timeline is held" if name is None else f"there is no session {name}, or it has ended", hint=begin
        )
    if name is None:
        return known[-1], len(known)
    exact = [each for each in known if each.id == name]
    matches = exact or [each for each in known if each.id.startswith(name) and FORK not in each.id]
    if len(matches) > 1:
        raise PolicyError(f"more than one session begins with {name!r}", hint="give more of its letters")
    if not matches:
        raise PolicyError(f"there is no session {name}, or it has ended", hint="see: agent-sandbox timeline --all")
    return matches[0], len(known)


def _last_line(path: str) -> str:
    """Return the last line of a holder's log; empty without one."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_LOG_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")[:500]
