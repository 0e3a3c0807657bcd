"""What runs inside, once everything is in force: take the payload, then become the program.

This is our last code in the guest. It holds no secret and no power; a guest that tampers with it tampers with itself.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.kernel import channel
from agent_sandbox.kernel.protocol import SCRIPT, SCRIPTS
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

_REHEARSAL = """
import sys
def words(count):
    return [f"{number}" for number in range(count)]
try:
    print(*words(0), end="", flush=True)
    {}["nothing"]
except KeyError as error:
    print(end="", file=sys.stderr)
"""


def run(payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
    """Say that we are ready, receive what to run, and run it.

    The socket closes as the program starts; before that, bytes on it say why it could not.
    """
    try:
        if python:
            _prepare_interpreter()
        ready()
        message, _ = channel.receive(payload)
        _enter(message["cwd"])
        if "file" in message:
            _write_script(f"{SCRIPTS}/{message['file']}", message["source"])
        if "argv" in message:
            _execute(message["argv"], message["env"])
        _give(message)
        payload.close()
    except BaseException as error:
        _refuse(payload, error)
    _run_script(message["source"])


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:  # not to be mistaken for a program that is not there
        raise RuntimeError(f"cannot start in {directory!r}: {error.strerror}") from error


def _execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """What os.execvpe does, without the module it loads on its way: through a view that has just been made, that takes its time."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    problem: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for directory in env.get("PATH", os.defpath).split(os.pathsep):
        try:
            os.execve(os.path.join(directory, argv[0]), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error if isinstance(problem, FileNotFoundError) else problem
    raise problem


def _refuse(payload: socket.socket, error: BaseException) -> NoReturn:
    code = 127 if isinstance(error, FileNotFoundError) else 126 if isinstance(error, PermissionError | OSError) else 125
    try:
        payload.sendall(f"{code} {getattr(error, 'strerror', None) or error}".encode(errors="replace"))
    finally:
        os._exit(code)


def _prepare_interpreter() -> None:
    """Whatever does not depend on the program, before anybody waits for it: streams, randomness, an empty environment, a first script.

    The rehearsal touches what every script will touch, so that this memory is the guest's own by then, and not copied while it runs.
    """
    os.environ.clear()
    _open_streams()
    _reseed()
    with suppress(OSError):  # a view may have no such place; then a script that needs it says so
        os.mkdir(SCRIPTS)
    exec(compile(_REHEARSAL, SCRIPT, "exec", dont_inherit=True), {"__name__": "__rehearsal__"})
    gc.enable()


def _give(message: dict[str, Any]) -> None:
    """Give this process what a fresh interpreter would have had: its own environment, arguments and search path."""
    os.environ.update(message["env"])
    if "TZ" in os.environ:
        time.tzset()
    sys.argv[:] = [SCRIPT, *message["arguments"]]
    sys.path.insert(0, message["cwd"])


def _open_streams() -> None:
    # Line by line even into a pipe: what was printed before a timeout or a kill must not be lost in a buffer.
    for name, fd, mode, errors in (
        ("stdin", 0, "rb", "surrogateescape"),
        ("stdout", 1, "wb", "surrogateescape"),
        ("stderr", 2, "wb", "backslashreplace"),
    ):
        raw = open(fd, mode, closefd=False)  # noqa: SIM115  lives as long as the process
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=fd != 0)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _write_script(path: str, source: str) -> None:
    # A real file, so that tracebacks show its lines and multiprocessing can import it again.
    with suppress(FileExistsError):
        os.mkdir(SCRIPTS)
    with open(path, "wb", buffering=0) as file:
        left = memoryview(source.encode("utf-8", "surrogatepass"))
        while left:
            left = left[file.write(left) :]


def _reseed() -> None:
    # Guests of one zygote are forks: without this they would all draw the same numbers.
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()


def _run_script(source: str) -> NoReturn:
    main = type(sys)("__main__")
    main.__dict__.update(__file__=SCRIPT, __cached__=None, __builtins__=__builtins__)
    for name in [name for name in sys.modules if name.partition(".")[0] == "agent_sandbox"]:
        del sys.modules[name]  # the script's own import of anything starts afresh
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(source, SCRIPT, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:
        code = _show(error)
    os._exit(_finish(main, code))


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> int:
    """Print the traceback as the interpreter would, without the frame of ours it began in."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _finish(main: ModuleType, code: int) -> int:
    """End as an interpreter ends: threads, exit functions, the script's own objects, streams.

    The rest of an interpreter's teardown is left out: it would touch, and so copy, the memory shared with the zygote, and no one could
    tell.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter reports output that could not be written
    return code
