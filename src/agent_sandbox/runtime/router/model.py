"""The values that the router takes and returns."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, Enum, dataclass, field
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping


class Feature(Enum):
    """Features that a program may need beyond its modules. The value completes the sentence "it …"."""

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


@dataclass(frozen=True)
class Workload:
    """The work to find a runtime for: source in a language, or a COMMAND, whose words the router does not need.

    repeatable: whether a run that lacks something can start again unnoticed. A run cannot if it has read input from a descriptor, passed
        output on, or called a tool of the caller.
    local: the modules in the code's own directory, which Python searches first. They may shadow any other module, and the router has not
        read them. None if unknown.
    given: modules that every runtime provides for the code.
    goes_on: whether later turns follow, which the router has not read either.
    placed: whether the code comes from a file and asks for its path, which a runtime with an interpreter of its own does not know.
    """

    language: str
    source: str = ""
    repeatable: bool = True
    local: frozenset[str] | None = frozenset()
    given: frozenset[str] = frozenset()
    goes_on: bool = False
    placed: bool = False


@dataclass(frozen=True)
class Permits:
    """The policy's permissions that help to explain a route. They never make a runtime eligible: only guarantees do."""

    processes: bool = False
    network: bool = False

    @classmethod
    def of(cls, policy: Policy) -> Permits:
        """Return the permissions of a policy that can explain a route. File rules are left out: they hold in every runtime."""
        return cls(policy.processes, policy.network.asks)


@dataclass(frozen=True)
class Candidate:
    """A runtime that the router may choose: its traits, and the reason if it is unavailable."""

    traits: Traits
    unavailable: str = ""

    @property
    def name(self) -> str:
        """The name of the runtime."""
        return self.traits.name

    @property
    def order(self) -> tuple[int, str]:
        """The key by which candidates are sorted: the cheapest is tried first."""
        return self.traits.cost, self.traits.name


@dataclass(frozen=True)
class ProgramNeeds:
    """The modules and features that a program needs, as far as its text shows. Line numbers are those of the first occurrence.

    `choices` are alternative imports, one of which must exist, in the program's order of preference. `unseen` lists uses that the text does
    not show; `unreadable` is the reason if it could not be read at all. `loose` are modules passed around as values, so that any of the
    attributes in `words` may be theirs. `open_loop` is the line of a loop of unknown length, or 0.
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
    """The chosen runtime and the reason, the other runtimes and the reasons against them, and the runtime for one retry.

    `runtime` is None if no runtime supports the language with these guarantees: then nothing may run. On a retry, `fell_forward` is the
    error of the first try, in the program's own words; nothing of that try was kept.
    """

    runtime: str | None
    why: str
    passed_over: tuple[tuple[str, str], ...] = ()
    fall_forward: str | None = None
    notes: tuple[str, ...] = ()
    fell_forward: str = ""
