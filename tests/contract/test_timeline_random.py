"""Random programs and random ways back: every state is that of a straight run of the statements that led to it, on every branch."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest

from agent_sandbox import Sandbox, SandboxSession
from agent_sandbox.timelines import Step
from tests.contract.test_timeline import STATEMENTS

DIGEST = (
    "[sorted([n, repr(v)] for n, v in globals().items() if n[0] == 'v' and n[1:].isdigit()),"
    " sorted([f'{d}/{n}', open(f'{d}/{n}').read()] for d, _, ns in __import__('os').walk('.') for n in ns)]"
)
# Runs each list of statements by itself, in a new interpreter's names and an empty directory, without anything of ours.
STRAIGHT = f"""
import json, os, sys, tempfile
for statements in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        names = {{"os": os}}
        for each in statements:
            exec(each, names)
        print(json.dumps(eval({DIGEST!r}, names)))
        os.chdir("/")
"""


def straight_runs(histories: Iterable[tuple[str, ...]]) -> list[object]:
    """Return what there is after each list of statements."""
    done = subprocess.run([sys.executable, "-c", STRAIGHT], input=json.dumps([*histories]), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Walk:
    """A random walk through a session. `before` has the statements that led to the state before each step."""

    def __init__(self, session: SandboxSession, seed: int) -> None:
        self.session = session
        self.chance = random.Random(seed)
        self.before: dict[int, tuple[str, ...]] = {}
        self.here: tuple[str, ...] = ()

    def run(self, statements: int) -> None:
        """Run a turn of random statements."""
        turn = [self.chance.choice(STATEMENTS).format(*(self.chance.randrange(4) for _ in range(3))) for _ in range(statements)]
        known = len(self.session.timeline)
        assert self.session.run("\n".join(["import os", *turn])).success
        self._follow(self.session.timeline.steps[known:])

    def go_back(self) -> None:
        """Return to a random step. What is run again on the way makes steps of its own."""
        chosen = self.chance.choice(self.session.timeline.steps)
        known = len(self.session.timeline)
        again = self.session.rewind(chosen).ran_again
        self.here = self.before[chosen.number]
        if steps := self.session.timeline.steps[known:]:
            assert again
            self.here = self.before[steps[0].parent] if steps[0].parent else ()
            if parent := (self.session.timeline[steps[0].parent].text if steps[0].parent else ""):
                self.here = (*self.here, parent)
            self._follow(steps)
            assert self.here == self.before[chosen.number], "the way was the same"

    def _follow(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.before[step.number] = self.here
            self.here = (*self.here, step.text) if step.text else self.here

    def check(self) -> None:
        """Compare every state that is kept, on all branches, with a straight run; and some that were given up."""
        kept = [step.number for step in self.session.timeline if step.kept]
        expected = straight_runs(self.before[number] for number in kept)
        for number, wanted in zip(kept, expected, strict=True):
            said = self.session.inspect(number).evaluate(f"__import__('hashlib').sha256(repr({DIGEST}).encode()).hexdigest()").repr
            assert said == repr(hashlib.sha256(repr(wanted).encode()).hexdigest()), (number, self.before[number])
        for _ in range(3):
            self.go_back()
            assert self.session.run(DIGEST).value == straight_runs([self.here])[0], self.here
            self._follow(self.session.timeline.steps[len(self.before) :])


def walk(seed: int, *, turns: int, most: int) -> None:
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as session:
        session._recording().tree.most = most
        walker = Walk(session, seed)
        walker.run(3)
        for _ in range(turns):
            if walker.chance.random() < 0.4:
                walker.go_back()
            walker.run(walker.chance.randrange(1, 6))
        walker.check()


@pytest.mark.parametrize(("seed", "most"), [(1, 100), (2, 8)])
def test_every_state_equals_a_straight_run_to_that_step(seed: int, most: int) -> None:
    walk(seed, turns=6, most=most)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(100, 150))
def test_every_state_equals_a_straight_run_to_that_step_for_many(seed: int) -> None:
    walk(seed, turns=40, most=random.Random(seed).choice([6, 20, 100]))


def test_a_straight_run_tells_states_apart() -> None:
    """The control: with one statement more or less, or another order, the comparison fails."""
    one, two, three = straight_runs([("v1 = 1",), ("v1 = 1", "open('f1', 'w').write('x')"), ("v1 = 2",)])
    assert one != two and one != three and two == [[["v1", "1"]], [["./f1", "x"]]]
