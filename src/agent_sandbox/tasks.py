"""A task a sandbox: a coordinator gives each task a fresh sandbox with its own permissions and credentials, and destroys it at the end.

Tasks share nothing. A task sees the files that it names, reaches the hosts that it names, and uses the secrets that it is given; what it
leaves behind is gone, but for its result and the files that it was asked to hand over. These can be given to a later task, by name.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from agent_sandbox._calls import Shell, check_timeout, check_type, words_of
from agent_sandbox._fast.values import replace
from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.experiment.admission import admit, processors
from agent_sandbox.errors import Denied, LedgerBroken, LedgerUnavailable, PolicyError, SandboxError
from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.options import PathLike, Tools
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from agent_sandbox.live import LiveSandbox
    from agent_sandbox.policy.bound_secrets import Secret
    from agent_sandbox.session import SandboxSession

__all__ = ["Coordinator", "Task", "TaskOutcome"]

TaskFunction = Callable[[Sandbox], object]
State = Literal["completed", "failed", "refused", "timed-out", "cancelled", "broken"]
LOOK_AGAIN_SECONDS = 0.1  # at functions that are late, and at the total time
LATE = "its time is over"
FUNCTION_SECONDS = 2.0  # for a function of the caller to notice that its sandbox is gone
ENDING_SECONDS = 30.0  # for threads whose sandboxes were closed, and which only clear away
MOST_BYTES = 64 << 20  # of one file that is handed over
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class Task:
    """One task, and all that it may use. Everything else is forbidden, as in the sandbox of the default settings.

    `work` is Python code (a string), a command (a sequence of words), a bash command line (`shell("…")`), or a function of this program
    that is handed the task's own `Sandbox`. `files` are paths of this machine that it may read. `hosts` are those that it may reach,
    written as `SandboxConfig.network`. `secrets` are credentials that it uses towards them and never sees. `tools` are functions of this
    program that its Python code may call.

    `given` are files, by relative path, that lie in its working directory when it starts. `collect` names files that it hands over there.
    `timeout` is for the whole task. `config` has the other settings, such as `max_memory_mb`. Without it, code is not checked first.
    """

    name: str
    work: str | Sequence[str] | Shell | TaskFunction
    files: Sequence[PathLike] = ()
    hosts: Sequence[str] = ()
    secrets: Sequence[Secret] = ()
    tools: Tools = ()
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are often secrets
    given: Mapping[str, str | bytes] = field(default_factory=dict, repr=False)
    collect: Sequence[str] = ()
    timeout: float | None = None
    config: SandboxConfig | None = None

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_timeout(self.timeout)
        if not _NAME.fullmatch(self.name):
            hint = "use letters, digits, '.', '_' and '-', at most 40, beginning with a letter or a digit"
            raise PolicyError(f"{self.name!r:.60} cannot be the name of a task", hint=hint)
        for path in (*self.given, *words_of("collect", self.collect)):
            check_type("the name of a file", path, str)
            if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise PolicyError(f"{path!r:.80} is not a path below the task's working directory", hint="name it relative, without '..'")
        if callable(self.work) and (self.given or self.collect):
            raise PolicyError("a function reads and writes the files of its sandbox itself", hint="leave out given and collect")
        self.settings()  # raises for settings that cannot be

    def settings(self) -> SandboxConfig:
        """Return all settings of the task's sandbox. Raises `PolicyError` if they cannot be enforced."""
        base = self.config or SandboxConfig(validate_code=False)
        changed: dict[str, Any] = {"env_vars": {**base.env_vars, **self.env_vars}}
        if self.files:
            changed |= {"allow_file_read": True, "allowed_paths": [*base.allowed_paths, *self.files]}
        if self.hosts:
            changed["network"] = tuple(self.hosts)
        if self.secrets:
            changed["secrets"] = tuple(self.secrets)
        if self.tools != ():
            changed["tools"] = self.tools
        if not isinstance(self.work, str) and not callable(self.work):
            changed["allow_subprocess"] = True
        if self.timeout is not None:
            changed |= {"timeout_seconds": self.timeout, "lifetime_seconds": self.timeout}
        return replace(base, **changed)


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of a task. `why` says in words what went wrong; empty if it completed.

    `result` is that of the code or command; None for a function. `value` is the value of the last expression, or what the function
    returned. `files` are those that were to be handed over. They come from the task, which may have written anything.
    """

    name: str
    state: State
    why: str = ""
    result: SandboxResult | None = None
    value: Any = None
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    sandbox_id: str = ""  # in the ledger

    @property
    def success(self) -> bool:
        """Whether the task completed."""
        return self.state == "completed"


class _RunningTask:
    """A task under way, in a thread of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.began = time.monotonic()
        self.sandbox: Sandbox | None = None
        self.over: tuple[State, str] | None = None  # why it is ended from outside
        self._lock = threading.Lock()

    @property
    def late(self) -> bool:
        """Whether the time of the task is over."""
        return self.task.timeout is not None and time.monotonic() - self.began >= self.task.timeout

    def open(self) -> Sandbox:
        """Make the sandbox. Raises `SandboxError` if the task is over already."""
        sandbox = Sandbox(self.task.settings())
        with self._lock:
            self.sandbox = sandbox
            over = self.over
        if over is not None:
            sandbox.close()
            raise SandboxError(over[1], hint="")
        return sandbox

    def end(self, state: State, why: str) -> None:
        """End the task from outside, from any thread: its sandbox is closed, and all its processes are killed."""
        with self._lock:
            self.over = self.over or (state, why)
            sandbox = self.sandbox
        if sandbox is not None:
            sandbox.close()


