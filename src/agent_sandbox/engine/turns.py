"""An interpreter that runs several turns. Each turn is an action of its own, through the gate and in the ledger.

The interpreter starts with the first turn, after the gate has allowed that turn. It ends when it is closed, when the program ends it, or
when a turn exceeds a limit. The outcome of the last turn says why it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.attachments import Attachments, attachments_of
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Code, Opened, Outcome, Work, facts
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.ledger.event import Facts
from agent_sandbox.policy.decide import Allow
from agent_sandbox.runtime.base import Exit, ExitReason, Interpreter, Launch
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder
    from agent_sandbox.engine.timeline.tree import Step

CLOSING_SECONDS = 2.0  # for exit functions and buffers of files; a thread that never ends delays the end no longer than this
LONGEST_REPR = 10_000  # characters
_NO_MORE = codec.packed(None)


@dataclass(frozen=True)
class Turn:
    """The input of one turn. `wall` is its own time limit; `on_start` receives the guest, so that another thread can kill it."""

    source: str
    stdin: bytes = b""
    wall: float | None = None
    idle: float | None = None  # how long the interpreter may wait for the turn after this one
    on_output: Callable[[str, bytes], None] | None = None
    on_start: Callable[[Interpreter], None] | None = None


@dataclass(frozen=True)
class Turned:
    """The outcome of a turn. `value` is the value of the last expression, if that is data; otherwise `described` is its repr."""

    outcome: Outcome
    value: Any = None
    described: str | None = None


class InterpreterTurns:
    """Runs turns in one interpreter, one at a time, from any thread."""

    def __init__(self, session: Session, work: Work) -> None:
        """`work` is common to all turns: environment, directory, arguments, tools, preloaded modules."""
        self.id = os.urandom(8).hex()
        self.ended = ""  # why there are no more turns
        self.changes = ChangeSet()  # known when the interpreter has ended
        self.listed = False  # whether they are known
        self._session = session
        self._work = work
        self._attached = Attachments(*attachments_of(work, session, turns=True))
        self._opened: Opened | None = None
        self._killed = False
        self._count = 0
        self._process = os.getpid()

    def _leave_to_its_own_process(self) -> None:
        """In a forked child of the application, mark this object as ended. The interpreter belongs to the parent process."""
        if self._process != os.getpid():
            self.ended, self._opened = "it belongs to another process, from which this one was forked", None

    def run(self, turn: Turn) -> Turned:
        """Run one turn. Raises what `Session.run` raises, and `SandboxError` if the interpreter has ended."""
        self._check_that_it_goes_on()
        assert isinstance(self._work.what, Code)
        action = self._session.judged(replace(self._work, what=replace(self._work.what, source=turn.source)))
        message = _packed(turn)
        gate = self._session.gate
        return gate.perform(action, lambda allow: self._deed(turn, message, allow), describe=self._facts, details=lambda: turn.source)

    def rewind(self, recorder: TimelineRecorder, number: int) -> Step:
        """Return to the state before a step of the session's timeline. Raises `SandboxError`."""
        self._check_that_it_goes_on()
        step = recorder.rewind(number)
        self._session.gate.note("session.rewound", {"session": self.id, "turn": self._count, "step": number})
        return step

    def use_file(self, request: FileRequest, turn: Turn) -> tuple[FileAnswer, tuple[Outcome, ...]]:
        """Do an operation on a file, in turns like `turn`. Returns the answer and the outcomes, which hold the output of other threads.

        Raises as `run` does, and `SandboxError` if the interpreter ended or gave no valid answer.
        """
        from agent_sandbox.engine.file_access import access_by_turns  # few sessions use files this way

        self._check_that_it_goes_on()
        outcomes: list[Outcome] = []

        def deed(allow: Allow) -> FileAnswer:
            def take(source: str, stdin: bytes) -> object:
                piece = replace(turn, source=source, stdin=stdin)
                turned = self._deed(piece, _packed(piece), allow, operation=f"{request.operation} {request.path}")
                outcomes.append(turned.outcome)
                if self.ended:
                    raise SandboxError(f"this session has ended: {self.ended}", hint="open another")
                return turned.value

            return access_by_turns(request, take)

        answer = self._session.gate.perform(request.action(), deed, describe=lambda answer: self._told(answer), details=request.details)
        return answer, tuple(outcomes)

    def _told(self, answer: FileAnswer) -> Facts:
        return {"status": answer.status, "session": self.id, "turn": self._count}

    def _check_that_it_goes_on(self) -> None:
        self._leave_to_its_own_process()
        if self._opened is not None and not self._opened.guest.waiting:
            self._end(f"it was {self._opened.guest.ended().reason.value} between two turns")
        if self._killed:
            self._end("it was killed")
        if self.ended:
            raise SandboxError(f"this session has ended: {self.ended}", hint="open another")

    def _deed(self, turn: Turn, message: bytes, allow: Allow, *, operation: str = "") -> Turned:
        began = time.monotonic()
        self._count += 1
        if self._work.timeline is not None:
            self._work.timeline.begin_turn(turn.source, operation=operation)
        opened = self._opened or self._open(turn)
        if turn.on_start is not None:
            turn.on_start(opened.guest)
        try:
            completed, said = opened.guest.turn(message, self._launch(opened.guest.launch, turn.wall, turn.on_output), idle=turn.idle)
        except BaseException as error:  # a callback raised, so the state of the interpreter is unknown
            self._end(f"its turn {self._count} was cut off by {type(error).__name__}")
            raise
        code, value, described, end = 0, None, None, completed.exit
        if said is not None:
            try:
                code, value, described = _understood(said)
                end = end if code == end.code else replace(end, code=code)
            except ValueError as error:
                end, said = Exit(137, ExitReason.GARBLED, 9, end.limits_hit, end.usage), None
                opened.guest.refused = f"it ended its turn with an invalid value: {error}"
        completed = completed if end is completed.exit else replace(completed, exit=end)
        outcome = Outcome.of(completed, opened.guest, opened.route, allow, opened.notes)
        outcome = self._attached.ended(opened.guest, completed, outcome)
        outcome = replace(outcome, seconds=time.monotonic() - began)
        if said is None:
            self._end(f"its turn {self._count} was {end.reason.value}")
            outcome = replace(outcome, changes=self.changes, listed=self.listed)
        return Turned(outcome, value, described)

    def _launch(self, before: Launch, wall: float | None, on_output: Callable[[str, bytes], None] | None) -> Launch:
        """Return `before`, the launch of the previous turn, with the time limit and the callback of this turn."""
        if before.limits.wall_seconds == wall and before.on_output is on_output:
            return before
        return replace(before, limits=replace(before.limits, wall_seconds=wall), on_output=on_output)

    def _open(self, turn: Turn) -> Opened:
        # This source is only read, to find modules that should be preloaded; the code that runs is sent as the turn.
        seen = f"import {', '.join(self._work.preload)}\n{turn.source}" if self._work.preload else turn.source
        assert isinstance(self._work.what, Code)
        what = replace(self._work.what, source=seen)
        self._opened = self._session.open(replace(self._work, what=what), self._attached)
        try:
            self._attached.started(self._opened.guest)
        except BaseException:
            self._end("it could not be started")
            raise
        return self._opened

    def _facts(self, turned: Turned) -> Facts:
        return {**facts(turned.outcome), "session": self.id, "turn": self._count}

    def kill(self) -> None:
        """Kill the interpreter at once, from any thread. A running turn reports that; if no turn runs, the next turn is refused."""
        self._leave_to_its_own_process()
        opened = self._opened
        if opened is not None:
            self._killed = True  # the guest still lives for a moment, and must not begin a turn
            opened.guest.kill()

    def close(self) -> None:
        """Let the interpreter end like a program, and keep its changes. Do not call it during a turn. It may be called again."""
        self._leave_to_its_own_process()
        try:
            if self._opened is not None:
                guest = self._opened.guest
                guest.turn(_NO_MORE, self._launch(guest.launch, CLOSING_SECONDS, None), idle=None)
        finally:
            self._end("it was closed")

    @property
    def running(self) -> bool:
        """Whether there is an interpreter, in this process and not in the one from which it was forked."""
        return self._opened is not None and self._process == os.getpid()

    def abandon(self) -> None:
        """Kill the interpreter and free its resources. Its changes are lost. For a session that nobody can close any more."""
        self._leave_to_its_own_process()
        self._end("it was abandoned", look=False)

    def _end(self, why: str, *, look: bool = True) -> None:
        self.ended = self.ended or why
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.guest.kill()
        if look and self._session.policy.files.write:
            opened.guest.settle()
            self.changes, unlisted = self._session.changes(opened.guest, self._work)
            self.listed = not unlisted
        opened.guest.close()
        self._attached.release()


def _packed(turn: Turn) -> bytes:
    """Return the message that begins a turn. Raises `PolicyError` if it is too long."""
    try:
        return codec.packed({"source": turn.source, "stdin": turn.stdin})
    except ValueError as error:
        raise PolicyError(f"the code and input of a turn: {error}", hint="put it into a file, or take several turns") from None


def _understood(said: bytes) -> tuple[int, Any, str | None]:
    match codec.understood(said):
        case {"turn": {"code": int(code), "value": value, **more}} if 0 <= code <= 255:
            described = more.get("repr")
            return int(code), value, described[:LONGEST_REPR] if isinstance(described, str) else None
    raise ValueError("there is no exit code in it")
