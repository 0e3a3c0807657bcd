"""A guest that is a native program: receive the program, then execute it. Also what a guest that is Python code does the same way.

Apart from `entry`, because a keeper that was forked for native programs need not load what runs Python code.
"""

from __future__ import annotations

import errno
import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import FAREWELL_FD, PAYLOAD_FD, SCRIPTS

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, NoReturn


def run(payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
    """Report that this guest is ready, receive its program from the supervisor, and execute it.

    The kernel closes the socket when the program starts. Anything sent before is the error message of a program that could not start.
    """
    try:
        ready()
        start(wire.receive(payload)[0])
        raise RuntimeError("this keeper has no interpreter for its guests")
    except BaseException as error:
        refuse(payload, error)


def start(message: dict[str, Any]) -> None:
    """Enter the directory of a program, write its script, if it has one, and execute it. Return if the program is Python code."""
    enter(message["cwd"])
    for path, content in message.get("files", ()):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        _write(path, content)
    if "file" in message:
        write_script(f"{SCRIPTS}/{message['file']}", message["source"])
    if message.get("kept"):  # for an agent of ours that an outer program runs
        for fd in (PAYLOAD_FD, FAREWELL_FD):
            os.set_inheritable(fd, True)
    if "argv" in message:
        _execute(message["argv"], message["env"])


def enter(directory: str) -> None:
    """Change to this working directory. Raises RuntimeError if that fails."""
    try:
        os.chdir(directory)
    except OSError as error:  # a FileNotFoundError would mean that the program is missing
        raise RuntimeError(f"cannot start in {directory!r}: {error.strerror}") from error


def _execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Execute a program as os.execvpe does, but without importing another module: imports through a fresh view are slow."""
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


def refuse(payload: socket.socket, error: BaseException) -> NoReturn:
    """Send the reason why nothing was started, and end the process with 127, 126 or 125."""
    code = 127 if isinstance(error, FileNotFoundError) else 126 if isinstance(error, PermissionError | OSError) else 125
    try:
        payload.sendall(f"{code} {getattr(error, 'strerror', None) or error}".encode(errors="replace"))
    finally:
        os._exit(code)


def write_script(path: str, source: str) -> None:
    """Write the source of a script to `path`, and make the directory for it."""
    # A real file, so that tracebacks show its lines and multiprocessing can import it again.
    content = source.encode("utf-8", "surrogatepass")
    try:
        _write(path, content)
    except FileNotFoundError:
        os.mkdir(os.path.dirname(path))
        _write(path, content)


def _write(path: str, left: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)
