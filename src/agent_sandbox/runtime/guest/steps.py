"""A session's turns, statement by statement, with a checkpoint before each statement that the host wants one for, and before each line.

A checkpoint is a copy of this process that sleeps. Init wakes it; then a copy of the copy goes on from there, and the checkpoint sleeps
again. A checkpoint can be made to fork, too: then the copy of the copy is in namespaces of its own, with other streams and another line to
the host. Nothing here is trusted by the host: a program that tampers with it spoils its own timeline and no other.

What a copy has: all memory, the working directory, and regular files and directories open at the same place. It has no threads, children
and timers, and no pipes, sockets and the like of its own: their other ends are with whoever has them now.
"""

from __future__ import annotations

import _ast
import fcntl
import io
import marshal
import os
import signal
import stat
import sys
from contextlib import nullcontext, suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import namespaces, wire
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.kept_processes import SPLITTING, WAKING
from agent_sandbox.kernel.mappings import shared_for_writing
from agent_sandbox.kernel.syscall_rules import FORK_FLAGS
from agent_sandbox.kernel.wire import FORKED, READY
from agent_sandbox.runtime.guest import entry, look, script_runner
from agent_sandbox.runtime.guest.line_tracer import LineTracer
from agent_sandbox.runtime.guest_rpc.client import Speaker, own_descriptors
from agent_sandbox.runtime.guest_rpc.inside import Turns

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType
    from typing import Any, NoReturn
else:
    from agent_sandbox._fast import sockets as socket

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
_FUTURES = 0x1FFE0000  # the flags of code that `from __future__ import` sets
_LONGEST = 500  # characters of a line or a name
_OURS = 4  # the streams and the line to the host
_LINE = 3
_SQLITE = b"SQLite format 3\0"
_MEMORY = "/memfd:"
_OF_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}
_ALL_SIGNALS = signal.valid_signals()


class _Woken(BaseException):
    """Raised in a copy that was woken, to leave the turn that was under way when its checkpoint was made."""


