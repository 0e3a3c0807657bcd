"""What a command would do, as values."""

from __future__ import annotations

from enum import Enum

from agent_sandbox.values import dataclass


class Kind(Enum):
    """A sort of effect. The value is its name in messages, in JSON and in tests."""

    READS = "reads"
    WRITES = "writes"
    DESTROYS = "destroys"  # what it takes away or overwrites cannot be had back by the same tool
    NETWORK = "network"
    RUNS_CODE = "runs-code"  # of its arguments, of a file, of a package: it can do whatever the sandbox permits
    PRIVILEGE = "privilege"  # becomes somebody else
    PROCESSES = "processes"  # signals or traces others
    SYSTEM = "system"  # services, mounts, accounts, kernel
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Effect:
    """One effect, and on what: a path, an address, a subcommand; empty when the arguments do not say."""

    kind: Kind
    what: str = ""


@dataclass(frozen=True)
class Use:
    """One program that is started, or a builtin of the shell that has an effect."""

    tool: str
    arguments: tuple[str, ...]
    effects: tuple[Effect, ...]
    builtin: bool = False


@dataclass(frozen=True)
class Understanding:
    """What was understood of a command line. `unknown` says in words what its text does not tell; `unreadable` why nothing was read."""

    uses: tuple[Use, ...] = ()
    unknown: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def tools(self) -> tuple[str, ...]:
        """The programs that it starts, each once, in the order of the text. Builtins of the shell are none."""
        return tuple(dict.fromkeys(use.tool for use in self.uses if not use.builtin))

    @property
    def effects(self) -> tuple[Effect, ...]:
        """All effects, each once."""
        found = dict.fromkeys(effect for use in self.uses for effect in use.effects)
        return (*found, *((Effect(Kind.UNKNOWN),) if (self.unknown or self.unreadable) and Effect(Kind.UNKNOWN) not in found else ()))

    @property
    def kinds(self) -> frozenset[Kind]:
        """The sorts of effects."""
        return frozenset(effect.kind for effect in self.effects)

    @property
    def read_only(self) -> bool:
        """Whether it is understood whole, and does nothing but read."""
        return self.kinds <= {Kind.READS}
