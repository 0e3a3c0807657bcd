"""A session's turns as commands of a shell. Each command has a bash of its own; this interpreter keeps the state between them, as data.

Because the state is data of this process, a checkpoint of this process holds it. A command inherits one private descriptor, to which its
shell writes the state at its end. A program that writes there spoils its own state and no other.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.runtime.guest import entry
from agent_sandbox.runtime.guest.shell_state import (
    MADE_BY_BASH,
    MOST_NAMED,
    ON_EXIT,
    PREFIX,
    ShellScript,
    ShellState,
    UnkeptState,
    read_state,
    read_status,
    readable,
)
from agent_sandbox.runtime.guest_rpc.inside import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from agent_sandbox.runtime.guest_rpc.client import Speaker

LARGEST_STATE = 64 << 20  # bytes
DID_NOT_RUN = 125  # exit code of a command that could not be started
_KILLED = 128 + signal.SIGKILL
_SCRATCH = "/tmp"
_HIGHEST = 250  # the highest of our descriptors in a shell: programs use low ones
_DEPTH = 32  # of a directory that is gone
_PR_SET_CHILD_SUBREAPER = 36


class PersistentShell:
    """Runs commands in bash, one after the other, and keeps the state between them."""

    def __init__(self, arguments: Iterable[str]) -> None:
        environment = {name: value for name, value in os.environb.items() if name not in MADE_BY_BASH}
        named = {name: value for name, value in environment.items() if name.decode("ascii", "replace").isidentifier()}
        others = {name: value for name, value in environment.items() if name not in named}
        self._functions = {name: value for name, value in others.items() if name.startswith(b"BASH_FUNC_")}  # for the first shell
        self._passed_on = {name: value for name, value in others.items() if name not in self._functions}  # bash has no variables for them
        self._path = environment.get(b"PATH", os.fsencode(os.defpath))
        self.state = ShellState(os.getcwdb(), map(os.fsencode, arguments), named)

    def turn(self, source: str, stdin: bytes) -> dict[str, Any]:
        """Run the command of a turn, and return the end of the turn."""
        code, remarks = self.run(source.removeprefix(PREFIX).encode(), stdin)
        return {"code": code, "value": None, "remarks": remarks}

    def end(self) -> None:
        """Run the program's trap on EXIT, if it has one."""
        if ON_EXIT in self.state.traps:
            self.run(b"exit")

    def run(self, command: bytes, stdin: bytes = b"", *, output: int = 1, errors: int = 2) -> tuple[int, list[str]]:
        """Run a command, and keep the state that it leaves. Return its exit code, and remarks on what is not as one may expect."""
        remarks: list[str] = []
        key = os.urandom(8).hex()
        top = min(_HIGHEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
        numbers = {name: top - place for place, name in enumerate(("state", "loading", "command", "errors", "trouble"))}
        files: dict[str, int] = {}
        try:
            script = ShellScript(self.state, numbers, key)
            given = {"input": stdin, "loading": script.loading(), "command": script.command(command), "state": b"", "trouble": b""}
            for name, content in given.items():
                files[name] = file_with(content)
            self._enter(remarks)
            # The streams last: their numbers are still needed until then.
            targets = {numbers["errors"]: errors, **{numbers[name]: files[name] for name in ("state", "loading", "command", "trouble")}}
            targets |= {0: files["input"], 1: output, 2: files["trouble"]}
            code = self._ran(script.line(), targets)
            data, trouble = content_of(files["state"]), content_of(files["trouble"])
        except OSError as error:
            return DID_NOT_RUN, [*remarks, f"the command did not run: {error.strerror or error}"]
        finally:
            for file in files.values():
                os.close(file)
        if lines := [line for line in readable(trouble).splitlines() if not line.startswith("shell-init: ")]:  # its directory is gone
            remarks.append(f"not all of the state could be loaded: {'; '.join(lines[:MOST_NAMED])}")
        loaded, _, rest = data.partition(b"\0")
        if loaded != script.loaded:
            return DID_NOT_RUN, [*remarks, "the command did not run: its shell could not load the state"]
        try:
            if len(data) > LARGEST_STATE:
                raise UnkeptState(f"it is larger than {LARGEST_STATE >> 20} MiB")
            self.state, exited, more = read_state(rest, key, self.state, script)
        except UnkeptState as error:
            written = read_status(rest, key)  # then the shell was killed by what wrote it
            self.state.status = code if written is None or code != _KILLED else written
            return self.state.status, [*remarks, f"the state before this command stays: {error}"]
        if exited:
            self.state.status = code
        with suppress(ChildProcessError):  # it is the last that its shell started, and no process that the command left behind
            os.waitpid(self.state.writer, 0)
        with suppress(OSError):  # the next command says so
            os.chdir(self.state.directory)
        return self.state.status, [*remarks, *more]

    def _ran(self, line: bytes, targets: dict[int, int]) -> int:
        """Run bash with these descriptors, and wait for its end. Return its exit code. Raises OSError."""
        with suppress(OSError):  # processes that a command leaves behind are children of this one, and a checkpoint names them
            sc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        bash = os.posix_spawn(
            _find(b"bash", self._path),
            [b"bash", b"-c", line, b"bash"],
            {**self._passed_on, **(self._functions if self.state.fresh else {}), b"PWD": self.state.directory},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in targets.items()],
            setpgroup=0,  # `kill 0` does not reach this process
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
        ended = None
        while ended is None:
            try:
                _, ended = os.waitpid(bash, 0)
            except KeyboardInterrupt:  # it is for the command
                os.killpg(bash, signal.SIGINT)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        code = os.waitstatus_to_exitcode(ended)
        return code if code >= 0 else 128 - code

    def _enter(self, remarks: list[str]) -> None:
        """Enter the working directory. If it is gone, enter one that is gone, too, with those above it.

        A relative path must lead nowhere, not elsewhere: `rm -rf ../*` may be the next command.
        """
        try:
            os.chdir(self.state.directory)
            return
        except OSError as error:
            remarks.append(f"the working directory {readable(self.state.directory)} cannot be entered: {error.strerror}")
        name = f".gone-{os.urandom(8).hex()}"
        places = [os.path.join(_SCRATCH, *[name] * depth) for depth in range(1, _DEPTH + 1)]
        for place in places:
            os.mkdir(place)
        os.chdir(places[-1])
        for place in reversed(places):
            os.rmdir(place)


class ShellTurns(Turns):
    """Takes turns like `Turns`; those of the caller are commands of a shell."""

    def __init__(
        self, names: Mapping[str, Any], speaker: Speaker, spell: Callable[[Any], bytes], ended: Callable[[BaseException], int]
    ) -> None:
        super().__init__(names, speaker.ask, spell, ended)
        self._shell = PersistentShell(sys.argv[1:])

    def take(self) -> int:
        """Take turns until there are no more, then end the shell."""
        code = super().take()
        self._shell.end()
        return code

    def _turn(self, name: str, source: str, stdin: bytes) -> dict[str, Any]:
        return self._shell.turn(source, stdin) if source.startswith(PREFIX) else super()._turn(name, source, stdin)


def _find(program: bytes, path: bytes) -> bytes:
    """Return where a program is. Raises FileNotFoundError."""
    for place in path.split(b":"):
        if os.access(found := os.path.join(place or b".", program), os.X_OK):
            return found
    raise FileNotFoundError(2, f"there is no {readable(program)} in {readable(path)}")


def file_with(content: bytes) -> int:
    """Return a descriptor of a file without a name, with this content, at its beginning."""
    try:
        file = os.memfd_create("shell")
    except OSError:  # of a sandbox that may execute only some programs
        file = os.open(_SCRATCH, os.O_TMPFILE | os.O_RDWR, 0o600)
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def content_of(file: int) -> bytes:
    """Return the content of a file, up to a little more than the largest state."""
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        return stream.read(LARGEST_STATE + 1)


entry.session_turns = ShellTurns
