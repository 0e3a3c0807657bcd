"""What runs inside, once everything is in force: take the payload, then become the program.

This is our last code in the guest. It holds no secret and no power; a guest that tampers with it tampers with itself.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import SCRIPT, SCRIPTS
from agent_sandbox.runtime.guest import script_runner
from agent_sandbox.runtime.guest_rpc import codec, inside
from agent_sandbox.runtime.guest_rpc.client import Speaker

if TYPE_CHECKING:
    from typing import NoReturn


def run(payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
    """Say that we are ready, receive what to run, and run it.

    The socket closes as the program starts, or says so where a conversation goes on over it; before that, bytes on it say why it could not.
    """
    speaker, names = None, {}
    try:
        if python:
            _prepare_interpreter()
        ready()
        message, _ = wire.receive(payload)
        enter(message["cwd"])
        if "file" in message:
            write_script(f"{SCRIPTS}/{message['file']}", message["source"])
        if "argv" in message:
            _execute(message["argv"], message["env"])
        script_runner.give(SCRIPT, message["env"], message["arguments"], message["cwd"])
        if "talk" in message:
            speaker = Speaker(payload)
            names = inside.offered(message["talk"]["tools"], speaker.ask, codec.spell)
            speaker.begin()
        else:
            payload.close()
    except BaseException as error:
        refuse(payload, error)
    _forget_ourselves()
    if speaker is not None and message["talk"]["turns"]:
        turns = inside.Turns(names, speaker.ask, codec.spell, script_runner.ended)
        script_runner.end(turns.main, turns.take())
    script_runner.run(SCRIPT, message["source"], names)


def enter(directory: str) -> None:
    """Make it the working directory."""
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


def refuse(payload: socket.socket, error: BaseException) -> NoReturn:
    """Say why nothing was started, and end."""
    code = 127 if isinstance(error, FileNotFoundError) else 126 if isinstance(error, PermissionError | OSError) else 125
    try:
        payload.sendall(f"{code} {getattr(error, 'strerror', None) or error}".encode(errors="replace"))
    finally:
        os._exit(code)


def _prepare_interpreter() -> None:
    """What a script will find, and what it will touch."""
    with suppress(OSError):  # a view may have no such place; then a script that needs it says so
        os.mkdir(SCRIPTS)
    script_runner.reseed()
    script_runner.prepare(SCRIPT)


def _forget_ourselves() -> None:
    """The script's own import of anything starts afresh."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "agent_sandbox"]:
        del sys.modules[name]


def write_script(path: str, source: str) -> None:
    """Write code where it is run from."""
    # A real file, so that tracebacks show its lines and multiprocessing can import it again.
    with suppress(FileExistsError):
        os.mkdir(os.path.dirname(path))
    with open(path, "wb", buffering=0) as file:
        left = memoryview(source.encode("utf-8", "surrogatepass"))
        while left:
            left = left[file.write(left) :]
