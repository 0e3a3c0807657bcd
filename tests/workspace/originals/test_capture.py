"""Bases are kept of what real overlays cover, and never a wrong one: a lost or late one is unknown."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.originals import files, runs
from agent_sandbox.workspace.originals.capture import Budget, Captured, OriginalsWriter
from agent_sandbox.workspace.reality import Base, is_settled
from tests.workspace.layers.overlays import in_namespace
from tests.workspace.originals.machine import Machine
from tests.workspace.racing import deep_tree


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.remove()


def test_the_base_of_a_changed_file_is_what_was_real_with_its_content(machine: Machine) -> None:
    (machine.data / "file").write_text("old")
    machine.run(lambda merged: merged.joinpath("file").write_text("new"))
    base = machine.base("/data/file")
    assert base.known and base.kept and base.seen is not None
    assert base.seen.inode == (machine.data / "file").stat().st_ino and base.seen.node.size == 3
    assert machine.content("/data/file") == b"old"


def test_links_directories_and_names_that_are_not_text_have_bases_too(machine: Machine) -> None:
    odd = os.fsdecode(b"\xff\n")
    (machine.data / odd).mkdir()
    (machine.data / odd / "link").symlink_to("old")

    def body(merged: Path) -> None:
        (merged / odd / "link").unlink()
        (merged / odd / "link").symlink_to("new")
        (merged / odd / "added\n").touch()

    assert machine.run(body) == Captured(added=3, unknown=0)
    link, directory = machine.base(f"/data/{odd}/link").seen, machine.base(f"/data/{odd}").seen
    assert link is not None and link.node.target == "old"
    assert directory is not None and directory.node.type is EntryType.DIRECTORY
    assert machine.base(f"/data/{odd}/added\n") == Base(f"/data/{odd}/added\n", None)


def test_where_nothing_was_that_is_kept_in_few_lines(machine: Machine) -> None:
    def body(merged: Path) -> None:
        for number in range(50):
            (merged / f"new/{number}").mkdir(parents=True)
            (merged / f"new/{number}/file").touch()

    assert machine.run(body) == Captured(added=101, unknown=0)
    assert machine.base("/data/new/7/file") == Base("/data/new/7/file", None)
    assert len(Path(machine.directory, "1.jsonl").read_text().splitlines()) == 54


def test_a_file_that_changed_in_reality_during_the_run_has_no_base(machine: Machine) -> None:
    for name in ("edited", "gone", "quiet"):
        (machine.data / name).write_text("old")
    (machine.data / "inner").mkdir()

    def body(merged: Path) -> None:
        for name in ("edited", "gone", "quiet"):
            (merged / name).write_text("of the sandbox")
        (merged / "inner/added").touch()
        (machine.data / "edited").write_text("meanwhile")
        (machine.data / "gone").unlink()

    assert machine.run(body).unknown == 2
    assert not machine.base("/data/edited").known and not machine.base("/data/gone").known
    assert machine.base("/data/quiet").known and machine.base("/data/inner/added").known


def test_times_that_were_set_back_do_not_make_a_base(machine: Machine) -> None:
    (machine.data / "file").write_text("old")
    os.utime(machine.data / "file", (1, 1))

    def body(merged: Path) -> None:
        (merged / "file").write_text("of the sandbox")
        (machine.data / "file").write_text("new")
        os.utime(machine.data / "file", (1, 1))

    machine.run(body)
    assert not machine.base("/data/file").known


def test_what_is_below_a_directory_that_was_swapped_during_the_run_has_no_base(machine: Machine) -> None:
    for name in ("src", "other"):
        (machine.data / name).mkdir()
        (machine.data / name / "file").write_text(name)

    def body(merged: Path) -> None:
        (merged / "src/file").write_text("of the sandbox")
        (machine.data / "src").rename(machine.data / "away")
        (machine.data / "other").rename(machine.data / "src")

    machine.run(body)
    assert (machine.data / "src/file").read_text() == "other"
    assert not machine.base("/data/src/file").known


@pytest.mark.needs_root
def test_a_directory_that_was_swapped_is_noticed_even_when_names_changed_in_it_afterwards(machine: Machine) -> None:
    for name in ("src", "other", "quiet"):
        (machine.data / name).mkdir()
        (machine.data / name / "file").write_text(name)

    def body(merged: Path) -> None:
        for name in ("src", "quiet"):
            (merged / name / "file").write_text("of the sandbox")
        (machine.data / "src").rename(machine.data / "away")
        (machine.data / "other").rename(machine.data / "src")
        (machine.data / "src/later").touch()
        (machine.data / "quiet/later").touch()

    machine.run(body)
    assert not machine.base("/data/src/file").known
    assert machine.base("/data/quiet/file").known, "a new name beside it is no reason to doubt"


def test_the_first_base_of_a_path_stays_when_reality_moves_on(machine: Machine) -> None:
    (machine.data / "file").write_text("first")
    machine.run(lambda merged: merged.joinpath("file").write_text("1"))
    (machine.data / "file").write_text("second")
    assert machine.run(lambda merged: merged.joinpath("file").write_text("2")) == Captured(0, 0)
    assert machine.content("/data/file") == b"first"


def test_a_run_that_covers_nothing_new_does_not_read_what_is_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.run(lambda merged: [(merged / name).write_text("new") for name in ("one", "two")])
    machine.begin()

    def read() -> Iterator[bytes]:
        raise AssertionError("it was read")

    monkeypatch.setattr(files, "recall", lambda *_: files.Recalled(read))
    assert machine.keep() == Captured(0, 0)


def test_after_a_run_that_was_killed_before_its_bases_were_kept_reality_must_be_older_than_that_run(machine: Machine) -> None:
    for name in ("moved", "quiet"):
        (machine.data / name).write_text("old")
    first = machine.begin()
    machine.edit(lambda merged: [merged.joinpath(name).write_text("of the sandbox") for name in ("moved", "quiet")])
    (machine.data / "moved").write_text("between the runs")
    assert machine.begin() == first
    machine.keep()
    assert not machine.base("/data/moved").known and machine.base("/data/quiet").known
    assert machine.begin() > first, "now all is kept"


def test_a_frozen_generation_without_its_bases_is_remembered_by_the_next(machine: Machine) -> None:
    first = machine.begin((1,))
    assert machine.begin((1, 2)) == first
    machine.keep((1, 2))
    assert machine.begin((1, 2)) == first


def test_of_a_removed_directory_everything_below_is_listed(machine: Machine) -> None:
    (machine.data / "tree/deep").mkdir(parents=True)
    (machine.data / "tree/deep/file").write_text("x")
    (machine.data / "tree/link").symlink_to("/")
    machine.run(lambda merged: shutil.rmtree(merged / "tree"))
    assert machine.base("/data/tree").listed
    found = machine.base("/data/tree/deep/file")
    assert found.known and found.seen is not None and found.seen.node.size == 1
    assert machine.base("/data/tree/link").seen is not None


def test_a_directory_that_is_removed_and_made_again_is_listed_and_what_is_in_it_keeps_its_content(machine: Machine) -> None:
    (machine.data / "tree").mkdir()
    (machine.data / "tree/again").write_text("old")
    (machine.data / "tree/gone").write_text("old")

    def body(merged: Path) -> None:
        shutil.rmtree(merged / "tree")
        (merged / "tree").mkdir()
        (merged / "tree/again").write_text("new")

    machine.run(body)
    assert machine.base("/data/tree").listed and machine.base("/data/tree/gone").seen is not None
    assert machine.content("/data/tree/again") == b"old"


def test_a_directory_that_only_a_later_run_removes_is_listed_then(machine: Machine) -> None:
    (machine.data / "tree").mkdir()
    (machine.data / "tree/file").write_text("old")
    machine.run(lambda merged: merged.joinpath("tree/new").touch())
    assert not machine.base("/data/tree").listed
    machine.run(lambda merged: shutil.rmtree(merged / "tree"))
    assert machine.base("/data/tree").listed and machine.base("/data/tree/file").known


def test_a_list_that_would_have_a_hole_is_none(machine: Machine) -> None:
    (machine.data / "tree").mkdir()
    for number in range(5):
        (machine.data / f"tree/{number}").touch()
    machine.begin()
    machine.edit(lambda merged: shutil.rmtree(merged / "tree"))
    machine.keep(budget=Budget(listed=4))
    assert not machine.base("/data/tree").listed


def test_content_is_kept_up_to_a_bound_and_its_digest_beyond_that(machine: Machine) -> None:
    for name, size in (("small", 10), ("large", 11), ("huge", 31)):
        (machine.data / name).write_bytes(b"x" * size)
    machine.begin()
    machine.edit(lambda merged: [(merged / name).write_text("x") for name in ("small", "large", "huge")])
    machine.keep(budget=Budget(kept_file=10, read_file=30))
    small, large, huge = (machine.base(f"/data/{name}") for name in ("small", "large", "huge"))
    assert small.kept and not large.kept and not huge.kept
    assert large.seen is not None and large.seen.digest and huge.seen is not None and not huge.seen.digest
    with pytest.raises(WorkspaceError, match="not kept"):
        files.open_content(machine.directory, large)


def test_what_all_runs_together_keep_of_content_is_bounded(machine: Machine) -> None:
    for name in ("first", "second", "third"):
        (machine.data / name).write_text("x" * 10)
    for name in ("first", "second", "third"):
        machine.begin()
        machine.edit(lambda merged, name=name: (merged / name).write_text("new"))  # type: ignore[misc]
        machine.keep(budget=Budget(kept=25))
    assert [bool(machine.base(f"/data/{name}").kept) for name in ("first", "second", "third")] == [True, True, False]
    third = machine.base("/data/third").seen
    assert third is not None and third.digest, "what it was can still be told"


def test_a_guest_that_nests_without_end_fills_no_disk_with_paths(machine: Machine) -> None:
    machine.begin()
    machine.edit(lambda merged: deep_tree(os.open(merged, os.O_RDONLY), 800))
    with pytest.raises(TooMany):
        machine.keep(budget=Budget(characters=200_000))
    assert Path(machine.directory, "1.jsonl").stat().st_size < 800_000
    assert runs.begin(machine.directory, [1], now_ns=machine.since + 10**12) == machine.since


def test_what_is_hidden_from_the_guest_is_not_copied_into_the_store(machine: Machine) -> None:
    (machine.data / "secrets").mkdir()
    (machine.data / "secrets/key").write_text("the key of the house")
    machine.begin()
    machine.edit(lambda merged: merged.joinpath("secrets/key").write_text("guess"))
    machine.keep(masks=["/data/secrets"])
    assert machine.base("/data/secrets/key").seen is not None and not machine.base("/data/secrets/key").kept
    assert os.listdir(machine.directory) == ["1.jsonl"]


def test_pipes_and_sockets_are_noted_and_never_opened(machine: Machine) -> None:
    os.mkfifo(machine.data / "pipe")
    machine.run(lambda merged: os.unlink(merged / "pipe"))
    seen = machine.base("/data/pipe").seen
    assert seen is not None and seen.node.type is EntryType.FIFO


def test_the_store_is_private(machine: Machine) -> None:
    (machine.data / "file").write_text("old")
    machine.run(lambda merged: merged.joinpath("file").write_text("new"))
    assert stat.S_IMODE(Path(machine.directory).stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in Path(machine.directory).iterdir()] == [0o600, 0o600]


def test_a_full_disk_of_the_store_is_said_and_leaves_the_run_unfinished(machine: Machine) -> None:
    (machine.data / "file").write_bytes(os.urandom(200_000))
    machine.begin()
    machine.edit(lambda merged: os.truncate(merged / "file", 1))

    def body() -> None:
        syscalls.mount("tmpfs", machine.directory, "tmpfs", 0, "size=64k")
        since = runs.begin(machine.directory, [1], now_ns=machine.since)
        with pytest.raises(WorkspaceError, match="full"):
            machine.keep()
        assert runs.begin(machine.directory, [1], now_ns=since + 10**12) == since
        assert "/data/file" not in files.recall(machine.directory, [1])

    in_namespace(body)


@pytest.mark.parametrize(
    ("ctime", "unmoved"), [(7_999_999_999, True), (8_000_000_001, False), (7_000_000_000, False), (5_000_000_000, True)]
)
def test_a_time_in_whole_seconds_proves_nothing_about_the_last_two(tmp_path: Path, ctime: int, unmoved: bool) -> None:
    contents = files.ContentWriter(str(tmp_path), 1, 0)
    writer = OriginalsWriter(
        str(tmp_path), 1, 0, 8_000_000_000, files.Recalled(lambda: iter(())), "", frozenset(), Budget(), time.time_ns, contents
    )
    status = SimpleNamespace(st_ctime_ns=ctime)
    assert writer.unmoved(status) is unmoved  # type: ignore[arg-type]
    assert writer.unmoved(None)


def test_a_file_that_is_not_read_can_be_told_from_a_later_one_even_if_it_was_written_right_before_the_run(machine: Machine) -> None:
    (machine.data / "huge").write_bytes(b"x" * 31)
    machine.since = machine.began = runs.begin(machine.directory, (1,), now_ns=(machine.data / "huge").stat().st_ctime_ns + 1)
    machine.edit(lambda merged: (merged / "huge").write_text("x"))
    machine.keep(budget=Budget(read_file=30))
    base = machine.base("/data/huge")
    assert base.known and base.seen is not None and not base.seen.digest
    assert is_settled(base.seen.ctime_ns, base.seen.looked_ns)
    (machine.data / "huge").write_bytes(b"y" * 31)
    assert not base.seen.untouched((machine.data / "huge").stat())
