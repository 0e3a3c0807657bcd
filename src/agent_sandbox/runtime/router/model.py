"""What the router is given and what it answers. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.policy.model import Policy

COMMAND = "command"  # in place of a language: a native program with its arguments


class Feature(Enum):
    """What a program may need beyond its modules. The value completes the sentence "it …"."""

    PROCESSES = "starts processes"
    THREADS = "starts threads"
    SOCKETS = "uses sockets"
    EVENT_LOOP = "runs an event loop"
    SIGNALS = "uses signals"
    NATIVE_CODE = "calls native code"
    SHARED_MEMORY = "maps memory"
    MACHINE = "asks about the machine"
    POSIX = "uses users, permissions or terminals"
    WIDE_INTEGERS = "counts on native integers of 64 bits"
    MUCH_MEMORY = "needs much memory"
    LONG_LOOPS = "computes for long"
    NODE = "uses what only Node.js has"


EVERY_FEATURE = frozenset(Feature)


@dataclass(frozen=True)
class Work:
    """One thing to run: source in a language, by its canonical name, or a COMMAND, whose words do not matter here.

    `repeatable` says whether a run that turns out to lack something can start again as if nothing had been: not after input was taken from
    a descriptor, output was passed on, or a tool of the caller was called. `local` names the modules that lie where the code would look
    first, in its own directory: they may shadow any other, and nobody has read them. None where that is not known. `given` are modules that
    every runtime has for it. With `goes_on` there is more to come, in turns that nobody has read either.
    """

    language: str
    source: str = ""
    repeatable: bool = True
    local: frozenset[str] | None = frozenset()
    given: frozenset[str] = frozenset()
    goes_on: bool = False


@dataclass(frozen=True)
class Permits:
    """What the policy allows, as far as it explains a route. It never makes a runtime eligible: only guarantees do."""

    processes: bool = False
    network: bool = False

    @classmethod
    def of(cls, policy: Policy) -> Permits:
        """The part of a policy that matters here. Its file rules hold on every runtime alike and decide nothing."""
        return cls(policy.processes, policy.network)


@dataclass(frozen=True)
class Host:
    """A runtime of this machine: what it proved, what it can run, and why it cannot be used just now, if so.

    `modules` are the top-level modules of its Python, or None for whatever is installed, which is not looked at. `absent` are dotted names
    that are missing although their top-level module is there. `cost` orders: less is tried first.
    """

    name: str
    cost: int
    languages: frozenset[str]
    guarantees: frozenset[Guarantee]
    features: frozenset[Feature] = EVERY_FEATURE
    modules: frozenset[str] | None = None
    absent: frozenset[str] = frozenset()
    unavailable: str = ""

    @property
    def whole(self) -> bool:
        """Whether it has whatever this machine has: then no reading of the code can speak against it."""
        return self.modules is None and self.features == EVERY_FEATURE


@dataclass(frozen=True)
class Reading:
    """What the text of a program shows. Lines are those where a thing is seen first.

    `choices` are imports of which one must be there, in the program's own order of preference. `unseen` is what the text does not tell,
    `unreadable` why nothing could be told at all. `loose` are modules that are handed around, so that any of the attributes in `words` may
    be one of theirs. `open_loop` is the line of a loop whose length the text does not tell, or 0.
    """

    modules: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[tuple[tuple[str, ...], ...], ...] = ()
    features: Mapping[Feature, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    unreadable: str = ""
    loose: Mapping[str, int] = field(default_factory=dict)
    words: frozenset[str] = frozenset()
    open_loop: int = 0


@dataclass(frozen=True)
class Route:
    """Which runtime, and why; every other one, and why not; where to start again, once, if something is missing after all.

    `runtime` is None when nothing here gives the guarantees and takes the language: then nothing may run. `fell_forward` is what a first
    try elsewhere lacked, in the program's own words, when this is the second; nothing of the first was kept.
    """

    runtime: str | None
    why: str
    passed_over: tuple[tuple[str, str], ...] = ()
    fall_forward: str | None = None
    notes: tuple[str, ...] = ()
    fell_forward: str = ""
