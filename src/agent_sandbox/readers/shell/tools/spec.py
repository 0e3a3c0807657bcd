"""The description of a tool: the effect on its operands, and the effects of its options. Enough for most tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.readers.shell.effects import Arguments, Effect, Kind, split
from agent_sandbox.readers.shell.expansion import Field

_NO_EFFECT = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "-"})


def words(text: str) -> frozenset[str]:
    """Split a text at blanks into a set of names."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Spec:
    """A tool.

    operands: the effect on each operand; None if operands are not files.
    last: the effect on the last of several operands instead, as in `cp`.
    skip: the number of leading operands that are not files, as the pattern of `grep`; none with one of the options `unless`.
    always: effects with any arguments.
    valued: options that take a value.
    outputs: options whose value is a file that is written.
    adds: further effects of options, and of operands that name a subcommand (`destroy`).
    instead: options that change the effect on the operands.
    subcommands: specs by the first operand; the effect of an unknown one is `otherwise`.
    """

    operands: Kind | None = Kind.READS
    last: Kind | None = None
    skip: int = 0
    unless: str = ""
    always: tuple[Kind, ...] = ()
    valued: str = ""
    outputs: str = ""
    adds: Mapping[str, Kind] = field(default_factory=dict)
    instead: Mapping[str, Kind | None] = field(default_factory=dict)
    subcommands: Mapping[str, Spec] = field(default_factory=dict)
    otherwise: Kind = Kind.UNKNOWN

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
            return [*effects, Effect(Kind.UNKNOWN if name is None else self.otherwise, fields[at].shown)]
        return [*effects, *(effect if effect.what else Effect(effect.kind, name or "") for effect in spec.effects(fields[at + 1 :]))]

    def _of_options(self, arguments: Arguments) -> list[Effect]:
        effects = [Effect(kind) for kind in self.always]
        operands = {operand.shown for operand in arguments.operands}
        effects += [Effect(kind, name) for name, kind in self.adds.items() if arguments.has(name) or name in operands]
        effects += [Effect(Kind.WRITES, value.shown) for value in arguments.values(self.outputs.split()) if value.shown not in _NO_EFFECT]
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


def on_path(kind: Kind, path: str) -> list[Effect]:
    """Return an effect on a path; none for the null device and standard streams.

    A network device counts as NETWORK, and writing to a disk device as DESTROYS.
    """
    if path in _NO_EFFECT:
        return []
    if path.startswith(("/dev/tcp/", "/dev/udp/")):
        return [Effect(Kind.NETWORK, path)]
    if kind is Kind.WRITES and path.startswith(("/dev/sd", "/dev/nvme", "/dev/hd", "/dev/vd", "/dev/mapper/", "/dev/disk/", "/dev/mem")):
        return [Effect(Kind.DESTROYS, path)]
    return [Effect(kind, path)]
