"""`inspect`: look at the state of a held session before a step: variables, an expression, files, and what differs between two states."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.commands.timeline import TimelineStep, found, sandbox_of
from agent_sandbox.cli.render.messages import Console, remark, shown
from agent_sandbox.cli.render.timeline import frame_lines, step_title, variable_lines
from agent_sandbox.cli.results import ErrorFacts, ErrorResult, PathName, VerbResult
from agent_sandbox.server import client, messages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from agent_sandbox.cli.timeline_options import InspectOptions


RAISED = 1  # exit code: the question raised in that state


@dataclass(frozen=True)
class VariableFacts:
    """A variable, or the value of an expression. `shape` and `columns` are those of a table or an array; `repr` is bounded.

    All of it comes from the program, which can make it say anything.
    """

    name: str
    type: str
    bytes: int
    repr: str
    shape: tuple[int, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> VariableFacts:
        """Return the variable that a holder told."""
        return cls(
            str(told["name"]),
            str(told["type"]),
            int(told["bytes"]),
            str(told["repr"]),
            tuple(told["shape"]),
            tuple(map(str, told["columns"])),
        )


@dataclass(frozen=True)
class FrameFacts:
    """A frame of an error, with its local variables."""

    function: str
    file: str
    line: int
    variables: tuple[VariableFacts, ...]


@dataclass(frozen=True)
class InspectResult(VerbResult):
    """The variables before a step. If its statement raised, also the frames of the error, outermost first."""

    kind = "inspect"

    session: str
    step: TimelineStep
    variables: tuple[VariableFacts, ...]
    frames: tuple[FrameFacts, ...]

    def text(self, console: Console) -> None:
        print(console.style.heading(shown(f"{self.session} before {step_title(self.step)}")))
        if not self.step.kept:
            remark("this state was not kept: code ran again to reach it")
        for line in variable_lines(self.variables):
            print(shown(line))
        if not self.variables:
            print("no variables yet")
        if self.step.error is not None:
            print(console.style.heading(shown(f"then: {self.step.error}")))
            for line in frame_lines(self.frames):
                print(shown(line))


@dataclass(frozen=True)
class ValueResult(VerbResult):
    """The value of an expression before a step."""

    kind = "inspect-value"

    session: str
    step: TimelineStep
    value: VariableFacts

    def text(self, console: Console) -> None:
        if self.value.shape:
            columns = f": {', '.join(self.value.columns)}" if self.value.columns else ""
            print(shown(f"{self.value.type} {' × '.join(map(str, self.value.shape))}{columns}"))
        for line in self.value.repr.split("\n"):
            print(shown(line))


@dataclass(frozen=True)
class FileResult(VerbResult):
    """A file as it was before a step; as it is now without a step, which is so if the present state is not kept."""

    kind = "inspect-file"

    session: str
    step: TimelineStep | None
    path: PathName
    content: bytes

    def text(self, console: Console) -> None:
        """Print it byte for byte; on a terminal, with control characters escaped."""
        if not sys.stdout.isatty():
            sys.stdout.flush()
            sys.stdout.buffer.write(self.content)
            return
        for line in self.content.decode(errors="backslashreplace").splitlines():
            print(shown(line))


@dataclass(frozen=True)
class DirectoryResult(VerbResult):
    """A directory as it was before a step; as it is now without a step, which is so if the present state is not kept."""

    kind = "inspect-list"

    session: str
    step: TimelineStep | None
    path: PathName
    names: tuple[str, ...]

    def text(self, console: Console) -> None:
        for name in self.names:
            print(shown(name))


@dataclass(frozen=True)
class StateDiffResult(VerbResult):
    """The differences of the states before two steps: variables and files, each with "new", "changed" or "gone"."""

    kind = "inspect-diff"

    session: str
    old: int
    new: int
    variables: dict[str, str]
    files: dict[str, str]

    def text(self, console: Console) -> None:
        if not self.variables and not self.files:
            console.note(f"nothing differs between the states before steps {self.old} and {self.new}")
        for title, differing in (("variables", self.variables), ("files", self.files)):
            if differing:
                print(console.style.heading(title))
            for name, kind in sorted(differing.items()):
                print(shown(f"  {kind:<8}{name}"))


def inspect(options: InspectOptions, console: Console) -> VerbResult:
    """Look at a state. Nothing is changed, whatever the answer takes."""
    if (stored := sandbox_of(options.session)) is not None:
        from agent_sandbox.cli.commands.run_timeline import inspect_runs  # which imports this module

        return inspect_runs(stored, options)
    taken = found(options.session, console)
    with client.opened(taken.place) as link:
        if options.question == "diff":
            told = link.ask({"do": "diff", "session": taken.id, "old": options.step, "new": options.other})
            return StateDiffResult(taken.id, told["old"], told["new"], told["variables"], told["files"])
        request = {"do": "inspect", "session": taken.id, "step": options.step, "what": options.question, "words": options.words}
        told = link.ask({**request, "seconds": options.seconds or 0.0})
    step = TimelineStep.of(told["step"]) if told["step"] is not None else None
    if "raised" in told:
        what = "the expression raised" if options.question == "value" else f"{options.words!r} could not be read:"
        hint = f"it was asked before {step_title(step)}" if step is not None else "it is not there now"
        return ErrorResult(ErrorFacts("Raised", f"{what} {told['raised']}", hint), RAISED)
    match options.question:
        case "read":
            return FileResult(taken.id, step, PathName(options.words), messages.unpacked(told["content"]))
        case "list":
            return DirectoryResult(taken.id, step, PathName(options.words), tuple(map(str, told["names"])))
    assert step is not None  # only files can be asked of a present that is not kept
    match options.question:
        case "value":
            return ValueResult(taken.id, step, VariableFacts.of(told["value"]))
        case _:
            frames = tuple(
                FrameFacts(each["function"], _short(each["file"]), each["line"], tuple(map(VariableFacts.of, each["variables"])))
                for each in told["frames"]
            )
            return InspectResult(taken.id, step, tuple(map(VariableFacts.of, told["variables"])), frames)


def _short(path: str) -> str:
    """Return a path below the current directory without it."""
    return path.removeprefix(f"{os.getcwd()}/")
