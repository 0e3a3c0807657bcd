"""A sandbox that runs on after the command that began it: its first program, further ones beside it, and its end.

This process is the supervisor of the sandbox: if it ends, in whatever way, the kernel and the keeper end all programs in it. The sandbox
ends with its first program, when it is stopped, after its lifetime, or when nobody has used it for some time. Use is a command in it, a
reader of its output, and output itself.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.live_commands import LiveCommand, LiveCommands
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import Denied, PolicyError, SandboxError
from agent_sandbox.runtime.base import ExitReason, Terminal
from agent_sandbox.server import background, messages
from agent_sandbox.server.detached_places import write_end
from agent_sandbox.server.held_session import Listener
from agent_sandbox.server.messages import Message
from agent_sandbox.server.output_log import OutputLog
from agent_sandbox.server.places import LOG, SOCKET, Place
from agent_sandbox.server.requests import RequestServer, attended

PATIENCE_SECONDS = 0.5  # between two looks at a first program that is quiet
GRACE_SECONDS = 10.0  # between the request to end and the end by force
_KILLED_SECONDS = 15.0  # for a killed program to be gone; the sandbox takes the rest with it
_MOST_EARLY = 64  # messages from a terminal before its program has begun
_LARGEST_SIDE = 1 << 16  # rows and columns of a terminal: two bytes
_FAREWELL_SECONDS = 5.0  # for commands to get their last answers


@dataclass(frozen=True)
class Terms:
    """How long a detached sandbox may live in all, and without use; None without a limit. After its lifetime its first program has
    `grace_seconds` to end: none where the lifetime is the end of a permission.
    """

    lifetime_seconds: float | None
    idle_seconds: float | None
    grace_seconds: float = GRACE_SECONDS


class _Asked:
    """A command that somebody waits for. It can be interrupted, and typed to, before its program has begun."""

    def __init__(self) -> None:
        self._command: LiveCommand | None = None
        self._interrupts = 0
        self._killed = False
        self._early: list[Message] = []
        self._lock = threading.Lock()

    def begin(self, command: LiveCommand) -> None:
        """Remember the command, and tell it what was typed already. If it was interrupted already, kill it."""
        with self._lock:
            self._command = command
            for message in self._early:
                _type(command, message)
        if self._killed or self._interrupts:
            command.kill()

    def hear(self, message: Message) -> None:
        """Pass on what was typed, or a new size of the terminal. Raises as `_type` does."""
        with self._lock:
            if self._command is not None:
                _type(self._command, message)
            elif len(self._early) < _MOST_EARLY:
                self._early.append(message)

    def interrupt(self, number: int) -> None:
        """Pass a signal on to the program; kill it the second time, or if whoever waited has gone (0)."""
        self._interrupts += 1
        if number == 0 or self._interrupts > 1:
            self.kill()
        elif self._command is not None:
            self._command.interrupt(number)

    def kill(self) -> None:
        """Kill it, now or when it begins."""
        self._killed = True
        if self._command is not None:
            self._command.kill()


class DetachedSandbox(RequestServer):
    """Holds one sandbox, and answers requests about it. Make it, `start` its first program, then `hold` it."""

    def __init__(self, place: Place, session: Session, work: Work, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        """`work` is common to all programs: variables, directory, published ports."""
        super().__init__(float("inf") if terms.idle_seconds is None else terms.idle_seconds, clock)
        self.place = place
        self._session, self._work = session, work
        self._expires = float("inf") if terms.lifetime_seconds is None else clock() + terms.lifetime_seconds
        self._commands = LiveCommands(session, replace(work, title=f"detached {place.id}: {work.title}"), self._seconds_left)
        self._output = OutputLog(place.path)
        self._first = _Asked()
        self._begun, self._first_ended, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._outcome: Outcome | SandboxError | None = None
        self._why = ""  # it is to end, if not because its first program has
        self._grace, self._last_grace = GRACE_SECONDS, terms.grace_seconds
        self.end_facts: Message = {}

    def _seconds_left(self) -> float | None:
        """Seconds after which the sandbox ends, whatever this process does: some time after its lifetime."""
        left = self._expires - self._clock()
        return None if left == float("inf") else max(0.0, left) + self._last_grace + _KILLED_SECONDS

    # -- its programs

    def start(self, argv: tuple[str, ...]) -> Outcome | None:
        """Start the first program. Return None when it runs, or the outcome if it could not be started. Raises as `Session.run` does."""
        work = replace(self._work, what=Command(argv), collect=False, on_output=self._keep, on_start=self._begin_first)
        threading.Thread(target=self._run_first, args=(work,), name="agent-sandbox-first", daemon=True).start()
        self._begun.wait()
        if isinstance(self._outcome, SandboxError):
            raise self._outcome
        return self._outcome if self._outcome is not None and self._outcome.refused else None

    def _begin_first(self, command: LiveCommand) -> None:
        command.on_running = self._begun.set
        self._first.begin(command)

    def _run_first(self, work: Work) -> None:
        try:
            self._outcome = self._commands.run(work, self._session.policy.limits.wall_seconds, patience=PATIENCE_SECONDS)
        except SandboxError as error:
            self._outcome = error
        except Exception as error:  # a mistake of ours ends the sandbox, and is told
            self._outcome = SandboxError(f"{type(error).__name__}: {error}")
        finally:
            self._first_ended.set()
            self._begun.set()
            self.wake()

    def _keep(self, stream: str, data: bytes) -> None:
        self.use()
        self._output.write(stream, data)

    def done(self, request: Message, link: socket.socket) -> Message:
        """Do what a request asks for."""
        match request["do"]:
            case "watch":  # a reader of the output, which is in files: as long as it is connected, the sandbox is in use
                return {}
            case "exec":
                return self._exec(request, link)
            case "stop":
                self.stop("it was stopped", request.get("seconds"))
                self._finished.wait()
                return self.end_facts
            case unknown:
                raise SandboxError(f"the process that holds it knows no {unknown!r}", hint="it is of another version: agent-sandbox stop")

    def _exec(self, request: Message, link: socket.socket) -> Message:
        """Run a program beside the others, with the caller's input, and pass its output."""
        asked, told = _Asked(), list[Outcome | SandboxError]()
        directory = self._work.cwd if request.get("cwd") is None else os.path.join(self._work.cwd or "/", str(request["cwd"]))
        work = replace(
            self._work,
            what=Command(tuple(map(str, request["words"]))),
            env={**self._work.env, **{str(name): str(value) for name, value in dict(request["env"]).items()}},
            cwd=os.path.normpath(directory or "/"),
            stdin=messages.unpacked(request["stdin"]),
            collect=False,
            on_output=Listener(link),
            on_start=asked.begin,
            terminal=None if request.get("terminal") is None else _terminal(request["terminal"]),
        )
        limits = [each for each in (self._session.policy.limits.wall_seconds, request.get("seconds")) if each is not None]

        def perform() -> None:
            try:
                told.append(self._commands.run(work, min(limits) if limits else None))
            except SandboxError as error:
                told.append(error)
            except Exception as error:
                told.append(SandboxError(f"the command failed: {type(error).__name__}: {error}"))

        attended(link, perform, interrupt=asked.interrupt, abandon=asked.kill, hear=asked.hear, clock=self._clock)
        return _told(told[0], self._commands.turns.ended)

    # -- its end

    def stop(self, why: str, grace: float | None = None) -> None:
        """End soon, for a reason."""
        self._why = self._why or why
        self._grace = GRACE_SECONDS if grace is None else float(grace)
        self.end()

    @property
    def over(self) -> bool:
        """Whether the sandbox has ended, or is to end."""
        if self._first_ended.is_set() or self._ending:
            return True
        if self._clock() >= self._expires:
            self._why = self._why or "its lifetime was over"
            return True
        if super().over:
            self._why = self._why or "nobody had used it for its time"
            return True
        return False

    @property
    def wait_seconds(self) -> float | None:
        """How long nothing has to be done unless something happens."""
        unused = super().wait_seconds
        soonest = min(float("inf") if unused is None else unused, max(0.0, self._expires - self._clock()))
        return None if soonest == float("inf") else soonest

    def close(self) -> None:
        """End all programs, and put the changes in order. The first program is asked to end, and after some time it is killed."""
        if not self._first_ended.is_set():
            self._first.interrupt(signal.SIGTERM)
            if not self._first_ended.wait(min(self._grace, max(0.0, self._expires - self._clock()) + self._last_grace)):
                self._first.kill()
                self._first_ended.wait(_KILLED_SECONDS)
        with suppress(SandboxError):
            self._commands.close()
        with suppress(Exception):  # the record of the end is worth more than the end of an approver
            self._session.gate.end()
        self._output.close()

    def _end_facts(self) -> Message:
        outcome = self._outcome
        common = {"at": time.time(), "dropped_output_bytes": self._output.dropped, "notes": list(self._commands.turns.notes)}
        if isinstance(outcome, Outcome):
            end = outcome.exit
            told = {"exit": end.code, "reason": end.reason.value, "limits_hit": list(end.limits_hit), "seconds": outcome.seconds}
            ended = "its first program reached the memory limit" if end.reason is ExitReason.OUT_OF_MEMORY else "its first program ended"
            return {**common, **told, "why": self._why or ended}
        return {
            **common,
            "exit": None,
            "reason": "",
            "limits_hit": [],
            "seconds": None,
            "why": self._why or (outcome.message if outcome is not None else self._commands.turns.ended or "it was killed"),
        }

    def hold(self, code: int) -> NoReturn:
        """Tell the caller the exit code, and hold the sandbox until it has ended. Then exit."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop("the process that held it was asked to end"))
        try:
            listener = self.place.listen()
            try:
                background.leave(code, os.open(os.path.join(self.place.path, LOG), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except SandboxError as error:
                self.stop(error.message)
            self.listen(listener)
            self.close()
            self.end_facts = self._end_facts()
            write_end(self.place, self.end_facts)
            listener.close()
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.place.path, SOCKET))
            self._finished.set()
            self.dismiss()
            until = time.monotonic() + _FAREWELL_SECONDS
            while self.connections and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            os._exit(0)


def _type(command: LiveCommand, message: Message) -> None:
    """Pass on what a message says was typed, or the new size. Raises ValueError, KeyError or `BrokenMessage` if it says neither."""
    if "size" in message:
        command.resize(_terminal(message["size"]))
    else:
        command.type(messages.unpacked(message["typed"]))


def _terminal(size: object) -> Terminal:
    """Return the size of a terminal that a message has. Raises ValueError if it is none."""
    match size:
        case [int(rows), int(columns)] if 0 < rows < _LARGEST_SIDE and 0 < columns < _LARGEST_SIDE:
            return Terminal(rows, columns)
    raise ValueError("the size of the terminal is not valid")


def _told(outcome: Outcome | SandboxError, ended: str) -> Message:
    """Return how a command ended, as a message. Raises `SandboxError` if the sandbox has ended meanwhile, or could not run it."""
    if isinstance(outcome, Denied):
        refused = "approval" if outcome.verdict.because.rule == "approval" else "denied"
        return {**_NOTHING, "refused": refused, "error": str(outcome)}
    if isinstance(outcome, PolicyError):
        return {**_NOTHING, "refused": "invalid", "error": str(outcome)}
    if isinstance(outcome, SandboxError):
        if ended:
            raise SandboxError(f"the sandbox has ended: {ended}", hint="see: agent-sandbox logs NAME")
        raise outcome
    end = outcome.exit
    return {
        "exit": end.code,
        "reason": end.reason.value,
        "signal": end.signal,
        "limits_hit": list(end.limits_hit),
        "seconds": round(outcome.seconds, 6),
        "not_started": outcome.refused,
        "notes": list(outcome.notes),
        "refused": "",
        "error": "",
    }


_NOTHING: Mapping[str, Any] = {
    **{"exit": 0, "reason": "", "signal": None, "limits_hit": [], "seconds": 0.0, "not_started": "", "notes": []},
    **{"refused": "", "error": ""},
}
