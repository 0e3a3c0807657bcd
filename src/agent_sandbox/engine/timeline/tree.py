"""The tree of a session's steps. Pure: it knows which states are kept, in which layers their files are, and which to give up first.

A step is a statement; its state is the one *before* the statement. The end of a turn is a step too, without a statement, and if that is
wanted each line that a statement executes. After going back to a step, the next one is its sibling: the old future stays reachable as
another branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace

if TYPE_CHECKING:
    from typing import Any

LOOK_SECONDS = 10.0  # for an answer of a state
MOST_LAYERS = 64  # of one chain, before those are merged whose difference no state needs


@dataclass(frozen=True)
class Step:
    """One step of a session, and the state before it.

    `parent` is the step before it, 0 for the first. `text` is the statement, cut; empty at the end of a turn. `kept` says whether the state
    can be returned to at once; `lost` says what it does not hold, such as children or pipes, and `why` it was not kept. `error` is set if
    the statement raised. `function` is set if the step is a line within a statement: the function in which it is.
    """

    number: int
    parent: int
    turn: int
    line: int
    text: str
    at: float  # seconds since the session began
    kept: bool = False
    files_changed: bool = False  # since the step before it
    lost: tuple[str, ...] = ()
    why: str = ""
    error: str = ""
    function: str = ""


@dataclass
class State:
    """A kept state: the process that sleeps, and the generations of layers that hold its files, newest first."""

    process: int
    chain: tuple[str, ...]


@dataclass
class StepTree:
    """The steps of a session. `here` is the step before the next one; `present` has the state in which the program is between turns."""

    most: int = 100  # states that are kept at once
    steps: dict[int, Step] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    here: int = 0  # the parent of the next step
    returned: int = 0  # the step that was returned to, until the next one
    returns: dict[int, int] = field(default_factory=dict)  # of steps that followed a return: to which step
    failed: set[int] = field(default_factory=set)  # the steps whose statement raised
    rooted: bool = False  # whether the state before the first step can be had again: a fork can be made once more
    divided: int = 0  # the step of the statement that runs, once a line of it is a step
    present: int = 0  # the end of the last turn, or the step that was returned to
    chain: tuple[str, ...] = ("1",)  # the layers of now, newest first
    generations: int = 1

    def add(self, turn: int, line: int, text: str, at: float, *, function: str = "") -> Step:
        """Add the step that comes now."""
        number = len(self.steps) + 1
        step = self.steps[number] = Step(number, self.here, turn, line, text, at, function=function)
        if self.returned:
            self.returns[number], self.returned = self.returned, 0
        self.here = self.present = number
        return step

    def change(self, number: int, **fields: Any) -> Step:
        """Replace fields of a step."""
        step = self.steps[number] = replace(self.steps[number], **fields)
        if step.error:
            self.failed.add(number)
        return step

    def new_generation(self) -> str:
        """Return the name of a new generation of layers."""
        self.generations += 1
        return str(self.generations)

    def line_to(self, number: int) -> Iterator[Step]:
        """Yield a step and those before it, backwards."""
        while number:
            step = self.steps[number]
            yield step
            number = step.parent

    def return_to(self, number: int, chain: tuple[str, ...]) -> None:
        """Go back to the state before a step: the next step is its sibling."""
        self.here, self.present = self.steps[number].parent, number
        self.returned = number
        self.chain = chain

    def begin_again(self, number: int, chain: tuple[str, ...]) -> None:
        """Go back to the state before the first step. If the state before step `number` is that one, it is returned to; 0 if none is."""
        self.here, self.present, self.returned, self.chain = 0, number, number, chain

    def least_wanted(self) -> int:
        """Return the step whose state is given up first.

        Kept longest are the states near the present, before errors, before the statement whose lines are steps just now, and the first
        one. Further back every second, fourth, eighth… stays: the one with the nearest neighbours goes first.
        """
        dear = {self.divided, *self.failed}
        numbers = sorted(self.states)
        candidates = [at for at in range(1, len(numbers) - 1) if numbers[at] not in dear] or list(range(max(1, len(numbers) - 1)))
        newest = numbers[-1]
        return numbers[min(candidates, key=lambda at: (_gap(numbers, at) / (newest - numbers[at] + 1), at))]

    def give_up(self, number: int) -> State:
        """Forget a state, and return it: its process must be ended."""
        self.change(number, kept=False, why="it was given up, so that newer states could be kept")
        return self.states.pop(number)

    def way_to(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the nearest step on the way to `number` whose state is kept, and the steps to run again from there; (0, ()) if none is.

        In a tree that is `rooted`, 0 and all steps on the way: they lead there from the state before the first one.
        The state before a step that followed a return is the state that was returned to. Before a line, the statement that it is in cannot
        be run again in part: only such a return leads on from there.
        """
        again: list[int] = []
        at = number
        while at and at not in self.states:
            if at in self.returns:
                at = self.returns[at]
            elif self.steps[at].function:
                return 0, ()
            else:
                at = next((step.number for step in self.line_to(self.steps[at].parent) if not step.function), 0)
                again.append(at)
        if not at and not self.rooted:
            return 0, ()
        return at, tuple(each for each in reversed(again) if each)

    def mergeable(self) -> tuple[str, str] | None:
        """Return two neighbouring layers of now, newer and older, whose difference no state needs; None unless there are many layers."""
        if len(self.chain) <= MOST_LAYERS:
            return None
        tops = {state.chain[0] for state in self.states.values() if state.chain}
        pairs = list(zip(self.chain[1:], self.chain[2:], strict=False))  # the newest one is written to
        return next(((newer, older) for newer, older in reversed(pairs) if older not in tops and self._together(newer, older)), None)

    def _together(self, newer: str, older: str) -> bool:
        return all((newer in state.chain) == (older in state.chain) for state in self.states.values())

    def merge(self, newer: str, older: str, merged: str) -> None:
        """Put one layer in the place of two, in all chains."""

        def changed(chain: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(merged if each == newer else each for each in chain if each != older)

        self.chain = changed(self.chain)
        for state in self.states.values():
            state.chain = changed(state.chain)


def _gap(numbers: list[int], at: int) -> int:
    """Return how far apart the neighbours of a kept state are."""
    return numbers[at + 1] - numbers[at - 1] if 0 < at < len(numbers) - 1 else 1


def described(lost: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return what a state does not hold, in words."""
    return tuple(f"{count} {kind if count > 1 else kind.removesuffix('s').replace('children', 'child')}" for kind, count in lost)
