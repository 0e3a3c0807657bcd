"""How a tool is described: by what becomes of its operands and what its options add. Most tools need no more than that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.readers.shell.effects import Arguments, Effect, Kind, split
from agent_sandbox.readers.shell.expansion import Field

_NOWHERE = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "-"})


def words(text: str) -> frozenset[str]:
    """Names written one after the other."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Spec:
    """A tool.

    operands: what is done with each operand; None when they are no files.
    last: what is done with the last of several operands instead, as in `cp`.
    skip: so many operands at the beginning are no files, as the pattern of `grep`; all are with one of the options `unless`.
    always: what is done whatever the arguments.
    valued: options that take a value. outputs: those whose value is a file that is written.
    adds: what options do beyond that. instead: options that make the operands something else.
    subcommands: by the first operand; unknown ones do what `otherwise` says.
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
        """What it does with these arguments."""
        valued = frozenset((*self.valued.split(), *self.outputs.split()))
        if self.subcommands:
            return self._of_subcommand(fields, valued)
        arguments, _ = split(fields, valued)
        return [*self._of_options(arguments), *self._of_operands(arguments)]

    def _of_subcommand(self, fields: Sequence[Field], valued: frozenset[str]) -> list[Effect]:
        before, at = split(fields, valued, stop_at_operand=True)
        found = self._of_options(before)
        if at >= len(fields):
            return found  # help, or a version
        name = fields[at].text
        spec = self.subcommands.get(name or "")
        if spec is None:
            return [*found, Effect(Kind.UNKNOWN if name is None else self.otherwise, fields[at].shown)]
        return [*found, *(effect if effect.what else Effect(effect.kind, name or "") for effect in spec.effects(fields[at + 1 :]))]

    def _of_options(self, arguments: Arguments) -> list[Effect]:
        found = [Effect(kind) for kind in self.always]
        found += [Effect(kind, name) for name, kind in self.adds.items() if arguments.has(name)]
        found += [Effect(Kind.WRITES, value.shown) for value in arguments.values(self.outputs.split()) if value.shown not in _NOWHERE]
        return found

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
    """An effect on a path, unless it leads nowhere. Writing to a disk or a network device is more than writing."""
    if path in _NOWHERE:
        return []
    if path.startswith(("/dev/tcp/", "/dev/udp/")):
        return [Effect(Kind.NETWORK, path)]
    if kind is Kind.WRITES and path.startswith(("/dev/sd", "/dev/nvme", "/dev/hd", "/dev/vd", "/dev/mapper/", "/dev/disk/", "/dev/mem")):
        return [Effect(Kind.DESTROYS, path)]
    return [Effect(kind, path)]
