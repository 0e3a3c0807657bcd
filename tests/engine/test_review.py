"""The review of a promotion: whoever applies only what it shows to the base gets exactly what the promotion writes.

Content that is shown by its digest is taken from a pool by that digest, so a digest of other content fails.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.promote import PromotionProposal, Wanted, selected
from agent_sandbox.engine.review import rows_for_approver, unified_rows
from agent_sandbox.errors import Drift
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.contents import SMALLEST_UNREMEMBERED, Mixed
from agent_sandbox.workspace.diff.compare import DEFAULT, EVERYTHING, DiffLimits, MachineFiles, Preview, compare, pair_renames
from agent_sandbox.workspace.digests import ContentDigests, content_digest, digest_of
from agent_sandbox.workspace.layers.readback import read_stack
from agent_sandbox.workspace.layers.renames import find_renames
from agent_sandbox.workspace.layers.stack import Stack
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion import promote as promote_module
from agent_sandbox.workspace.promotion.inspect import look_at, protected_classes
from agent_sandbox.workspace.protected import CLASSES
from tests.workspace.diff.test_patch import CONTENTS, perform
from tests.workspace.layers.overlays import edit, make_layer, userxattr
from tests.workspace.promotion.trees import ME, shown

Steps = list[tuple[str, bytes, bytes]]
TEXT = b"".join(b"line %d\n" % number for number in range(20))
LONG = b"".join(b"%d\n" % number for number in range(DEFAULT.added + 50))
NAMES = st.sampled_from([b"a", b"b", b"c", b"sub", b"__pycache__", b".npm", b"a b", b"new\nline", b"\xff"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
EDITED = st.integers(0, 19).map(lambda at: TEXT.replace(b"line %d\n" % at, b"edited\n"))
BINARY = st.binary(min_size=1, max_size=40).map(lambda content: b"\x7fELF\0\0\xff\xfe" * 4 + content)
STEPS = st.one_of(
    st.tuples(st.just("write"), PATHS, st.one_of(CONTENTS, EDITED, BINARY, st.sampled_from([LONG, b"x" * 3000 + b"\n"]))),
    st.tuples(st.just("run"), PATHS, CONTENTS),
    st.tuples(st.just("link"), PATHS, st.sampled_from([b"nowhere", b"../b", b"/etc/passwd", b"to\nwhere"])),
    st.tuples(st.just("remove"), PATHS, st.just(b"")),
    st.tuples(st.just("move"), PATHS, PATHS),
    st.tuples(st.just("mode"), PATHS, st.sampled_from([b"600", b"755", b"500", b"644"])),
    st.tuples(st.just("attribute"), PATHS, st.sampled_from([b"", b"value", b"\0\1"])),
)


def do(root: bytes, steps: Steps) -> None:
    """Do the steps in a tree."""
    for step, path, argument in steps:
        place = os.path.join(root, path)
        if step in ("mode", "attribute"):
            if os.path.isfile(place) and not os.path.islink(place):
                os.chmod(place, int(argument, 8)) if step == "mode" else os.setxattr(place, "user.note", argument)
        else:
            perform(root, [(step, path, argument)])


class Promotable:
    """A real project, an overlay over it in which somebody has worked, and the proposal of a promotion. Rooted in a scratch directory."""

    def __init__(self, scratch: Path, before: Steps, steps: Steps) -> None:
        self.scratch, self.project = scratch, scratch / "project"
        self.project.mkdir()
        do(os.fsencode(self.project), before)
        (scratch / "layers").mkdir()
        self._layers = os.open(scratch / "layers", os.O_RDONLY | os.O_DIRECTORY)
        self.layer = scratch / "layers" / make_layer(self._layers, str(self.project))
        edit(self.project, self.layer, lambda merged: do(os.fsencode(merged), steps))
        self.stack = Stack.of([self._layers], userxattr=userxattr())
        self.changes = find_renames(read_stack(self.stack), self.stack)
        self.before = scratch / "before"
        shutil.copytree(self.project, self.before, symlinks=True)

    def close(self) -> None:
        self.stack.__exit__(None, None, None)
        os.close(self._layers)

    def proposal(self, wanted: Wanted) -> PromotionProposal:
        """Return the proposal that `proposed` yields if no real file has changed."""
        root, contents = str(self.project), Mixed(self.stack)
        changes, caches = selected(self.changes, root, replace(wanted, system=False))
        expected = look_at(root, changes)
        classes = protected_classes(changes, expected, contents, root=root)
        wanted = replace(wanted, approved=frozenset(CLASSES))
        hashes = ContentDigests(changes, contents)
        return PromotionProposal(root, changes, contents, wanted, expected, classes, pending=self.changes, caches=caches, hashes=hashes)

    def promote(self, proposal: PromotionProposal) -> None:
        """Promote it, without waiting for the disk: no crash is tried here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(promote_module, "syncfs", lambda fd: None)
            patch.setattr(os, "fsync", lambda fd: None)
            promote_module.promote(proposal.plan(), proposal.contents, str(self.scratch / "promotions"), holder=ME)

    def pool(self) -> dict[str, bytes]:
        """All contents in the layer by digest, for content that is shown by its digest."""
        files = [path for path in self.layer.joinpath("upper").rglob("*") if path.is_file() and not path.is_symlink()]
        return {sha256(content).hexdigest(): content for content in map(Path.read_bytes, files)}

    def applied(self, previews: list[Preview]) -> dict[str, tuple[object, ...]]:
        """The base, to which exactly these previews were applied."""
        copy, pool = self.scratch / "copy", self.pool()
        shutil.copytree(self.before, copy, symlinks=True)
        for preview in sorted(previews, key=lambda each: each.change.after is not None):  # what goes away makes room
            apply(preview, self.before, copy, pool, str(self.project))
        applied = entries(copy)
        shutil.rmtree(copy)
        return applied

    def previews(self, changes: ChangeSet, limits: DiffLimits) -> Iterator[Preview]:
        machine = MachineFiles()
        for whole in pair_renames(changes):
            for change in machine.one_by_one(whole, limits.inside):
                yield compare(change, self.stack, machine, limits=limits)


