"""A small machine with one sandbox on it, whose bases are kept: what the tests of bases share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.originals import capture, files, runs
from agent_sandbox.workspace.originals.capture import Budget, Captured
from agent_sandbox.workspace.reality import Base
from tests.workspace.layers.overlays import edit, make_layer, userxattr


class Machine:
    """A directory that stands for the machine, with /data in it, and one sandbox on it. Files in it look as if they were old."""

    def __init__(self, place: Path) -> None:
        self.root, self.place = place / "machine", place
        self.data = self.root / "data"
        self.data.mkdir(parents=True)
        (place / "layers").mkdir()
        self.layers = os.open(place / "layers", os.O_RDONLY | os.O_DIRECTORY)
        self.layer = place / "layers" / make_layer(self.layers, "/data")
        self.directory = str(place / "bases")
        self.since = self.began = 0

    def begin(self, generations: tuple[int, ...] = (1,)) -> int:
        """A run begins, and the clock has ticked since anything was changed."""
        now = max(time.time_ns(), *(path.lstat().st_ctime_ns for path in (self.data, *self.data.rglob("*")))) + 2 * runs.TICK_NS
        while time.time_ns() < now + runs.TICK_NS:
            pass
        self.began = now
        self.since = runs.begin(self.directory, generations, now_ns=now)
        return self.since

    def edit(self, body: Callable[[Path], object]) -> None:
        def edited(merged: Path) -> None:
            body(merged)

        edit(self.data, self.layer, edited)

    def keep(self, generations: tuple[int, ...] = (1,), *, masks: Collection[str] = (), budget: Budget | None = None) -> Captured:
        upper = os.open(self.layer / "upper", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return capture.keep(
                self.directory,
                generations[-1],
                [("/data", upper)],
                since_ns=self.since,
                began_ns=self.began,
                already=files.recall(self.directory, generations),
                prefix="user.overlay." if userxattr() else "trusted.overlay.",
                masks=masks,
                machine_root=str(self.root),
                budget=budget,
            )
        finally:
            os.close(upper)

    def run(self, body: Callable[[Path], object]) -> Captured:
        self.begin()
        self.edit(body)
        return self.keep()

    def base(self, path: str) -> Base:
        return files.recall(self.directory, [1])[path]

    def content(self, path: str) -> bytes:
        with open(files.open_content(self.directory, self.base(path)), "rb") as file:
            return file.read()

    def remove(self) -> None:
        """The layers are removed with our own means: pytest's give up on deep trees."""
        os.close(self.layers)
        place = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        remove_tree(place, "layers")
        os.close(place)
