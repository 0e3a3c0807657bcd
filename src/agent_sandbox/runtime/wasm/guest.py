"""The process of a wasm guest: an interpreter inside WebAssembly, and this module around it.

The program inside cannot see this process. If the program breaks out of the engine, it is confined like any other guest: no network, no
other program, and only the files of its view.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import select
import signal
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import wasmtime

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import FAREWELL, FAREWELL_FD, INPUTS, JAVASCRIPT, NOT_COUNTED, SCRIPT, SCRIPTS
from agent_sandbox.runtime.guest.native import enter, refuse, write_script
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.runtime.guest_rpc.client import Speaker
from agent_sandbox.runtime.wasm.javascript.interpreter import Broken, QuickJS, prelude
from agent_sandbox.runtime.wasm.machine import DeterministicSettings, Inside, Instance, MemoryImage, WasmMachine
from agent_sandbox.runtime.wasm.recipe import OURS
from agent_sandbox.runtime.wasm.turn_loop import SESSION, TurnLoop
from agent_sandbox.runtime.wasm.view import COMPILED, LIBRARY, LIBRARY_INSIDE, VIEW

if TYPE_CHECKING:
    from typing import Any, NoReturn

MOST = 4096  # inputs recorded: many more than people would look through
_DIRECTORIES = ((LIBRARY, LIBRARY_INSIDE), (VIEW, "/"))  # in the order of the images, which remember them by number
_HEAVY = re.compile(r"\b(?:import|from)\s+[\w., ]*\b(?:numpy|pandas)\b")
_MOMENT_MS = 2  # without a program after this time, nobody waits for this guest
_LIKELY = "/tmp"  # working directory of most programs
_REHEARSAL = f"""
ours = __import__("sys").modules[{OURS!r}]
ours.reseed()
ours.rehearse_within({SCRIPT!r}, {_LIKELY!r})
"""
_RUN = "__import__('sys').modules.pop({ours}).start({path}, {source}, {env}, {arguments}, {cwd}, seeded={seeded})"
_TALK = """
ours = __import__("sys").modules.pop({ours})
ours.begin({path}, {env}, {arguments}, {cwd}, seeded={seeded})
ask, spell, talk = __import__("_host").call, ours.codec.spell, __import__("marshal").loads({talk})
ours.run({path}, {source}, ours.inside.offered(talk["tools"], ask, spell))
"""


class Inputs:
    """Records the files and directories that the program opens, in order of first opening, with their digests at that time."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, str], str] = {}

    def note(self, kind: str, path: str) -> None:
        """Record that the program opens `path`, as named in this process. Not recorded: the interpreter's library, the program's text."""
        if not path.startswith(VIEW) or path.startswith(VIEW + SCRIPTS) or (kind, path) in self._digests or len(self._digests) >= MOST:
            return
        digest = _hash_names(path) if kind == "directory" else _hash_content(path)
        if digest is not None:
            self._digests[kind, path] = digest

    def report(self) -> bytes:
        """Return a line for each input: its kind, its digest, and in hexadecimal the path that the program sees."""
        lines = (f"{kind} {digest} {os.fsencode(path[len(VIEW) :]).hex()}\n" for (kind, path), digest in self._digests.items())
        return "".join(lines).encode()


