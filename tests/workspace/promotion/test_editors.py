"""Editors that save in a loop while the same files are promoted and taken back lose nothing that they have saved."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from mmap import mmap
from pathlib import Path
from types import TracebackType

import pytest

from agent_sandbox.errors import SandboxError
from agent_sandbox.workspace.promotion import promote
from tests.security.test_promotion_crash import SEED, naive
from tests.workspace.promotion.trees import Edited

Save = Callable[[Path, bytes], None]


def by_rename(path: Path, text: bytes) -> None:
    new = path.with_name(f".{path.name}.swp")
    new.write_bytes(text)
    new.rename(path)


def in_place(path: Path, text: bytes) -> None:
    path.write_bytes(text)  # truncates the file and writes it anew


def by_appending(path: Path, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(text)


class KeptOpen:
    """Appends to a file that stays open, as a program does that writes a log."""

    def __init__(self) -> None:
        self.fd = -1

    def __call__(self, path: Path, text: bytes) -> None:
        if self.fd < 0:
            self.fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(self.fd, text)


class Editor:
    """A child that saves version after version, in its own time. It ends between two saves, and `saved` says how many there were."""

    def __init__(self, path: Path, save: Save, seed: int) -> None:
        self.path, self.save, self.chance = path, save, random.Random(seed)
        self._shared = mmap(-1, 16)

    @property
    def saved(self) -> int:
        return int.from_bytes(self._shared[:8], "little")

    def version(self, number: int) -> bytes:
        return f"<{self.path.name} version {number} by {self.save!r:.40}>\n".encode()

    def __enter__(self) -> Editor:
        self.child = os.fork()
        if self.child == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            number = self.saved
            with suppress(BaseException):
                while not self._shared[8]:
                    with suppress(FileNotFoundError):  # somebody else has it in hand
                        self.save(self.path, self.version(number + 1))
                        number += 1
                        self._shared[:8] = number.to_bytes(8, "little")
                    time.sleep(self.chance.random() ** 4 * 0.3)  # in bursts, as people save
            os._exit(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._shared[8] = 1
        os.waitpid(self.child, 0)
        self._shared[8] = 0


EDITORS: dict[str, Callable[[], Save]] = {
    "renamed": lambda: by_rename,
    "in-place": lambda: in_place,
    "appended": lambda: by_appending,
}
EVERY_VERSION_STAYS = {"appended", "kept-open"}


def make(tree: Path) -> None:
    for name in (*EDITORS, *(f"other{number}" for number in range(5))):
        (tree / name).write_text("old\n")


def edit(tree: Path) -> None:
    for path in tree.iterdir():
        path.write_text(f"the guest's {path.name}\n")
    (tree / "added").write_text("by the guest\n")


def everything(edited: Edited) -> bytes:
    """All that is in the tree, kept for an undo, or kept because it was somebody else's."""
    kept = [path for path in edited.promotions.rglob("*") if "olds" in path.parts or "kept" in path.parts]
    return b"".join(path.read_bytes() for path in (*edited.project.iterdir(), *kept) if path.is_file())


def lost(edited: Edited, promoter: Callable[[], object], rounds: int) -> tuple[list[str], int, int]:
    """Which saved versions are nowhere any more after promotions amid editing; how many were promoted, and how many refused."""
    editors = [Editor(edited.project / name, make(), SEED + number) for number, (name, make) in enumerate(EDITORS.items())]
    gone: list[str] = []
    promoted = refused = 0
    for _ in range(rounds):
        with ExitStack() as stack:
            for editor in editors:
                stack.enter_context(editor)
            for _ in range(10):
                try:
                    promoter()
                    promoted += 1
                except SandboxError:
                    refused += 1
        found = everything(edited)
        for editor in editors:
            numbers = range(1, editor.saved + 1) if editor.path.name in EVERY_VERSION_STAYS else [editor.saved]
            gone += [f"{editor.path.name} {number}" for number in numbers if number and editor.version(number) not in found]
    return gone, promoted, refused


@pytest.mark.slow
def test_nothing_that_an_editor_saves_meanwhile_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "REMEMBERED", 1000)  # so that what is forgotten with the oldest promotion does not look lost
    edited = Edited(tmp_path, make, edit)

    def ours() -> None:
        try:
            edited.promote(edited.plan())
        except SandboxError:
            with suppress(SandboxError):
                edited.undo()
            raise

    gone, promoted, refused = lost(edited, ours, 6)
    assert gone == []
    assert promoted and refused, (promoted, refused)
    edited.close()


def test_whoever_copies_by_path_loses_what_was_saved_meanwhile(tmp_path: Path) -> None:
    edited = Edited(tmp_path, make, edit)
    edited.promotions.mkdir()
    assert lost(edited, lambda: naive(edited), 2)[0]
    edited.close()


def test_a_program_that_keeps_a_file_open_goes_on_writing_to_the_file_in_the_tree(tmp_path: Path) -> None:
    edited = Edited(tmp_path, make, edit)
    with Editor(edited.project / "other1", KeptOpen(), SEED) as editor:
        while not editor.saved:
            os.sched_yield()
        for _ in range(10):
            with pytest.raises(SandboxError):
                edited.promote(edited.plan())
    found = (edited.project / "other1").read_bytes()
    assert editor.saved and all(editor.version(number) in found for number in range(1, editor.saved + 1))
    assert edited.staging() == []
    edited.close()
