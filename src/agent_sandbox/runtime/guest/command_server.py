"""The server of a live sandbox: it starts programs, collects their output, waits for them and kills them, each when the host asks for it.

The host sends this text into an interpreter inside the sandbox, so nothing here may import anything of ours. Everything here has the powers
of a program in the sandbox, and no others. Programs that run beside it may change it, so the host takes each answer for the word of a
hostile program.

`answer` takes one request and returns one answer, both data. It never waits longer than the request says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PIECE = 1 << 16  # bytes of one read or write
_MOST_HELD = 4 << 20  # bytes of one stream that wait for the host; a program that prints more waits
_LONGEST_WORD = 100_000  # bytes of a command line that fit into one argument: the kernel takes 128 KiB


class RunningProgram:
    """One program: a thread passes its input and output, and another one waits for its end.

    The program has ended when its first process has. What that process had written until then is collected; output of processes that it
    left in the background is read on and dropped, so that they are not stopped by a full pipe.

    With a terminal, given by its rows and columns, all output is `stdout`, and input is typed while it runs. Processes in the background
    lose their terminal when the program ends.
    """

    def __init__(
        self, words: list[str], cwd: str, env: dict[str, str], stdin: bytes, script: str, terminal: tuple[int, int] | None
    ) -> None:
        self.code: int | None = None
        self.finished = threading.Event()  # the exit code is known and the output complete
        self._script = script
        self._held = {"stdout": bytearray(), "stderr": bytearray()}
        self._lock = threading.Condition()
        self._stdin = memoryview(stdin)
        self._ended, self._end = os.pipe()
        self._master = -1
        try:
            if terminal is None:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(
                    words, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
                )
            else:
                self._process = self._at_terminal(words, cwd, env, terminal)
        except BaseException:
            os.close(self._ended)
            os.close(self._end)
            raise
        threading.Thread(target=self._wait, daemon=True).start()
        threading.Thread(target=self._pass if terminal is None else self._pass_terminal, daemon=True).start()

    def _at_terminal(self, words: list[str], cwd: str, env: dict[str, str], size: tuple[int, int]) -> subprocess.Popen[bytes]:
        """Start the program in a session of its own, on a new terminal."""
        self._master, theirs = os.openpty()

        def take_terminal() -> None:  # in the new process, after its new session; it takes no lock
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            self.resize(*size)
            os.set_blocking(self._master, False)
            return subprocess.Popen(
                words, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take_terminal
            )
        except BaseException:
            os.close(self._master)
            raise
        finally:
            os.close(theirs)

    def type(self, data: bytes) -> int:
        """Type on its terminal. Return how many bytes of it were taken: a program that does not read takes no more at some time."""
        with suppress(OSError), self._lock:
            return os.write(self._master, data) if self._master >= 0 else len(data)
        return 0

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""
        with suppress(OSError), self._lock:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _pass_terminal(self) -> None:
        """Take the output of the terminal until the program has ended. Closing it then hangs up on whatever else is there."""
        poller = select.poll()
        poller.register(self._master, select.POLLIN)
        poller.register(self._ended, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._ended in ready:
                break
            if not self._take(self._master, "stdout"):  # nobody has it open any more, but the program goes on
                poller.unregister(self._master)
        self._drain(self._master, "stdout")
        os.close(self._ended)
        with self._lock:
            os.close(self._master)
            self._master = -1
        self._finish()

    def _wait(self) -> None:
        code = self._process.wait()
        self.code = 128 - code if code < 0 else code
        os.close(self._end)

    def _pass(self) -> None:
        """Pass input and output until all of it is passed."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        streams = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
        given = process.stdin.fileno()
        for fd in (*streams, given):
            os.set_blocking(fd, False)
        poller = select.poll()
        for fd in (*streams, self._ended):
            poller.register(fd, select.POLLIN)
        feeding = bool(self._stdin)
        if feeding:
            poller.register(given, select.POLLOUT)
        else:
            process.stdin.close()
        ended = False
        while streams or not ended:
            for fd, _ in poller.poll():
                if fd == self._ended:
                    ended, gone = True, [each for each, name in streams.items() if not self._drain(each, name)]
                    for each in (self._ended, *gone):
                        poller.unregister(each)
                        streams.pop(each, "")
                    self._finish()
                elif fd in streams and not self._take(fd, streams[fd]):
                    poller.unregister(fd)
                    del streams[fd]
                if feeding and (ended or (fd == given and not self._feed(given))):
                    feeding = False
                    poller.unregister(given)
                    process.stdin.close()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        os.close(self._ended)

    def _finish(self) -> None:
        if self._script and not self.finished.is_set():
            with suppress(OSError):
                os.unlink(self._script)
        self.finished.set()
        with self._lock:
            self._lock.notify_all()

    def _feed(self, fd: int) -> bool:
        """Write some input. Return whether there is more, and somebody who reads it."""
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin[:_PIECE]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self._stdin)

    def _take(self, fd: int, name: str) -> bool:
        """Read some output. Return whether more may come."""
        with self._lock:
            while len(self._held[name]) >= _MOST_HELD and not self.finished.is_set():
                self._lock.wait()
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data and not self.finished.is_set():
            with self._lock:
                self._held[name] += data
                self._lock.notify_all()
        return bool(data)

    def _drain(self, fd: int, name: str) -> bool:
        """Read what the program had written when it ended. Return whether others hold the stream open."""
        while True:
            try:
                data = os.read(fd, _PIECE)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            with self._lock:
                self._held[name] += data
                if len(self._held[name]) > 4 * _MOST_HELD:  # a process in the background goes on writing
                    return True

    def taken(self) -> dict[str, bytes]:
        """Return the output that has arrived since the last call, at most so much that it fits into an answer."""
        with self._lock:
            pieces = {name: bytes(held[:_MOST_HELD]) for name, held in self._held.items()}
            for name, piece in pieces.items():
                del self._held[name][: len(piece)]
            self._lock.notify_all()
        return pieces

    def await_output(self, seconds: float) -> None:
        """Wait so long for output or for the end of the program."""
        with self._lock:
            self._lock.wait_for(lambda: any(self._held.values()) or self.finished.is_set(), seconds)

    @property
    def empty(self) -> bool:
        """Whether all output has been taken."""
        with self._lock:
            return not any(self._held.values())

    def kill(self, number: int) -> None:
        """Kill the program, and all processes of its session or below it. Other signals than SIGKILL are sent to its group alone."""
        if number != signal.SIGKILL:
            with suppress(OSError):
                os.killpg(self._process.pid, number)
            return
        for pid in {self._process.pid, *_below(self._process.pid)}:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _below(root: int) -> list[int]:
    """Return the processes of a session, and those that descend from one of them, as far as /proc tells."""
    parents: dict[int, int] = {}
    found = {root}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        if int(fields[3]) == root:
            found.add(int(name))
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown, found = bool(more), found | more
    return sorted(found)


