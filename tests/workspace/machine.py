"""A small machine in a directory, and one sandbox on it with a real overlay over /data."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers.readback import NO_BASES, read_stack
from agent_sandbox.workspace.layers.stack import Stack
from agent_sandbox.workspace.reality import Bases
from tests.workspace.layers.overlays import edit, make_layer, userxattr


class Machine:
    """The machine and its sandbox. Remove it at the end of the test."""

    def __init__(self, place: Path) -> None:
        self.root = place / "machine"
        self.data = self.root / "data"
        self.data.mkdir(parents=True)
        (place / "layers").mkdir()
        self.layers = os.open(place / "layers", os.O_RDONLY | os.O_DIRECTORY)
        self.layer = place / "layers" / make_layer(self.layers, "/data")

    def remove(self) -> None:
        """The layers are removed with our own means: pytest's give up on deep trees."""
        os.close(self.layers)
        place = os.open(self.root.parent, os.O_RDONLY | os.O_DIRECTORY)
        remove_tree(place, "layers")
        os.close(place)

    def edit(self, body: Callable[[Path], None]) -> None:
        edit(self.data, self.layer, body)

    def stack(self, owner_shift: int = 0) -> Stack:
        return Stack.of([self.layers], userxattr=userxattr(), owner_shift=owner_shift)

    def changes(self, *, masks: Collection[str] = (), limit: int = 1000, owner_shift: int = 0, bases: Bases = NO_BASES) -> ChangeSet:
        with self.stack(owner_shift) as stack:
            return read_stack(stack, machine_root=str(self.root), masks=masks, limit=limit, bases=bases)

    def kinds(self, *, masks: Collection[str] = ()) -> dict[str, str]:
        return {change.path: change.kind.value for change in self.changes(masks=masks)}
