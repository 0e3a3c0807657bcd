"""A frozen project: a copy that stays as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace import frozen_tree
from agent_sandbox.workspace.frozen_tree import changed_since, freeze


def test_the_copy_has_every_kind_of_entry_and_not_what_is_hidden(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "deep" / "er").mkdir(parents=True)
    (project / "secrets").mkdir()
    (project / "secrets" / "key").write_text("canary")
    (project / ".env").write_text("canary")
    (project / "deep" / "er" / "run.sh").write_text("#!/bin/sh\n")
    (project / "deep" / "er" / "run.sh").chmod(0o750)
    os.utime(project / "deep" / "er" / "run.sh", ns=(10**18, 10**18))
    (project / "deep").chmod(0o700)
    os.symlink("/etc/passwd", project / "link")
    os.link(project / "deep" / "er" / "run.sh", project / "twin")
    os.mkfifo(project / "pipe")
    (project / "sparse").write_bytes(b"")
    os.truncate(project / "sparse", 1 << 30)
    os.mkdir(os.fsencode(project) + b"/caf\xe9")
    frozen = freeze(str(project), str(tmp_path / "copy"), skip=[str(project / ".env"), str(project / "secrets")])
    copy = tmp_path / "copy"
    assert not (copy / ".env").exists() and not (copy / "secrets").exists()
    assert sorted(os.listdir(os.fsencode(copy))) == [b"caf\xe9", b"deep", b"link", b"pipe", b"sparse", b"twin"]
    script = (copy / "deep" / "er" / "run.sh").stat()
    assert (stat.S_IMODE(script.st_mode), script.st_mtime_ns, script.st_nlink) == (0o750, 10**18, 2)
    assert stat.S_IMODE((copy / "deep").stat().st_mode) == 0o700 and os.readlink(copy / "link") == "/etc/passwd"
    assert (copy / "sparse").stat().st_size == 1 << 30 and (copy / "sparse").stat().st_blocks < 1024
    assert frozen.entries == 8 and not frozen.left_out and frozen.since_ns > (project / "twin").stat().st_ctime_ns


def test_writing_to_the_project_afterwards_changes_nothing_in_the_copy(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "file").write_text("before")
    freeze(str(project), str(tmp_path / "copy"))
    with open(project / "file", "r+") as file:
        file.write("after!")
    assert (tmp_path / "copy" / "file").read_text() == "before"


def test_a_copy_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "file").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(frozen_tree, "SPARED_BYTES", 1 << 60)
    with pytest.raises(WorkspaceError, match="too little room") as refused:
        freeze(str(project), str(tmp_path / "copy"))
    assert "disk is full" in refused.value.hint
    monkeypatch.setattr(frozen_tree, "SPARED_BYTES", 0)
    monkeypatch.setattr(frozen_tree, "MOST_ENTRIES", 0)
    with pytest.raises(WorkspaceError, match="cannot be frozen"):
        freeze(str(project), str(tmp_path / "second"))


def test_large_stores_are_left_live_and_a_change_there_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    for name in (".venv/lib/__pycache__", "web/node_modules/a", ".git/objects/ab", "objects"):
        (project / name).mkdir(parents=True)
        (project / name / "file").write_text("x")
    (project / ".venv" / "pyvenv.cfg").write_text("")
    assert freeze(str(project), str(tmp_path / "small")).live == (), "small ones are copied"
    monkeypatch.setattr(frozen_tree, "LARGE_ENTRIES", 1)
    assert freeze(str(project), str(tmp_path / "all"), stores=True).live == ()
    assert (tmp_path / "all" / ".venv" / "lib" / "__pycache__" / "file").exists()
    frozen = freeze(str(project), str(tmp_path / "copy"))
    assert frozen.live == tuple(str(project / name) for name in (".git/objects", ".venv", "web/node_modules"))
    assert all(not os.listdir(tmp_path / "copy" / name) for name in (".venv", "web/node_modules", ".git/objects"))
    assert (tmp_path / "copy" / "objects" / "file").read_text() == "x" and changed_since(frozen) == ()
    (project / ".venv" / "lib" / "__pycache__" / "other").write_text("a cache")
    assert changed_since(frozen) == ()
    (project / "web" / "node_modules" / "a" / "new").write_text("installed meanwhile")
    assert changed_since(frozen) == (str(project / "web" / "node_modules"),)
