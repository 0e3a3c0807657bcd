"""Widen a policy that a person wrote by as much as a proposal takes: what either of the two permits. Nothing else of it changes.

What a proposal never speaks of (denied paths and programs, guarantees, a preset to begin with) stays, even where it is in the way: that was
meant, and whoever tries the result is told that it does not do.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox.policy.document import Document
from agent_sandbox.policy.paths import Tree, matches, parse
from agent_sandbox.policy.programs import covers
from agent_sandbox.policy.proposal import Asked, Line, Proposal
from agent_sandbox.policy.settings import BY_KEY, Shape
from agent_sandbox.values import TYPE_CHECKING, replace

if TYPE_CHECKING:
    from typing import Any

AS_IT_WAS = "as it was"
# Where a proposal that is silent permits everything. Of the network it is silent when none was wanted.
_LEARNT = frozenset(
    {
        *("files.read", "files.write", "files.allowed", "processes.commands", "processes.max"),
        *("limits.timeout_seconds", "limits.cpu_seconds", "limits.memory_mb", "limits.disk_mb"),
    }
)


def widened(own: Document, proposal: Proposal, *, home: str) -> Proposal:
    """The policy that permits what either permits, as far as a proposal speaks of it."""
    learnt = {line.key: line for line in proposal.lines}
    needs_files = "files.read" not in learnt
    lines = []
    for key, value in own.settings:
        line = learnt.pop(key, None)
        if key == "processes.allow":  # a command is a process
            continue
        if key.startswith("files.") and not needs_files:
            lines.append(_kept(key, value))
        elif line is not None:
            lines.append(_both(line, value, home))
        elif key not in _LEARNT or key in proposal.unknown:
            lines.append(_kept(key, value))
    # Of the network a policy that says nothing of it asks for nothing. Of all else, it permits everything.
    lines += [line for line in learnt.values() if line.key.startswith("network.")]
    if own.get("files.read") is False and needs_files and "files.allowed" in learnt:
        lines.append(learnt["files.allowed"])
    return replace(proposal, lines=tuple(lines))


def _kept(key: str, value: Any) -> Line:
    if BY_KEY[key].shape is Shape.TEXTS:
        return Line(key, tuple(Asked(each, AS_IT_WAS) for each in value))
    return Line(key, value, AS_IT_WAS)


def _both(line: Line, value: Any, home: str) -> Line:
    if not isinstance(value, tuple):
        wider = value or line.value if isinstance(value, bool) else max(value, line.value)
        return Line(line.key, wider, AS_IT_WAS if wider == value else line.because)
    if BY_KEY[line.key].shape is Shape.COUNTS:
        return Line(line.key, tuple(sorted({*value, *line.value})), line.because)
    new = [each for each in line.value if not _has(line.key, value, each.text, home)]
    return Line(line.key, (*(Asked(each, AS_IT_WAS) for each in value), *new))


def _has(key: str, value: Iterable[str], text: str, home: str) -> bool:
    """Whether a list covers one more item already."""
    if key == "files.allowed":
        wanted = parse(text, home=home)
        return isinstance(wanted, Tree) and any(matches(parse(each, home=home), wanted.path) for each in value)
    return covers(value, text) if key == "processes.commands" else text in value
