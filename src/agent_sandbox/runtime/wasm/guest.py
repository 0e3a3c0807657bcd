"""What runs inside the confinement of a wasm guest: an interpreter inside WebAssembly, and around it only what is written here.

The program never sees this process. Should it break out of the engine all the same, it finds itself a guest like any other: no network, no
other program, and of the machine what its view shows.
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
from agent_sandbox.runtime.guest.entry import enter, refuse, write_script
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.runtime.guest_rpc.client import Speaker
from agent_sandbox.runtime.wasm.javascript.interpreter import Broken, Interpreter, prelude
from agent_sandbox.runtime.wasm.machine import Determinism, Image, Inside, Instance, Machine
from agent_sandbox.runtime.wasm.recipe import OURS
from agent_sandbox.runtime.wasm.view import COMPILED, LIBRARY, LIBRARY_INSIDE, VIEW

if TYPE_CHECKING:
    from typing import Any, NoReturn

MOST = 4096  # that are noted: many more than people would look through


class Inputs:
    """Files and directories, in the order in which the program first opened them, as they were then."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], str] = {}

    def note(self, kind: str, path: str) -> None:
        """It opens this, by the name that it has in our own process. Neither the interpreter's library nor its own text is an input."""
        if not path.startswith(VIEW) or path.startswith(VIEW + SCRIPTS) or (kind, path) in self._found or len(self._found) >= MOST:
            return
        digest = _listing(path) if kind == "directory" else _content(path)
        if digest is not None:
            self._found[kind, path] = digest

    def report(self) -> bytes:
        """A line for each: what it is, its digest, and its path inside in hexadecimal."""
        lines = (f"{kind} {digest} {os.fsencode(path[len(VIEW) :]).hex()}\n" for (kind, path), digest in self._found.items())
        return "".join(lines).encode()


