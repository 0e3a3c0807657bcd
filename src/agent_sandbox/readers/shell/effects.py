"""The effects of a command as values, the splitting of its arguments into options and operands, and `Spec`, which describes a tool."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum

from agent_sandbox._fast.values import dataclass
from agent_sandbox._fast.values import field as value_field
from agent_sandbox.readers.shell.expansion import Field

_NO_EFFECT = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "-"})


class EffectKind(Enum):
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
    """One effect and its object: a path, an address or a subcommand. The object is empty if the arguments do not name it."""

    kind: EffectKind
    what: str = ""


@dataclass(frozen=True)
class Use:
    """One program that is started. With `builtin`: a shell builtin, redirection or variable that has an effect."""

    tool: str
    arguments: tuple[str, ...]
    effects: tuple[Effect, ...]
    builtin: bool = False


@dataclass(frozen=True)
class Understanding:
    """The analysis of a command line.

    `unknown` are sentences about parts whose effects are unknown. `unreadable` is the reason why nothing was read; empty if it was read.
    """

    uses: tuple[Use, ...] = ()
    unknown: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def tools(self) -> tuple[str, ...]:
        """The programs that the command line starts, each once, in the order of the text. Shell builtins are left out."""
        return tuple(dict.fromkeys(use.tool for use in self.uses if not use.builtin))

    @property
    def effects(self) -> tuple[Effect, ...]:
        """All effects, each once; with UNKNOWN if anything is unknown or unreadable."""
        known = dict.fromkeys(effect for use in self.uses for effect in use.effects)
        return (
            *known,
            *((Effect(EffectKind.UNKNOWN),) if (self.unknown or self.unreadable) and Effect(EffectKind.UNKNOWN) not in known else ()),
        )

    @property
    def kinds(self) -> frozenset[EffectKind]:
        """The kinds of all effects."""
        return frozenset(effect.kind for effect in self.effects)

    @property
    def read_only(self) -> bool:
        """Whether the command line is fully understood and only reads."""
        return self.kinds <= {EffectKind.READS}


@dataclass(frozen=True)
class Arguments:
    """The arguments of a program: its options in order, each with its value or None, and its operands."""

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
    """Split fields into options and operands. Returns them and the number of fields read.

    `valued` are the options that take a value, in the next field or after `=`. Short options may be combined in one word (`-xzf file`),
    except those in `whole`, which are long although they begin with one dash (`-destroy`). `stop_at_operand` stops before the first
    operand.
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
    """Append the options in one field to `options`. Returns whether the `following` field is the value of the last one."""
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


def words(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by blanks."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Spec:
    """A description of a tool, from which its effects follow for any arguments.

    operands: the effect on each operand; None if operands are not files.
    last: the effect on the last of several operands instead, as in `cp`.
    skip: the number of leading operands that are not files, as the pattern of `grep`; 0 if one of the options in `unless` is given.
    always: effects with any arguments.
    valued: options that take a value.
    outputs: options whose value is a file that is written.
    adds: further effects of options, and of operands that name a subcommand (`destroy`).
    instead: options that change the effect on the operands.
    subcommands: the spec of each subcommand, by its name; an unknown subcommand has the effect `otherwise`.
    """

    operands: EffectKind | None = EffectKind.READS
    last: EffectKind | None = None
    skip: int = 0
    unless: str = ""
    always: tuple[EffectKind, ...] = ()
    valued: str = ""
    outputs: str = ""
    adds: Mapping[str, EffectKind] = value_field(default_factory=dict)
    instead: Mapping[str, EffectKind | None] = value_field(default_factory=dict)
    subcommands: Mapping[str, Spec] = value_field(default_factory=dict)
    otherwise: EffectKind = EffectKind.UNKNOWN

    def effects(self, fields: Sequence[Field]) -> list[Effect]:
        """Return the effects of the tool with these arguments."""
        valued = frozenset((*self.valued.split(), *self.outputs.split()))
        if self.subcommands:
            return self._of_subcommand(fields, valued)
        arguments, _ = split(fields, valued, whole=(*self.adds, *self.instead))
        return [*self._of_options(arguments), *self._of_operands(arguments)]

    def _of_subcommand(self, fields: Sequence[Field], valued: frozenset[str]) -> list[Effect]:
        before, at = split(fields, valued, stop_at_operand=True)
        effects = self._of_options(before)
        if at >= len(fields):
            return effects  # prints help or a version
        name = fields[at].text
        spec = self.subcommands.get(name or "")
        if spec is None:
            return [*effects, Effect(EffectKind.UNKNOWN if name is None else self.otherwise, fields[at].shown)]
        return [*effects, *(effect if effect.what else Effect(effect.kind, name or "") for effect in spec.effects(fields[at + 1 :]))]

    def _of_options(self, arguments: Arguments) -> list[Effect]:
        effects = [Effect(kind) for kind in self.always]
        operands = {operand.shown for operand in arguments.operands}
        effects += [Effect(kind, name) for name, kind in self.adds.items() if arguments.has(name) or name in operands]
        effects += [
            Effect(EffectKind.WRITES, value.shown) for value in arguments.values(self.outputs.split()) if value.shown not in _NO_EFFECT
        ]
        return effects

    def _of_operands(self, arguments: Arguments) -> Iterator[Effect]:
        kind = self.operands
        for name, other in self.instead.items():
            kind = other if arguments.has(name) else kind
        skipped = 0 if arguments.has(*self.unless.split()) else self.skip
        operands = arguments.operands[skipped:]
        for index, operand in enumerate(operands):
            sort = self.last if self.last is not None and index == len(operands) - 1 and (index or skipped) else kind
            if sort is not None:
                yield from on_path(sort, operand.shown)


def on_path(kind: EffectKind, path: str) -> list[Effect]:
    """Return the effect of this kind on a path, as a list; empty for the null device and standard streams.

    A network device counts as NETWORK, and writing to a disk device as DESTROYS.
    """
    if path in _NO_EFFECT:
        return []
    if path.startswith(("/dev/tcp/", "/dev/udp/")):
        return [Effect(EffectKind.NETWORK, path)]
    if kind is EffectKind.WRITES and path.startswith(
        ("/dev/sd", "/dev/nvme", "/dev/hd", "/dev/vd", "/dev/mapper/", "/dev/disk/", "/dev/mem")
    ):
        return [Effect(EffectKind.DESTROYS, path)]
    return [Effect(kind, path)]
