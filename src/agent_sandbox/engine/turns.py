"""An interpreter that runs several turns. Each turn is an action of its own, through the gate and in the ledger.

The interpreter starts with the first turn, after the gate has allowed that turn. It ends when it is closed, when the program ends it, or
when a turn exceeds a limit. The outcome of the last turn says why it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import cast

from agent_sandbox._fast.contexts import ExitStack, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.attachments import Attachments, attachments_of
from agent_sandbox.engine.plan_launch import DISK_BYTES
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.state_transfer import Resumption, StateSink, StateTransfer
from agent_sandbox.engine.work import Code, Opened, Outcome, Work, facts
from agent_sandbox.errors import CheckpointError, PolicyError, SandboxError
from agent_sandbox.ledger.event import Facts
from agent_sandbox.policy.decide import Allow
from agent_sandbox.runtime.base import Exit, ExitReason, Interpreter, Launch
from agent_sandbox.runtime.guest.look import PREFIX as LOOK
from agent_sandbox.runtime.guest.shell_state import PREFIX
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder
    from agent_sandbox.engine.timeline.tree import Step
    from agent_sandbox.runtime.process.fork_handle import ForkedGuest

SAVING_SECONDS = 600.0  # for a session that is saved: a guard against a guest that never ends
MOST_MEMORY = 1 << 32  # of a program inside WebAssembly
STATE_BYTES = 64 << 20  # of a saved state that is neither memory nor files
DURABLE = "wasm"  # the runtime whose sessions can be saved
CLOSING_SECONDS = 2.0  # for exit functions and buffers of files; a thread that never ends delays the end no longer than this
LONGEST_REPR = 10_000  # characters
LONGEST_REMARK, MOST_REMARKS = 500, 10  # characters of a remark of the shell, and remarks of one turn
_NO_MORE = codec.packed(None)
# In the guest, without and with a timeline; preloaded, because its view may not show our package.
_SHELL_MODULES = ("agent_sandbox.runtime.guest.shell", "agent_sandbox.runtime.guest.shell_steps")


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
    """Runs turns in one interpreter, one at a time, from any thread. The turns are Python code, or with `Work.shell` bash code."""

    def __init__(self, session: Session, work: Work, resumption: Resumption | None = None) -> None:
        """`work` is common to all turns: environment, directory, arguments, tools, preloaded modules.

        With `resumption`, the interpreter goes on from a saved state: call `resume` before any turn.
        """
        self.id = os.urandom(8).hex()
        self.ended = ""  # why there are no more turns
        self.changes = ChangeSet()  # known when the interpreter has ended
        self.listed = False  # whether they are known
        self._session = session
        self._work = work
        self._transfer = StateTransfer(resumption)
        self._attached = Attachments(*attachments_of(work, session, turns=True), self._transfer)
        self._opened: Opened | None = None
        self._ends = ExitStack()  # what the layers of a stored sandbox hold
        self.notes: tuple[str, ...] = ()  # on these layers, once the interpreter has ended
        self._killed = False
        self._count = 0
        self._process = os.getpid()

    def _leave_to_its_own_process(self) -> None:
        """In a forked child of the application, mark this object as ended. The interpreter belongs to the parent process."""
        if self._process != os.getpid():
            self.ended, self._opened = "it belongs to another process, from which this one was forked", None
            self._ends = ExitStack()

    def run(self, turn: Turn) -> Turned:
        """Run one turn. Raises what `Session.run` raises, and `SandboxError` if the interpreter has ended."""
        self._check_that_it_goes_on()
        assert isinstance(self._work.what, Code)
        action = self._session.judged(replace(self._work, what=replace(self._work.what, source=turn.source)))
        message = _packed(turn, PREFIX if self._work.shell else "")
        gate = self._session.gate
        return gate.perform(action, lambda allow: self._deed(turn, message, allow), describe=self._facts, details=lambda: turn.source)

    def rewind(self, recorder: TimelineRecorder, number: int) -> Step:
        """Return to the state before a step of the session's timeline. Raises `SandboxError`."""
        self._check_that_it_goes_on()
        step = recorder.rewind(number)
        self._session.gate.note("session.rewound", {"session": self.id, "turn": self._count, "step": number})
        return step

    def resume(self, turn: Turn, digest: str) -> None:
        """Start the interpreter from the saved state with this digest. Nothing of the program runs. Raises as `run` does, and
        `CheckpointError` if the state does not fit here."""
        self.run(turn)
        self._transfer.end_resumption()
        if self.ended:
            raise CheckpointError(f"the checkpoint cannot be resumed: {self.ended}", hint="allow more memory and time")
        self._session.gate.note("checkpoint.resumed", {"target": digest, "session": self.id})

    def save(self, sink: StateSink, idle: float | None) -> None:
        """Write the state of the interpreter to `sink`; the session goes on. Raises `CheckpointError` if it cannot be saved.

        The guest reads its own memory and files. Of files outside its private directories, it is told which ones have changed.
        """
        self._check_that_it_goes_on()
        opened = self._opened
        if opened is None:
            raise CheckpointError("nothing has run in this session yet", hint="run a turn first")
        if opened.route.runtime != DURABLE:
            why = f"a session on the runtime {opened.route.runtime!r} cannot be saved"
            raise CheckpointError(why, hint='use Sandbox(runtime="wasm"); session(timeline=True) keeps states while a session lasts')
        changed: list[str] = []
        if self._session.policy.files.write:
            changes, unlisted = self._session.changes(opened.guest, self._work)
            if unlisted:
                raise CheckpointError(unlisted[0], hint="save it with fewer changed files")
            changed = [change.path for change in changes]
        limits = opened.guest.launch.limits
        sink.most_bytes = (limits.memory_bytes or MOST_MEMORY) + (limits.disk_bytes or DISK_BYTES) + STATE_BYTES
        order = codec.packed({"save": {"scratch": list(self._transfer.scratch), "changed": changed}})
        self._transfer.receive(sink)
        try:
            _, said = opened.guest.turn(order, self._launch(opened.guest.launch, SAVING_SECONDS, None), idle=idle)
        except BaseException as error:
            self._end(f"saving it was cut off by {type(error).__name__}")
            raise
        finally:
            self._transfer.receive(None)
        if said is None:
            self._end(f"it was {opened.guest.ended().reason.value} while it was saved")
            raise CheckpointError(f"the session was not saved: {self.ended}", hint="allow it more memory and time")
        if sink.error is not None:
            raise sink.error
        try:
            code, why, *_ = _understood(said)
        except ValueError:
            self._end("it answered with an invalid value when it was saved")
            raise CheckpointError(f"the session was not saved: {self.ended}", hint="open another session") from None
        if code:
            raise CheckpointError(f"the session was not saved: {_printable(why)}", hint="the session goes on")

    def note(self, what: str, facts: Facts) -> None:
        """Record a fact about this session in the ledger."""
        self._session.gate.note(what, {**facts, "session": self.id, "turn": self._count})

    def fork(self, recorder: TimelineRecorder, number: int, instead_of: InterpreterTurns | None = None) -> InterpreterTurns:
        """Return turns that go on from the state before a step, in an interpreter of their own. Raises `SandboxError`.

        They take the place of the fork `instead_of`, under its id: that one is to go back to where it began.
        """
        self._check_that_it_lives()
        policy = self._session.policy
        if policy.network.outbound or policy.network.inbound:
            raise SandboxError("a session with a network cannot be forked: a fork has a network of its own", hint="open it without one")
        with recorder.exclusive:
            own = recorder.for_fork(number)
            forked = InterpreterTurns(self._session, replace(self._work, timeline=own))
            if instead_of is not None:
                forked.id, forked._count = instead_of.id, instead_of._count
            assert self._opened is not None
            launch = forked._attached.before(self._opened.guest.launch)
            try:
                guest = recorder.fork(number, launch, own)
            except BaseException:
                forked._attached.release()
                raise
        forked._opened = Opened(guest, self._opened.route, self._opened.notes)
        forked._attached.started(guest)
        self._session.gate.note("session.forked", {"session": self.id, "turn": self._count, "step": number, "fork": forked.id})
        return forked

    def look(self, kind: str, words: str, seconds: float) -> dict[str, Any]:
        """Ask the interpreter itself what a state is asked. It may change by that. Raises `SandboxError`."""
        self._check_that_it_goes_on()
        assert self._opened is not None
        guest = self._opened.guest
        question = codec.packed({"source": f"{LOOK}{kind}\0{words}", "stdin": b""})
        _, said = guest.turn(question, self._launch(guest.launch, seconds, None), idle=None)
        if said is None:
            self._end(f"it was {guest.ended().reason.value} while it was looked at")
            raise SandboxError(f"it gave no answer within {seconds:g} seconds", hint="ask for less, or give it more time: timeout=60")
        with suppress(ValueError):
            match codec.understood(said):
                case {"turn": {"value": dict(value)}}:
                    return value
        raise SandboxError("the state gave no valid answer", hint="the program may have changed how it answers")

    @property
    def fork_guest(self) -> ForkedGuest:
        """The guest of a fork."""
        assert self._opened is not None
        return cast("ForkedGuest", self._opened.guest)

    @property
    def timeline(self) -> TimelineRecorder | None:
        """The recorder of its steps, if it has a timeline."""
        return self._work.timeline

    @property
    def _rests(self) -> bool:
        return self._work.timeline is not None and self._work.timeline.rests

    def use_file(self, request: FileRequest, turn: Turn) -> tuple[FileAnswer, tuple[Outcome, ...]]:
        """Do an operation on a file, in turns like `turn`. Returns the answer and the outcomes, which hold the output of other threads.

        Raises as `run` does, and `SandboxError` if the interpreter ended or gave no valid answer.
        """
        from agent_sandbox.engine.file_access import access_by_turns  # few sessions use files this way

        self._check_that_it_goes_on()
        outcomes: list[Outcome] = []

        def deed(allow: Allow) -> FileAnswer:
            def take(source: str, stdin: bytes) -> object:
                turned = self.take(replace(turn, source=source, stdin=stdin), allow, f"{request.operation} {request.path}")
                outcomes.append(turned.outcome)
                return turned.value

            return access_by_turns(request, take)

        answer = self._session.gate.perform(request.action(), deed, describe=lambda answer: self._told(answer), details=request.details)
        return answer, tuple(outcomes)

    def take(self, turn: Turn, allow: Allow, operation: str) -> Turned:
        """Run code of ours, as a part of an action that the gate has allowed. Raises `SandboxError` if the interpreter ends."""
        self._check_that_it_goes_on()
        turned = self._deed(turn, _packed(turn), allow, operation=operation)
        if self.ended:
            raise SandboxError(f"this session has ended: {self.ended}", hint="open another")
        return turned

    @property
    def memory_kills(self) -> int:
        """How many processes inside were killed so far because the memory limit was reached."""
        return 0 if self._opened is None else self._opened.guest.memory_kills

    def tend(self) -> bool:
        """Enlarge the image of stored layers, if it needs that, while no turn is under way. Return whether this must be done again."""
        opened = self._opened
        if opened is None or opened.stored is None or not opened.stored.grows:
            return False
        opened.stored.grow()
        return True

    def _told(self, answer: FileAnswer) -> Facts:
        return {"status": answer.status, "session": self.id, "turn": self._count}

    def _check_that_it_goes_on(self) -> None:
        self._check_that_it_lives()
        if self._work.timeline is not None:
            self._work.timeline.check_awake()

    def _check_that_it_lives(self) -> None:
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
            self._work.timeline.begin_turn(turn.source, turn.stdin, operation=operation)
        opened = self._opened or self._open(turn)
        if turn.on_start is not None:
            turn.on_start(opened.guest)
        try:
            completed, said = opened.guest.turn(message, self._launch(opened.guest.launch, turn.wall, turn.on_output), idle=turn.idle)
        except BaseException as error:  # a callback raised, so the state of the interpreter is unknown
            self._end(f"its turn {self._count} was cut off by {type(error).__name__}")
            raise
        code, value, described, end = 0, None, None, completed.exit
        remarks: tuple[str, ...] = ()
        if said is not None:
            try:
                code, value, described, remarks = _understood(said)
                end = end if code == end.code else replace(end, code=code)
            except ValueError as error:
                end, said = Exit(137, ExitReason.GARBLED, 9, end.limits_hit, end.usage), None
                opened.guest.refused = f"it ended its turn with an invalid value: {error}"
        completed = completed if end is completed.exit else replace(completed, exit=end)
        outcome = Outcome.of(completed, opened.guest, opened.route, allow, (*opened.notes, *remarks))
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
        what, preload = replace(self._work.what, source=seen), self._work.preload
        if self._work.shell:
            what, preload = replace(what, language="python", source=""), (_SHELL_MODULES[self._work.timeline is not None],)
        try:
            self._opened = self._session.open(replace(self._work, what=what, preload=preload), self._attached, self._ends)
        except BaseException:
            self._ends.close()  # the next turn may try again
            raise
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
            if not self._rests:  # if it does, it ends after its forks
                opened.guest.kill()

    def close(self) -> None:
        """Let the interpreter end like a program, and keep its changes. Do not call it during a turn. It may be called again."""
        self._leave_to_its_own_process()
        try:
            if self._opened is not None and not self._rests:
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
        with self._ends:
            if opened is not None:
                self._ends.callback(self._attached.release)
                self._ends.callback(opened.guest.close)
                if not self._rests:  # else its processes are stopped, and end after its forks
                    opened.guest.kill()
                if look:
                    self._look(opened)

    def _look(self, opened: Opened) -> None:
        """List the changes of throw-away layers, or put stored layers in order."""
        if not self._session.policy.files.write:
            return
        if not self._rests:
            opened.guest.settle()
        if opened.stored is not None:
            self.notes = opened.stored.put_in_order(opened.guest.layers)
        else:
            self.changes, unlisted = self._session.changes(opened.guest, self._work)
            self.listed = not unlisted


