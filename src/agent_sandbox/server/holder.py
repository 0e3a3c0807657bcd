"""A process that holds sessions with timelines after the command that began them has ended.

It is the supervisor of their guests: if it ends, in whatever way, the kernel and the keeper end them. It has no terminal, takes requests of
its user alone (see `messages.check_peer`), and ends when its last session is ended, when nobody has used it for some time, or by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from agent_sandbox.errors import PolicyError, SandboxError, SandboxWarning
from agent_sandbox.server import background, messages
from agent_sandbox.server.held_session import HeldSession, Listener
from agent_sandbox.server.messages import Message
from agent_sandbox.server.places import FORK, Place
from agent_sandbox.server.requests import RequestServer, attended
from agent_sandbox.server.timeline_sandbox import SessionRequest, TimelineSandbox

MOST_SESSIONS = 16  # of one holder: a session and its forks


class SessionHolder(RequestServer):
    """Holds the sessions of one sandbox, by their ids, and answers requests about them."""

    def __init__(self, place: Place, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(idle_seconds, clock)
        self._place = place
        self._sandbox: TimelineSandbox | None = None
        self._sessions: dict[str, HeldSession] = {}
        self._forks = 0
        self._begun = False  # whether anything has run: the command that opened the first session may have gone before

    def open(self, request: Message) -> None:
        """Open the first session. Raises `SandboxError`."""
        asked = SessionRequest.read(request["session"])
        self._sandbox = TimelineSandbox(asked)
        session = self._sandbox.session(timeline=True, args=asked.arguments)
        name = asked.script.name if asked.script is not None else "-"
        self._sessions[self._place.id] = HeldSession(self._place.id, session, asked.project, name, time.time())

    @property
    def useless(self) -> bool:
        """Whether it holds no session, or one in which nothing has run."""
        return not self._sessions or not self._begun

    def close(self) -> None:
        """End all sessions."""
        if self._sandbox is not None:
            self._sandbox.close()

    def done(self, request: Message, link: socket.socket) -> Message:
        """Do what a request asks for."""
        match request["do"]:
            case "list":
                return {"sessions": [each.facts() for each in self._held()], "idle_seconds": self.idle_seconds}
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
            case "changed":
                return held.changed()
            case "present-file":
                return held.present_file(str(request["path"]))
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
        attended(
            link,
            turn.take,
            interrupt=lambda _: turn.interrupt(),
            abandon=held.session.kill,
            seconds=turn.seconds,
            time_out=turn.time_out,
            clock=self._clock,
        )
        return turn.result()


def main() -> NoReturn:
    """Hold sessions: `PLACE SECONDS LINK LOCK OWNER`, of which the last three are descriptors. The first request comes on the link.

    OWNER is the daemon that this process ends with, or -1.
    """
    path, seconds, *numbers = sys.argv[-5:]
    for descriptor in (int(number) for number in numbers if number != "-1"):
        os.set_inheritable(descriptor, False)  # nothing that we start has them
    if numbers[2] != "-1":
        background.follow(int(numbers[2]))
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
    holder.listen(listener)
