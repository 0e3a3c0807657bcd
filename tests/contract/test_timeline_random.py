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
# What more there is to a state than plain values and files.
BEGIN = (
    "import os, random, signal; base = globals().get('base') or os.getcwd()",
    "random.seed(1)",
    """def named(letter):
    return sorted([n, v] for n, v in globals().items() if n[0] == letter and n[1:].isdigit())""",
    """def tree():
    return sorted([os.path.relpath(f'{d}/{n}', base), os.lstat(f'{d}/{n}').st_mode, content(f'{d}/{n}')]
        for d, ds, ns in os.walk(base) for n in ns + ds)""",
    """def content(path):
    return os.readlink(path) if os.path.islink(path) else os.path.isdir(path) or open(path).read()""",
    """def directory():
    try:
        return os.path.relpath(os.getcwd(), base)
    except FileNotFoundError:  # it was removed
        return None""",
    """def everything():
    return [[[n, repr(v)] for n, v in named('v')], tree(), directory(), os.environ.get('V'),
        [[n, v.__defaults__[0][0]] for n, v in named('c')], [[n, v.v] for n, v in named('C')],
        [[n, v.gi_frame and v.gi_frame.f_locals.get('each')] for n, v in named('g')],
        [[n, os.lseek(v, 0, 1)] for n, v in named('h')], [[n, sorted(os.listdir(v)) == sorted(os.listdir(base))] for n, v in named('o')],
        repr(random.getstate())[-90:], signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN]""",
)
RICH = (
    *(each.replace("'f{", "base + '/f{").replace("'d{", "base + '/d{") for each in STATEMENTS),
    "def c{0}(n=[{1}]):\n    n[0] += 1\n    return n[0]",
    "'c{0}' in globals() and c{0}()",
    "class C{0}:\n    v = {1}",
    "'C{0}' in globals() and setattr(C{0}, 'v', {1})",
    "g{0} = (each * {1} for each in range(5))",
    "'g{0}' in globals() and next(g{0}, None)",
    "h{0} = os.open(base + '/f{1}', os.O_RDWR | os.O_CREAT)",
    "'h{0}' in globals() and os.write(h{0}, b'{1}{2}')",
    "'h{0}' in globals() and (os.lseek(h{0}, 1, 0), os.read(h{0}, {1}))",
    "'h{0}' in globals() and 'h{1}' not in globals() and globals().update(h{1}=os.dup(h{0}))",
    "'h{0}' in globals() and os.close(globals().pop('h{0}'))",
    "o{0} = os.open(base, os.O_RDONLY)",
    "os.path.isdir(base + '/d{0}') and os.chdir(base + '/d{0}')",
    "os.chdir(base)",
    "os.environ['V'] = '{0}'",
    "os.path.lexists(base + '/l{0}') or os.symlink('{1}', base + '/l{0}')",
    "os.path.lexists(base + '/l{0}') and os.unlink(base + '/l{0}')",
    "os.path.exists(base + '/f{0}') and os.chmod(base + '/f{0}', 0o600 + {1})",
    "v{0} = random.random()",
    "random.seed({0})",
    "_ = signal.signal(signal.SIGUSR1, ({0} % 2 and signal.SIG_IGN) or signal.SIG_DFL)",
)
# Runs each list of statements by itself, in a new interpreter's names and an empty directory, without anything of ours.
STRAIGHT = f"""
import json, os, sys, tempfile
for statements in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        names = {{"os": os}}
        before = {{*os.listdir("/proc/self/fd")}}
        for each in statements:
            exec(each, names)
        print(json.dumps(eval("everything()" if "everything" in names else {DIGEST!r}, names)))
        os.chdir("/")
        os.environ.pop("V", None)
        for each in {{*os.listdir("/proc/self/fd")}} - before:
            os.path.exists(f"/proc/self/fd/{{each}}") and os.close(int(each))
        import signal
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
"""


def straight_runs(histories: Iterable[tuple[str, ...]]) -> list[object]:
    """Return what there is after each list of statements."""
    done = subprocess.run([sys.executable, "-c", STRAIGHT], input=json.dumps([*histories]), stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Walk:
    """A random walk through a session. `before` has the statements that led to the state before each step."""

    def __init__(self, session: SandboxSession, seed: int, *, rich: bool = False) -> None:
        self.session = session
        self.begin: tuple[str, ...]
        self.statements: tuple[str, ...]
        self.begin, self.statements, self.digest = (BEGIN, RICH, "everything()") if rich else (("import os",), STATEMENTS, DIGEST)
        self.chance = random.Random(seed)
        self.before: dict[int, tuple[str, ...]] = {}
        self.here: tuple[str, ...] = ()

    def run(self, statements: int) -> None:
        """Run a turn of random statements."""
        turn = [self.chance.choice(self.statements).format(*(self.chance.randrange(4) for _ in range(3))) for _ in range(statements)]
        known = len(self.session.timeline)
        done = self.session.run("\n".join([*(self.begin[:1] if self.begin[-1] in self.here else self.begin), *turn]))
        assert done.success, done.stderr
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
            if parent := (self._whole(steps[0].parent) if steps[0].parent else ""):
                self.here = (*self.here, parent)
            self._follow(steps)
            assert self.here == self.before[chosen.number], "the way was the same"

    def _whole(self, number: int) -> str:
        return self.session._recording()._statements[number]  # what a step shows is cut

    def began(self, number: int) -> bool:
        """Return whether the state before a step has all that is defined at first."""
        return self.begin[-1] in self.before.get(number, ())

    def _follow(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.before[step.number] = self.here
            self.here = (*self.here, self._whole(step.number)) if step.text else self.here

    def check(self) -> None:
        """Compare every state that is kept, on all branches, with a straight run; and some that were given up."""
        kept = [step.number for step in self.session.timeline if step.kept]
        expected = straight_runs(self.before[number] for number in kept)
        for number, wanted in zip(kept, expected, strict=True):
            said = (
                self.session.inspect(number)
                .evaluate(f"__import__('hashlib').sha256(repr({self.digest if self.began(number) else DIGEST}).encode()).hexdigest()")
                .repr
            )
            assert said == repr(hashlib.sha256(repr(wanted).encode()).hexdigest()), (number, self.before[number])
        for _ in range(3):
            self.go_back()
            if self.began(self.session.timeline._recorder.tree.present):
                assert self.session.run(self.digest).value == straight_runs([self.here])[0], self.here
            self._follow(self.session.timeline.steps[len(self.before) :])


def walk(seed: int, *, turns: int, most: int, rich: bool = False) -> None:
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as session:
        session._recording().tree.most = most
        walker = Walk(session, seed, rich=rich)
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


@pytest.mark.parametrize(("seed", "most"), [(1, 100), (2, 8)])
def test_every_state_has_all_that_a_program_can_hold(seed: int, most: int) -> None:
    """Closures, classes, generators, open files and copies of them, directories, links, modes, the environment, signals, random numbers."""
    walk(seed, turns=6, most=most, rich=True)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(200, 230))
def test_every_state_has_all_that_a_program_can_hold_for_many(seed: int) -> None:
    walk(seed, turns=30, most=random.Random(seed).choice([6, 20, 100]), rich=True)
