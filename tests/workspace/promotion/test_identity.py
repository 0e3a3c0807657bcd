"""For any tree and any edit: promoted, the tree is the edited one; taken back, it is what it was."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workspace.promotion.trees import Edited, expected_after, shown

NAMES = st.sampled_from(["a", "b", "c", "new\nline", "caf\udce9", "-rf", " "])  # one of them is no UTF-8
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.tuples(st.just("file"), st.binary(max_size=40), st.sampled_from([0o600, 0o644, 0o755, 0o444]), st.integers(0, 2**33))
LINKS = st.tuples(st.just("link"), st.sampled_from([b"a", b"b/c", b"../x"]), st.just(0), st.just(0))
DIRECTORIES = st.tuples(st.just("dir"), st.sampled_from([b"", b"noted"]), st.sampled_from([0o755, 0o700]), st.just(0))
ENTRIES = st.dictionaries(PATHS, FILES | LINKS | DIRECTORIES, max_size=8)
Entries = dict[str, tuple[str, bytes, int, int]]


def build(tree: Path, entries: Entries) -> None:
    """Make the tree hold these; what is in the way is replaced, so that types change."""
    for name, (kind, content, mode, seconds) in sorted(entries.items()):
        path = tree / name
        for above in reversed(path.relative_to(tree).parents[:-1]):
            clear(tree / above, unless_directory=True)
            (tree / above).mkdir(exist_ok=True)
        clear(path, unless_directory=kind == "dir")
        if kind == "link":
            os.symlink(content, os.fsencode(path))
            continue
        if kind == "dir":
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
            os.utime(path, ns=(seconds * 10**9, seconds * 10**9 + 7))
        os.setxattr(path, "user.note", content)
        path.chmod(mode)


def clear(path: Path, *, unless_directory: bool) -> None:
    if path.is_dir() and not path.is_symlink():
        if not unless_directory:
            shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(old=ENTRIES, edits=ENTRIES, removed=st.lists(PATHS, max_size=4))
def test_promote_then_undo_is_the_identity(old: Entries, edits: Entries, removed: list[str]) -> None:
    def edit(tree: Path) -> None:
        for name in removed:
            clear(tree / name, unless_directory=False)
        build(tree, edits)

    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        edited = Edited(Path(scratch), lambda tree: build(tree, old), edit)
        before, wanted = shown(edited.project), expected_after(edited)
        done = edited.promote()
        assert shown(edited.project) == wanted
        assert bool(done.number) == bool(edited.changes)
        if done.number:
            edited.undo()
        assert shown(edited.project) == before
        assert edited.staging() == []
        edited.close()
