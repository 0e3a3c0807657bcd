"""The recorder of a timeline: an attachment that answers the guest before each statement, and returns to the states that were kept.

A fork of a state has a recorder of its own, which notes its steps and keeps no states. They are reached from the state that it was made
from, in another fork, by running its statements again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.timeline.tree import LOOK_SECONDS, State, Step, StepTree, described
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.runtime.base import Nonsense, StateNotKept
from agent_sandbox.runtime.guest.look import PREFIX, lines_of
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.runtime.process.zygote import ONE_THREAD, STEPS_MODULE

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.runtime.base import Completed, Guest, Launch
    from agent_sandbox.runtime.process.checkpoints import Checkpoints
    from agent_sandbox.runtime.process.guest_handle import ProcessGuest

LOST = ("children", "pipes", "sockets", "terminals", "event descriptors", "timers")
LONGEST_TEXT = 500  # characters of a statement, a reason or an error that a step shows
MOST_STEPS = 100_000  # of a session: a program could make them without end
FULL = 0.5  # part of the run's memory above which states are given up
_WITH_COPIES = 4  # times as much as a state itself: measured with tables of many megabytes, which are written often
_SHARE = 10  # at most such a part of the time is spent on measuring
MOST_FORKS = 32  # of one session at once
FORK_BYTES = (
    16 << 20
)  # of memory that a fork uses at once, besides tables of pages: the interpreter writes to every object that it looks at
_TABLES = 128  # tables of pages are a part of the memory of about 1/512, for each of the two processes of a fork; doubled
_LEFT = 0.1  # part of the memory limit that must be left after a fork


class TimelineRecorder(Attachment):
    """Records the steps of one session, and keeps states of it."""

    def __init__(self, *, most: int = 100, lines: bool = False, overhead: float | None = None, chain: tuple[str, ...] = ("1",)) -> None:
        """Keep at most so many states, also before each line if `lines` says so. `chain` are the layers that the session begins on.

        With `overhead`, a state before a statement or a line is kept only while states have taken no more than this part of the time.
        """
        self.tree = StepTree(most=most, chain=chain)
        self._lines = lines
        self._budget = _Budget(overhead)
        self.turn = 0
        self.exclusive = threading.RLock()  # held by whoever gives orders about states: forks run in threads of their own, and tick too
        self._began = time.monotonic()
        self._checkpoints: Checkpoints | None = None  # of the guest, while it runs
        self._memory: int | None = None  # bytes that the run may use
        self._hear: Callable[[bytes], bytes] | None = None
        self._now: Step | None = None
        self._settled = False  # whether nothing writes to frozen layers: once so, it stays so until layers are exchanged or a state wakes
        self._last_statement = 0
        self._look_at = 0.0  # when to look at the memory again
        self._operation = ""  # what the turn that is under way does on a file, if it does no more
        self._source: list[str] = []  # the lines of the turn that is under way
        self._statements: dict[int, str] = {}  # the whole statement of each step
        self._stdin = b""  # of the turn that is under way
        self._inputs: dict[int, bytes] = {}  # what the turn of a step was given to read, if it was given anything

    def before(self, launch: Launch) -> Launch:
        """Let the guest ask before each statement."""
        assert launch.talk is not None  # of a session
        self._hear = launch.talk.hear
        talk = replace(launch.talk, hear=self._answer)
        limits = launch.limits
        self._memory = limits.memory_bytes
        if limits.processes is not None:  # sleeping states are processes, too
            limits = replace(limits, processes=limits.processes + self.tree.most + 3 + 2 * MOST_FORKS)
        return replace(
            launch,
            talk=talk,
            env={**ONE_THREAD, **launch.env},  # a library that computes in threads of its own would keep every state from being kept
            checkpoints=True,
            limits=limits,
            on_tick=(*launch.on_tick, self._tick),
            preload=(*launch.preload, STEPS_MODULE),
        )

    def started(self, guest: Guest) -> None:
        """Receive the guest."""
        self._checkpoints = cast("ProcessGuest", guest).checkpoints  # no other runtime has any

    def release(self) -> None:
        """Forget the guest and its states: they have ended."""
        self._checkpoints = None
        for number in list(self.tree.states):
            self.tree.give_up(number)

    def begin_turn(self, source: str, stdin: bytes = b"", *, operation: str = "") -> None:
        """Count the turn that begins now. One that only does an `operation` on a file has one step, at its end."""
        self.turn += not operation
        self._operation = operation
        self._source, self._stdin = lines_of(source), stdin
        self._last_statement = self.tree.divided = 0
        self._budget.begin_turn()

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Mark the step that raised, after a turn."""
        self._budget.end_turn()
        if completed.exit.code and self._last_statement:
            lines = [line for line in completed.stderr.decode(errors="replace").splitlines() if line.strip()]
            self.tree.change(self._last_statement, error=(lines[-1] if lines else f"exit code {completed.exit.code}")[:LONGEST_TEXT])
        return outcome

    def _answer(self, words: bytes) -> bytes:
        """Answer a question of the guest: about a step, or of another kind."""
        assert self._hear is not None
        if not words.startswith((b'{"step"', b'{"line"', b'{"kept"', b'{"reopened"', b'{"unkept"')):
            return self._hear(words)
        try:
            match codec.understood(words):
                case {"step": [int(line), int(column), int(end), int(end_column)]}:
                    return codec.packed({"keep": self._step(line, column, end, end_column), "lines": self._lines and not self._operation})
                case {"line": int(line), "function": str(function), "text": str(text)} if self._lines and function:
                    return codec.packed({"keep": self._line(line, function, text)})
                case {"kept": int(process), "lost": dict(lost), "by": int(program)}:
                    moved = self._keep(process, lost, program)
                    self._budget.spend()
                    return codec.packed({"moved": moved})
                case {"unkept": str(why)}:
                    self._unkept(why)
                    return codec.packed({})
                case {"reopened": list(problems)}:
                    self._settle([str(each) for each in problems])
                    self._budget.spend()
                    return codec.packed({})
        except ValueError:
            pass
        raise Nonsense("it sent a malformed message about a step")

    def _step(self, line: int, column: int, end: int, end_column: int) -> bool:
        """Note the step that comes now: a statement by its place, or with line 0 the end of the turn. Return whether to keep its state."""
        if (line and self._operation) or not self._has_room():
            return False
        statement = _between(self._source, line, column, end, end_column) if line else ""
        self._now = self.tree.add(self.turn, line, (statement or self._operation)[:LONGEST_TEXT], round(time.monotonic() - self._began, 3))
        self._statements[self._now.number] = statement
        if statement and self._stdin:
            self._inputs[self._now.number] = self._stdin
        if line:
            self._last_statement, self.tree.divided = self._now.number, 0
        if not self.tree.most:
            self._unkept("a fork keeps no states of its own")
            return False
        return (not line or self._affords()) and self._make_room()

    def _line(self, line: int, function: str, text: str) -> bool:
        """Note the line of a function that comes now. What it says is a claim of the program. Return whether to keep its state."""
        if self._operation or not self._has_room():
            return False
        shown, at = _printable(text), round(time.monotonic() - self._began, 3)
        self._now = self.tree.add(self.turn, line, shown, at, function=_printable(function))
        self.tree.divided = self._last_statement
        return self._affords() and self._make_room()

    def _affords(self) -> bool:
        """Return whether a state may be kept now. The first one is kept in any case: others are reached from there."""
        if self._budget.allows() or not self.tree.states:
            return True
        self._unkept("it was left out, so that states take no more of the time than was asked for")
        return False

    def _make_room(self) -> bool:
        """Where every state counts in full, give states up before there is one more. Return whether there is memory for it."""
        checkpoints, states, limit = self._checkpoints, self.tree.states, self._memory
        if checkpoints is None or limit is None or checkpoints.shares_memory:
            return True
        while True:
            used, largest = checkpoints.measure()
            fits = used + largest <= limit * (1 - _LEFT)
            if used + largest <= limit * FULL or (fits and len(states) < 2):
                return True
            if not states or (len(states) == 1 and 2 * largest > limit * (1 - _LEFT)):
                self._unkept("the memory limit leaves no room for a copy of the program: max_memory_mb=…")
                return False
            checkpoints.drop(self.tree.give_up(self.tree.least_wanted()).process)

    def _has_room(self) -> bool:
        if len(self.tree.steps) < MOST_STEPS:
            return True
        self._now = None
        return False

    def _keep(self, process: int, lost: dict[str, Any], program: int) -> bool:
        """Keep a copy of the guest that sleeps now, and freeze its files. Return whether its paths lead to new layers now.

        `program` is the process that says so, and waits.
        """
        checkpoints, tree, step = self._checkpoints, self.tree, self._now
        if step is None or checkpoints is None:
            raise Nonsense("it kept a state that nobody wanted")
        checkpoints.keep(process)
        generation = tree.new_generation()
        try:
            moved = checkpoints.advance(generation, tree.chain, program)
        except StateNotKept as error:
            checkpoints.drop(process)
            self._unkept(error.message)
            return False
        self._settled = self._settled and not moved
        # If nothing was moved, the newest layer is empty and will be written to.
        tree.states[step.number] = State(process, tree.chain if moved else tree.chain[1:])
        if moved:
            tree.chain = (generation, *tree.chain)
        counted = [(kind, count) for kind in LOST if isinstance(count := lost.get(kind), int) and count > 0]
        self._now = tree.change(step.number, kept=True, files_changed=moved, lost=described(counted))
        if not moved and not self._settled:
            self._settle([])
        self._thin(memory=checkpoints.shares_memory)  # otherwise room was made before
        while (pair := tree.mergeable()) is not None:
            merged = tree.new_generation()
            checkpoints.merge(*pair, merged)
            tree.merge(*pair, merged)
        return moved

    def _tick(self) -> None:
        """Look at the memory while a statement runs. Called about twenty times a second."""
        if len(self.tree.states) > 1 and (began := time.monotonic()) >= self._look_at and self.exclusive.acquire(blocking=False):
            try:
                with suppress(SandboxError):  # the run has just ended, and its states with it
                    self._thin()
                self._look_at = time.monotonic() + _SHARE * (time.monotonic() - began)
            finally:
                self.exclusive.release()

    def _thin(self, *, memory: bool = True) -> None:
        """Give up states while there are too many, or with `memory` while half of the run's memory is used."""
        assert self._checkpoints is not None
        tree = self.tree
        while len(tree.states) > tree.most or (memory and len(tree.states) > 1 and self._is_full(self._checkpoints)):
            self._checkpoints.drop(tree.give_up(tree.least_wanted()).process)

    def _is_full(self, checkpoints: Checkpoints) -> bool:
        """Return whether half of the run's memory is used, without the state that is just ending."""
        if self._memory is None or checkpoints.memory_bytes <= self._memory * FULL:
            return False
        checkpoints.await_dropped()
        return checkpoints.memory_bytes > self._memory * FULL

    def _settle(self, problems: list[str]) -> None:
        """Give the state up if something still writes to its files."""
        if self._now is None or self._checkpoints is None:
            raise Nonsense("it opened files again that nobody exchanged")
        problems = [*problems, *self._checkpoints.writers()]
        self._settled = not problems
        if problems:
            if (state := self.tree.states.pop(self._now.number, None)) is not None:
                self._checkpoints.drop(state.process)
            self._unkept("; ".join(problems))

    def _unkept(self, why: str) -> None:
        if self._now is None:
            raise Nonsense("it did not keep a state that nobody wanted")
        self._now = self.tree.change(self._now.number, kept=False, why=why[:LONGEST_TEXT])

    def _state(self, number: int) -> tuple[Checkpoints, State]:
        step, state = self.tree.steps.get(number), self.tree.states.get(number)
        if step is None:
            raise SandboxError(f"there is no step {number}", hint=f"there are {len(self.tree.steps)}: see session.timeline")
        if not self.tree.most:
            raise SandboxError(
                "a fork keeps no states of its own", hint="look at one state after the other: inspect() runs to each of them"
            )
        if self._checkpoints is None:
            raise SandboxError("this session has ended, and its states with it", hint="open another")
        if state is None:
            raise SandboxError(f"the state before step {number} is not kept: {step.why}", hint="choose another step: see session.timeline")
        return self._checkpoints, state

    @property
    def rests(self) -> bool:
        """Whether the session rests, because there are forks of it."""
        return self._checkpoints is not None and self._checkpoints.rests

    def check_awake(self) -> None:
        """Raise `SandboxError` if the session rests."""
        if self.rests:
            why = "this session rests while there are forks of it: their processes lie below its own, and it could reach them"
            raise SandboxError(why, hint="close its forks first, or make one more fork and go on in that")

    def check_room(self, number: int, count: int) -> None:
        """Raise `SandboxError` if the state before a step is not kept, or if there is no memory for so many forks of it."""
        checkpoints, _ = self._state(number)
        if not 0 < count <= MOST_FORKS - checkpoints.forks:
            raise SandboxError(
                f"a session has at most {MOST_FORKS} forks at once, and this one has {checkpoints.forks}", hint="close some of them first"
            )
        used = checkpoints.memory_bytes
        needed = count * (used // _TABLES + FORK_BYTES)
        limit = self._memory
        if limit is not None and used + needed > limit * (1 - _LEFT):
            why = f"{count} forks need about {needed >> 20} MB, and the session uses {used >> 20} of its {limit >> 20} MB"
            raise SandboxError(why, hint="make fewer forks, or open the session with more memory: max_memory_mb=…")
        free = available_memory()
        if free is not None and needed > free:
            raise SandboxError(
                f"{count} forks need about {needed >> 20} MB, and this machine has {free >> 20} MB left", hint="make fewer forks"
            )

    def fork(self, number: int, launch: Launch, recorder: TimelineRecorder) -> ProcessGuest:
        """Return a guest that goes on from the state before a step. `recorder` is its own. Raises `SandboxError`."""
        checkpoints, state = self._state(number)
        with self._forgetting(number):
            return checkpoints.fork(state.process, recorder.tree.chain[0], state.chain, launch)

    def for_fork(self, number: int) -> TimelineRecorder:
        """Return the recorder of a fork of the state before a step."""
        _, state = self._state(number)
        recorder = TimelineRecorder(most=0, chain=(self.tree.new_generation(), *state.chain))
        recorder.tree.rooted = True
        return recorder

    def take_over(self, before: TimelineRecorder, number: int) -> None:
        """Take over the steps of a fork in whose place this one is. It is before its first step; if that is `number`, there again."""
        before.tree.begin_again(number, self.tree.chain)
        self.tree, self.turn, self._began = before.tree, before.turn, before._began
        self._statements, self._inputs = before._statements, before._inputs

    def rewind(self, number: int) -> Step:
        """Return to the state before a step: memory and files. Raises `SandboxError` if it is not kept."""
        self.check_awake()
        checkpoints, state = self._state(number)
        self._settled = False
        generation = self.tree.new_generation()
        with self._forgetting(number):
            checkpoints.rewind(state.process, generation, state.chain)
        self.tree.return_to(number, (generation, *state.chain))
        return self.tree.steps[number]

    @contextmanager
    def _forgetting(self, number: int) -> Iterator[None]:
        """In the block, give a state up that turns out to have gone."""
        try:
            yield
        except StateNotKept as error:
            self.tree.give_up(number)
            self.tree.change(number, why=error.message)
            raise

    def again(self, number: int) -> tuple[int, str]:
        """Return the kept step from which a given-up state is reached, and the statements to run again; (number, "") if it is kept.

        Raises `SandboxError` if there is no way.
        """
        if number in self.tree.states or (self.tree.rooted and not number):
            return number, ""
        if number not in self.tree.steps:
            self._state(number)
        start, steps = self.tree.way_to(number)
        if not start and not self.tree.rooted:
            self._state(number)
        if done := [step.text for each in steps if (step := self.tree.steps[each]).text and not step.line]:
            why = f"the state before step {number} was given up, and the caller did something to its files on the way: {done[0]}"
            raise SandboxError(why, hint=f"go back to step {start}, and go on from there yourself")
        return start, "".join(f"{self._statements[each]}\n" for each in steps)

    def commands(self, number: int) -> list[tuple[Step, str, bytes]]:
        """Return the statements to run again, as `again` does, one by one: its step, the statement, and the input of its turn."""
        _, way = self.tree.way_to(number)
        return [(self.tree.steps[each], self._statements[each], self._inputs.get(each, b"")) for each in way if self._statements[each]]

    def futures(self, number: int) -> list[str]:
        """Return the statements `from __future__ import` that came before a step in its turn: they change what the step means."""
        step = self.tree.steps[number]
        before = [each for each in self.tree.line_to(step.parent) if each.turn == step.turn and not each.function]
        return [self._statements[each.number] for each in reversed(before) if each.text.split()[:2] == ["from", "__future__"]]

    def differences(self, old: int, new: int) -> dict[str, str]:
        """Return the files that differ between the states before two steps."""
        (checkpoints, before), (_, after) = self._state(old), self._state(new)
        return checkpoints.compare(before.chain, after.chain)

    def changed_files(self, fork: TimelineRecorder | None = None) -> dict[str, str]:
        """Return the files that differ now from those that the session began with; of a fork of it, with `fork`. Raises `SandboxError`."""
        if self._checkpoints is None:
            raise SandboxError("this session has ended, and its files with it", hint="open another")
        return self._checkpoints.compare((), (fork or self).tree.chain)

    def look(self, number: int, kind: str, words: str = "", *, seconds: float = LOOK_SECONDS) -> dict[str, Any]:
        """Ask the state before a step something. It does not change, whatever the answer takes. Raises `SandboxError`."""
        self.check_awake()
        checkpoints, state = self._state(number)
        self._settled = False
        question = codec.packed({"source": f"{PREFIX}{kind}\0{words}", "stdin": b""})
        with self._forgetting(number), checkpoints.woken(state.process, self.tree.new_generation(), state.chain) as take_turn:
            said = take_turn(question, seconds)
        match codec.understood(said):
            case {"turn": {"value": dict(value)}}:
                return value
        raise SandboxError("the state gave no valid answer", hint="the program may have changed how it answers")


class _Budget:
    """The time that states may take, as a part of the time that turns take."""

    def __init__(self, part: float | None) -> None:
        self._part = part
        self._spent = self._turns = 0.0  # seconds
        self._turn_began = self._asked = time.monotonic()

    def begin_turn(self) -> None:
        self._turn_began = time.monotonic()

    def end_turn(self) -> None:
        self._turns += time.monotonic() - self._turn_began

    def allows(self) -> bool:
        """Return whether a state may be made now; its cost is counted from here."""
        self._asked = now = time.monotonic()
        return self._part is None or self._spent <= self._part * (self._turns + now - self._turn_began)

    def spend(self) -> None:
        """Count what a state has taken, and what it costs later: the kernel copies each page that the program writes to afterwards."""
        now = time.monotonic()
        self._spent += _WITH_COPIES * (now - self._asked)
        self._asked = now


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "�" for each in text[:LONGEST_TEXT])


def _between(lines: list[str], line: int, column: int, end: int, end_column: int) -> str:
    """Return the text between two places, whose columns count bytes."""
    taken = [each.encode(errors="surrogatepass") for each in lines[max(line, 1) - 1 : max(end, 1)]]
    if not taken:
        return ""
    taken[-1] = taken[-1][:end_column]
    taken[0] = taken[0][column:]
    return b"".join(taken).decode(errors="replace")