class KeptFile:
    """A regular file or a directory that this process has open, to be opened again at the same place.

    `numbers` are its descriptors, each with whether children inherit it: copies of a descriptor share one place, and go on to.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.offset = 0 if self.flags & os.O_PATH else os.lseek(fd, 0, os.SEEK_CUR)
        self.numbers = {fd: os.get_inheritable(fd)}

    def join(self, other: KeptFile) -> bool:
        """Take the descriptor of another over, if it is a copy of this one. Return whether it was."""
        fd, theirs = next(iter(self.numbers)), next(iter(other.numbers))
        if (self.path, self.flags, self.offset) != (other.path, other.flags, other.offset) or self.flags & os.O_PATH:
            return False
        # This flag belongs to what copies share, and means nothing for a file.
        fcntl.fcntl(fd, fcntl.F_SETFL, self.flags ^ os.O_NONBLOCK)
        try:
            copied = fcntl.fcntl(theirs, fcntl.F_GETFL) != other.flags
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, self.flags)
        if copied:
            self.numbers |= other.numbers
        return copied

    def is_removed(self) -> bool:
        """Return whether its name leads to another file, or to none: then it cannot be opened again."""
        try:
            return not os.path.samestat(os.lstat(self.path), os.fstat(next(iter(self.numbers))))
        except OSError:
            return True

    def is_being_listed(self) -> bool:
        """Return whether it is a directory whose entries were read in part: another view may have them in another order."""
        return bool(self.offset) and stat.S_ISDIR(os.fstat(next(iter(self.numbers))).st_mode)

    def is_database(self) -> bool:
        """Return whether it may be a database of SQLite, which refuses to write once its file has another number."""
        if "_sqlite3" not in sys.modules or self.flags & os.O_ACCMODE != os.O_RDWR:
            return False
        return os.pread(next(iter(self.numbers)), len(_SQLITE), 0) in (_SQLITE, b"")

    def open_again(self, least: int = 0) -> str:
        """Open it again under the same numbers, from `least` on. Return why that was not possible; empty if it was."""
        try:
            new = os.open(self.path, self.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        try:
            if self.offset:
                os.lseek(new, self.offset, os.SEEK_SET)
            for fd, inheritable in self.numbers.items():
                if fd >= least:
                    os.dup2(new, fd, inheritable=inheritable)
        finally:
            os.close(new)
        return ""


class SteppedTurns(Turns):
    """Takes turns like `Turns`, and asks the host before each statement whether the state is to be kept."""

    def __init__(
        self,
        names: Mapping[str, Any],
        speaker: Speaker,
        spell: Callable[[Any], bytes],
        ended: Callable[[BaseException], int],
    ) -> None:
        super().__init__(names, speaker.ask, spell, ended)
        self._speaker = speaker
        self._error: BaseException | None = None  # what ended the last turn
        self._ask, self._ended = _uninterrupted(self._ask), lambda error: ended(_without_our_frames(error))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # an interrupt ends a turn, and not the session
        self._frame: FrameType | None = None  # of the line before which this process was woken, until its next turn
        self._mask: set[signal.Signals | int] = set()  # of the program, while signals wait
        self._thread_id_at = sc.thread_id_address()
        self._count = 0  # of turns: also of those that a copy takes in the middle of one

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = marshal.loads(self._ask(self._spell(question)))
        return answer

    def _turn(self, name: str, source: str, stdin: bytes) -> dict[str, Any]:
        if source.startswith(look.PREFIX):
            _exchange_score(b"1000")  # what is only looked at is ended before any state when memory runs out
            return {"code": 0, "value": self._look(source)}
        self._count += 1
        name = f"<turn {self._count}>"
        if name == FIRST_TURN:
            name = self.main.__dict__.get("__file__", name)  # of a script, so that errors name it
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="surrogateescape")
        self._lines.kept[name] = (len(source), None, look.lines_of(source), name)
        code, value = 0, None
        self._error = self._frame = None
        tracer = LineTracer(self._line_step)
        try:
            for node, last in _statements(source, name):
                with tracer if self._step(node) else nullcontext():
                    if last is None:
                        exec(node.compiled, self.main.__dict__)
                    else:
                        value = eval(last, self.main.__dict__)
        except _Woken:
            return {"code": 0, "value": None, "woken": True}
        except BaseException as error:
            self._error = error
            code = self._ended(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # it may be anything by now, or nothing
                code = code or 120
        try:
            self._step(None)
        except _Woken:
            return {"code": 0, "value": None, "woken": True}
        except BaseException as error:  # of a signal that came meanwhile
            self._error = error
            code = self._ended(error)
        return {"code": code, "value": value}

    def _look(self, question: str) -> dict[str, Any]:
        """Answer a question about this state, in a copy that is thrown away afterwards."""
        return look.answer(question, self.main.__dict__, self._error, self._frame)

    def _step(self, node: _Statement | None) -> bool:
        """Make a checkpoint before a statement, or without one at the end of the turn, if the host wants one.

        Return whether the lines that the statement executes are steps, too.
        """
        if os.getpid() != self._process:  # a fork of the program's own, which has no timeline
            return False
        return bool(self._keep_at({"step": [0, 0, 0, 0] if node is None else node.place})["lines"])

    def _keep_at(self, step: dict[str, Any], frame: FrameType | None = None) -> dict[str, Any]:
        """Tell the host of a step, and make a checkpoint if it wants one. Return what it said.

        Signals wait meanwhile: a handler of the program may raise, as that of an alarm does, and half of a question is none. What one
        raises afterwards passes through.
        """
        before = self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # the handlers of those that have come already run here
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS - _OF_FAULTS)
            wanted = self._asked(step)
            if wanted["keep"]:
                self._keep(frame)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return wanted

    def _line_step(self, frame: FrameType) -> None:
        """Make a checkpoint before a line, if the host wants one."""
        if os.getpid() != self._process or self._speaker.busy:  # busy: it is in a signal handler, or the like, while a tool is called
            return
        code, line = frame.f_code, frame.f_lineno
        lines = self._lines.kept.get(code.co_filename, (0, None, [], ""))[2]
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        self._keep_at({"line": line, "function": code.co_qualname[:_LONGEST], "text": text[:_LONGEST]}, frame)

    def _keep(self, frame: FrameType | None = None) -> None:
        """Make a checkpoint of this process, and go on. A copy of it that is woken later goes on here, too, and leaves the turn.

        It raises `_Woken`. In the middle of a statement, before a line of `frame`, that would run whatever cleans up in the program: there
        the copy takes its turns where it is, and what is under way never goes on.
        """
        for stream in (sys.stdout, sys.stderr):  # what is in a buffer would be written by the copy, too
            with suppress(Exception):
                stream.flush()
        held = _held()
        try:
            files = _files(held)
            if why := _obstacle(held, files):
                raise OSError(why)
            directory, lost = os.getcwd(), _lost(held)
            child, forked = self._copy(files, directory)
        except OSError as error:  # also if there are too many processes, or its directory has gone: the program goes on without a state
            self._asked({"unkept": error.strerror or str(error)})
            return
        if child == 0:
            self._process = os.getpid()
            self._speaker.take_over()
            if forked:
                self._speaker.begin()
            else:
                _open_again(files, directory)
            if frame is None:
                raise _Woken
            self._stay(frame)
        if self._asked({"kept": child, "lost": lost, "by": self._process})["moved"]:
            self._asked({"reopened": _open_again(files, directory)})

    def _copy(self, files: list[KeptFile], directory: str) -> tuple[int, bool]:
        """Make a copy of this process. Return its pid; in the copy 0, once it is woken, and whether it is a fork."""
        before = _withdraw()  # already here: the copy has no moment in which the program reaches it, nor one in which waking would end it
        forked = False
        try:
            if (child := sc.clone(sc.CLONE_PARENT, self._thread_id_at)) == 0:
                forked = _sleep(files, directory, self._thread_id_at)
        finally:
            _come_forward(*before, forked=forked)
        return child, forked

    def _stay(self, frame: FrameType) -> NoReturn:
        """Take turns before a line, inside the tracer's call, until there are no more."""
        self._frame = frame
        sys.settrace(None)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # the caller's block ends only where this call returns
        script_runner.end(self.main, sys.call_tracing(self.take, ()))


