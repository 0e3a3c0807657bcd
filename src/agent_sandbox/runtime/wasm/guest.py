"""What runs inside the confinement of a wasm guest: an interpreter inside WebAssembly, and around it only what is written here.

The program never sees this process. Should it break out of the engine all the same, it finds itself a guest like any other: no network, no
other program, and of the machine what its view shows.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import wasmtime

from agent_sandbox.kernel import channel
from agent_sandbox.kernel.protocol import FAREWELL, FAREWELL_FD, JAVASCRIPT, SCRIPT, SCRIPTS
from agent_sandbox.runtime.guest import enter, refuse, write_script
from agent_sandbox.runtime.wasm.javascript.interpreter import Broken, Interpreter, prelude
from agent_sandbox.runtime.wasm.machine import Image, Instance, Machine
from agent_sandbox.runtime.wasm.recipe import OURS
from agent_sandbox.runtime.wasm.view import COMPILED, LIBRARY, LIBRARY_INSIDE, VIEW
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, NoReturn

_DIRECTORIES = ((LIBRARY, LIBRARY_INSIDE), (VIEW, "/"))  # as in the images, which remember them by number
_HEAVY = re.compile(r"\b(?:import|from)\s+[\w., ]*\b(?:numpy|pandas)\b")
_MOMENT_MS = 2  # after which nobody is waiting for this guest
_LIKELY = "/tmp"  # where most programs begin
_REHEARSAL = f"""
ours = __import__("sys").modules[{OURS!r}]
ours.reseed()
ours.rehearse_within({SCRIPT!r}, {_LIKELY!r})
"""
_START = "__import__('sys').modules.pop({ours}).start({path}, {source}, {env}, {arguments}, {cwd}, seeded={seeded})"


class Guest:
    """A machine for Python, images to choose from, and one for JavaScript, made in the zygote; `run` is called once in each fork."""

    def __init__(self, python: Machine, images: Mapping[str, Image], javascript: Machine, held: Mapping[str, int]) -> None:
        """`held` are the engine's descriptors of its compiled files, by number. No fork keeps them: they would be to the real files."""
        self._python = python
        self._images = images
        self._javascript = javascript
        self._prelude = prelude()
        self._held = held

    def run(self, payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
        """Say that we are ready, receive what to run, and run it. As in `runtime.guest`."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ours would be told when the program has ended
            self._open_again()
            instance = self._python.instance(_DIRECTORIES)
            ready()
            interpreter, rehearsed = None, not _asked(payload)
            if rehearsed:
                instance.become(self._images["plain"])
                _rehearse(instance)
                interpreter = self._interpreter()
            message, _ = channel.receive(payload)
            enter(VIEW + message["cwd"])
            write_script(f"{VIEW}{SCRIPTS}/{message['file']}", message["source"])
            if message["file"] == JAVASCRIPT:
                ready_made = interpreter or self._interpreter()
                payload.close()
                leave(_drive(lambda: ready_made.run(f"{SCRIPTS}/{JAVASCRIPT}", message)))
            image = "pandas" if _HEAVY.search(message["source"]) else "plain"
            if image != "plain" or not rehearsed:
                instance.become(self._images[image])
            code = _start(message, seeded=rehearsed and image == "plain")
            payload.close()
        except BaseException as error:
            refuse(payload, error)
        leave(_drive(lambda: instance.run(code)))

    def _interpreter(self) -> Interpreter:
        return Interpreter(*self._javascript.fresh(((VIEW, "/"),)), self._prelude)

    def _open_again(self) -> None:
        for name, number in self._held.items():
            fd = os.open(f"{COMPILED}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            if fd != number:
                os.dup2(fd, number, inheritable=False)
                os.close(fd)


def leave(code: int) -> NoReturn:
    """The program has ended: say so, and go. The kernel takes longer to take the engine's memory apart than most programs take."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with suppress(OSError):
        os.write(FAREWELL_FD, FAREWELL.pack(code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024))
    os._exit(code)


def _asked(payload: socket.socket) -> bool:
    """Whether a program comes at once. One who waits for it gains nothing by a rehearsal; a guest of the pool has the time."""
    poller = select.poll()
    poller.register(payload, select.POLLIN)
    return bool(poller.poll(_MOMENT_MS))


def _rehearse(instance: Instance) -> None:
    """Do once what is done for every program, inside and around it: a fork copies each page when it is first written to."""
    instance.run(_REHEARSAL)
    with suppress(OSError):  # a view may have no such place; then a program that needs it says so
        write_script(VIEW + SCRIPT, "")
    _HEAVY.search(_start({"cwd": "/", "env": {}, "arguments": [], "source": ""}, seeded=True))


def _start(message: dict[str, Any], *, seeded: bool) -> str:
    """What makes the interpreter inside run the script, as text: everything in it is quoted, in ASCII."""
    given = {
        "cwd": message["cwd"],
        "env": message["env"],
        "arguments": message["arguments"],
        "source": message["source"],
        "path": SCRIPT,
        "ours": OURS,
        "seeded": seeded,
    }
    return _START.format(**{name: ascii(value) for name, value in given.items()})


def _drive(run: Callable[[], int]) -> int:
    """Run it to its end. A program that breaks the engine's rules ends as one that breaks the processor's: by a signal."""
    try:
        return run()
    except Broken:
        return 1
    except (wasmtime.Trap, wasmtime.WasmtimeError) as trap:
        why = str(trap).strip().rpartition("\n")[2].strip()  # before it, page after page, where in the interpreter
        os.write(2, f"the interpreter was ended: {why}\n".encode(errors="replace"))
        os.kill(os.getpid(), signal.SIGABRT)
        return 128 + signal.SIGABRT
