"""The mark of a review: which state of a sandbox a person was last shown.

Every run writes a line before it starts (see `originals.runs`), and every snapshot, rollback and promotion changes the layers. So a mark
consists of the layers and the number of runs in each. Two marks are equal only if nothing could have changed the sandbox in between.

The mark is in a file of its own, `shown.json`. A sandbox without the file was never shown; an unreadable file counts as missing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.durable import write_atomically
from agent_sandbox.workspace.originals.runs import RUN, read_lines
from agent_sandbox.workspace.store import SandboxState

NAME = "shown.json"


@dataclass(frozen=True)
class ReviewMark:
    """A state of a sandbox: its layers, uppermost first, and the number of runs in each."""

    layers: tuple[int, ...]
    runs: tuple[int, ...]

    @classmethod
    def of(cls, state: SandboxState) -> ReviewMark:
        """Return the mark of the present state. Raises OSError, and `WorkspaceError` if its history is damaged."""
        layers = state.history().layers
        return cls(layers, tuple(sum(line.startswith(RUN) for line in read_lines(state.bases, layer)) for layer in layers))

    @classmethod
    def recall(cls, state: SandboxState) -> ReviewMark | None:
        """Return the mark of the state that a person was last shown; None if there is none."""
        try:
            with open(os.path.join(state.path, NAME), "rb") as file:
                layers, runs = json.loads(file.read())
            mark = cls(tuple(map(int, layers)), tuple(map(int, runs)))
        except (OSError, ValueError, TypeError):
            return None
        return mark if mark.layers and len(mark.layers) == len(mark.runs) else None

    def remember(self, state: SandboxState) -> None:
        """Store the mark. A failure is ignored: then a person is told again of runs whose changes they have seen."""
        with suppress(OSError):
            if state.exists:
                write_atomically(os.path.join(state.path, NAME), json.dumps([self.layers, self.runs]) + "\n")

    def since(self, shown: ReviewMark) -> str:
        """Describe in words what happened to the sandbox between the mark `shown` and this one; "" if nothing did."""
        if self == shown:
            return ""
        if self.layers[0] == shown.layers[0]:  # the lower layers may have been merged into one
            runs = self.runs[0] - shown.runs[0]
        elif self.layers[-len(shown.layers) :] == shown.layers:  # snapshots were taken
            runs = sum(self.runs) - sum(shown.runs)
        else:
            return "the sandbox was restored to another state"
        return "" if runs <= 0 else f"{runs:,} {'run' if runs == 1 else 'runs'} used the sandbox"