@cache
def _place() -> str:
    """Memory, if it takes extended attributes: the end of an overlay waits for the disk below it."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.setxattr(file.name, "user.note", b"")
        return "/dev/shm"
    return os.environ["PYTEST_DEBUG_TEMPROOT"]


@contextmanager
def promotable(before: Steps, steps: Steps) -> Iterator[Promotable]:
    with tempfile.TemporaryDirectory(dir=_place()) as scratch:
        work = Promotable(Path(scratch), before, steps)
        try:
            yield work
        finally:
            work.close()


def apply(preview: Preview, base: Path, copy: Path, pool: dict[str, bytes], project: str) -> None:
    """Do to a copy of the base what a preview shows, and nothing else."""
    change = preview.change
    place = copy / change.path.removeprefix(project + "/")
    node = change.after
    if node is None or (change.before is not None and change.before.type is not node.type):
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)
    if node is None:
        return
    if node.type is EntryType.DIRECTORY:
        place.mkdir(exist_ok=True)
    elif node.type is EntryType.SYMLINK:
        place.unlink(missing_ok=True)
        place.symlink_to(os.fsdecode(b"".join(preview.new)))
        return
    else:
        source = base / (change.renamed_from or change.path).removeprefix(project + "/")
        from_base = (change.before is not None and change.before.type is EntryType.FILE) or bool(change.renamed_from)
        content = source.read_bytes() if from_base else b""
        if preview.cut:
            content = pool[preview.sha256]
        elif preview.edits or preview.binary is not None:
            content = b"".join(preview.new)
            assert preview.lines_before == 0 and all(len(line) <= EVERYTHING.columns for line in preview.new)
        assert len(content) == node.size
        place.unlink(missing_ok=True)
        place.write_bytes(content)
        for name, value in node.xattrs.items():
            digest = sha256(value).hexdigest()
            assert name not in change.xattrs or any(f"{name} differs: now" in fact and digest in fact for fact in preview.facts)
            os.setxattr(place, name, value)
    place.chmod(node.mode)


def entries(tree: Path) -> dict[str, tuple[object, ...]]:
    """All that is promised of a tree, but for owners and times."""
    return {path: (entry.type, entry.mode, entry.content, entry.xattrs) for path, entry in shown(tree).items()}


def check(before: Steps, steps: Steps, *, caches: bool, limits: DiffLimits) -> None:
    with promotable(before, steps) as work:
        proposal = work.proposal(Wanted(caches=caches))
        previews = list(work.previews(proposal.changes, limits))
        applied = work.applied(previews)
        assert proposal.digest == digest_of(proposal.changes, ContentDigests(proposal.changes, work.stack).by_path())
        by_digest = {preview.sha256 for preview in previews if preview.cut}
        rows = unified_rows(proposal.changes, work.stack, MachineFiles(), relative_to=str(work.project), limits=limits)
        lines = [row.plain for row in rows]
        assert all(any(digest in line for line in lines) for digest in by_digest)
        assert list(rows_for_approver(proposal))[-1].plain.endswith(proposal.digest)
        work.promote(proposal)
        assert entries(work.project) == applied


MOVED = ([("write", b"a", TEXT)], [("move", b"a", b"sub/c"), ("write", b"sub/c", TEXT.replace(b"line 7\n", b"evil()\n"))])
BOTH = pytest.mark.parametrize("caches", [False, True], ids=["promote", "promote --caches"])


@BOTH
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=7), st.lists(STEPS, max_size=7), st.sampled_from([DEFAULT, EVERYTHING]))
@example(*MOVED, DEFAULT)
@example([("write", b"__pycache__/a", TEXT)], [("move", b"__pycache__/a", b"b"), ("write", b"b", TEXT[7:])], DEFAULT)
@example([], [("write", b"a", LONG), ("write", b"b", b"\x7fELF\0\0\xff\xfe" * 9), ("attribute", b"b", b"value")], DEFAULT)
def test_applying_what_is_shown_gives_what_is_promoted(caches: bool, before: Steps, steps: Steps, limits: DiffLimits) -> None:
    check(before, steps, caches=caches, limits=limits)


@pytest.mark.torture
@BOTH
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=12), st.lists(STEPS, max_size=12), st.sampled_from([DEFAULT, EVERYTHING]))
def test_applying_what_is_shown_gives_what_is_promoted_in_many_more_cases(
    caches: bool, before: Steps, steps: Steps, limits: DiffLimits
) -> None:
    check(before, steps, caches=caches, limits=limits)


def test_what_is_left_out_of_a_review_is_missed() -> None:
    """The control of the tests above."""
    steps: Steps = [
        ("write", b"a", TEXT.replace(b"line 7\n", b"evil()\n")),
        ("mode", b"b", b"755"),
        ("remove", b"c", b""),
        ("link", b"d", b"a"),
    ]
    with promotable([("write", name, TEXT) for name in (b"a", b"b", b"c")], steps) as work:
        proposal = work.proposal(Wanted())
        previews = list(work.previews(proposal.changes, EVERYTHING))
        whole = work.applied(previews)
        for number in range(len(previews)):
            assert work.applied([*previews[:number], *previews[number + 1 :]]) != whole
        binary = replace(previews[0], cut=True, sha256=sha256(b"another").hexdigest())
        with pytest.raises(KeyError):
            work.applied([binary, *previews[1:]])
        work.promote(proposal)
        assert entries(work.project) == whole


def test_every_part_of_a_change_that_is_promoted_changes_the_digest() -> None:
    steps: Steps = [("write", b"a", b"one\n"), ("write", b"sub/b", b"two\n"), ("link", b"c", b"nowhere"), ("attribute", b"a", b"value")]
    with promotable([("write", b"gone/x", b"")], [*steps, ("remove", b"gone", b"")]) as work:
        proposal = work.proposal(Wanted())
        content = proposal.hashes.by_path()
        changes = proposal.changes.changes
        digests = {proposal.digest, digest_of(changes[1:], content)}
        for number, change in enumerate(changes):
            for other in _others(change):
                digests.add(digest_of((*changes[:number], other, *changes[number + 1 :]), content))
        file = next(change.path for change in changes if change.path.endswith("/a"))
        digests.add(digest_of(changes, {**content, file: sha256(b"another\n").hexdigest()}))
        assert len(digests) == 3 + sum(len(list(_others(change))) for change in changes), "no two of them are the same"


def _others(change: Change) -> Iterator[Change]:
    """The same change with something else in it."""
    yield replace(change, path=change.path + "x")
    yield replace(change, kind=Kind.OWNER)
    yield replace(change, inside=change.inside + 1)
    if change.after is not None:
        yield replace(change, after=replace(change.after, mode=change.after.mode ^ 0o100))
        yield replace(change, after=replace(change.after, target="elsewhere"))
        yield replace(change, after=replace(change.after, size=change.after.size + 1))
        yield replace(change, after=replace(change.after, xattrs={"user.note": b"another"}))
        yield replace(change, after=replace(change.after, type=EntryType.FIFO))


@pytest.mark.parametrize("length", [9, SMALLEST_UNREMEMBERED], ids=["small", "large"])
def test_content_that_changes_after_it_was_hashed_is_not_promoted(length: int) -> None:
    hashed, evil = b"harmless\n".ljust(length, b"."), b"evil----\n".ljust(length, b".")
    steps: Steps = [("write", b"a", b"harmless\n"), ("write", b"b", hashed)]
    with promotable([], steps) as work:
        proposal = work.proposal(Wanted())
        assert proposal.digest
        (swapped,) = work.layer.joinpath("upper").rglob("b")
        swapped.write_bytes(evil)  # as long as before, so that only the content differs
        if length < SMALLEST_UNREMEMBERED:
            work.promote(proposal)
            assert (work.project / "b").read_bytes() == hashed, "it was read once, and what was hashed is what is written"
            return
        with pytest.raises(Drift, match="not the one that was approved"):
            work.promote(proposal)
        assert entries(work.project) == {}, "neither of the two was written"
        work.promote(work.proposal(Wanted()))
        assert (work.project / "b").read_bytes() == evil, "hashed again, it is"


def test_holes_count_as_zeros_and_a_file_of_another_size_has_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(5 << 20)
        file.seek(3 << 20)
        file.write(b"data")

    class Sparse:
        def open_file(self, change: Change) -> int:
            return os.open(path, os.O_RDONLY)

    change = Change("/sparse", Kind.ADDED, None, Node(EntryType.FILE, 0o644, 0, 0, 5 << 20))
    assert content_digest(change, Sparse()) == sha256(path.read_bytes()).hexdigest()
    for size in ((5 << 20) - 1, (5 << 20) + 1):
        os.truncate(path, size)
        with pytest.raises(OSError, match="has changed"):
            content_digest(change, Sparse())