class _Statement:
    """One statement of a turn: where it is, and its code."""

    def __init__(self, place: list[int], compiled: CodeType) -> None:
        self.place, self.compiled = place, compiled  # the place: first line, column in bytes, last line, column


def _statements(source: str, name: str) -> Iterator[tuple[_Statement, CodeType | None]]:
    """Yield the top-level statements of a program; the last one with its value, if it is an expression. All are compiled first."""
    tree: Any = compile(source, name, "exec", _ONLY_AST, dont_inherit=True)
    flags, found = 0, []
    for place, node in enumerate(tree.body):
        code = compile(_ast.Module([node], []), name, "exec", flags, dont_inherit=True)
        flags |= code.co_flags & _FUTURES
        value = None
        if type(node).__name__ == "Expr" and place == len(tree.body) - 1:
            value = compile(_ast.Expression(node.value), name, "eval", flags, dont_inherit=True)
        decorators = getattr(node, "decorator_list", ())
        start = [decorators[0].lineno, 0] if decorators else [node.lineno, node.col_offset]
        found.append((_Statement([*start, node.end_lineno, node.end_col_offset], code), value))
    yield from found


def _sleep(files: list[KeptFile], directory: str, thread_id_at: int) -> bool:
    """Sleep as a checkpoint. Returns in a copy, when this checkpoint is woken; the checkpoint itself never does, and ends if it fails.

    Return whether the copy is a fork, which has opened its files again.
    """
    try:
        return _sleep_until_woken(files, directory, thread_id_at)
    except BaseException:  # a second program must not go on
        os._exit(1)


def _sleep_until_woken(files: list[KeptFile], directory: str, thread_id_at: int) -> bool:
    os.setsid()  # signals to the group of the program do not reach it
    while True:
        if signal.sigwaitinfo({WAKING, SPLITTING}).si_signo == SPLITTING:
            if _split():
                _become_fork(files, directory, thread_id_at)
                return True
        # A child of init, which learns of its end. What the program and its modules do after a fork is not done: `random` would begin a
        # new series, and a state is to go on exactly as it was. There is one thread, so no lock is held by another.
        elif not sc.clone(sc.CLONE_PARENT, thread_id_at):
            os.setsid()
            return False


def _withdraw() -> tuple[set[signal.Signals | int], bytes]:
    """Put this process out of the program's reach. Return what `_come_forward` needs."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
    score = _exchange_score(b"1000")  # when memory runs out, the kernel ends states, and not the program
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # its memory is closed, and so are its files in /proc
    return mask, score


def _come_forward(mask: set[signal.Signals | int], score: bytes, *, forked: bool) -> None:
    """Take back `_withdraw`. When memory runs out, states are ended first, then forks, then the session that they are of."""
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    _exchange_score(b"500" if forked else score)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exchange_score(score: bytes) -> bytes:
    """Set how soon the kernel ends this process when memory runs out. Return what it was."""
    before = b"0"
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:
        before = file.read(32)
        file.write(score)
    return before


def _split() -> bool:
    """Make a copy of this checkpoint in new namespaces. Return whether this is the copy. The host decides whether it may be."""
    try:
        return sc.clone(FORK_FLAGS) == 0
    except OSError:
        os.write(_LINE, FORKED)  # the host sees who says it
        return False


def _become_fork(files: list[KeptFile], directory: str, thread_id_at: int) -> None:
    """In the first process of a fork's pid namespace: get a view, streams and a line to the host. Return in the program, a child of it.

    It gives up the power over its new namespaces, and the host makes sure of that before it lets the program begin.
    """
    sc.prctl(sc.PR_SET_DUMPABLE, 1)  # the host prepares it through /proc
    namespaces.drop_capabilities()
    _exchange_score(b"500")
    with socket.socket(fileno=os.dup(_LINE)) as line:
        line.sendall(FORKED)
        _, given = wire.receive_descriptors(line, 1)
    for number, fd in zip((_LINE, 0, 1, 2), given, strict=True):
        os.dup2(fd, number, inheritable=number < _LINE)
    _close_all_but({fd for file in files if not file.open_again(_OURS) for fd in file.numbers})
    os.chdir(directory)
    os.write(_LINE, READY)
    if os.read(_LINE, 1) != READY:
        os._exit(1)
    for file in files:  # the host has seen that it uses the streams that it was given; the program had sent one elsewhere
        if min(file.numbers) < _OURS and file.open_again():
            os._exit(1)
    if (program := sc.clone(0, thread_id_at)) == 0:
        os.setsid()
        return
    _wait_as_init(program)


def _wait_as_init(program: int) -> NoReturn:
    """Reap every process of this pid namespace until the program ends. Then this one ends, and the kernel ends all others.

    It stays open to the program: it has nothing that the program lacks, and so its memory can be counted without a cgroup, too.
    """
    sc.close_range(0, 0xFFFFFFFF)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _close_all_but(files: set[int]) -> None:
    """Close pipes, sockets and directories, which lead to others, and all that could not be opened again."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if int(name) >= _OURS and int(name) not in files:
                with suppress(OSError):
                    os.close(int(name))