class Coordinator:
    """Runs tasks, each in a fresh sandbox, as many at once as the machine has processors and memory for.

    `at_once` runs fewer; `total_timeout` ends all that is left then. A task that fails, hangs or is refused does not disturb the others. As
    a context manager it ends all tasks when the block is left, and waits for that.

    >>> with Coordinator() as coordinator:
    ...     tasks = [Task(f"t{n}", f"{n} * {n}") for n in range(3)]
    ...     sorted(outcome.value for outcome in coordinator.run(tasks))
    [0, 1, 4]
    """

    def __init__(self, *, at_once: int | None = None, total_timeout: float | None = None) -> None:
        check_timeout(total_timeout)
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise PolicyError(f"at_once is a number of tasks of at least 1, not {at_once!r}", hint="leave it out for as many as possible")
        self._at_once, self._total = at_once, total_timeout
        self._changed = threading.Condition()
        self._running: dict[str, _RunningTask] = {}
        self._cancelled: set[str] = set()
        self._ended: list[TaskOutcome] = []
        self._fatal: BaseException | None = None
        self._closed = False
        self._busy = False

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskOutcome]:
        """Run tasks, and yield the outcome of each as soon as it ends. Leaving the loop ends the tasks that are left.

        Raises `PolicyError` for names that are taken twice, `RuntimeUnavailable` if memory is short, and what the ledger raises.
        """
        planned = list(tasks)
        for task in planned:
            check_type("each of tasks", task, Task, write='Task("name", work)')
        names = [task.name for task in planned]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PolicyError(f"two tasks are called {twice[0]!r}", hint="give each a name of its own")
        with self._changed:
            if self._closed or self._busy:
                raise SandboxError("this coordinator is closed, or runs other tasks", hint="make another")
            self._busy, self._cancelled, self._fatal = True, set(), None
        try:
            memory = [mb for task in planned if (mb := task.settings().max_memory_mb) is not None]
            wanted = int(max(memory) * (1 << 20)) if memory else None
            at_once = admit(processors(), available_memory(), wanted=wanted, ceiling=None, most=self._at_once, what="task").at_once
        except BaseException:
            self._busy = False
            raise
        return self._conducted(planned, at_once)

    def _conducted(self, waiting: list[Task], at_once: int) -> Iterator[TaskOutcome]:
        began = time.monotonic()
        try:
            while waiting or self._running or self._ended:
                if self._total is not None and time.monotonic() - began >= self._total:
                    self._end_all("timed-out", "the time of all tasks together is over")
                    yield from (TaskOutcome(task.name, "timed-out", "it never ran: the time was over") for task in waiting)
                    waiting.clear()
                if self._closed:
                    yield from (TaskOutcome(task.name, "cancelled", "it never ran") for task in waiting)
                    waiting.clear()
                while waiting and len(self._running) < at_once:
                    task = waiting.pop(0)
                    if task.name in self._cancelled:
                        yield TaskOutcome(task.name, "cancelled", "it never ran")
                    else:
                        self._start(task)
                self._cut_late()
                with self._changed:
                    if self._running and not self._ended and self._fatal is None:
                        self._changed.wait(LOOK_AGAIN_SECONDS)
                    ended, self._ended = self._ended, []
                yield from ended
                if self._fatal is not None:
                    raise self._fatal
        finally:
            self._end_all("cancelled", "the coordinator was left")
            self._settle()
            self._busy = False

    def _start(self, task: Task) -> None:
        running = _RunningTask(task)
        with self._changed:
            self._running[task.name] = running
        threading.Thread(target=self._thread, args=(running,), name=f"task-{task.name}", daemon=True).start()

    def _thread(self, running: _RunningTask) -> None:
        try:
            outcome = _performed(running)
        except BaseException as error:  # the ledger cannot be written: nothing may go on
            with self._changed:
                self._fatal = self._fatal or error
                self._running.pop(running.task.name, None)
                self._changed.notify_all()
            return
        self._finish(running, outcome)

    def _finish(self, running: _RunningTask, outcome: TaskOutcome) -> None:
        with self._changed:
            if self._running.get(running.task.name) is running:  # else it was given up
                del self._running[running.task.name]
                self._ended.append(replace(outcome, seconds=time.monotonic() - running.began))
            self._changed.notify_all()

    def _cut_late(self) -> None:
        """End tasks whose time is over. A run is ended by its own limit, a moment earlier; a function may hang outside of its sandbox."""
        with self._changed:
            late = [each for each in self._running.values() if each.late]
        for each in late:
            each.end("timed-out", LATE)
            if callable(each.task.work) and time.monotonic() - each.began >= (each.task.timeout or 0.0) + FUNCTION_SECONDS:
                self._finish(each, TaskOutcome(each.task.name, "timed-out", f"{LATE}, and its function goes on without its sandbox"))

    def _end_all(self, state: State, why: str) -> None:
        with self._changed:
            running = [*self._running.values()]
        for each in running:
            each.end(state, why)

    def _settle(self) -> None:
        """Wait for the threads. What a function of the caller does without its sandbox is not waited for long."""
        with self._changed:
            self._changed.wait_for(lambda: all(callable(each.task.work) for each in self._running.values()), ENDING_SECONDS)
            self._changed.wait_for(lambda: not self._running, FUNCTION_SECONDS)
            self._running.clear()
            self._ended.clear()

    def cancel(self, name: str) -> None:
        """End one task, from any thread; or keep it from starting. Its outcome says so."""
        with self._changed:
            self._cancelled.add(name)
            running = self._running.get(name)
        if running is not None:
            running.end("cancelled", "it was cancelled")

    def close(self) -> None:
        """End all tasks, from any thread, and take no more. Their outcomes say so. Idempotent."""
        self._closed = True
        self._end_all("cancelled", "the coordinator was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        self._settle()


def _performed(running: _RunningTask) -> TaskOutcome:
    """Run one task to its end, in a sandbox that is gone afterwards. Raises only what the ledger raises."""
    outcome = TaskOutcome(running.task.name, "broken")
    try:
        with running.open() as sandbox:
            outcome = replace(outcome, sandbox_id=sandbox.id)
            outcome = _tried(running.task, sandbox, outcome)
    except (LedgerUnavailable, LedgerBroken):
        raise
    except Denied as refusal:
        outcome = replace(outcome, state="refused", why=str(refusal))
    except Exception as error:  # a mistake in one task is the failure of that task
        broken = isinstance(error, SandboxError | OSError)
        outcome = replace(outcome, state="broken" if broken else "failed", why=f"{type(error).__name__}: {error}"[:500])
    if running.over is not None:
        outcome = replace(outcome, state=running.over[0], why=running.over[1])
    elif outcome.state == "timed-out" or (outcome.state == "broken" and running.late):
        # Its sandbox's own limit was first, perhaps before its work began: the same, in the same words.
        outcome = replace(outcome, state="timed-out", why=LATE)
    return outcome


def _tried(task: Task, sandbox: Sandbox, outcome: TaskOutcome) -> TaskOutcome:
    if callable(task.work):
        return replace(outcome, state="completed", value=task.work(sandbox))
    with _place_of(task, sandbox) as place:
        for path, content in task.given.items():
            place.files.write(path, content)
        result = place.run(task.work)  # type: ignore[arg-type]  # code for a session, words for a live sandbox
        outcome = replace(outcome, result=result, value=result.value, state=_state_of(result), why=result.error or "")
        if not outcome.success:
            return outcome
        files: dict[str, bytes] = {}
        for path in task.collect:
            try:
                files[path] = place.files.read_bytes(path, max_bytes=MOST_BYTES)
            except OSError as error:
                return replace(outcome, state="failed", why=f"it hands over no file {path!r}: {error.strerror}", files=files)
        return replace(outcome, files=files)


def _place_of(task: Task, sandbox: Sandbox) -> SandboxSession | LiveSandbox:
    """Return where the work runs: Python code has tools and a value, and commands have processes."""
    return sandbox.session() if isinstance(task.work, str) else sandbox.live()


def _state_of(result: SandboxResult) -> State:
    if result.exit is None:
        return "refused"
    if result.status is SandboxStatus.TIMEOUT:
        return "timed-out"
    return "completed" if result.success else "failed"
