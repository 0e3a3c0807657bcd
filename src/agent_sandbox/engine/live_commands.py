"""Commands in a sandbox that stays alive: several at once, with programs that go on between them. Each is an action through the gate.

One interpreter holds the sandbox. It runs a small server of ours (`runtime.guest.command_server`), which starts programs and passes their
output. The host asks it in short turns, so that commands and operations on files take turns with one another. The server runs beside the
guest's programs, with their powers: it is trusted no more than they are, and every answer of it is checked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import lru_cache, partial

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.turns import InterpreterTurns, Turn, Turned
from agent_sandbox.engine.work import Code, Outcome, Work, facts
from agent_sandbox.errors import PolicyError, SandboxError, WorkspaceError
from agent_sandbox.runtime import guest
from agent_sandbox.runtime.base import Exit, ExitReason, Usage
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agent_sandbox.egress.orders import FlowRecord
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.run import Session
    from agent_sandbox.policy.decide import Allow
    from agent_sandbox.runtime.base import Interpreter, Terminal

TURN_SECONDS = 60.0  # of one turn, which takes milliseconds; a server that does not answer ends the sandbox
LATE_SECONDS = 10.0  # the same, after the time of the command is over
WAIT_SECONDS = 0.05  # how long the server waits for the end of a program in one turn, while others wait for theirs
TEND_SECONDS = 0.05  # between two looks at the room that is left, while no turn is under way
KILL_SECONDS = 10.0  # after which a killed program is no longer waited for
PIECE = 8 << 20  # bytes of input in one turn, whose messages are limited
LIVELY_SECONDS = 0.01  # the same, for a program at a terminal that something has just happened at
CALM_SECONDS = 1.0  # without anything happening at a terminal, after which it is not lively any more
MOST_TYPED = 1 << 20  # bytes typed on a terminal that nobody reads
_TYPED_PIECE = 4096  # bytes that are typed in one turn: a terminal takes no more
GROWTH = 1.5  # of the pauses between looks at a quiet program that may be looked at rarely
PATIENCE_BYTES = 64 << 20  # that a command may print beyond its limit before it is ended
MOST_OUTPUT = 64 << 20  # bytes of each stream, if the policy sets no limit; the rest is dropped
_MODULE = "agent_sandbox_command_server"
_NOT_FOUND = ("ENOENT", "ENOTDIR", "ELOOP")


class _Turnstile:
    """A lock that is given in the order in which it was asked for. A thread that asks again and again would starve the others else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # its first has the lock

    def __enter__(self) -> None:
        me = object()
        with self._changed:
            self._queue.append(me)
            try:
                self._changed.wait_for(lambda: self._queue[0] is me)
            except BaseException:  # an interrupt: nobody may wait for this thread
                self._queue.remove(me)
                self._changed.notify_all()
                raise

    def __exit__(self, *details: object) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()


class LiveCommand:
    """A command under way. It can be signalled and killed from any thread. `on_running` is called when its program runs.

    One with a terminal can be typed to, and its terminal can be given another size.
    """

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        self.killed = False
        self.on_running: Callable[[], object] = lambda: None
        self._signals: deque[int] = deque()
        self._typed = bytearray()
        self._size: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._asked = threading.Event()

    def type(self, data: bytes) -> None:
        """Type on its terminal. What nobody reads is dropped from some length on, as on any terminal."""
        with self._lock:
            self._typed += data[: max(0, MOST_TYPED - len(self._typed))]
        self._asked.set()

    def resize(self, size: Terminal) -> None:
        """Give its terminal another size."""
        with self._lock:
            self._size = size.rows, size.columns
        self._asked.set()

    def typed(self) -> tuple[bytes, tuple[int, int] | None]:
        """Return some of what was typed, and the new size if there is one. The size is returned once."""
        with self._lock:
            size, self._size = self._size, None
            return bytes(self._typed[:_TYPED_PIECE]), size

    def take_typed(self, count: int) -> None:
        """Forget so many bytes of what was typed: the terminal has them."""
        with self._lock:
            del self._typed[:count]

    def kill(self) -> None:
        """Ask for its end. The thread that runs it does the rest."""
        self.killed = True
        self._asked.set()

    def interrupt(self, number: int) -> None:
        """Ask for a signal to the program and the processes of its group."""
        self._signals.append(int(number))  # a member of `Signals` is no literal
        self._asked.set()

    def signals(self) -> tuple[int, ...]:
        """Return the signals that were asked for since the last call."""
        self._asked.clear()
        return tuple(self._signals.popleft() for _ in range(len(self._signals)))

    def pause(self, seconds: float) -> None:
        """Wait so long, or until somebody asks for something."""
        self._asked.wait(seconds)