def _held() -> list[tuple[int, str]]:
    """Return the descriptors of the program, each with what it leads to. Our own are left out, and streams that are still pipes of ours."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with suppress(OSError):  # of the list itself
            if fd != _LINE and fd not in own_descriptors:
                path = os.readlink(f"/proc/self/fd/{name}")
                if fd >= _OURS or path.startswith("/"):
                    held.append((fd, path))
    return [(fd, path) for fd, path in held if not path.startswith("/proc/")]


def _files(held: list[tuple[int, str]]) -> list[KeptFile]:
    """Return the files and directories among descriptors, each with all of its copies."""
    files: list[KeptFile] = []
    for fd, path in held:
        if path.startswith("/") and not path.startswith(_MEMORY):
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                file = KeptFile(fd, path)
                if not any(each.join(file) for each in files):
                    files.append(file)
    return files


def _obstacle(held: list[tuple[int, str]], files: list[KeptFile]) -> str:
    """Return why a copy of this process would not be the same; empty if it would."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads, and a copy would have one"
    if shared_for_writing("/proc/self"):
        return "it has memory that all its copies share (mmap), so later changes would change this state"
    if any(path.startswith(_MEMORY) for _, path in held):
        return "it has a file in memory open that all its copies share (memfd), so later changes would change this state"
    for file in files:
        if file.is_removed():
            return f"it has {file.path} open, which was removed or replaced"
        if file.is_being_listed():
            return f"it has read the directory {file.path} in part"
        if file.is_database():
            return f"it has {file.path} open for SQLite, which would not write to a copy of it"
    return ""


def _open_again(files: list[KeptFile], directory: str) -> list[str]:
    """Open the files again, and enter the directory again: the same paths may lead to other layers now. Return what could not be done."""
    problems = [problem for file in files if (problem := file.open_again())]
    try:
        os.chdir(directory)
    except OSError as error:
        problems.append(f"{directory}: {error.strerror}")
    return problems


def _lost(held: list[tuple[int, str]]) -> dict[str, int]:
    """Return what a copy of this process would not have as it was, with the number of each kind, such as children, pipes and sockets."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = len(file.read().split())
    kinds = [_kind(fd, path) for fd, path in held]
    counted = {"children": children, **{kind: kinds.count(kind) for kind in ("pipes", "sockets", "terminals", "event descriptors")}}
    counted["timers"] = sum(bool(signal.getitimer(which)[0]) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF))
    return {kind: count for kind, count in counted.items() if count}


def _kind(fd: int, path: str) -> str:
    """Return of what kind a descriptor is that copies do not have of their own; empty if they do."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return "pipes" if stat.S_ISFIFO(mode) else "sockets"
    if path.startswith(("/dev/ptmx", "/dev/pts/")):
        return "terminals"
    return "" if path.startswith("/") else "event descriptors"  # such as epoll, eventfd, timerfd, inotify


FIRST_TURN = "<turn 1>"
_FILE = (lambda: None).__code__.co_filename


def _uninterrupted(ask: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return a function that asks as `ask` does, and is not cut off by an interrupt: an interrupt is for the program of a turn."""

    def asked(question: bytes) -> bytes:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return ask(question)
        finally:
            if signal.SIGINT not in before:
                signal.sigtimedwait({signal.SIGINT}, 0)  # one that came too late for the last turn must not end the next
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return asked


def _without_our_frames(error: BaseException) -> BaseException:
    """Return the error of a turn without frames of this module below the first: an interrupt between two statements has some."""
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None and trace.tb_next.tb_frame.f_code.co_filename == _FILE:
        trace.tb_next = None
    return error


entry.session_turns = SteppedTurns
