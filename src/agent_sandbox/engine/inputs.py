"""What a caller submits, as values: code, a command or a shell line, with what is given to it. Nothing is judged or run here."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypedDict

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.policy.action import canonical_language

OnOutput = Callable[[Literal["stdout", "stderr"], str], object]


class RunOptions(TypedDict, total=False):
    """What may be given with each piece of work.

    stdin: its input, text or bytes; nothing by default.
    env_vars: added to those of the configuration.
    timeout: seconds of wall time, in place of the configuration's.
    args: what the program finds in its argument list.
    tools: functions that Python code may call, beside those of the configuration.
    deterministic, seed: in place of the configuration's.
    record: a file to write the record of a deterministic run to, for `replay`.
    on_output: called with "stdout" or "stderr" and text as it arrives, in the thread that runs the work. What it raises ends the run.
    """

    stdin: str | bytes
    env_vars: Mapping[str, str]
    timeout: float
    args: Sequence[str]
    tools: Mapping[str, Callable[..., object]] | Iterable[Callable[..., object]]
    deterministic: bool
    seed: int
    record: str | os.PathLike[str]
    on_output: OnOutput


class SessionOptions(TypedDict, total=False):
    """What may be given with a session, for all of its turns: as with each piece of work. `timeout` is for each turn."""

    env_vars: Mapping[str, str]
    timeout: float
    args: Sequence[str]
    tools: Mapping[str, Callable[..., object]] | Iterable[Callable[..., object]]
    on_output: OnOutput


class TurnOptions(TypedDict, total=False):
    """What may be given with one turn. `timeout` and `on_output` are in place of the session's."""

    stdin: str | bytes
    timeout: float
    on_output: OnOutput


@dataclass(frozen=True)
class Shell:
    """A command line for bash."""

    text: str


def shell(text: str) -> Shell:
    """For `Sandbox.run`: this is a command line for bash, not Python code."""
    return Shell(text)


def code_of(code: str, language: str) -> Code:
    """What `execute` was given, as a value."""
    for name, value in (("code", code), ("language", language)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a str, not {type(value).__name__}")
    return Code(canonical_language(language), code)


def work_of(work: str | Sequence[str] | Shell) -> Code | Command:
    """What `run` was given, as a value."""
    match work:
        case str():
            return Code("python", work)
        case Shell(text=text):
            return Code("bash", text)
        case _:
            return Command(tuple(work))


def with_arguments(what: Code | Command, args: Sequence[str]) -> Code | Command:
    """The same work with more arguments."""
    return replace(what, arguments=(*what.arguments, *args)) if isinstance(what, Code) else Command((*what.argv, *args))


def encoded(text: str | bytes) -> bytes:
    """Input as bytes, whatever the text holds."""
    if not isinstance(text, str):
        return memoryview(text).tobytes()  # unlike bytes(), it does not take a number for a length
    try:
        return text.encode("utf-8", "surrogateescape")  # what Python once read from bytes becomes those bytes again
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


class Listener:
    """Turns the bytes of each stream into text as they arrive; a character may come in two pieces."""

    def __init__(self, call: OnOutput) -> None:
        self._call = call
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    def __call__(self, stream: str, data: bytes) -> None:
        self._tell(stream, self._decoders[stream].decode(data))

    def finish(self) -> None:
        """Pass on what was left of a character that never ended."""
        for stream, decoder in self._decoders.items():
            self._tell(stream, decoder.decode(b"", final=True))

    def _tell(self, stream: str, text: str) -> None:
        if text:
            self._call("stdout" if stream == "stdout" else "stderr", text)
