"""Helpers of `Sandbox`, `Workspace` and sessions. They check arguments, decode output, and keep the list of calls that are under way.

Programs do not import this. A value of the wrong type is a mistake of the calling program: it raises TypeError, which names the argument.
"""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy.action import canonical_language

if TYPE_CHECKING:
    from agent_sandbox.engine.exchange_records import ExchangeOptions
    from agent_sandbox.options import OnOutput
    from agent_sandbox.runtime.base import Guest

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
CLOSING_SECONDS = 10.0  # how long close() waits for runs in other threads; killing one takes milliseconds


@dataclass(frozen=True)
class Shell:
    """A command line for bash."""

    text: str


def shell(text: str) -> Shell:
    """Return a bash command line for `Sandbox.run`, where a plain string is Python code.

    >>> Sandbox(allow_subprocess=True).run(shell("echo one | tr a-z A-Z")).stdout
    'ONE\\n'
    """
    check_type("text", text, str)
    return Shell(text)


def check_type(name: str, value: object, *types: type, also: str = "", write: str = "") -> None:
    """Raise TypeError, with the name of the argument, unless the value has one of these types.

    `also` names what is taken besides. `write` is the right spelling, which the message ends with.
    """
    if not isinstance(value, types):
        wanted = " or ".join(filter(None, (*(each.__name__ for each in types), also)))
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} is {_article(wanted)} {wanted}, not {given}{f': write {write}' if write else ''}")


def _article(word: str) -> str:
    return "an" if word[0] in "aeiouAEI" else "a"


def code_of(code: str, language: str) -> Code:
    """Return the arguments of `execute` as one value. Raises TypeError unless both are strings."""
    check_type("code", code, str)
    check_type("language", language, str)
    return Code(canonical_language(language), code)


def work_of(work: str | Sequence[str] | Shell) -> Code | Command:
    """Return the argument of `run` as code or a command. Raises TypeError for any other value."""
    if isinstance(work, str):
        return Code("python", work)
    if isinstance(work, Shell):
        return Code("bash", work.text)
    given: object = work
    if (
        not isinstance(given, Sequence)
        or isinstance(given, bytes | bytearray | memoryview)
        or not all(isinstance(each, str) for each in given)
    ):
        wanted = 'Python code (a str), a program with its arguments (a list of str), or shell("…")'
        raise TypeError(f"run takes {wanted}, not {given!r:.60}")
    return Command(tuple(given))


def words_of(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return a sequence of words as a tuple. Raises TypeError for a single string, and for a word that is no string."""
    if isinstance(words, str | bytes | bytearray) or not isinstance(words, Sequence):
        raise TypeError(f"{name} is a sequence of str, not {type(words).__name__}")
    for word in words:
        check_type(f"each of {name}", word, str)
    return tuple(words)


def with_arguments(what: Code | Command, args: Sequence[str]) -> Code | Command:
    """Return the work with these arguments added to its own. Raises TypeError unless they are a sequence of strings."""
    given = words_of("args", args)
    return replace(what, arguments=(*what.arguments, *given)) if isinstance(what, Code) else Command((*what.argv, *given))


def encoded(text: str | bytes) -> bytes:
    """Return standard input as bytes. Text becomes UTF-8; surrogates are encoded too, so no text is refused."""
    if not isinstance(text, str):
        check_type("stdin", text, bytes, bytearray, memoryview, also="str")
        return memoryview(text).tobytes()
    try:
        return text.encode("utf-8", "surrogateescape")  # surrogate escapes become the original bytes again
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def with_variables(env: Mapping[str, str], more: Mapping[str, str] | None) -> dict[str, str]:
    """Return environment variables with further ones. Raises TypeError unless the further ones are text."""
    if more is None:
        return {**env}
    check_type("env_vars", more, Mapping)
    for name, value in more.items():
        check_type("the name of an environment variable", name, str)
        check_type(f"the environment variable {name!r}", value, str)
    return {**env, **more}


def check_timeout(timeout: float | None) -> None:
    """Raise TypeError unless a timeout is a number or None. Whether the number makes sense is found out with the other limits."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")