def _printable(text: object) -> str:
    return "".join(each if each.isprintable() else "?" for each in str(text)[:1000])


def _packed(turn: Turn, prefix: str = "") -> bytes:
    """Return the message that begins a turn. Raises `PolicyError` if it is too long."""
    try:
        return codec.packed({"source": prefix + turn.source, "stdin": turn.stdin})
    except ValueError as error:
        raise PolicyError(f"the code and input of a turn: {error}", hint="put it into a file, or take several turns") from None


def _understood(said: bytes) -> tuple[int, Any, str | None, tuple[str, ...]]:
    """Return the exit code of a turn, its value or the repr of it, and remarks. They are claims of the program. Raises ValueError."""
    match codec.understood(said):
        case {"turn": {"code": int(code), "value": value, **more}} if 0 <= code <= 255:
            described, remarks = more.get("repr"), more.get("remarks")
            told = [each[:LONGEST_REMARK] for each in remarks if isinstance(each, str)] if isinstance(remarks, list) else []
            return int(code), value, described[:LONGEST_REPR] if isinstance(described, str) else None, _remarks(told)
    raise ValueError("there is no exit code in it")


def _remarks(told: list[str]) -> tuple[str, ...]:
    if not told:
        return ()
    from agent_sandbox.workspace.escape import visible  # few turns are remarked on

    return tuple(f"shell: {visible(each)}" for each in told[:MOST_REMARKS])
