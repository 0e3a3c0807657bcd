"""The effects of a command as values, and the splitting of arguments into options and operands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from agent_sandbox._fast.values import dataclass
from agent_sandbox.readers.shell.expansion import Field


class Kind(Enum):
    """Kinds of effect. The value is the name in messages, JSON and tests."""

    READS = "reads"
    WRITES = "writes"
    DESTROYS = "destroys"  # removes or overwrites data that the same tool cannot bring back
    NETWORK = "network"
    RUNS_CODE = "runs-code"  # from arguments, a file or a package: it can do anything that the sandbox permits
    PRIVILEGE = "privilege"  # becomes another user
    PROCESSES = "processes"  # signals or traces other processes
    SYSTEM = "system"  # services, mounts, accounts, kernel
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Effect:
    """One effect and its object: a path, an address or a subcommand; empty if the arguments do not name it."""

    kind: Kind
    what: str = ""


@dataclass(frozen=True)
class Use:
    """One program that is started, or a shell builtin that has an effect."""

    tool: str
    arguments: tuple[str, ...]
    effects: tuple[Effect, ...]
    builtin: bool = False


@dataclass(frozen=True)
class Understanding:
    """The analysis of a command line. `unknown` lists in words what its text does not tell; `unreadable` is why nothing was read."""

    uses: tuple[Use, ...] = ()
    unknown: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def tools(self) -> tuple[str, ...]:
        """The programs that it starts, each once, in the order of the text. Shell builtins are left out."""
        return tuple(dict.fromkeys(use.tool for use in self.uses if not use.builtin))

    @property
    def effects(self) -> tuple[Effect, ...]:
        """All effects, each once; with UNKNOWN if anything is unknown or unreadable."""
        known = dict.fromkeys(effect for use in self.uses for effect in use.effects)
        return (*known, *((Effect(Kind.UNKNOWN),) if (self.unknown or self.unreadable) and Effect(Kind.UNKNOWN) not in known else ()))

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of effect."""
        return frozenset(effect.kind for effect in self.effects)

    @property
    def read_only(self) -> bool:
        """Whether everything is understood, and nothing but reading happens."""
        return self.kinds <= {Kind.READS}


@dataclass(frozen=True)
class Arguments:
    """Options in order, each with its value or None, and operands."""

    options: tuple[tuple[str, Field | None], ...]
    operands: tuple[Field, ...]

    def has(self, *names: str) -> bool:
        """Whether one of these options is given."""
        return any(name in names for name, _ in self.options)

    def values(self, names: Collection[str]) -> list[Field]:
        """Return the values of these options."""
        return [value for name, value in self.options if name in names and value is not None]


def split(
    fields: Sequence[Field], valued: Collection[str] = (), *, whole: Collection[str] = (), stop_at_operand: bool = False
) -> tuple[Arguments, int]:
    """Split fields into options and operands. Returns them and the number of fields read: all, or those before the first operand.

    `valued` are the options that take a value, in the next field or after `=`; short ones may be written in one word (`-xzf file`).
    `whole` are options that are not such a word, although they begin with one dash (`-destroy`).
    """
    options: list[tuple[str, Field | None]] = []
    operands: list[Field] = []
    at = 0
    while at < len(fields):
        field = fields[at]
        text = field.shown
        if text == "--":
            if stop_at_operand:
                return Arguments(tuple(options), ()), at + 1
            operands += fields[at + 1 :]
            break
        if not text.startswith("-") or text == "-":
            if stop_at_operand:
                return Arguments(tuple(options), ()), at
            operands.append(field)
            at += 1
            continue
        at += 1
        following = fields[at] if at < len(fields) else None
        taken = _options(field, valued, whole, options, following)
        at += taken
    return Arguments(tuple(options), tuple(operands)), at


def _options(
    field: Field, valued: Collection[str], whole: Collection[str], options: list[tuple[str, Field | None]], following: Field | None
) -> bool:
    """Add the options in one field. Returns whether the following field is the value of one."""
    text = field.shown
    name, equals, value = text.partition("=")
    if text.startswith("--") or name in valued or name in whole:  # some tools write long options with one dash
        if equals:
            options.append((name, Field(value, field.known, field.pattern)))
            return False
        options.append((text, following if text in valued else None))
        return text in valued and following is not None
    for index, letter in enumerate(text[1:], start=2):
        if f"-{letter}" in valued:
            rest = text[index:]
            options.append((f"-{letter}", Field(rest, field.known) if rest else following))
            return not rest and following is not None
        options.append((f"-{letter}", None))
    return False