class _Collected:
    """The output of a command so far. Without `collects`, it is only counted: it was passed on."""

    def __init__(self, limit: int | None, *, collects: bool) -> None:
        self.limit = MOST_OUTPUT if limit is None and collects else limit
        self.streams = {"stdout": bytearray(), "stderr": bytearray()}
        self._collects = collects
        self._passed = {"stdout": 0, "stderr": 0}
        self._taken = 0  # bytes of both streams, with those that were dropped

    @property
    def cut(self) -> bool:
        """Whether something was dropped."""
        return self._taken > sum(self._passed.values())

    @property
    def overflowing(self) -> bool:
        """Whether so much was dropped that the command must end."""
        return self.limit is not None and self._taken > max(16 * self.limit, PATIENCE_BYTES)

    def add(self, name: str, data: bytes) -> bytes:
        """Keep output up to the limit. Return what was kept of it."""
        kept = data if self.limit is None else data[: max(0, self.limit - self._passed[name])]
        self._taken += len(data)
        self._passed[name] += len(kept)
        if self._collects:
            self.streams[name] += kept
        return kept


class LiveCommands:
    """Runs commands and operations on files in one live sandbox, from any thread. The sandbox starts with the first of them."""

    def __init__(self, session: Session, work: Work, lifetime: Callable[[], float | None] = lambda: None) -> None:
        """`work` is common to all commands. `lifetime` returns the seconds after which the sandbox ends, also between commands."""
        self._session = session
        self._lifetime = lifetime
        self.turns = InterpreterTurns(session, work)
        self._turnstile = _Turnstile()
        self._running: set[str] = set()  # by name
        self._served = False
        self._network: list[FlowRecord] = []

    def run(self, work: Work, wall: float | None, *, patience: float = 0.0) -> Outcome:
        """Run a command for at most `wall` seconds. Raises as `Session.run` does, and `SandboxError` if the sandbox has ended.

        A quiet program is looked at every `patience` seconds only: its output and its end are noticed as much later.
        """
        action = self._session.judged(work)
        deed = partial(self._deed, work, wall=wall, patience=patience)
        return self._session.gate.perform(action, deed, describe=self._facts, details=work.text)

    def _facts(self, outcome: Outcome) -> dict[str, str | int | float]:
        return {**facts(outcome), "session": self.turns.id}

    def use_file(self, request: FileRequest, on_start: Callable[[Interpreter], None] | None = None) -> FileAnswer:
        """Do an operation on a file. Raises as `InterpreterTurns.use_file` does."""
        with self._turnstile:
            answer, outcomes = self.turns.use_file(request, Turn("", wall=TURN_SECONDS, idle=self._lifetime(), on_start=on_start))
            self._network += [flow for outcome in outcomes for flow in outcome.network]
            return answer

    def close(self) -> None:
        """End the sandbox, and with it all programs in it. Stored layers are put in order."""
        with self._turnstile:
            self.turns.close()

    def _deed(self, work: Work, allow: Allow, *, wall: float | None, patience: float) -> Outcome:
        began = time.monotonic()
        command = LiveCommand()
        if work.on_start is not None:
            work.on_start(command)
        collected = _Collected(self._session.policy.limits.output_bytes, collects=work.collect)
        ends = float("inf") if wall is None else began + wall
        self._running.add(command.name)
        killed_before = self.turns.memory_kills
        try:
            turned, refused = self._start(command, work, allow, ends)
            end = Exit(126 if refused and "not found" not in refused else 127 if refused else 0)
            if not refused:
                command.on_running()
                turned, end = self._wait(command, work, allow, collected, ends, patience)
        except BaseException:  # an interrupt, or a callback that raised: the program must not go on unseen
            with suppress(SandboxError):
                self._ask({"do": "kill", "id": command.name, "signal": int(signal.SIGKILL)}, allow)
            raise
        finally:
            self._running.discard(command.name)
        if self.turns.memory_kills > killed_before:
            end = _out_of_memory(end)
        usage = replace(end.usage, wall_seconds=time.monotonic() - began)
        hit = (*end.limits_hit, *(("output",) if collected.cut else ()))
        network, self._network = (*self._network, *turned.outcome.network), []
        return replace(
            turned.outcome,
            exit=replace(end, usage=usage, limits_hit=hit),
            stdout=bytes(collected.streams["stdout"]),
            stderr=bytes(collected.streams["stderr"]),
            changes=ChangeSet(),
            seconds=usage.wall_seconds,
            refused=refused,
            network=network,
        )

    def _start(self, command: LiveCommand, work: Work, allow: Allow, ends: float) -> tuple[Turned, str]:
        """Start the program, which may stop the server at once. Return why that is impossible; empty if it runs."""
        words, script = _words_of(work)
        stdin = work.stdin if isinstance(work.stdin, bytes) else b""
        for offset in range(0, len(stdin), PIECE):
            self._ask({"do": "feed", "id": command.name}, allow, stdin[offset : offset + PIECE], ends=ends)
        size = None if work.terminal is None else (work.terminal.rows, work.terminal.columns)
        request = {"do": "start", "id": command.name, "words": words, "cwd": work.cwd, "env": dict(work.env), "script": script}
        turned = self._ask({**request, "terminal": size}, allow, ends=ends)
        match turned.value:
            case {"error": str(name), "directory": bool(directory)}:
                return turned, _refusal(name[:20], words[0], work.cwd if directory else None)
            case {**nothing} if not nothing:
                return turned, ""
        raise _unanswered()

    def _wait(
        self, command: LiveCommand, work: Work, allow: Allow, collected: _Collected, ends: float, patience: float
    ) -> tuple[Turned, Exit]:
        """Pass output until the program has ended. Kill it if its time is over, or if somebody asks for that."""
        reason: ExitReason | None = None
        give_up, pause = float("inf"), 0.0
        lively_until = time.monotonic()
        while True:
            for number in command.signals():
                self._ask({"do": "kill", "id": command.name, "signal": number}, allow, ends=ends)
            if work.terminal is not None and self._type(command, allow, ends):
                lively_until = time.monotonic() + CALM_SECONDS
            late = time.monotonic() >= ends
            if reason is None and (command.killed or late or collected.overflowing):
                reason = ExitReason.KILLED if command.killed else ExitReason.TIMED_OUT if late else ExitReason.OUTPUT_LIMIT
                self._ask({"do": "kill", "id": command.name, "signal": int(signal.SIGKILL)}, allow, ends=ends)
                give_up = time.monotonic() + KILL_SECONDS
            longest = LIVELY_SECONDS if time.monotonic() < lively_until else WAIT_SECONDS
            seconds = 0.0 if pause else longest / max(1, len(self._running))
            request = {"do": "wait", "id": command.name, "seconds": seconds, "lively": work.terminal is not None}
            turned = self._ask(request, allow, ends=ends)
            match turned.value:
                case {"stdout": bytes(stdout), "stderr": bytes(stderr), "code": None | int() as code}:
                    pass
                case _:
                    raise _unanswered()
            if stdout and work.terminal is not None:
                lively_until = time.monotonic() + CALM_SECONDS
            for name, data in (("stdout", stdout), ("stderr", stderr)):
                kept = collected.add(name, data)
                if kept and work.on_output is not None:
                    work.on_output(name, kept)
            if code is not None or time.monotonic() >= give_up:
                return turned, _exit_of(code, reason)
            quiet = patience and reason is None and not (stdout or stderr)
            pause = min(patience, max(WAIT_SECONDS, pause * GROWTH), max(0.0, ends - time.monotonic())) if quiet else 0.0
            if pause:  # not during a turn: others take theirs
                command.pause(pause)

    def _type(self, command: LiveCommand, allow: Allow, ends: float) -> bool:
        """Pass on what was typed, as much as the terminal takes. Return whether there was anything."""
        data, size = command.typed()
        if not data and size is None:
            return False
        match self._ask({"do": "type", "id": command.name, "size": size}, allow, data, ends=ends).value:
            case {"taken": int(count)} if 0 <= count <= len(data):
                command.take_typed(count)
                return bool(count or size)
        raise _unanswered()

    def _ask(self, request: dict[str, Any], allow: Allow, stdin: bytes = b"", *, ends: float = float("inf")) -> Turned:
        """Ask the server. `ends` is when the time of the command is over: a server that was stopped must not hold its caller for long."""
        with self._turnstile:
            if not self._served:
                self._take(_install(), allow, b"", TURN_SECONDS)
                self._served = True
                if self.turns.tend():
                    threading.Thread(target=self._tend, name="agent-sandbox-room", daemon=True).start()
            seconds = min(TURN_SECONDS, max(0.0, ends - time.monotonic()) + LATE_SECONDS)
            turned = self._take(f"__import__('sys').modules[{_MODULE!r}].answer({request!a})", allow, stdin, seconds)
            self._network += turned.outcome.network
            return replace(turned, outcome=replace(turned.outcome, network=()))

    def _tend(self) -> None:
        """Care for the room of programs in the background, until the sandbox ends: during turns the pump does that."""
        with suppress(WorkspaceError, OSError):  # other layers than ours are left alone, and the end of the sandbox says so
            while True:
                time.sleep(TEND_SECONDS)
                with self._turnstile:
                    if self.turns.ended or not self.turns.tend():
                        return

    def _take(self, source: str, allow: Allow, stdin: bytes, seconds: float) -> Turned:
        return self.turns.take(Turn(source, stdin, seconds, self._lifetime()), allow, "command")


