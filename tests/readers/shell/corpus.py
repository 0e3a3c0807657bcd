"""The corpus of command lines, read from its file."""

from __future__ import annotations

from pathlib import Path

from agent_sandbox.readers.shell.effects import EffectKind

LETTERS = {
    "R": EffectKind.READS,
    "W": EffectKind.WRITES,
    "D": EffectKind.DESTROYS,
    "N": EffectKind.NETWORK,
    "C": EffectKind.RUNS_CODE,
    "P": EffectKind.PRIVILEGE,
    "K": EffectKind.PROCESSES,
    "S": EffectKind.SYSTEM,
    "?": EffectKind.UNKNOWN,
}


def corpus() -> list[tuple[str, tuple[str, ...], frozenset[EffectKind]]]:
    """Each command with the tools that it starts and the sorts of effects that it has."""
    found = []
    for line in Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            kinds, tools, command = (part.strip() for part in line.split("|", 2))
            names = tuple(name.strip() for name in tools.split(",") if name.strip())
            found.append((command.replace("⏎", "\n"), names, frozenset(LETTERS[each] for each in kinds if each != "-")))
    return found
