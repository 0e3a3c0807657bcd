"""Real stacks of overlays for tests: several generations of layers over one base, each written through the overlay of those below it.

Frozen layers can only be stacked when they lie on another filesystem than the base, so they are on a tmpfs, in a mount namespace that ends
with the test: call `in_namespace` first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers.readback import NO_BASES, read_stack
from agent_sandbox.workspace.layers.stack import Stack
from agent_sandbox.workspace.reality import Bases
from tests.workspace.layers.overlays import make_layer, userxattr

TARGET = "/data"
Picture = Mapping[str, tuple[object, ...]]


class Stacked:
    """A small machine with /data, and generations of layers over it. The newest is last in `generations`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "machine"
        self.data = self.root / "data"
        self.data.mkdir(parents=True)
        self.store = place / "store"
        self.store.mkdir()
        syscalls.mount("tmpfs", str(self.store), "tmpfs", 0, "mode=700")
        self.merged = place / "merged"
        self.merged.mkdir()
        self.generations: list[Path] = []
        self.numbers = iter(range(1_000_000))

    def fresh(self) -> Path:
        """An empty directory for one more generation."""
        made = self.store / str(next(self.numbers))
        made.mkdir()
        return made

    def add(self) -> Path:
        """Begin a new uppermost generation; returns its upper directory."""
        generation = self.fresh()
        fd = os.open(generation, os.O_RDONLY)
        key = make_layer(fd, TARGET)
        os.close(fd)
        self.generations.append(generation)
        return generation / key / "upper"

    def run(self, body: Callable[[Path], None]) -> None:
        """Let `body` work in the merged tree, writing to a new generation."""
        upper = self.add()
        with self.mounted(self.generations):
            body(self.merged)
        assert upper.is_dir()

    def look(self) -> Picture:
        """What the guest would see."""
        with self.mounted(self.generations):
            return picture(self.merged)

    @contextmanager
    def mounted(self, generations: list[Path]) -> Iterator[None]:
        """The overlay of some generations, the last one being written to."""
        tops = [next(generation.iterdir()) for generation in reversed(generations)]
        lowers = ":".join([*(f"{top}/upper" for top in tops[1:]), str(self.data)])
        marks = "userxattr" if userxattr() else "redirect_dir=nofollow,metacopy=off,index=off"
        options = f"lowerdir={lowers},upperdir={tops[0]}/upper,workdir={tops[0]}/work,{marks}"
        syscalls.mount("overlay", str(self.merged), "overlay", 0, options)
        try:
            yield
        finally:
            syscalls.umount2(str(self.merged))

    @contextmanager
    def stack(self) -> Iterator[Stack]:
        """The generations, opened."""
        opened = [os.open(generation, os.O_RDONLY | os.O_DIRECTORY) for generation in reversed(self.generations)]
        try:
            with Stack.of(opened, userxattr=userxattr()) as stack:
                yield stack
        finally:
            for fd in opened:
                os.close(fd)

    def changes(self, *, bases: Bases = NO_BASES, masks: Collection[str] = ()) -> ChangeSet:
        with self.stack() as stack:
            return read_stack(stack, machine_root=str(self.root), bases=bases, masks=masks)

    def kinds(self, *, bases: Bases = NO_BASES) -> dict[str, str]:
        return {change.path.removeprefix(TARGET + "/"): change.kind.value for change in self.changes(bases=bases)}


def picture(root: Path) -> Picture:
    """A tree by type, mode, owner, attributes and content, so that two can be compared."""
    found: dict[str, tuple[object, ...]] = {}
    for where, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(where) / name
            status = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            attributes = tuple(sorted(name for name in os.listxattr(path, follow_symlinks=False) if name != "security.selinux"))
            size = status.st_size if path.is_file() and not path.is_symlink() else 0
            found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, size, content, attributes)
    return found