def _words_of(work: Work) -> tuple[list[str], bool]:
    """Return the command as words, and whether the last word is a script that may be handed over as a file instead."""
    what = work.what
    if not isinstance(what, Code):
        return [*what.argv], False
    if what.arguments or what.language not in ("python", "bash"):
        raise PolicyError(
            f"a live sandbox runs commands, bash and Python, not {what.language} code", hint="write it into a file and run that"
        )
    return [sys.executable if what.language == "python" else "bash", "-c", what.source], True


def _refusal(error: str, program: str, directory: str | None) -> str:
    if directory is not None:
        return f"no such directory: {directory!r}" if error in _NOT_FOUND else f"the directory {directory!r} cannot be used ({error})"
    return f"not found: {program!r}" if error in _NOT_FOUND else f"cannot be executed: {program!r} ({error})"


def _exit_of(code: int | None, reason: ExitReason | None) -> Exit:
    if reason is not None:
        return Exit(124 if reason is ExitReason.TIMED_OUT else 137, reason, 9, ("wall",) if reason is ExitReason.TIMED_OUT else ())
    assert code is not None
    if not 0 <= code <= 255:
        raise _unanswered()
    return Exit(code, usage=Usage())


def _out_of_memory(end: Exit) -> Exit:
    """Return the end of a command during which the kernel killed a process for the memory limit: its own, if it ended like that."""
    killed = end.code == 137 and end.reason is ExitReason.EXITED
    hit = (*end.limits_hit, "memory")
    return replace(end, reason=ExitReason.OUT_OF_MEMORY, signal=9, limits_hit=hit) if killed else replace(end, limits_hit=hit)


def _unanswered() -> SandboxError:
    return SandboxError("the live sandbox gave no valid answer: a program in it may have tampered with its server", hint="open another")


@lru_cache(maxsize=1)
def _install() -> str:
    """Return code that makes the server a module of the interpreter, under a name that nothing else has."""
    # Its text is enough: the module itself cannot be imported where there are no terminals, as on Windows.
    with open(os.path.join(*guest.__path__, "command_server.py"), encoding="utf-8") as file:
        text = file.read()
    return (
        f"(lambda sys: (sys.modules.__setitem__({_MODULE!r}, type(sys)({_MODULE!r})), "
        f"exec(compile({text!r}, {_MODULE!r}, 'exec'), sys.modules[{_MODULE!r}].__dict__), None)[2])(__import__('sys'))"
    )
