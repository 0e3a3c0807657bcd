"""The entry point of a guest, after all confinement is in force: receive the program, then run it in this process.

This is our last code in the guest. It holds no secret and no privilege; a guest that tampers with it harms only itself.
"""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import SCRIPT
from agent_sandbox.runtime.guest import native, script_runner
from agent_sandbox.runtime.guest_rpc import codec, inside
from agent_sandbox.runtime.guest_rpc.client import Speaker

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from agent_sandbox.runtime.guest.shell import ShellTurns
    from agent_sandbox.runtime.guest.steps import SteppedTurns

# Set by `steps`, `shell` or `shell_steps`, in a zygote that has loaded it: all its runs are such sessions.
session_turns: type[SteppedTurns] | type[ShellTurns] | None = None


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
        native.start(message)
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
        native.refuse(payload, error)
    if script is not None and script["environment"]:
        _use_environment(script["environment"])
    if speaker is not None and message["talk"]["turns"]:
        turns = (
            inside.Turns(names, speaker.ask, codec.spell, script_runner.ended)
            if session_turns is None
            else session_turns(names, speaker, codec.spell, script_runner.ended)
        )
        if script is not None:
            turns.main.__dict__["__file__"] = path
        script_runner.end(turns.main, turns.take())
    _run_to_its_end(path, message["source"], names)


def _run_to_its_end(path: str, source: str, names: Mapping[str, object]) -> NoReturn:
    """Do what `script_runner.run` does, and close the output before the process ends: its reader then looks for the end at once.

    The kernel closes it only after it has freed the memory. The text of `script_runner` belongs to the identity of a recorded run, so this
    is not there.
    """
    code = script_runner._finish(*script_runner._execute(path, source, names))
    os.closerange(1, 3)
    os._exit(code)


def _prepare_interpreter() -> None:
    """Prepare the interpreter for a script, and touch the memory that a script will use, so that it is copied beforehand."""
    script_runner.reseed()
    script_runner.prepare(SCRIPT)
    with suppress(OSError):  # a view may lack this directory; then a script that needs it fails
        native.write_script(SCRIPT, "")  # the program takes its place
    script_runner.give(SCRIPT, {"_": ""}, (), "/")
    del os.environ["_"], sys.path[0]
    _forget_ourselves()


def _forget_ourselves() -> None:
    """Remove our modules from `sys.modules`, so that the script does not find them imported."""
    for name in [name for name in sys.modules if name.startswith("agent_sandbox") and (name + ".").startswith("agent_sandbox.")]:
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
