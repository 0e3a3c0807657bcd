"""A process that holds sessions with timelines after the command that began them has ended.

It is the supervisor of their guests: if it ends, in whatever way, the kernel and the keeper end them. It has no terminal, takes requests of
its user alone (see `messages.check_peer`), and ends when its last session is ended, when nobody has used it for some time, or by SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from agent_sandbox.errors import PolicyError, SandboxError, SandboxWarning
from agent_sandbox.server import messages
from agent_sandbox.server.held_session import HeldSession, Listener
from agent_sandbox.server.messages import BrokenMessage, Message
from agent_sandbox.server.places import FORK, Place
from agent_sandbox.server.timeline_sandbox import SessionRequest, TimelineSandbox

MOST_SESSIONS = 16  # of one holder: a session and its forks
MOST_CONNECTIONS = 16
UNHEARD_SECONDS = 2.0  # for a turn to end by itself, after the command that began it has gone
_LOOK_SECONDS = 0.2


class SessionHolder:
    """Holds the sessions of one sandbox, by their ids, and answers requests about them."""

    def __init__(self, place: Place, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._used = clock()
        self._connections = 0
        self._sandbox: TimelineSandbox | None = None
        self._sessions: dict[str, HeldSession] = {}
        self._forks = 0
        self._lock = threading.Lock()
        self._ending = False
        self._begun = False  # whether anything has run: the command that opened the first session may have gone before
        self.woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # can be read when `over` may have changed

    def open(self, request: Message) -> None:
        """Open the first session. Raises `SandboxError`."""
        asked = SessionRequest.read(request["session"])
        self._sandbox = TimelineSandbox(asked)
        session = self._sandbox.session(timeline=True, args=asked.arguments)
        name = asked.script.name if asked.script is not None else "-"
        self._sessions[self._place.id] = HeldSession(self._place.id, session, asked.project, name, time.time())

    @property
    def over(self) -> bool:
        """Whether this process has no more to do: it was told to end, holds nothing of use, or was not used for too long."""
        with self._lock:
            if self._ending:
                return True
            unused = not self._sessions or not self._begun or self._clock() - self._used >= self._idle_seconds
            return unused and not self._connections  # whoever is connected gets an answer first

    @property
    def wait_seconds(self) -> float | None:
        """How long nothing has to be done unless something happens; None while somebody is connected."""
        with self._lock:
            return None if self._connections else max(0.0, self._used + self._idle_seconds - self._clock())

    def end(self) -> None:
        """End soon. For a handler of signals, too."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is full, and wakes
            os.write(self._waker, b"w")

    def close(self) -> None:
        """End all sessions."""
        if self._sandbox is not None:
            self._sandbox.close()

    def accept(self, link: socket.socket) -> None:
        """Serve a connection in a thread of its own. One that may not be served is closed."""
        with self._lock:
            if self._connections >= MOST_CONNECTIONS:
                link.close()
                return
            self._connections += 1
        threading.Thread(target=self.serve, args=(link,), daemon=True).start()

    def serve(self, link: socket.socket) -> None:
        """Answer the requests of one connection until it is closed."""
        try:
            with link, suppress(OSError, BrokenMessage):
                while (request := messages.receive(link)) is not None:
                    self._used = self._clock()
                    if "interrupt" in request:  # it came too late: the turn had ended
                        continue
                    answer = self._answer(request, link)
                    try:
                        messages.send(link, answer)
                    except BrokenMessage as error:
                        messages.send(link, messages.failure(SandboxError(f"the answer cannot be sent: {error}", hint="ask for less")))
        finally:
            with self._lock:
                self._connections -= 1
                self._used = self._clock()
            self._wake()

    def _answer(self, request: Message, link: socket.socket) -> Message:
        try:
            return {"done": self._done(request, link)}
        except SandboxError as error:
            return messages.failure(error)
        except Exception as error:  # a request that nobody of ours sends, or a mistake of ours: other sessions go on
            return messages.failure(SandboxError(f"the request could not be answered: {type(error).__name__}: {error}"))

    def _done(self, request: Message, link: socket.socket) -> Message:
        match request["do"]:
            case "list":
                return {"sessions": [each.facts() for each in self._held()], "idle_seconds": self._idle_seconds}
            case "end":
                return self._end_session(str(request["session"]))
        held = self._session(str(request["session"]))
        match request["do"]:
            case "run":
                return self._run(held, request, link)
            case "timeline":
                return held.timeline()
            case "rewind":
                return held.rewind(request.get("step"))
            case "inspect":
                return held.inspect(request.get("step"), request["what"], str(request.get("words", "")), float(request.get("seconds", 0)))
            case "diff":
                return held.diff(int(request["old"]), request.get("new"))
            case "fork":
                return self._fork(held, request.get("step"), int(request["count"]))
            case unknown:
                raise SandboxError(f"the holder of this session knows no {unknown!r}", hint="it was started by another version: end it")

    def _held(self) -> list[HeldSession]:
        with self._lock:
            return list(self._sessions.values())

    def _session(self, name: str) -> HeldSession:
        with self._lock:
            if name in self._sessions:
                return self._sessions[name]
        raise PolicyError(f"the session {name} has ended", hint="see: agent-sandbox timeline --all")

    def _end_session(self, name: str) -> Message:
        held = self._session(name)
        held.session.close()
        with self._lock:
            self._sessions.pop(name, None)
            return {"left": len(self._sessions)}

    def _fork(self, held: HeldSession, step: int | None, count: int) -> Message:
        with self._lock:
            if len(self._sessions) + count > MOST_SESSIONS:
                why = f"{held.id} and its forks would be {len(self._sessions) + count} sessions, and {MOST_SESSIONS} are the most"
                raise SandboxError(why, hint="end some: agent-sandbox timeline --end ID")
        number, made = held.fork(step, count)
        ids = []
        with self._lock:
            for session in made:
                self._forks += 1
                name = f"{self._place.id}{FORK}{self._forks}"
                self._sessions[name] = HeldSession(name, session, held.project, held.name, time.time(), held.id, number)
                ids.append(name)
        return {"session": held.id, "step": number, "forks": ids}

    def _run(self, held: HeldSession, request: Message, link: socket.socket) -> Message:
        """Run a turn in a thread of its own, and listen to the command meanwhile: it may interrupt the turn, or go away."""
        self._begun = True
        turn = held.turn(str(request["source"]), Listener(link))
        ended, ending = os.pipe2(os.O_CLOEXEC)

        def take() -> None:
            turn.take()
            os.close(ending)

        worker = threading.Thread(target=take, daemon=True)
        worker.start()
        gone_at: float | None = None
        ends_at = None if turn.seconds is None else self._clock() + turn.seconds
        while worker.is_alive():
            if gone_at is not None:
                worker.join(_LOOK_SECONDS)
                if self._clock() - gone_at > UNHEARD_SECONDS:
                    held.session.kill()
                continue
            ready = select.select([link.fileno(), ended], [], [], None if ends_at is None else max(0.0, ends_at - self._clock()))[0]
            if ended in ready:
                worker.join()
            elif ready:
                if not _is_there(link):
                    gone_at = self._clock()
                turn.interrupt()
            else:
                ends_at = None
                turn.time_out()
        os.close(ended)
        return turn.result()


