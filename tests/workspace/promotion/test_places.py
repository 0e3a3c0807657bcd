"""Where trees and state can lie, and what they can be like: other filesystems, mounts, directories without rights, odd files."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.errors import Drift, PolicyError, WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.promotion.journal import Journal
from agent_sandbox.workspace.promotion.promote import REMEMBERED, recover
from tests.leftovers import remove
from tests.workspace.layers.overlays import in_namespace
from tests.workspace.promotion.test_promote_recovery import interrupt
from tests.workspace.promotion.trees import ME, Edited, changes_between, edit_mixed, expected_after, make_mixed, shown


def test_a_state_directory_on_another_filesystem_keeps_copies(mixed: Edited, tmp_path: Path) -> None:
    def body() -> None:
        mixed.promotions.mkdir()
        syscalls.mount("tmpfs", str(mixed.promotions), "tmpfs")
        before, wanted = shown(mixed.project), expected_after(mixed)
        mixed.promote()
        assert shown(mixed.project) == wanted and mixed.staging() == []
        olds = shown(mixed.promotions / "1/olds")
        assert {entry.content for entry in olds.values()} >= {b"old src/app.py\n", b"old gone/deep/two\n", b"src"}
        mixed.undo()
        assert shown(mixed.project) == before
        interrupt(mixed, committed=True)
        assert recover(str(mixed.promotions), ME).finished == (3,)
        mixed.undo()
        assert shown(mixed.project) == before

    in_namespace(body)


def test_a_mount_in_the_tree_is_refused_before_anything_is_written(mixed: Edited) -> None:
    def body() -> None:
        syscalls.mount(str(mixed.project / "src"), str(mixed.project / "src"), None, syscalls.MS_BIND)
        before = shown(mixed.project)
        with pytest.raises(PolicyError, match="another mount"):
            mixed.promote(mixed.plan())
        assert shown(mixed.project) == before and mixed.staging() == []

    in_namespace(body)


def test_a_tree_that_is_read_only_is_a_clear_error(mixed: Edited) -> None:
    def body() -> None:
        syscalls.mount(str(mixed.project), str(mixed.project), None, syscalls.MS_BIND)
        syscalls.mount("", str(mixed.project), None, syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY)
        with pytest.raises(WorkspaceError, match="read-only"):
            mixed.promote(mixed.plan())

    in_namespace(body)


def test_a_file_where_a_directory_should_be_is_drift(mixed: Edited) -> None:
    made = mixed.plan()
    (mixed.project / "src").rename(mixed.project.parent / "src")
    (mixed.project / "src").write_text("a file\n")
    with pytest.raises(Drift, match="no directory"):
        mixed.promote(made)
    assert (mixed.project / "src").read_text() == "a file\n" and mixed.staging() == []


def test_more_than_is_free_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def sparse(tree: Path) -> None:
        with open(tree / "sparse", "wb") as file:
            file.truncate(60 << 30)

    def body() -> None:
        (tmp_path / "small").mkdir()
        syscalls.mount("tmpfs", str(tmp_path / "small"), "tmpfs", 0, "size=1m")
        edited = Edited(tmp_path / "small", make_mixed, lambda tree: None)
        sparse(edited.after)
        edited.changes = changes_between(edited.project, edited.after)
        with pytest.raises(WorkspaceError, match="are free"):
            edited.promote()

    in_namespace(body)


def test_holes_stay_holes_and_a_large_file_is_whole(tmp_path: Path) -> None:
    def edit(tree: Path) -> None:
        with open(tree / "holes", "wb") as file:
            file.seek(3 << 20)
            file.write(b"in the middle" * 9999)
            file.truncate(40 << 20)
        (tree / "large").write_bytes(os.urandom(3 << 20) + b"end")

    edited = Edited(tmp_path, make_mixed, edit)
    edited.promote()
    for name in ("holes", "large"):
        assert (edited.project / name).read_bytes() == (edited.after / name).read_bytes()
    assert os.stat(edited.project / "holes").st_blocks * 512 < 4 << 20
    edited.close()


def test_directories_that_may_not_be_written_are_put_removed_and_brought_back() -> None:
    """For an ordinary user, to whom modes apply; what is in them is not changed here, which would need the right to."""

    def body(scratch: Path) -> None:
        closed = Edited(scratch, make_closed, edit_closed)
        before, wanted = shown(closed.project), expected_after(closed)
        closed.promote()
        assert shown(closed.project) == wanted
        closed.undo()
        assert shown(closed.project) == before
        interrupt(closed)
        assert recover(str(closed.promotions), ME).problems == ()
        assert shown(closed.project) == before

    as_user(body)


def make_closed(tree: Path) -> None:
    make_mixed(tree)
    (tree / "gone").chmod(0o555)


def edit_closed(tree: Path) -> None:
    (tree / "gone").chmod(0o755)
    edit_mixed(tree)
    (tree / "new/tree").chmod(0o555)
    (tree / "new").chmod(0o555)


def as_user(body: Callable[[Path], None]) -> None:
    """Run it as somebody who is not root, in a child, with a directory that such a user can reach."""
    scratch = Path(tempfile.mkdtemp(dir="/var/tmp"))
    scratch.chmod(0o777)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(60600, 60600, 60600)
                os.setresuid(60600, 60600, 60600)
            body(scratch)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    ended = os.waitpid(child, 0)[1]
    remove(scratch)
    assert os.waitstatus_to_exitcode(ended) == 0, "see the traceback of the child above"


@pytest.mark.needs_root
def test_what_is_new_belongs_to_whoever_owns_the_place_and_not_to_the_guest(mixed: Edited) -> None:
    for path in (mixed.project, mixed.project / "src"):
        os.chown(path, 60998, 60997)
    os.chown(mixed.project / "src/app.py", 60996, 60995)
    mixed.promote()

    def owner(name: str) -> tuple[int, int]:
        status = os.lstat(mixed.project / name)
        return status.st_uid, status.st_gid

    assert owner("src/app.py") == (60996, 60995)
    assert {owner(name) for name in ("src/added", "new", "new/tree", "new/tree/1", "new/link", "to-link")} == {(60998, 60997)}
    mixed.undo()
    assert owner("src/app.py") == (60996, 60995)


@pytest.mark.needs_root
def test_an_access_list_of_the_owner_stays_on_what_is_replaced(mixed: Edited) -> None:
    path = mixed.project / "src/app.py"
    # Version 2; the owner, user 60998, the group, the mask and others may read.
    listed = b"\x02\x00\x00\x00" + b"".join(
        tag.to_bytes(2, "little") + (4).to_bytes(2, "little") + who.to_bytes(4, "little")
        for tag, who in ((1, 0xFFFFFFFF), (2, 60998), (4, 0xFFFFFFFF), (16, 0xFFFFFFFF), (32, 0xFFFFFFFF))
    )
    try:
        os.setxattr(path, "system.posix_acl_access", listed)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            pytest.skip("this filesystem has no access lists")
        raise
    mixed.promote(mixed.plan())
    assert (60998).to_bytes(4, "little") in os.getxattr(path, "system.posix_acl_access")


def test_only_so_many_promotions_are_remembered(tmp_path: Path) -> None:
    edited = Edited(tmp_path, lambda tree: None, lambda tree: (tree / "x").mkdir())
    for _ in range(REMEMBERED):
        edited.promote()
        edited.undo()
    assert len([name for name in os.listdir(edited.promotions) if name.isdecimal()]) == REMEMBERED
    edited.close()


def test_after_a_restart_of_the_machine_filesystems_may_have_other_numbers(mixed: Edited) -> None:
    before = shown(mixed.project)
    interrupt(mixed)
    journal = Journal(str(mixed.promotions), 1)
    begun, moves = (Path(journal.path, name) for name in ("begun", "moves"))
    device = os.stat(mixed.project).st_dev
    for record in (begun, moves):
        record.write_text(record.read_text().replace(f"[{device},", "[424242,").replace(f",{device},", ",424242,"))
    assert "not the directory" in recover(str(mixed.promotions), ME).problems[0]
    begun.write_text(begun.read_text().replace('"boot":"', '"boot":"another-'))
    assert recover(str(mixed.promotions), ME).rolled_back == (1,)
    assert shown(mixed.project) == before


def test_a_real_pipe_that_was_deleted_comes_back(tmp_path: Path) -> None:
    edited = Edited(tmp_path, lambda tree: os.mkdir(tree / "d"), lambda tree: None)
    os.mkfifo(edited.project / "d/pipe", 0o640)
    (edited.after / "d").rmdir()
    edited.changes = changes_between(edited.project, edited.after)
    edited.promote()
    assert not (edited.project / "d").exists()
    edited.undo()
    assert stat.S_ISFIFO(os.stat(edited.project / "d/pipe").st_mode)
    edited.close()