_programs: dict[str, RunningProgram] = {}
_inputs: dict[str, bytearray] = {}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the host asks for: feed, start, wait, type or kill."""
    return _ANSWERS[request["do"]](request)


def _feed(request: dict[str, Any]) -> dict[str, Any]:
    """Keep a piece of input for a program that will start."""
    _inputs.setdefault(request["id"], bytearray()).extend(sys.stdin.buffer.read())
    return {}


def _start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a program. Answer with an error if that is impossible: its errno by name, and whether the directory is to blame."""
    stdin = bytes(_inputs.pop(request["id"], b""))
    words, script = [*request["words"]], ""
    try:
        if request["script"] and len(os.fsencode(words[-1])) > _LONGEST_WORD:
            fd, script = tempfile.mkstemp(prefix="script-")
            with open(fd, "wb") as file:
                file.write(os.fsencode(words[-1]))
            words = [*words[:-2], script]  # without the option that takes the script as a word
        os.stat(request["cwd"])
        _programs[request["id"]] = RunningProgram(words, request["cwd"], request["env"], stdin, script, request["terminal"])
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or errno.EINVAL
        place = getattr(error, "filename", None) == request["cwd"]
        return {"error": errno.errorcode.get(number, "EIO"), "directory": place}
    return {}


def _wait(request: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a program, for some moments, and return its output so far. `code` is None as long as there may be more."""
    program = _programs[request["id"]]
    if request["lively"]:
        program.await_output(request["seconds"])
    elif program.empty:
        program.finished.wait(request["seconds"])
    over = program.finished.is_set()
    output = program.taken()
    done = over and program.empty
    if done:
        del _programs[request["id"]]
    return {**output, "code": program.code if done else None}


def _type(request: dict[str, Any]) -> dict[str, Any]:
    """Type on the terminal of a program, and change its size if there is one in the request. Answer how much was taken."""
    program = _programs.get(request["id"])
    if program is None:
        return {"taken": 0}
    if request["size"] is not None:
        program.resize(*request["size"])
    data = sys.stdin.buffer.read()
    return {"taken": program.type(data) if data else 0}


def _kill(request: dict[str, Any]) -> dict[str, Any]:
    program = _programs.get(request["id"])
    if program is not None:
        program.kill(request["signal"])
    _inputs.pop(request["id"], None)
    return {}


_ANSWERS = {"feed": _feed, "start": _start, "wait": _wait, "type": _type, "kill": _kill}