def _is_there(link: socket.socket) -> bool:
    """Receive a message, and return whether there was one: the other side may have gone."""
    try:
        return messages.receive(link) is not None
    except (OSError, BrokenMessage):
        return False


def main() -> NoReturn:
    """Hold sessions: `PLACE SECONDS LINK LOCK`, of which the last two are descriptors. The first request comes on the link."""
    path, seconds, *numbers = sys.argv[-4:]
    for descriptor in map(int, numbers):
        os.set_inheritable(descriptor, False)  # nothing that we start has them
    place = Place(path)
    holder = SessionHolder(place, float(seconds))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: holder.end())
    warnings.simplefilter("ignore", SandboxWarning)  # a command is told of them with the result of its turn
    link = socket.socket(fileno=int(numbers[0]))
    try:
        _hold(holder, place, link)
    finally:
        with suppress(Exception):
            holder.close()
        place.remove()
        os._exit(0)


def _hold(holder: SessionHolder, place: Place, link: socket.socket) -> None:
    try:
        request = messages.receive(link)
        if request is None:
            return
        holder.open(request)
        listener = place.listen()
    except SandboxError as error:
        messages.send(link, messages.failure(error))
        return
    messages.send(link, {"done": {}})
    holder.accept(link)
    while not holder.over:
        ready = select.select([listener.fileno(), holder.woken], [], [], holder.wait_seconds)[0]
        if holder.woken in ready:
            os.read(holder.woken, 1 << 10)
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        try:
            messages.check_peer(connection)
        except OSError as error:
            with suppress(OSError):
                messages.send(connection, messages.failure(SandboxError(f"not served: {error}")))
            connection.close()
            continue
        holder.accept(connection)