class TextListener:
    """Decodes a run's output as it arrives, and passes the text to a callback. A character may arrive in two pieces."""

    def __init__(self, call: OnOutput) -> None:
        self._call = call
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    @classmethod
    def of(cls, call: OnOutput | None) -> TextListener | None:
        """Return a listener for the option `on_output`. Raises TypeError for a value that cannot be called."""
        if call is not None and not callable(call):
            raise TypeError(f"on_output is a function of a stream's name and text, not {type(call).__name__}")
        return None if call is None else cls(call)

    def __call__(self, stream: str, data: bytes) -> None:
        self._tell(stream, self._decoders[stream].decode(data))

    def finish(self) -> None:
        """Pass on a replacement character for an incomplete character at the end of the output."""
        for stream, decoder in self._decoders.items():
            self._tell(stream, decoder.decode(b"", final=True))

    def _tell(self, stream: str, text: str) -> None:
        if text:
            self._call("stdout" if stream == "stdout" else "stderr", text)


class Run:
    """The handle of one execution. It can be cancelled from any thread, also before it begins."""

    def __init__(self) -> None:
        self._guest: Guest | None = None
        self.cancelled = False
        self.thread = 0  # the thread that runs it; 0 before it begins

    def started(self, guest: Guest) -> None:
        """Remember the running guest. If the run is already cancelled, kill the guest."""
        self._guest = guest
        if self.cancelled:
            guest.kill()

    def cancel(self) -> None:
        """Kill the run, now or as soon as it begins."""
        self.cancelled = True  # first: `started` sets the guest and then reads this, so one of the two kills
        if self._guest is not None:
            self._guest.kill()


class Runs:
    """The runs of one sandbox or workspace that are under way. A forked child of the application has none: those are its parent's."""

    def __init__(self, owner: str, further: Callable[[], None] = lambda: None) -> None:
        """`owner` is the word for messages. `further` raises `SandboxError` if the owner takes no more work for a reason of its own."""
        self._owner, self._further = owner, further
        self._closed = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process, self._changed, self._runs = os.getpid(), threading.Condition(), set[Run]()

    def lock(self) -> threading.Condition:
        """Return the lock. In a forked child it is a new one: a thread that does not exist there may have held the parent's."""
        if self._process != os.getpid():
            self._begin_anew()
        return self._changed

    def check_open(self) -> None:
        """Raise `SandboxError` if the owner takes no more work."""
        if self._closed:
            raise SandboxError(f"this {self._owner} has been closed", hint="make another")
        self._further()

    def begin(self, run: Run) -> None:
        """Register a run that begins in this thread. Raises as `check_open` does."""
        with self.lock():
            self.check_open()
            run.thread = threading.get_ident()
            self._runs.add(run)

    def end(self, run: Run) -> None:
        """Unregister a run that has ended."""
        with self.lock():
            self._runs.discard(run)
            self._changed.notify_all()

    @property
    def any(self) -> bool:
        """Whether a run is under way."""
        with self.lock():
            return bool(self._runs)

    def kill(self) -> None:
        """Kill all runs."""
        with self.lock():
            runs = list(self._runs)
        for run in runs:
            run.cancel()

    def close(self) -> None:
        """Take no more work."""
        with self.lock():
            self._closed = True

    def wait(self) -> None:
        """Wait until runs in other threads are over. If a callback of a run waits, it does not wait for that run."""
        me = threading.get_ident()
        with self.lock():
            self._changed.wait_for(lambda: all(run.thread == me for run in self._runs), CLOSING_SECONDS)


def exchanges_of(record: str | os.PathLike[str] | None, bodies: bool, replay: str | os.PathLike[str] | None) -> ExchangeOptions | None:
    """Return where exchanges are recorded and what answers them; None if neither is asked for. Raises `PolicyError`."""
    if record is None and replay is None and not bodies:
        return None
    if record is not None and replay is not None:
        raise PolicyError("record_network and replay_network do not go together", hint="give one of them")
    if bodies and record is None:
        raise PolicyError("record_bodies goes with record_network", hint="add record_network=…")
    from agent_sandbox.engine.exchange_records import ExchangeOptions  # few runs are recorded

    paths = (os.path.abspath(each) if each is not None else "" for each in (record, replay))
    return ExchangeOptions(next(paths), bodies, next(paths))
