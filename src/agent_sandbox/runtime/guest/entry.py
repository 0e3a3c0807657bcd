"""The entry point of a guest, after all confinement is in force: receive the program, then run it in this process.

This is our last code in the guest. It holds no secret and no privilege; a guest that tampers with it harms only itself.
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
    """Report that this guest is ready, receive its program from the supervisor, and run it.

    When the program starts, the socket is closed or, if program and host converse, a greeting is sent on it. Anything sent before is the
    error message of a program that could not start.
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
        script = message.get("script")
        path, directory = (SCRIPT, message["cwd"]) if script is None else (script["path"], script["directory"])
        script_runner.give(path, message["env"], message["arguments"], directory)
        if script is not None:
            sys.argv[0] = script["name"]
        if "talk" in message:
            speaker = Speaker(payload)
            names = inside.offered(message["talk"]["tools"], speaker.ask, codec.spell)
            speaker.begin()
        else:
            payload.close()
    except BaseException as error:
        refuse(payload, error)
    _forget_ourselves()
    if script is not None and script["environment"]:
        _use_environment(script["environment"])
    if speaker is not None and message["talk"]["turns"]:
        turns = inside.Turns(names, speaker.ask, codec.spell, script_runner.ended)
        script_runner.end(turns.main, turns.take())
    script_runner.run(path, message["source"], names)


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


def _prepare_interpreter() -> None:
    """Prepare the interpreter for a script, and touch the memory that a script will use, so that it is copied beforehand."""
    with suppress(OSError):  # a view may lack this directory; then a script that needs it fails
        os.mkdir(SCRIPTS)
    script_runner.reseed()
    script_runner.prepare(SCRIPT)


def _forget_ourselves() -> None:
    """Remove our modules from `sys.modules`, so that the script does not find them imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "agent_sandbox"]:
        del sys.modules[name]


def _use_environment(prefix: str) -> None:
    """Give this interpreter the packages of a virtual environment, in place of those of the environment that it was started from."""
    import site  # its files of paths name further directories, such as those of editable installs

    if sys.prefix != sys.base_prefix:
        sys.path[:] = [place for place in sys.path if not place.startswith(sys.prefix + "/")]
    sys.prefix = sys.exec_prefix = prefix
    sys.executable = os.path.join(prefix, "bin", "python")
    for packages in filter(os.path.isdir, site.getsitepackages([prefix])):
        site.addsitedir(packages)


def write_script(path: str, source: str) -> None:
    """Write the source of a script to `path`, and make the directory for it."""
    # A real file, so that tracebacks show its lines and multiprocessing can import it again.
    with suppress(FileExistsError):
        os.mkdir(os.path.dirname(path))
    with open(path, "wb", buffering=0) as file:
        left = memoryview(source.encode("utf-8", "surrogatepass"))
        while left:
            left = left[file.write(left) :]
