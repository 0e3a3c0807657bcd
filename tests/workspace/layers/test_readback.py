"""Changes are read back from real overlays: as root with trusted attributes, as an ordinary user in a user namespace with `userxattr`."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType
from tests.workspace.layers.overlays import in_namespace
from tests.workspace.machine import Machine
from tests.workspace.racing import deep_tree


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.remove()


def only(changes: ChangeSet) -> Change:
    (change,) = changes
    return change


def test_what_was_below_a_directory_that_was_made_anew_inside_another_made_anew_is_gone(machine: Machine) -> None:
    """Only the outer one is marked opaque by the kernel: in the inner one nothing real shows through either."""
    (machine.data / "outer/inner/deepest").mkdir(parents=True)
    (machine.data / "outer/inner/old").write_text("x")
    (machine.data / "outer/inner/deepest/old").write_text("x")

    def edits(view: Path) -> None:
        shutil.rmtree(view / "outer")
        (view / "outer/inner/deepest").mkdir(parents=True)
        (view / "outer/inner/new").write_text("x")

    machine.edit(edits)
    assert machine.kinds() == {
        "/data/outer/inner/deepest/old": "deleted",
        "/data/outer/inner/new": "added",
        "/data/outer/inner/old": "deleted",
    }


def test_added_changed_and_deleted_files_are_found(machine: Machine) -> None:
    (machine.data / "changed").write_text("old")
    (machine.data / "gone").write_text("x")
    (machine.data / "same").write_text("x")

    def body(view: Path) -> None:
        (view / "changed").write_text("new")
        (view / "gone").unlink()
        (view / "new").mkdir()
        (view / "new/file").write_text("x")

    machine.edit(body)
    assert machine.kinds() == {
        "/data/changed": "modified",
        "/data/gone": "deleted",
        "/data/new": "added",
        "/data/new/file": "added",
    }
    assert (machine.data / "changed").read_text() == "old"


def test_a_file_copied_up_and_left_as_it_was_is_no_change(machine: Machine) -> None:
    (machine.data / "d").mkdir()
    (machine.data / "d/touched").write_text("x")
    (machine.data / "d/rewritten").write_text("same")

    def body(view: Path) -> None:
        os.utime(view / "d/touched", (0, 0))
        (view / "d/rewritten").write_text("same")
        (view / "d/passing").write_text("x")
        (view / "d/passing").unlink()

    machine.edit(body)
    assert (machine.layer / "upper/d/touched").exists()  # it was copied up
    assert machine.kinds() == {}
    assert not machine.changes()


def test_mode_and_attributes_alone_are_changes_and_are_told(machine: Machine) -> None:
    (machine.data / "mode").write_text("x")
    (machine.data / "mode").chmod(0o644)
    (machine.data / "attribute").write_text("x")
    (machine.data / "d").mkdir(mode=0o755)

    def body(view: Path) -> None:
        (view / "mode").chmod(0o4755)
        os.setxattr(view / "attribute", "user.colour", b"red")
        (view / "d").chmod(0o700)

    machine.edit(body)
    found = {change.path: change for change in machine.changes()}
    assert found["/data/mode"].kind is Kind.MODE and found["/data/mode"].after and found["/data/mode"].after.mode == 0o4755
    assert found["/data/attribute"].kind is Kind.XATTR and found["/data/attribute"].xattrs == ("user.colour",)
    assert found["/data/d"].kind is Kind.MODE


@pytest.mark.needs_root
def test_an_owner_alone_is_a_change_and_shifted_owners_are_not(machine: Machine) -> None:
    (machine.data / "file").write_text("x")
    machine.edit(lambda view: os.chown(view / "file", 100_000, 100_000))
    assert only(machine.changes()).kind is Kind.OWNER
    assert not machine.changes(owner_shift=100_000)


@pytest.mark.needs_root
@pytest.mark.parametrize("attribute", ["system.posix_acl_access", "system.posix_acl_default"])
def test_the_users_of_an_access_list_are_shifted_like_owners(machine: Machine, attribute: str) -> None:
    def listed(shift: int, rights: int = 6) -> bytes:
        entries = ((1, 7, -1), (2, rights, 1000 + shift), (4, 5, -1), (8, 5, 1001 + shift), (16, 7, -1), (32, 5, -1))
        return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)

    (machine.data / "d").mkdir()
    os.setxattr(machine.data / "d", attribute, listed(0))

    def body(view: Path) -> None:
        os.chown(view / "d", 100_000, 100_000)
        os.setxattr(view / "d", attribute, listed(100_000))

    machine.edit(body)
    assert not machine.changes(owner_shift=100_000)
    machine.edit(lambda view: os.setxattr(view / "d", attribute, listed(100_000, rights=7)))
    assert attribute in only(machine.changes(owner_shift=100_000)).xattrs, "other rights are a change"


def test_a_directory_removed_and_made_again_lists_what_is_gone(machine: Machine) -> None:
    (machine.data / "d/sub").mkdir(parents=True)
    (machine.data / "d/sub/x").write_text("x")
    (machine.data / "d/kept").write_text("x")
    (machine.data / "d/lost").write_text("x")

    def body(view: Path) -> None:
        shutil.rmtree(view / "d")
        (view / "d").mkdir()
        (view / "d/kept").write_text("x")

    machine.edit(body)
    assert machine.kinds() == {"/data/d/sub": "deleted", "/data/d/lost": "deleted"}
    assert next(iter(machine.changes().within("/data/d/sub"))).inside == 1


def test_a_change_of_type_is_told_and_what_a_link_led_to_is_left_out(machine: Machine) -> None:
    (machine.data / "real").mkdir()
    (machine.data / "real/file").write_text("x")
    (machine.data / "link").symlink_to("real")
    (machine.data / "d").mkdir()
    (machine.data / "d/file").write_text("x")

    def body(view: Path) -> None:
        (view / "link").unlink()
        (view / "link").mkdir()
        (view / "link/file").write_text("x")
        shutil.rmtree(view / "d")
        (view / "d").symlink_to("/etc")

    machine.edit(body)
    assert machine.kinds() == {"/data/link": "retyped", "/data/link/file": "added", "/data/d": "retyped"}
    change = only(machine.changes().within("/data/d"))
    assert change.inside == 1 and change.after and change.after.target == "/etc"


def test_fifos_and_sockets_are_listed_and_nobody_waits_for_them(machine: Machine) -> None:
    def body(view: Path) -> None:
        os.mkfifo(view / "fifo")
        os.chdir(view)
        socket.socket(socket.AF_UNIX).bind("socket")

    machine.edit(body)
    types = {change.path: change.after.type for change in machine.changes() if change.after}
    assert types == {"/data/fifo": EntryType.FIFO, "/data/socket": EntryType.SOCKET}


def test_overlay_attributes_set_by_the_guest_delete_nothing(machine: Machine) -> None:
    (machine.data / "d").mkdir()
    (machine.data / "d/file").write_text("x")

    def body(view: Path) -> None:
        (view / "d/other").write_text("")
        for path, name in ((view / "d", "opaque"), (view / "d/other", "whiteout"), (view / "d", "redirect")):
            for prefix in ("user.overlay.", "trusted.overlay."):
                try:
                    os.setxattr(path, prefix + name, b"y")
                except OSError:
                    continue

    machine.edit(body)
    kinds = machine.kinds()
    assert "deleted" not in kinds.values() and kinds["/data/d/other"] == "added"


def test_what_the_guest_puts_at_a_hidden_path_is_added_and_says_that_something_real_is_there(machine: Machine) -> None:
    (machine.data / ".env").write_text("SECRET=1")
    (machine.data / "ssh").mkdir()
    (machine.data / "ssh/key").write_text("secret")
    upper = machine.layer / "upper"
    (upper / ".env").write_text("guest's")
    (upper / "ssh").mkdir()
    (upper / "ssh/key").write_text("guest's")
    (upper / "ssh/new").write_text("guest's")
    found = {change.path: change for change in machine.changes(masks=("/data/.env", "/data/ssh"))}
    assert {path: (change.kind.value, change.masks_real) for path, change in found.items()} == {
        "/data/.env": ("added", True),
        "/data/ssh/key": ("added", True),
        "/data/ssh/new": ("added", False),
    }
    assert all(change.before is None for change in found.values())


@pytest.mark.needs_root
def test_a_whiteout_that_is_a_mask_is_no_deletion(machine: Machine) -> None:
    (machine.data / ".env").write_text("SECRET=1")
    os.mknod(machine.layer / "upper/.env", 0o20000, 0)
    assert machine.kinds() == {"/data/.env": "deleted"}
    assert machine.kinds(masks=("/data/.env",)) == {}


def test_a_deleted_directory_that_contains_something_hidden_says_so(machine: Machine) -> None:
    (machine.data / "d").mkdir()
    (machine.data / "d/.env").write_text("SECRET=1")
    machine.edit(lambda view: shutil.rmtree(view / "d"))
    assert only(machine.changes(masks=("/data/d/.env",))).masks_real
    assert not only(machine.changes()).masks_real


def test_a_mount_on_the_machine_is_compared_as_what_its_path_means(machine: Machine) -> None:
    (machine.data / "mount").mkdir()
    (machine.layer / "upper/mount").mkdir()
    for name in ("same", "new"):
        (machine.layer / "upper/mount" / name).write_text("x")

    def body() -> None:
        syscalls.mount("tmpfs", str(machine.data / "mount"), "tmpfs", 0, "mode=755")
        (machine.data / "mount/same").write_text("x")
        assert machine.kinds() == {"/data/mount/new": "added"}

    in_namespace(body)


def test_more_changes_than_the_limit_are_refused_rather_than_cut(machine: Machine) -> None:
    for number in range(30):
        (machine.layer / "upper" / str(number)).touch()
    assert len(machine.changes(limit=30)) == 30
    with pytest.raises(TooMany):
        machine.changes(limit=29)


def test_a_very_deep_tree_is_listed_or_refused_but_breaks_nothing(machine: Machine) -> None:
    upper = os.open(machine.layer / "upper", os.O_RDONLY)
    deep_tree(upper, 3000)
    os.close(upper)
    assert len(machine.changes(limit=10_000)) == 3001


def test_a_huge_sparse_file_is_compared_by_its_size(machine: Machine) -> None:
    (machine.data / "file").write_text("x")
    machine.edit(lambda view: os.truncate(view / "file", 1 << 40))
    assert only(machine.changes()).kind is Kind.MODIFIED


def test_what_is_in_a_directory_closed_by_the_guest_is_seen(machine: Machine) -> None:
    def body(view: Path) -> None:
        (view / "closed").mkdir()
        (view / "closed/hidden").write_text("x")
        (view / "closed").chmod(0)

    machine.edit(body)
    assert machine.kinds() == {"/data/closed": "added", "/data/closed/hidden": "added"}
