"""A list of changes that was kept is the list that the layers would give, or it is not used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import Workspace, shell
from agent_sandbox.assembly import here
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers import readback


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def work(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    for name in ("a", "b", "c"):
        (project / name).write_text(f"{name}\n")
    (project / os.fsdecode(b"odd\xff\n")).write_text("odd\n")
    time.sleep(0.05)
    made = Workspace.over(project)
    yield made
    made.reset()


def _kept(work: Workspace) -> Path:
    return Path(work._stored.state.path, readback._CACHE)


def _read(work: Workspace) -> ChangeSet:
    """What the layers give, whatever was kept."""
    with work._stored.opened() as stack:
        return work._stored.changes_in(stack, work._policy)


def test_a_list_that_was_kept_is_that_of_the_layers(work: Workspace) -> None:
    work.run(shell("echo x >> a; rm b; mv c moved; chmod 700 src; ln -s a link; echo y >> odd*; mkdir -p new/deep; touch new/deep/file"))
    first = work.changes()
    assert _kept(work).exists() and len(first) > 8
    before = _kept(work).stat()
    assert work.changes() == first == _read(work)
    after = _kept(work).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it was used, not made again"


def test_whatever_changes_the_layers_makes_it_useless(work: Workspace) -> None:
    work.run(shell("echo x >> a"))
    assert len(work.changes()) == 1
    work.snapshot("one")
    work.run(shell("echo x >> b"))
    assert len(work.changes()) == 2
    work.rollback("one")
    assert len(work.changes()) == 1
    work.promote()
    assert len(work.changes()) == 0
    work.undo()
    assert len(work.changes()) == 1


def test_reality_is_asked_again_where_it_was_asked(work: Workspace, project: Path) -> None:
    (project / "a").write_text("saved in the very moment\n")  # so it has no base, and is compared with what is real now
    work.run(shell("cat a > kept; cat kept > a; touch a"))
    assert {Path(each.path).name for each in work.changes()} == {"kept"} == {Path(each.path).name for each in _read(work)}
    (project / "a").write_text("something else\n")
    assert work.changes() == _read(work)


def test_a_list_is_not_kept_where_it_depends_on_all_that_is_in_a_directory(work: Workspace, project: Path) -> None:
    work.run(shell("rm -r src && mkdir src && echo new > src/new.py"))
    work.changes()
    assert not _kept(work).exists()
    (project / "src/later.py").write_text("x")
    assert work.changes() == _read(work)


def test_a_torn_list_is_not_believed(work: Workspace) -> None:
    work.run(shell("echo x >> a; echo x >> b"))
    whole = work.changes()
    content = _kept(work).read_bytes()
    for damaged in (b"", content[:40], content[:-1], content[:-9] + b"x" * 9, b"0" * len(content)):
        _kept(work).write_bytes(damaged)
        assert work.changes() == whole


def test_while_a_run_goes_on_nothing_is_kept_or_used(work: Workspace) -> None:
    work.run(shell("echo x >> a"))
    work.changes()
    state = work._stored.state
    with open(os.path.join(state.bases, f"{state.history().active}.jsonl"), "ab") as file:
        file.write(b'{"run":1}\n')  # as at the beginning of one
    assert readback.cache_key(state.path, state.bases, state.history().layers, ()) is None
