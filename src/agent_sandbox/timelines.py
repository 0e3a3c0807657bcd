"""The timeline of a session: every statement is a step, and the state before it, memory and files, can be returned to and looked at.

Errors are as in `session`: a step that is not there, or whose state is not kept, is a `SandboxError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.engine.timeline.tree import LOOK_SECONDS, Step
from agent_sandbox.errors import SandboxError

if TYPE_CHECKING:
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder

LARGEST_FILE = 16 << 20  # bytes of a file of a state

__all__ = ["PastFrame", "PastState", "PastVariable", "Rewound", "StateDiff", "Step", "Timeline"]


@dataclass(frozen=True)
class PastVariable:
    """A variable, or the value of an expression. `shape` and `columns` are those of a table or an array; `repr` is bounded.

    What it says comes from the program itself, which can make it say anything.
    """

    name: str
    type: str
    bytes: int
    repr: str
    shape: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class PastFrame:
    """A frame of the error that ended a turn, with its local variables."""

    function: str
    file: str
    line: int
    variables: tuple[PastVariable, ...]


@dataclass(frozen=True)
class Rewound:
    """A return to the state before a step. `ran_again` has the statements that had to be run again, because that state was given up."""

    step: Step
    ran_again: str = ""


@dataclass(frozen=True)
class StateDiff:
    """What differs between two states: names of variables, and paths of files, each with "new", "changed" or "gone".

    Before a line of a function, its local variables are named after it: "function.name".
    """

    variables: dict[str, str]
    files: dict[str, str]


class PastState:
    """The state before a step. Looking at it changes neither this state nor the session."""

    def __init__(self, step: Step, look: Callable[[str, str, float], dict[str, Any]]) -> None:
        self.step = step
        self._look = look

    def __repr__(self) -> str:
        return f"<state before step {self.step.number}>"

    @property
    def variables(self) -> tuple[PastVariable, ...]:
        """The variables of the program, without modules. Of a shell also its functions, as `name()`, aliases, options and directory."""
        return tuple(map(_variable, self._asked("variables", "", LOOK_SECONDS)["variables"]))

    @property
    def frames(self) -> tuple[PastFrame, ...]:
        """The frames of the error that ended the last turn before this state, outermost first; empty without an error.

        Before a line of a function, those of the call that is under way.
        """
        found = self._asked("frames", "", LOOK_SECONDS)["frames"]
        return tuple(PastFrame(each["function"], each["file"], each["line"], tuple(map(_variable, each["variables"]))) for each in found)

    def evaluate(self, expression: str, *, timeout: float = LOOK_SECONDS) -> PastVariable:
        """Evaluate an expression in this state; before a line of a function, with its local variables. Whatever it does is undone.

        In a shell the expression is a command line, and its value is what it prints; an exit code other than 0 raises.
        Raises `SandboxError` if it raises or takes too long.
        """
        return _variable({"name": expression, **self._asked("value", expression, timeout)["value"]})

    def read(self, path: str) -> bytes:
        """Return the content of a file as it was. Raises `SandboxError` if it cannot be read, or is larger than 16 MiB."""
        content, more = b"", True
        while more:
            piece = self._asked("read", f"{path}\0{len(content)}", LOOK_SECONDS)
            content, more = content + bytes(piece["content"]), bool(piece["more"])
            if len(content) > LARGEST_FILE:
                raise SandboxError(f"{path!r} is larger than {LARGEST_FILE >> 20} MiB", hint="read it in a turn, piece by piece")
        return content

    def list(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory as it was."""
        return tuple(self._asked("list", path, LOOK_SECONDS)["names"])

    def _asked(self, kind: str, words: str, seconds: float) -> dict[str, Any]:
        answer = self._look(kind, words, seconds)
        if "raised" in answer:
            raise SandboxError(str(answer["raised"])[:1000], hint="ask for something that is there in that state")
        return answer


class Timeline:
    """The steps of a session, by their numbers from 1. `print(session.timeline)` shows them as a tree."""

    def __init__(self, recorder: TimelineRecorder, state: Callable[[int], PastState], files: Callable[[int, int], dict[str, str]]) -> None:
        self._recorder = recorder
        self._state = state
        self._files = files

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, oldest first, those of abandoned branches too."""
        return tuple(self._recorder.tree.steps.values())

    @property
    def here(self) -> tuple[Step, ...]:
        """The steps that led to the present state, oldest first."""
        return tuple(self._recorder.tree.line_to(self._recorder.tree.here))[::-1]

    @property
    def failed(self) -> Step | None:
        """The last step whose statement raised; None if none has."""
        return next((step for step in reversed(self.steps) if step.error), None)

    def diff(self, old: Step | int, new: Step | int) -> StateDiff:
        """Compare the states before two steps: variables and files. Raises `SandboxError` if one of them is not kept."""
        first, second = (each if isinstance(each, int) else each.number for each in (old, new))
        before, after = (self._state(number)._asked("digests", "", LOOK_SECONDS)["digests"] for number in (first, second))
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        variables = {name: "new" if name not in before else "gone" if name not in after else "changed" for name in names}
        return StateDiff(variables, self._files(first, second))

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, number: int) -> Step:
        try:
            return self._recorder.tree.steps[number]
        except KeyError:
            raise SandboxError(f"there is no step {number}", hint=f"there are {len(self)}") from None

    def __str__(self) -> str:
        return "\n".join(lines_of(self.steps, {step.number for step in self.here}))


def lines_of(steps: tuple[Step, ...], present: set[int]) -> Iterator[str]:
    """Yield a line for each step: its number, marks, time and statement. A branch is indented below the step that it left."""
    children: dict[int, list[Step]] = {}
    for step in steps:
        children.setdefault(step.parent, []).append(step)
    waiting = [(step, 0) for step in reversed(children.get(0, []))]
    while waiting:
        step, depth = waiting.pop()
        yield _line(step, depth, step.number in present)
        after = children.get(step.number, [])
        waiting += [(each, depth + (at < len(after) - 1)) for at, each in reversed([*enumerate(after)])]


def _line(step: Step, depth: int, present: bool) -> str:
    text = step.text.splitlines()[0] if step.text else f"end of turn {step.turn}" if not step.function else f"line {step.line}"
    text = f"· {step.function}: {text}" if step.function else text
    marks = "*" if present else " "
    marks += "✗" if step.error else " "
    marks += " " if step.kept else "-"
    about = [*(["files changed"] if step.files_changed else []), *([step.error] if step.error else []), *([step.why] if step.why else [])]
    about += [f"without {each}" for each in step.lost]
    line = f"{step.number:4} {marks} {step.at:8.3f}  {'  ' * depth}{text[:80]}" + (f"   # {'; '.join(about)}" if about else "")
    return "".join(each if each.isprintable() else "�" for each in line)  # a program wrote the errors, and it is read at a terminal


def _variable(about: dict[str, Any]) -> PastVariable:
    shape, columns = about.get("shape") or (), about.get("columns") or ()
    return PastVariable(
        str(about["name"]), str(about["type"]), int(about["bytes"]), str(about["repr"]), tuple(map(int, shape)), tuple(map(str, columns))
    )
