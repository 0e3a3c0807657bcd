"""A session's turns, statement by statement, with a checkpoint before each statement that the host wants one for.

A checkpoint is a copy of this process that sleeps. Init wakes it; then a copy of the copy goes on from there, and the checkpoint sleeps
again. Nothing here is trusted by the host: a program that tampers with it spoils its own timeline and no other.

What a copy has: all memory, the working directory, and regular files open at the same place. It has no threads, no children, and no pipes
and sockets of its own: their other ends are with whoever has them now.
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
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.kept_processes import WAKING
from agent_sandbox.runtime.guest import entry, look
from agent_sandbox.runtime.guest_rpc.client import Speaker
from agent_sandbox.runtime.guest_rpc.inside import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType
    from typing import Any

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
_FUTURES = 0x1FFE0000  # the flags of code that `from __future__ import` sets
_OURS = 4  # the streams and the line to the host


class _Woken(BaseException):
    """Raised in a copy that was woken, to leave the turn that was under way when its checkpoint was made."""


class KeptFile:
    """A regular file that this process has open, to be opened again at the same place."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.inheritable = os.get_inheritable(fd)
        self.offset = os.lseek(fd, 0, os.SEEK_CUR)

    def is_removed(self) -> bool:
        """Return whether its name leads to another file, or to none: then it cannot be opened again."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return True

    def open_again(self) -> str:
        """Open it again under the same number. Return why that was not possible; empty if it was."""
        try:
            new = os.open(self.path, self.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        try:
            os.lseek(new, self.offset, os.SEEK_SET)
            os.dup2(new, self.fd, inheritable=self.inheritable)
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
        self._take_over = speaker.take_over
        self._error: BaseException | None = None  # what ended the last turn

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = marshal.loads(self._ask(self._spell(question)))
        return answer

    def _turn(self, name: str, source: str, stdin: bytes) -> dict[str, Any]:
        if source.startswith(look.PREFIX):
            return {"code": 0, "value": look.answer(source, self.main.__dict__, self._error)}
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="surrogateescape")
        self._lines.kept[name] = (len(source), None, source.splitlines(keepends=True), name)
        code, value = 0, None
        self._error = None
        try:
            for node, last in _statements(source, name):
                self._step(node)
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
        return {"code": code, "value": value}

    def _step(self, node: _Statement | None) -> None:
        """Make a checkpoint before a statement, or without one at the end of the turn, if the host wants one."""
        if os.getpid() != self._process:  # a fork of the program's own, which has no timeline
            return
        if self._asked({"step": [0, 0, 0, 0] if node is None else node.place})["keep"]:
            self._keep()

    def _keep(self) -> None:
        """Make a checkpoint of this process, and go on. A copy of it that is woken later goes on here, too, and raises `_Woken`."""
        for stream in (sys.stdout, sys.stderr):  # what is in a buffer would be written by the copy, too
            with suppress(Exception):
                stream.flush()
        held = _held()
        files = [KeptFile(fd, path) for fd, path in held if path.startswith("/") and stat.S_ISREG(os.fstat(fd).st_mode)]
        try:
            if why := _obstacle(files):
                raise OSError(why)
            directory, lost = os.getcwd(), _lost(held)
            child = sc.clone(sc.CLONE_PARENT)
        except OSError as error:  # also if there are too many processes, or its directory has gone: the program goes on without a state
            self._asked({"unkept": error.strerror or str(error)})
            return
        if child == 0:
            _sleep()
            self._process = os.getpid()
            self._take_over()
            _open_again(files, directory)
            raise _Woken
        if self._asked({"kept": child, "lost": lost})["moved"]:
            self._asked({"reopened": _open_again(files, directory)})


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


def _sleep() -> None:
    """Sleep as a checkpoint. Returns in a copy, when this checkpoint is woken; the checkpoint itself never does, and ends if it fails."""
    try:
        _sleep_until_woken()
    except BaseException:  # a second program must not go on
        os._exit(1)


def _sleep_until_woken() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as first:
        first.write("1000")  # when memory runs out, the kernel ends states, and not the program
    os.setsid()  # signals to the group of the program do not reach it
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # nor does the program reach its memory
    while True:
        signal.sigwaitinfo({WAKING})
        between = os.fork()  # twice, so that the copy is a child of init, which learns of its end
        if between:
            os.waitpid(between, 0)
            continue
        if os.fork():
            os._exit(0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as as_before:
            as_before.write("0")
        os.setsid()
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return


def _held() -> list[tuple[int, str]]:
    """Return the descriptors of the program, each with what it leads to. Our own are left out, and memory without a name."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the list itself
            if int(name) >= _OURS:
                held.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return [(fd, path) for fd, path in held if not path.startswith(("/memfd:", "/proc/"))]


def _obstacle(files: list[KeptFile]) -> str:
    """Return why a copy of this process would not be the same; empty if it would."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads, and a copy would have one"
    return next((f"it has {file.path} open, which was removed or replaced" for file in files if file.is_removed()), "")


def _open_again(files: list[KeptFile], directory: str) -> list[str]:
    """Open the files again, and enter the directory again: the same paths may lead to other layers now. Return what could not be done."""
    problems = [problem for file in files if (problem := file.open_again())]
    try:
        os.chdir(directory)
    except OSError as error:
        problems.append(f"{directory}: {error.strerror}")
    return problems


def _lost(held: list[tuple[int, str]]) -> dict[str, int]:
    """Return what a copy of this process would not have, with the number of each: children, pipes and sockets."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = len(file.read().split())
    kinds = [path.partition(":")[0] for _, path in held]
    counted = {"children": children, "pipes": kinds.count("pipe"), "sockets": kinds.count("socket")}
    return {kind: count for kind, count in counted.items() if count}


entry.stepped_turns = SteppedTurns