def _hash_content(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # opened for writing, and not readable
        return None


def _hash_names(path: str) -> str | None:
    try:
        names = sorted(map(os.fsencode, os.listdir(path)))
    except OSError:
        return None
    return hashlib.sha256(b"\0".join(names)).hexdigest()


class Ending:
    """Ends a run without counted fuel, and reports its usage."""

    def begin(self, fuel: int | None) -> None:
        """Do nothing. Called when the program starts; `Counted` starts to count fuel here, up to `fuel`."""

    def leave(self, code: int) -> NoReturn:
        """Report usage and end the process with this exit code, or by signal `-code` if it is below 0."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = -code if code < 0 else (code & 0xFF) << 8
        with suppress(OSError):  # the reader has gone
            os.write(FAREWELL_FD, FAREWELL.pack(status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, self._fuel(), 0))
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)

    def _fuel(self) -> int:
        return NOT_COUNTED


class Counted(Ending):
    """Ends a run with counted fuel, and reports its usage and recorded inputs. Nothing inside WebAssembly can reach the socket."""

    def __init__(self, instance: Inside, socket: socket.socket, inputs: Inputs | None) -> None:
        self._instance, self._socket, self._inputs = instance, socket, inputs

    def begin(self, fuel: int | None) -> None:
        """Start counting fuel, up to `fuel`. What our own code has used before does not count."""
        self._instance.give_fuel(fuel)

    def leave(self, code: int) -> NoReturn:
        """Report the inputs, then report usage and end the process, as `Ending.leave` does."""
        if self._inputs is not None:
            with suppress(OSError):
                self._socket.sendall(INPUTS + self._inputs.report())
        super().leave(code)

    def _fuel(self) -> int:
        return self._instance.fuel_used()


class WasmGuest:
    """Runs a program inside WebAssembly. The zygote makes it, with loaded interpreters and memory images; each fork calls `run` once."""

    def __init__(
        self, python: WasmMachine, images: Mapping[str, Sequence[MemoryImage]], javascript: WasmMachine, held: Mapping[str, int]
    ) -> None:
        """Receive three copies of each image: for the program, for the rehearsal, and one that stays unchanged.

        `held` maps the names of compiled files to the descriptors under which the engine has opened them. These refer to the real files, so
        every fork replaces them by descriptors of the files in its own view.
        """
        self._python = python
        self._images = images
        self._javascript = javascript
        self._prelude = prelude()
        self._held = held

    def run(self, payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
        """Report that we are ready, receive the program and run it, as `runtime.guest.entry.run` does."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would only run after the program has ended
            self._open_again()
            instance: Instance | None = (waiting := self._python.instance(_DIRECTORIES))
            interpreter: QuickJS | None = None
            ready()
            rehearsed = False
            if not _asked(payload):
                rehearsed = self._rehearse(waiting)
                instance = waiting if rehearsed else None
                interpreter = self._interpreter() if rehearsed else None
            message, _ = wire.receive(payload)
            enter(VIEW + message["cwd"])
            write_script(f"{VIEW}{SCRIPTS}/{message['file']}", message["source"])
            inputs = Inputs() if message["watch"] else None
            if message["seed"] is not None or _saved(message) is not None:  # a new instance, because not every guest is rehearsed
                instance, interpreter, rehearsed = None, None, False
            program: Inside
            run: Callable[[], int]
            if message["file"] == JAVASCRIPT:
                machine, program = self._javascript, (script := self._script(message, interpreter, inputs))
                run = partial(script.run, f"{SCRIPTS}/{JAVASCRIPT}", message)
            else:
                machine, program = self._python, (code := self._code(message, instance, rehearsed, inputs))
                run = partial(code.run, _start(message, seeded=rehearsed and _image(message) == "plain"))
            ending = Counted(program, payload, inputs) if machine.counting else Ending()
            ending.begin(message.get("fuel"))
            machine.leave = ending.leave
            if "talk" in message:
                speaker = Speaker(payload)
                machine.door.answer = speaker.ask
                if message["talk"]["turns"] and isinstance(program, Instance):
                    run = self._turns(message, program, speaker, rehearsed)
                speaker.begin()
            elif inputs is None:
                payload.close()
        except BaseException as error:
            refuse(payload, error)
        ending.leave(_drive(run))

    def _rehearse(self, instance: Instance) -> bool:
        """Do in advance the work that every program causes, so that the memory pages it writes to are copied before the program arrives.

        Return False if the engine trapped; then the instance is unusable. The program is run even then: it will show the same fault, and
        the result reports it.
        """
        instance.become(self._images["plain"][1])
        try:
            instance.run(_REHEARSAL)
        except Exception:  # as in `_drive`
            return False
        with suppress(OSError):  # a view may lack this directory; then a program that needs it fails
            write_script(VIEW + SCRIPT, "")
        _HEAVY.search(_start({"cwd": "/", "env": {}, "arguments": [], "source": ""}, seeded=True))
        return True

    def _turns(self, message: dict[str, Any], instance: Instance, speaker: Speaker, rehearsed: bool) -> Callable[[], int]:
        """Return the function that takes the turns of a session: a new one, or one that was saved."""
        image = _image(message)
        loop = TurnLoop(self._python, instance, image, self._images[image][2], speaker)
        self._python.door.answer = loop.answer
        if _saved(message) is not None:
            return lambda: loop.resume(message["talk"]) or loop.run()
        code = _start(message, seeded=rehearsed and image == "plain")
        return lambda: loop.begin(code) or loop.run()

    def _code(self, message: dict[str, Any], instance: Instance | None, rehearsed: bool, inputs: Inputs | None) -> Instance:
        """Return a Python interpreter with the memory image that the program needs: `instance`, or a new one if `instance` is None."""
        image = self._images[_image(message)][0]
        if instance is None:
            determinism = None if message["seed"] is None else _determinism(message, image.size, inputs)
            instance = self._python.instance(_DIRECTORIES, determinism)
        if _image(message) != "plain" or not rehearsed:
            instance.become(image)
        return instance

    def _script(self, message: dict[str, Any], waiting: QuickJS | None, inputs: Inputs | None) -> QuickJS:
        """Return a JavaScript interpreter: `waiting`, or a new one if `waiting` is None or the run is deterministic."""
        if message["seed"] is not None:
            return self._interpreter(_determinism(message, 0, inputs))
        return waiting or self._interpreter()

    def _interpreter(self, determinism: DeterministicSettings | None = None) -> QuickJS:
        interpreter = self._javascript.made(QuickJS, ((VIEW, "/"),), determinism)
        interpreter.prepare(self._prelude)
        return interpreter

    def _open_again(self) -> None:
        for name, number in self._held.items():
            fd = os.open(f"{COMPILED}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            if fd != number:
                os.dup2(fd, number, inheritable=False)
                os.close(fd)


def _asked(payload: socket.socket) -> bool:
    """Return whether a program arrives at once. If so, there is no time for a rehearsal, as there is in a guest of the pool."""
    poller = select.poll()
    poller.register(payload, select.POLLIN)
    return bool(poller.poll(_MOMENT_MS))


def _start(message: dict[str, Any], *, seeded: bool) -> str:
    """Return the code that makes the interpreter run the script. Every value in it is quoted, in ASCII."""
    given = {
        "cwd": message["cwd"],
        "env": dict(sorted(message["env"].items())),
        "arguments": message["arguments"],
        "source": message["source"],
        "path": SCRIPT,
        "ours": OURS,
        "seeded": seeded,
        "talk": codec.packed(message.get("talk")),
    }
    talk = message.get("talk")
    code = _RUN if talk is None else SESSION if talk["turns"] else _TALK
    return code.format(**{name: ascii(value) for name, value in given.items()})


def _image(message: dict[str, Any]) -> str:
    """Return the name of the image that the program begins as."""
    if (saved := _saved(message)) is not None:
        return str(saved["image"])
    return "pandas" if _HEAVY.search(message["source"]) else "plain"


def _saved(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the supervisor says of the session that is resumed; None if there is none."""
    resume: dict[str, Any] | None = (message.get("talk") or {}).get("resume")
    return resume


def _determinism(message: dict[str, Any], least: int, inputs: Inputs | None) -> DeterministicSettings:
    """Return the settings of a deterministic run.

    Its memory limit inside WebAssembly is five eighths of the run's limit, and at least `least`. So it is always the engine, and never the
    kernel, that refuses more memory, at the same moment in every run.
    """
    memory = message["memory"]
    most = None if memory is None else max(memory * 5 // 8, least)
    return DeterministicSettings(message["seed"], most, inputs.note if inputs is not None else lambda *_: None)


def _drive(run: Callable[[], int]) -> int:
    """Run the program to its end and return its exit code, or a negative signal number.

    A trap ends the program by SIGABRT, as a fault of the processor would end a native one; empty fuel ends it by SIGKILL.
    """
    try:
        return run()
    except Broken:
        return 1
    except Exception as trap:  # from the engine, or from a system call of ours that got unusable arguments
        if isinstance(trap, wasmtime.Trap) and trap.trap_code is wasmtime.TrapCode.OUT_OF_FUEL:
            return -signal.SIGKILL
        why = str(trap).strip().rpartition("\n")[2].strip()  # the lines before are pages of the interpreter's stack
        os.write(2, f"the interpreter was ended: {why}\n".encode(errors="replace"))
        return -signal.SIGABRT