def _content(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # opened to be written, and not readable
        return None


def _listing(path: str) -> str | None:
    try:
        names = sorted(map(os.fsencode, os.listdir(path)))
    except OSError:
        return None
    return hashlib.sha256(b"\0".join(names)).hexdigest()


class Ending:
    """Of a program that nobody counts."""

    def begin(self, fuel: int | None) -> None:
        """The program starts now, with so much fuel at most."""

    def leave(self, code: int) -> NoReturn:
        """End with this exit code, or by this signal if it is below 0."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = -code if code < 0 else (code & 0xFF) << 8
        with suppress(OSError):  # nobody is there any more
            os.write(FAREWELL_FD, FAREWELL.pack(status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, self._fuel()))
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)

    def _fuel(self) -> int:
        return NOT_COUNTED


class Counted(Ending):
    """Of a program that is counted and, with `inputs`, watched. The socket is one that nothing inside WebAssembly can reach."""

    def __init__(self, instance: Inside, socket: socket.socket, inputs: Inputs | None) -> None:
        self._instance, self._socket, self._inputs = instance, socket, inputs

    def begin(self, fuel: int | None) -> None:
        """What was used before, by us, does not count."""
        self._instance.give_fuel(fuel)

    def leave(self, code: int) -> NoReturn:
        """Say what it looked into, and end."""
        if self._inputs is not None:
            with suppress(OSError):
                self._socket.sendall(INPUTS + self._inputs.report())
        super().leave(code)

    def _fuel(self) -> int:
        return self._instance.fuel_used()


_DIRECTORIES = ((LIBRARY, LIBRARY_INSIDE), (VIEW, "/"))  # as in the images, which remember them by number
_HEAVY = re.compile(r"\b(?:import|from)\s+[\w., ]*\b(?:numpy|pandas)\b")
_MOMENT_MS = 2  # after which nobody is waiting for this guest
_LIKELY = "/tmp"  # where most programs begin
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
names = ours.inside.offered(talk["tools"], ask, spell)
if talk["turns"]:
    turns = ours.inside.Turns(names, ask, spell, ours.ended)
    ours.end(turns.main, turns.take())
ours.run({path}, {source}, names)
"""


class Guest:
    """A machine for Python, images to choose from, and one for JavaScript, made in the zygote; `run` is called once in each fork."""

    def __init__(self, python: Machine, images: Mapping[str, Sequence[Image]], javascript: Machine, held: Mapping[str, int]) -> None:
        """Each image is there twice: to rehearse on, and as it was made. `held` are the engine's descriptors of its compiled files, by
        number, which no fork keeps: they would be to the real files."""
        self._python = python
        self._images = images
        self._javascript = javascript
        self._prelude = prelude()
        self._held = held

    def run(self, payload: socket.socket, python: bool, ready: Callable[[], None]) -> NoReturn:
        """Say that we are ready, receive what to run, and run it. As in `runtime.guest.entry`."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ours would be told when the program has ended
            self._open_again()
            instance: Instance | None = (waiting := self._python.instance(_DIRECTORIES))
            interpreter: Interpreter | None = None
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
            if message["seed"] is not None:  # never where somebody has rehearsed: not every guest has; and its memory is needed
                instance, interpreter, rehearsed = None, None, False
            program: Inside
            run: Callable[[], int]
            if message["file"] == JAVASCRIPT:
                machine, program = self._javascript, (script := self._script(message, interpreter, inputs))
                run = partial(script.run, f"{SCRIPTS}/{JAVASCRIPT}", message)
            else:
                machine, program = self._python, (code := self._code(message, instance, rehearsed, inputs))
                run = partial(code.run, _start(message, seeded=rehearsed and not _heavy(message)))
            ending = Counted(program, payload, inputs) if machine.counting else Ending()
            ending.begin(message.get("fuel"))
            machine.leave = ending.leave
            if "talk" in message:
                speaker = Speaker(payload)
                machine.door.answer = speaker.ask
                speaker.begin()
            elif inputs is None:
                payload.close()
        except BaseException as error:
            refuse(payload, error)
        ending.leave(_drive(run))

    def _rehearse(self, instance: Instance) -> bool:
        """Do once what is done for every program, inside and around it: a fork copies each page when it is first written to.

        False when the engine ended it, and then the instance is good for nothing. A rehearsal refuses no program: what is wrong shows again
        when the program runs, and its result says so.
        """
        instance.become(self._images["plain"][1])
        try:
            instance.run(_REHEARSAL)
        except Exception:  # as in `_drive`
            return False
        with suppress(OSError):  # a view may have no such place; then a program that needs it says so
            write_script(VIEW + SCRIPT, "")
        _HEAVY.search(_start({"cwd": "/", "env": {}, "arguments": [], "source": ""}, seeded=True))
        return True

    def _code(self, message: dict[str, Any], instance: Instance | None, rehearsed: bool, inputs: Inputs | None) -> Instance:
        """An interpreter of Python with the image that the program needs: the one that waits, unless all must be as it was made."""
        image = self._images["pandas" if _heavy(message) else "plain"][0]
        if instance is None:
            determinism = None if message["seed"] is None else _determinism(message, image.size, inputs)
            instance = self._python.instance(_DIRECTORIES, determinism)
        if _heavy(message) or not rehearsed:
            instance.become(image)
        return instance

    def _script(self, message: dict[str, Any], waiting: Interpreter | None, inputs: Inputs | None) -> Interpreter:
        """The same of JavaScript."""
        if message["seed"] is not None:
            return self._interpreter(_determinism(message, 0, inputs))
        return waiting or self._interpreter()

    def _interpreter(self, determinism: Determinism | None = None) -> Interpreter:
        made = self._javascript.made(Interpreter, ((VIEW, "/"),), determinism)
        made.prepare(self._prelude)
        return made

    def _open_again(self) -> None:
        for name, number in self._held.items():
            fd = os.open(f"{COMPILED}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            if fd != number:
                os.dup2(fd, number, inheritable=False)
                os.close(fd)


def _asked(payload: socket.socket) -> bool:
    """Whether a program comes at once. One who waits for it gains nothing by a rehearsal; a guest of the pool has the time."""
    poller = select.poll()
    poller.register(payload, select.POLLIN)
    return bool(poller.poll(_MOMENT_MS))


def _start(message: dict[str, Any], *, seeded: bool) -> str:
    """What makes the interpreter inside run the script, as text: everything in it is quoted, in ASCII."""
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
    code = _TALK if "talk" in message else _RUN
    return code.format(**{name: ascii(value) for name, value in given.items()})


def _heavy(message: dict[str, Any]) -> bool:
    return _HEAVY.search(message["source"]) is not None


def _determinism(message: dict[str, Any], least: int, inputs: Inputs | None) -> Determinism:
    """Inside it has less memory than the kernel would let it have: so it is always the engine that refuses more, at the same moment."""
    memory = message["memory"]
    most = None if memory is None else max(memory * 5 // 8, least)
    return Determinism(message["seed"], most, inputs.note if inputs is not None else lambda *_: None)


def _drive(run: Callable[[], int]) -> int:
    """Run it to its end. A program that breaks the engine's rules ends as one that breaks the processor's: by a signal, here below 0."""
    try:
        return run()
    except Broken:
        return 1
    except Exception as trap:  # the engine, or a system call of ours that was handed something it could not use
        if isinstance(trap, wasmtime.Trap) and trap.trap_code is wasmtime.TrapCode.OUT_OF_FUEL:
            return -signal.SIGKILL
        why = str(trap).strip().rpartition("\n")[2].strip()  # before it, page after page, where in the interpreter
        os.write(2, f"the interpreter was ended: {why}\n".encode(errors="replace"))
        return -signal.SIGABRT
