"""The side of a command: start a holder, find the session that is meant, and ask its holder."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.process.zygote import argv_for
from agent_sandbox.server import background, messages
from agent_sandbox.server.messages import BrokenMessage, Message
from agent_sandbox.server.places import FORK, LOG, Place, Places
from agent_sandbox.server.timeline_sandbox import SessionRequest

_PROGRAM = "agent_sandbox.server.holder"
_CHOSEN = ("AGENT_SANDBOX_STATE", "AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_SHARED_CACHE")  # directories, which may be relative
_DROPPED = ("AGENT_SANDBOX_CAPABILITY",)  # its value is a permission, and a holder lives long
_LOG_BYTES = 1 << 16


class HolderLink:
    """A connection to a holder."""

    def __init__(self, link: socket.socket, place: Place, what: str = "session") -> None:
        self._link = link
        self._place, self._what = place, what
        self._waits = False  # whether a request was sent and not answered yet
        self._interrupts = 0  # that could not be passed on yet
        self._outbox: deque[Message] = deque()
        self._posting = False

    def close(self) -> None:
        """Close the connection. A turn that is under way is interrupted."""
        self._link.close()

    def ask(
        self,
        request: Message,
        on_output: Callable[[str, bytes], None] | None = None,
        *,
        seconds: float | None = None,
        keys: int | None = None,
    ) -> Message:
        """Ask something and return the answer. `on_output` receives the output of a turn. Raises `SandboxError`.

        With `seconds`, the holder is given up if it says nothing for so long. What can be read from the descriptor `keys` meanwhile is
        typed on the terminal of the program.
        """
        self._link.settimeout(seconds)
        with self._explained():
            messages.send(self._link, request)
        self._waits = True
        for _ in range(self._interrupts):
            self.interrupt()
        try:
            while True:
                with self._explained():
                    while keys is not None and not self._answers(keys):
                        if not self._pass_keys(keys):
                            keys = None
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

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Interrupt what is asked for. For a handler of signals: it may come while the answer is awaited or passed on."""
        if not self._waits:
            self._interrupts += 1
            return
        self._post({"interrupt": int(number)})

    def resize(self, rows: int, columns: int) -> None:
        """Say that the terminal has another size. For a handler of signals, too."""
        if self._waits:
            self._post({"size": [rows, columns]})

    def _post(self, message: Message) -> None:
        """Send a message without an answer. A handler of signals may call this while this very method sends another one."""
        self._outbox.append(message)
        if self._posting:
            return
        self._posting = True
        try:
            while self._outbox:
                messages.send(self._link, self._outbox.popleft())
        except OSError:  # the answer says that the holder has gone
            self._outbox.clear()
        finally:
            self._posting = False

    def _answers(self, keys: int) -> bool:
        """Wait until the holder says something, or something was typed. Return whether the holder did."""
        return self._link.fileno() in select.select([self._link.fileno(), keys], [], [])[0]

    def _pass_keys(self, keys: int) -> bool:
        """Pass on what was typed. Return whether more may come: if the terminal has gone, the program is told."""
        try:
            typed = os.read(keys, 4096)
        except OSError:
            typed = b""
        self._post({"typed": messages.packed(typed)} if typed else {"interrupt": int(signal.SIGHUP)})
        return bool(typed)

    def has_gone(self, seconds: float) -> bool:
        """Wait so long, and return whether the holder has closed the connection. Only while nothing is asked."""
        ready = select.select([self._link.fileno()], [], [], seconds)[0]
        try:
            return bool(ready) and not self._link.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BrokenMessage) as error:
            why = _last_line(os.path.join(self._place.path, LOG)) or str(error)
            raise SandboxError(f"the process that holds the {self._what} has gone: {why}", hint=f"begin another {self._what}") from error


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
    owner = background.owner()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    kept = {name: value for name, value in env.items() if name not in _DROPPED}
    surroundings = {**kept, **{name: os.path.abspath(env[name]) for name in _CHOSEN if env.get(name)}}
    try:
        with open(os.open(os.path.join(place.path, LOG), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as log:
            process = subprocess.Popen(
                argv_for(_PROGRAM, place.path, str(idle_seconds), str(theirs.fileno()), str(lock), str(-1 if owner is None else owner)),
                cwd="/",
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(), lock, *(() if owner is None else (owner,))),
                start_new_session=True,
            )
            background.entrust(process.pid)
    except OSError as error:
        ours.close()
        place.remove()
        raise SandboxError(f"the process that would hold the session cannot be started: {error.strerror}") from error
    finally:
        theirs.close()
        wire.close_all((lock, *(() if owner is None else (owner,))))
    link = HolderLink(ours, place)
    try:
        link.ask({"do": "open", "session": asked.message()})
    except BaseException:
        link.close()
        raise
    return link, place.id


@contextmanager
def opened(place: Place, what: str = "session") -> Iterator[HolderLink]:
    """Connect to a holder for the length of a block. Raises `SandboxError` if it has ended."""
    try:
        link = place.connect()
    except OSError as error:
        see = "timeline --all" if what == "session" else "ps --all"
        raise SandboxError(f"the {what} {place.id} has ended", hint=f"see: agent-sandbox {see}") from error
    with link:
        try:
            messages.check_peer(link)
        except OSError as error:
            raise SandboxError(f"the socket of {place.id} is not ours: {error}") from error
        yield HolderLink(link, place, what)


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
