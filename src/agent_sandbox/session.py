"""A Python interpreter, or a shell, that keeps its state between turns. A thin layer over `engine.turns`.

Errors are as in `sandbox`: a problem of the code is a result; a problem of the settings or of this machine is raised.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, get_args

from agent_sandbox import result
from agent_sandbox._calls import (
    CLOSING_SECONDS,
    ENVIRONMENT,
    Run,
    TextListener,
    check_timeout,
    check_type,
    code_of,
    encoded,
    with_variables,
    words_of,
)
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.engine.plan_launch import SCRATCH
from agent_sandbox.engine.tools import named
from agent_sandbox.engine.turns import DURABLE, InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import Denied, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.options import OnOutput, Steps, TurnOptions
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from agent_sandbox.checkpoints import SessionCheckpoint
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.state_transfer import Resumption
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder
    from agent_sandbox.engine.timeline.tree import Step
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.files import SandboxFiles
    from agent_sandbox.timelines import PastState, Rewound, Timeline

__all__ = ["SandboxSession"]

T = TypeVar("T")
STEPS = get_args(Steps)


class SandboxSession:
    """A Python interpreter or a shell in a sandbox, made by `Sandbox.session`. It runs one turn at a time; others wait.

    Variables, imports, functions, the working directory and files stay from turn to turn. `result.value` is the value of the turn's last
    expression, as data. If the value is not data, `result.value` is None and `result.value_repr` is its repr. An exception, or
    `sys.exit()`, ends only its turn; the session goes on. A turn that exceeds its time, or that ends the interpreter, ends the session. Its
    result says why, and from then on `run` raises `SandboxError`.

    In a shell session each turn is a command of bash. Variables, functions, aliases, options, traps, the umask and the working directory
    stay, however the command ends; `exit` ends only its turn. If a command leaves no state, as after `exec`, the state before it stays, and
    `result.notes` say so. Open descriptors and jobs do not stay.

    Wall time and output are limited for each turn; processor time, memory, processes and disk for the session. Between turns nothing is
    read from the interpreter: output and tool calls of its threads wait for the next turn.

    Close a session, best by `with`. If it is only dropped, its interpreter is killed when Python frees it, with a ResourceWarning. In a
    forked child of the application, the session has ended: the interpreter belongs to the parent.

    >>> with Sandbox(validate_code=False).session() as session:
    ...     session.files.write("numbers.txt", "1 2 3")
    ...     session.run("sum(map(int, open('numbers.txt').read().split()))").value
    6
    >>> with Sandbox(allow_subprocess=True).session(language="shell") as session:
    ...     _ = session.run("cd /usr; twice() { echo $1 $1; }")
    ...     session.run("twice $PWD").stdout
    '/usr /usr\\n'
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        env_vars: Mapping[str, str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] = (),
        tools: object = (),
        on_output: OnOutput | None = None,
        timeline: bool = False,
        resumes: tuple[Resumption, int | None] | None = None,
        language: str = "python",
        steps: Steps = "statement",
        overhead: float | None = None,
    ) -> None:
        check_type("sandbox", sandbox, Sandbox, write="Sandbox().session()")
        config = sandbox.config
        check_timeout(timeout)
        TextListener.of(on_output)  # raises TypeError
        self._language = code_of("", language).language
        shell = self._language == "bash"
        _check_language(self._language, sandbox, steps, has_tools=bool(named(tools)))
        handed = {} if shell else {**config._toolbox, **named(tools)}
        recorder = _recorder(steps, overhead, timeline=timeline)
        session = sandbox._within(timeout, tools=handed, deterministic=sandbox.config.deterministic)[0]
        resumption, seed = resumes or (None, None)
        self._seed = config.seed if seed is None else seed  # of a deterministic session
        turns = InterpreterTurns(
            session if resumption is None else replace(session, runtimes=here().runtimes(DURABLE)),
            Work(
                Code(self._language, "", words_of("args", args), sandbox._script),
                with_variables({**ENVIRONMENT, **(_one_thread() if timeline else {}), **config.env_vars}, env_vars),
                cwd=config.cwd,
                preload=() if shell else tuple(config.preload),
                tools=handed,
                ends=sandbox._expires,
                seed=self._seed,
                observe=sandbox._observes and not config.deterministic,
                log_observed=True,
                publish=config._publications(),
                shell=shell,
                timeline=recorder,
            ),
            resumption,
        )
        self._origin: tuple[SandboxSession, int] | None = None  # of a fork: its session, and the step whose state it was made from
        self._begin(sandbox, timeout, on_output, recorder, turns, tools=bool(handed))

    def _begin(
        self,
        sandbox: Sandbox,
        timeout: float | None,
        on_output: OnOutput | None,
        recorder: TimelineRecorder | None,
        turns: InterpreterTurns,
        *,
        tools: bool,
    ) -> None:
        self._sandbox = sandbox
        self._timeout = timeout
        self._on_output = on_output
        self._recorder = recorder
        self._tools = tools
        self._turns = turns
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._taking = 0  # the thread that takes a turn
        self._closing = False
        self._kept: list[Outcome] = []  # of operations on files: what threads of the interpreter printed meanwhile, for the next turn
        self._watch_over()

    def _watch_over(self) -> None:
        """End the interpreter if this object is dropped without being closed."""
        if (before := getattr(self, "_unclosed", None)) is not None:
            before.detach()
        self._unclosed = weakref.finalize(self, _abandon, self._turns, repr(self))
        self._unclosed.atexit = False  # the interpreter ends with this process

    def __repr__(self) -> str:
        return f"<session {self.id} of sandbox {self._sandbox.id}{f', ended: {self._turns.ended}' if self._turns.ended else ''}>"

    @property
    def id(self) -> str:
        """The id of the session in the ledger."""
        return self._turns.id

    @property
    def ended(self) -> str:
        """Why the session has ended; empty before that."""
        return self._turns.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes of all turns together, once the session has ended. Only known if file writes are allowed."""
        return self._turns.changes

    def run(self, code: str, **options: Unpack[TurnOptions]) -> SandboxResult:
        """Run one turn and wait for its end. `input()` reads `stdin`; programs that the turn starts have empty input.

        In a shell session `code` is a command line, whose programs read `stdin`.
        """
        return self._perform(Run(), code, **options)

    @property
    def files(self) -> SandboxFiles:
        """The files that the turns see, to be read, written and listed. Relative paths begin at `working_dir`, by default /tmp.

        An operation waits for the turn that is under way. The interpreter does it, so its program could forge an answer.

        >>> with Sandbox(validate_code=False).session() as session:
        ...     session.run("open('answer.txt', 'w').write('42')").success, session.files.read("answer.txt")
        (True, '42')
        """
        from agent_sandbox.files import SandboxFiles  # few sessions use files this way

        return SandboxFiles(self._use_file, self._sandbox.config.cwd or SCRATCH)

    @property
    def timeline(self) -> Timeline:
        """The steps of this session, made with `timeline=True`: one for each statement or shell command, with the state before it."""
        from agent_sandbox.timelines import Timeline  # few sessions have one

        recorder = self._recording()
        return Timeline(recorder, self.inspect, lambda old, new: self._in_turn(Run(), lambda: recorder.differences(old, new)))

    def rewind(self, step: Step | int) -> Rewound:
        """Return to the state before a step: all variables, and all files that the program may write. The next turn goes on from there.

        What happened since stays in the timeline, as another branch. Processes that the program had started are ended; threads, pipes and
        connections are not restored. A state that was given up is reached by running again what came after the one before it; the result
        says so. Raises `SandboxError` if the state cannot be reached, or if tools or a network would be used again.

        >>> with Sandbox(validate_code=False).session(timeline=True) as session:
        ...     _ = session.run("a = 1; a = 2")
        ...     _ = session.rewind(2)
        ...     session.run("a").value
        1
        """
        from agent_sandbox.timelines import Rewound  # few sessions have a timeline

        recorder, number = self._recording(), step if isinstance(step, int) else step.number
        start, source = self._way_to(recorder, number)
        if self._origin is None:
            self._in_turn(Run(), lambda: self._turns.rewind(recorder, start))
        else:
            self._in_turn(Run(), lambda: self._begin_again(0 if source else number))
            self._turns.note("session.rewound", {"step": number})
        self._run_again(recorder, number, source)
        return Rewound(self.timeline[number], source)

    def _begin_again(self, number: int) -> None:
        """In a fork, go back to the state that it was made from: another fork takes its place. If that is before `number`, be there."""
        session, start = self._beginning()
        recorder = session._recording()

        def make() -> InterpreterTurns:
            recorder.check_room(start, 1)
            turns = session._turns.fork(recorder, start, instead_of=self._turns)
            try:
                turns.fork_guest.let_begin()
                turns.fork_guest.await_begin()
            except BaseException:
                turns.abandon()
                raise
            return turns

        turns = session._in_turn(Run(), make)
        assert turns.timeline is not None
        turns.timeline.take_over(self._recording(), number)
        before, self._turns, self._recorder = self._turns, turns, turns.timeline
        self._watch_over()
        before.abandon()

    def _beginning(self) -> tuple[SandboxSession, int]:
        """Return the session of which this is a fork, and the step whose state it was made from. Raises `SandboxError`."""
        assert self._origin is not None
        session, start = self._origin
        if session.ended:
            why = "this fork cannot go back: the session that it was made from has ended, and its states with it"
            raise SandboxError(why, hint="close a session after its forks")
        return session, start

    def _way_to(self, recorder: TimelineRecorder, number: int) -> tuple[int, str]:
        """Return the kept step from which the state before a step is reached, and what to run again. Raises `SandboxError`."""
        start, source = recorder.again(number)
        config = self._sandbox.config
        if source and (self._tools or config.allow_network or config.network):
            why = f"the state before step {number} was given up, and running again what led to it would use tools or the network again"
            raise SandboxError(why, hint=f"go back to step {start}, and run on from there yourself")
        if source and self._language == "python" and any(stdin for _, _, stdin in recorder.commands(number)):
            why = f"the state before step {number} was given up, and turns that led to it were given input"  # which belongs to its turn
            raise SandboxError(why, hint=f"go back to step {start}, and run on from there yourself")
        if source and any(step.error.startswith("KeyboardInterrupt") for step, _, _ in recorder.commands(number)):
            why = f"the state before step {number} was given up, and a statement that led to it was interrupted: nobody knows where"
            raise SandboxError(why, hint=f"go back to step {start}, and run on from there yourself")
        return start, source

    def _run_again(self, recorder: TimelineRecorder, number: int, source: str) -> None:
        """Run again what led from the last kept state to the state before a step. Raises `SandboxError` if it comes out otherwise."""
        if not source:
            return
        commands = recorder.commands(number)
        turns = (
            _in_turns(commands, recorder.futures)
            if self._language == "python"
            else [(step, [text], stdin) for step, text, stdin in commands]
        )
        steps = self._recording().tree.steps
        for before, statements, stdin in turns:  # what failed then ends its turn, and fails again
            known = len(steps)
            again = self._perform(Run(), "\n".join(statements), stdin=stdin)
            done = [step for step in [*steps.values()][known:] if step.text and not step.function]
            if again.success == bool(before.error) or len(done) != len(statements):
                what = f"running again what led to step {number} came out otherwise: {before.text[:60]!r} ended with {again.exit_code}"
                raise SandboxError(what, hint="see session.timeline")

    def fork(self, step: Step | int | None = None, count: int = 1) -> tuple[SandboxSession, ...]:
        """Return so many sessions that go on from the state before a step, by default from the present one, at the same time.

        Each has all variables and files of that state, and sees no other: files, processes, network and output are its own. Together they
        and this session keep to its limits on memory, processor time and processes. Until its forks are closed, this session rests: its
        processes are stopped, and `run` raises `SandboxError`. It may be closed before them. Pipes, sockets, children and threads of the
        program are not in a fork. A state that was given up is reached by running again what led to it, in each fork. A fork notes its
        steps, and keeps no states: it is rewound, inspected and forked by running its statements again in another fork of the same state,
        while this session is open. Raises `SandboxError` if the state cannot be forked, or if memory is short.

        >>> with Sandbox(validate_code=False).session(timeline=True) as session:
        ...     _ = session.run("a = 1")
        ...     with session.fork()[0] as fork:
        ...         fork.run("a += 1; a").value
        2
        """
        recorder = self._recording()
        number = recorder.tree.present if step is None else step if isinstance(step, int) else step.number
        start, source = self._way_to(recorder, number)
        if self._origin is not None:
            return self._fork_again(recorder, number, source, count)
        made: list[SandboxSession] = []

        def make() -> None:
            recorder.check_room(start, count)
            for _ in range(count):
                turns = self._turns.fork(recorder, start)
                fork = SandboxSession.__new__(SandboxSession)
                fork._language, fork._seed, fork._origin = self._language, self._seed, (self, start)
                fork._begin(self._sandbox, self._timeout, self._on_output, turns.timeline, turns, tools=self._tools)
                made.append(fork)
                with self._sandbox._runs.lock():
                    self._sandbox._sessions.add(fork)  # which closes it at its own end
            for fork in made:  # not earlier: the state was awake until now, and could have reached a program that runs
                fork._turns.fork_guest.let_begin()
            for fork in made:
                fork._turns.fork_guest.await_begin()

        try:
            self._in_turn(Run(), make)
            for fork in made:
                fork._run_again(recorder, number, source)
        except BaseException:
            for fork in made:
                fork.close()
            raise
        return tuple(made)

    def _fork_again(self, recorder: TimelineRecorder, number: int, source: str, count: int) -> tuple[SandboxSession, ...]:
        """Fork the session of which this is a fork once more, and run to a step of this fork in each."""
        session, start = self._beginning()
        made = session.fork(start, count)
        try:
            for fork in made:
                fork._run_again(recorder, number, source)
        except BaseException:
            for fork in made:
                fork.close()
            raise
        return made

    def inspect(self, step: Step | int | None = None) -> PastState:
        """Return the state before a step, to look at; by default the present one. Looking at it changes nothing."""
        from agent_sandbox.timelines import PastState  # few sessions have a timeline

        recorder = self._recording()
        number = recorder.tree.present if step is None else step if isinstance(step, int) else step.number

        def look(kind: str, words: str, seconds: float) -> dict[str, Any]:
            if self._origin is None:
                return self._in_turn(Run(), lambda: recorder.look(number, kind, words, seconds=seconds))
            with self._fork_again(recorder, number, self._way_to(recorder, number)[1], 1)[0] as fork:
                return fork._in_turn(Run(), lambda: fork._turns.look(kind, words, seconds))

        if number not in recorder.tree.steps:
            raise SandboxError(f"there is no step {number}", hint=f"there are {len(recorder.tree.steps)}: see session.timeline")
        return PastState(recorder.tree.steps[number], look)

    def _changed_files(self) -> dict[str, str]:
        """Return the files that this session has changed up to now, by path, each with "new", "changed" or "gone"."""
        session = self if self._origin is None else self._beginning()[0]
        return session._in_turn(Run(), lambda: session._recording().changed_files(self._recording()))

    def checkpoint(self, name: str = "") -> SessionCheckpoint:
        """Save this session to disk, memory and files, and go on. `Sandbox.resume` goes on from there, also in another process.

        Only on the wasm runtime. Raises `CheckpointError` if it cannot be saved: the session goes on, and nothing was kept. Saving counts
        as processor time of the session.
        """
        from agent_sandbox.checkpoints import save  # few sessions are saved

        seed = self._seed if self._sandbox.config.deterministic else None
        return self._in_turn(Run(), lambda: save(self._turns, self._sandbox, name, seed, self._sandbox._time_for(self._timeout)[2]))

    def _resume(self, digest: str) -> None:
        def do() -> None:
            seconds, _, left = self._sandbox._time_for(self._timeout)
            self._turns.resume(Turn(f"# resume the checkpoint {digest}", b"", seconds, left, TextListener.of(self._on_output)), digest)

        self._in_turn(Run(), do)

    def _recording(self) -> TimelineRecorder:
        if self._recorder is None:
            raise SandboxError("this session has no timeline", hint="open it with session(timeline=True)")
        return self._recorder

    def _perform(
        self, run: Run, code: str, *, stdin: str | bytes = b"", timeout: float | None = None, on_output: OnOutput | None = None
    ) -> SandboxResult:
        """Run one turn. `run` is a handle with which another thread can cancel it."""
        source = code_of(code, self._language).source
        check_timeout(timeout)
        listener, given = TextListener.of(on_output or self._on_output), encoded(stdin)
        outcome = self._in_turn(run, lambda: self._result(source, run, given, timeout, listener))
        if listener is not None:
            listener.finish()
        return outcome

    def _in_turn(self, run: Run, do: Callable[[], T]) -> T:
        """Do something while no turn of another thread is under way. Raises `SandboxError` if this session or its sandbox is closed."""
        if self._taking == threading.get_ident():
            raise SandboxError("this session is in a turn, which waits for this call", hint="use another session in it")
        with self._own():
            self._sandbox._runs.begin(run)  # raises if the sandbox is closed now, or its lifetime is over
            self._taking = threading.get_ident()
            status = SandboxStatus.FAILED  # also when an exception passes through
            try:
                done = do()
                status = done.status if isinstance(done, SandboxResult) else self._sandbox._last
            finally:
                self._taking = 0
                if self._closing:
                    self._close()
                self._sandbox._end(run, status)
            return done

    def _own(self) -> threading.Lock:
        """Return the lock. In a forked child it is a new one: a thread that does not exist there may have held the parent's."""
        if self._process != os.getpid():
            self._lock, self._process, self._taking = threading.Lock(), os.getpid(), 0
        return self._lock

    def _use_file(self, run: Run, request: FileRequest) -> FileAnswer:
        def do() -> FileAnswer:
            seconds, _, left = self._sandbox._time_for(self._timeout)
            listener = TextListener.of(self._on_output)
            answer, outcomes = self._turns.use_file(request, Turn("", b"", seconds, left, listener, run.started))
            self._kept += [each for each in outcomes if each.stdout or each.stderr]
            return answer

        return self._in_turn(run, do)

    def _result(self, source: str, run: Run, stdin: bytes, timeout: float | None, listener: TextListener | None) -> SandboxResult:
        about: dict[str, Any] = {"sandbox_id": self._sandbox.id, "language": self._language}
        try:
            seconds, wall, left = self._sandbox._time_for(self._timeout if timeout is None else timeout)
            turned = self._turns.run(Turn(source, stdin, seconds, left, listener, run.started))
            turned = replace(turned, outcome=self._with_earlier_output(turned.outcome))
        except PolicyError as error:
            return self._sandbox._told(result.refused(str(error), **about))
        except Denied as error:
            return self._sandbox._told(result.refused(str(error), verdict=error.verdict, **about))
        except RuntimeUnavailable as error:
            if self._language == "bash" and "bash" in error.missing:
                return self._sandbox._told(result.refused(str(error), **about))
            raise
        outcome = self._sandbox._told(result.completed(turned.outcome, wall=wall, **about))
        return replace(outcome, value=turned.value, value_repr=turned.described)

    def _with_earlier_output(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a turn with what was printed since the turn before, up to the limit on output."""
        kept, self._kept = self._kept, []
        if not kept:
            return outcome
        limit = self._sandbox.config.max_output_bytes
        stdout, stderr = (b"".join(getattr(each, name) for each in (*kept, outcome))[:limit] for name in ("stdout", "stderr"))
        return replace(outcome, stdout=stdout, stderr=stderr)

    def kill(self) -> None:
        """Kill the interpreter, from any thread. A running turn reports it."""
        self._turns.kill()

    def close(self) -> None:
        """End the session; a turn in another thread is killed first. The interpreter runs its exit functions. Idempotent."""
        lock = self._own()
        self._closing = True
        if self._taking == threading.get_ident():  # called by a tool or callback of a turn: the turn closes the session at its end
            self._turns.kill()
            return
        if not lock.acquire(blocking=False):
            self._turns.kill()
            if not lock.acquire(timeout=CLOSING_SECONDS):  # a tool takes long: the turn that waits for it closes the session
                return
        try:
            self._close()
        finally:
            lock.release()

    def _close(self) -> None:
        self._unclosed.detach()
        self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_language(language: str, sandbox: Sandbox, steps: str, *, has_tools: bool) -> None:
    """Raise `PolicyError` for a session that this sandbox cannot have in this language."""
    if language == "python":
        return
    if language != "bash":
        raise PolicyError(f"there are no sessions in {language[:40]!r}", hint='use language="python" or language="shell"')
    if steps == "line":
        raise PolicyError("each command is a step of a shell", hint='leave steps="line" out, or open a Python session')
    if has_tools:
        raise PolicyError("tools are for Python code", hint="leave them out, or open a Python session")
    if not sandbox._session.policy.processes:
        raise PolicyError("a shell session starts programs, and the policy does not permit that", hint="add allow_subprocess=True")


def _recorder(steps: str, overhead: float | None, *, timeline: bool) -> TimelineRecorder | None:
    """Return the recorder of a session with a timeline. Raises ValueError if an option of it is invalid, or given without one."""
    if steps not in STEPS:
        raise ValueError(f'steps is "statement" or "line", not {steps!r:.60}')
    if not timeline:
        if steps != "statement":
            raise ValueError(f"steps={steps!r} needs a timeline: write session(timeline=True, steps={steps!r})")
        if overhead is not None:
            raise ValueError(f"overhead={overhead!r} needs a timeline: write session(timeline=True, overhead={overhead!r})")
        return None
    if overhead is not None and not _is_part(overhead):
        raise ValueError(f"overhead is a part of the time, such as 0.1, not {overhead!r:.60}")
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder  # few sessions have a timeline

    return TimelineRecorder(lines=steps == "line", overhead=overhead)


def _is_part(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _in_turns(commands: list[tuple[Step, str, bytes]], futures: Callable[[int], list[str]]) -> list[tuple[Step, list[str], bytes]]:
    """Join the statements of each turn again, up to one that raised; the last step of each stands for them.

    A statement can end its turn without an error, as `sys.exit()` does. What changes the meaning of a turn comes before its rest.
    """
    joined: list[tuple[Step, list[str], bytes]] = []
    ended = True
    for step, statement, _ in commands:
        if ended or joined[-1][0].turn != step.turn:
            joined.append((step, [*futures(step.number), statement], b""))
        else:
            joined[-1] = (step, [*joined[-1][1], statement], b"")
        ended = bool(step.error)
    return joined


def _one_thread() -> dict[str, str]:
    """Return variables by which numeric libraries start no threads: no state could hold them."""
    from agent_sandbox.runtime.process.zygote import ONE_THREAD  # few sessions have a timeline

    return ONE_THREAD


def _abandon(turns: InterpreterTurns, what: str) -> None:
    """End the interpreter of a session that was dropped without being closed."""
    if turns.running:
        turns.abandon()
        warnings.warn(f"unclosed {what}", ResourceWarning, stacklevel=2)
