"""Commands in a sandbox that stays alive: several at once, with programs that go on between them. Each is an action through the gate.

One interpreter holds the sandbox. It runs a small server of ours (`runtime.guest.command_server`), which starts programs and passes their
output. The host asks it in short turns, so that commands and operations on files take turns with one another. The server runs beside the
guest's programs, with their powers: it is trusted no more than they are, and every answer of it is checked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.turns import InterpreterTurns, Turn, Turned
from agent_sandbox.engine.work import Code, Outcome, Work, facts
from agent_sandbox.errors import PolicyError, SandboxError, WorkspaceError
from agent_sandbox.runtime.base import Exit, ExitReason, Usage
from agent_sandbox.runtime.guest import command_server
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agent_sandbox.egress.orders import FlowRecord
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.run import Session
    from agent_sandbox.policy.decide import Allow
    from agent_sandbox.runtime.base import Interpreter

TURN_SECONDS = 60.0  # of one turn, which takes milliseconds; a server that does not answer ends the sandbox
LATE_SECONDS = 10.0  # the same, after the time of the command is over
WAIT_SECONDS = 0.05  # how long the server waits for the end of a program in one turn, while others wait for theirs
TEND_SECONDS = 0.05  # between two looks at the room that is left, while no turn is under way
KILL_SECONDS = 10.0  # after which a killed program is no longer waited for
PIECE = 8 << 20  # bytes of input in one turn, whose messages are limited
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
    """A command under way. It can be killed from any thread."""

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        self.killed = False

    def kill(self) -> None:
        """Ask for its end. The thread that runs it does the rest."""
        self.killed = True


@dataclass
class _Collected:
    """The output of a command so far."""

    stdout: bytearray
    stderr: bytearray
    limit: int
    taken: int = 0  # bytes of both streams, with those that were dropped

    @property
    def cut(self) -> bool:
        """Whether something was dropped."""
        return self.taken > len(self.stdout) + len(self.stderr)

    @property
    def overflowing(self) -> bool:
        """Whether so much was dropped that the command must end."""
        return self.taken > max(16 * self.limit, PATIENCE_BYTES)

    def add(self, name: str, data: bytes) -> bytes:
        """Keep output up to the limit. Return what was kept of it."""
        kept = self.stdout if name == "stdout" else self.stderr
        room = max(0, self.limit - len(kept))
        self.taken += len(data)
        kept += data[:room]
        return data[:room]


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

    def run(self, work: Work, wall: float | None) -> Outcome:
        """Run a command for at most `wall` seconds. Raises as `Session.run` does, and `SandboxError` if the sandbox has ended."""
        action = self._session.judged(work)
        return self._session.gate.perform(action, lambda allow: self._deed(work, allow, wall), describe=self._facts, details=work.text)

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

    def _deed(self, work: Work, allow: Allow, wall: float | None) -> Outcome:
        began = time.monotonic()
        command = LiveCommand()
        if work.on_start is not None:
            work.on_start(command)
        collected = _Collected(bytearray(), bytearray(), self._session.policy.limits.output_bytes or MOST_OUTPUT)
        self._running.add(command.name)
        try:
            turned, refused = self._start(command, work, allow)
            end = Exit(126 if refused and "not found" not in refused else 127 if refused else 0)
            if not refused:
                turned, end = self._wait(command, work, allow, collected, began, wall)
        except BaseException:  # an interrupt, or a callback that raised: the program must not go on unseen
            with suppress(SandboxError):
                self._ask({"do": "kill", "id": command.name}, allow)
            raise
        finally:
            self._running.discard(command.name)
        usage = replace(end.usage, wall_seconds=time.monotonic() - began)
        hit = (*end.limits_hit, *(("output",) if collected.cut else ()))
        network, self._network = (*self._network, *turned.outcome.network), []
        return replace(
            turned.outcome,
            exit=replace(end, usage=usage, limits_hit=hit),
            stdout=bytes(collected.stdout),
            stderr=bytes(collected.stderr),
            changes=ChangeSet(),
            seconds=usage.wall_seconds,
            refused=refused,
            network=network,
        )

    def _start(self, command: LiveCommand, work: Work, allow: Allow) -> tuple[Turned, str]:
        """Start the program. Return why that is impossible; empty if it runs."""
        words, script = _words_of(work)
        stdin = work.stdin if isinstance(work.stdin, bytes) else b""
        for offset in range(0, len(stdin), PIECE):
            self._ask({"do": "feed", "id": command.name}, allow, stdin[offset : offset + PIECE])
        request = {"do": "start", "id": command.name, "words": words, "cwd": work.cwd, "env": dict(work.env), "script": script}
        turned = self._ask(request, allow)
        match turned.value:
            case {"error": str(name), "directory": bool(directory)}:
                return turned, _refusal(name[:20], words[0], work.cwd if directory else None)
            case {**nothing} if not nothing:
                return turned, ""
        raise _unanswered()

    def _wait(
        self, command: LiveCommand, work: Work, allow: Allow, collected: _Collected, began: float, wall: float | None
    ) -> tuple[Turned, Exit]:
        """Pass output until the program has ended. Kill it if its time is over, or if somebody asks for that."""
        reason: ExitReason | None = None
        ends = float("inf") if wall is None else began + wall
        give_up = float("inf")
        while True:
            late = time.monotonic() >= ends
            if reason is None and (command.killed or late or collected.overflowing):
                reason = ExitReason.KILLED if command.killed else ExitReason.TIMED_OUT if late else ExitReason.OUTPUT_LIMIT
                self._ask({"do": "kill", "id": command.name}, allow, ends=ends)
                give_up = time.monotonic() + KILL_SECONDS
            turned = self._ask({"do": "wait", "id": command.name, "seconds": WAIT_SECONDS / max(1, len(self._running))}, allow, ends=ends)
            match turned.value:
                case {"stdout": bytes(stdout), "stderr": bytes(stderr), "code": None | int() as code}:
                    pass
                case _:
                    raise _unanswered()
            for name, data in (("stdout", stdout), ("stderr", stderr)):
                kept = collected.add(name, data)
                if kept and work.on_output is not None:
                    work.on_output(name, kept)
            if code is not None or time.monotonic() >= give_up:
                return turned, _exit_of(code, reason)

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


def _unanswered() -> SandboxError:
    return SandboxError("the live sandbox gave no valid answer: a program in it may have tampered with its server", hint="open another")


@lru_cache(maxsize=1)
def _install() -> str:
    """Return code that makes the server a module of the interpreter, under a name that nothing else has."""
    with open(command_server.__file__, encoding="utf-8") as file:
        text = file.read()
    return (
        f"(lambda sys: (sys.modules.__setitem__({_MODULE!r}, type(sys)({_MODULE!r})), "
        f"exec(compile({text!r}, {_MODULE!r}, 'exec'), sys.modules[{_MODULE!r}].__dict__), None)[2])(__import__('sys'))"
    )
