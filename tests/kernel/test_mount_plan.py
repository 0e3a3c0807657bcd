"""A mount plan can be read before it happens, travels unchanged, and is carried out without following anything a guest left behind."""

from __future__ import annotations

import marshal
import os
import stat
from pathlib import Path

import pytest

from agent_sandbox.kernel import mask_layers, mount_plan, mount_steps, mount_tools, namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mount_plan import PathMask
from agent_sandbox.kernel.mount_tools import Site
from tests.kernel.children import ChildEnded, in_child

PLAN = mount_plan.MountPlan(
    mount_plan.ThrowAway(64 << 20),
    (
        mount_plan.SkeletonRoot(),
        mount_plan.Overlay(
            "/usr", "/usr", "%2Fusr", masks=(PathMask("share/doc", keep=True), PathMask("games")), places=("share/doc/kept",)
        ),
        mount_plan.Copies("/etc", "/etc", "%2Fetc", ("hostname",), writable=False),
        mount_plan.Bind("/usr/bin/env", "/bin/env"),
        mount_plan.Tmpfs("/tmp", 1 << 20, 0o1777),
        mount_plan.Directory("/sys"),
        mount_plan.Symlink("/lib", "usr/lib"),
        mount_plan.NewFile("/note", b"\xff\x00"),
        mount_plan.Devices(1 << 20),
        mount_plan.Proc(),
        mount_plan.SealRoot(),
    ),
)


def test_a_plan_travels_unchanged() -> None:
    assert mount_plan.decode(mount_plan.encode(PLAN)) == PLAN


def test_a_plan_on_disk_travels_unchanged() -> None:
    plan = mount_plan.MountPlan(mount_plan.OnDisk("/var/lib/\udcff"), (mount_plan.Proc(),))
    assert mount_plan.decode(mount_plan.encode(plan)) == plan


def test_every_step_says_what_it_will_do() -> None:
    lines = PLAN.describe()
    assert lines[0] == "layers on a tmpfs of 64 MiB, thrown away"
    assert "overlay /usr on /usr [copy-on-write], hiding share/doc/*, games" in lines
    assert "bind file /usr/bin/env on /bin/env [read-only]" in lines
    assert len(lines) == len(PLAN.steps) + 1


def test_equal_plans_are_the_same_bytes_whoever_else_holds_their_parts() -> None:
    path = "".join(("games", "/", "x"))
    plans = [
        mount_plan.MountPlan(PLAN.layers, (mount_plan.Overlay("/usr", "/usr", "%2Fusr", masks=(PathMask(each),)),))
        for each in (path, "".join(("games", "/", "x")))
    ]
    assert mount_plan.encode(plans[0]) == mount_plan.encode(plans[1])
    shared, alone = marshal.dumps(path), marshal.dumps("".join(("games", "/", "x")))
    assert shared != alone, "the control arm: by default it shows that somebody holds the first"


def _in_staging(staging: Path) -> None:
    os.chdir(staging)
    os.mkdir("r")


@pytest.mark.parametrize("make", [mount_tools.directory_for, mount_tools.file_for], ids=["directory", "file"])
def test_a_link_left_in_the_view_is_never_followed(tmp_path: Path, make: object) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()

    def attempt() -> str:
        _in_staging(tmp_path)
        os.symlink(outside, "r/etc")
        try:
            with make("/etc/made"):  # type: ignore[operator]
                return "made"
        except OSError as error:
            return str(error.strerror)

    assert in_child(attempt) == "etc is not a directory in the view"
    assert list(outside.iterdir()) == []


def test_without_the_guard_the_same_link_leads_outside(tmp_path: Path) -> None:
    """The control arm: what the guard prevents does happen to code that walks by path."""
    outside = tmp_path / "outside"
    outside.mkdir()

    def attempt() -> None:
        _in_staging(tmp_path)
        os.symlink(outside, "r/etc")
        os.makedirs("r/etc/made")

    in_child(attempt)
    assert (outside / "made").is_dir()


def test_only_a_regular_file_is_bound(tmp_path: Path) -> None:
    def attempt() -> None:
        if os.geteuid():
            namespaces.enter_own_user_namespace()
        namespaces.enter_private_mounts()
        _in_staging(tmp_path)
        mount_steps.perform_step(mount_plan.Bind("/usr", "/usr"), Site(None, 0, userxattr=True))

    with pytest.raises(ChildEnded, match="only regular files are bound"):
        in_child(attempt)


def _mask_layer(tmp_path: Path, *masks: PathMask) -> dict[str, str]:
    """What a mask layer over a small tree holds, by path: "dir", "opaque" or "whiteout"."""
    lower = tmp_path / "lower"
    (lower / "home" / "deep").mkdir(parents=True)
    (lower / "home" / "key").write_text("secret")
    (lower / "home" / "link").symlink_to("/etc")

    def build() -> dict[str, str]:
        if os.geteuid() != 0:
            namespaces.enter_own_user_namespace()
        namespaces.enter_private_mounts()  # a tmpfs: the filesystem of the test may not take the attributes
        site = Site(None, 0, userxattr=os.geteuid() != 0)
        mask_layers.make_layer("layer", str(lower))
        mask_layers.fill_mask_layer("layer", str(lower), masks, site.opaque_attribute)
        found = {}
        for directory, names, files in os.walk("layer"):
            for name in (*names, *files):
                path = f"{directory}/{name}"
                status = os.lstat(path)
                whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
                opaque = not whiteout and site.opaque_attribute in os.listxattr(path)
                found[path.removeprefix("layer/")] = "whiteout" if whiteout else "opaque" if opaque else "dir"
        return found

    return in_child(build)


def test_a_masked_name_becomes_a_whiteout_below_parents_that_look_real(tmp_path: Path) -> None:
    assert _mask_layer(tmp_path, PathMask("home/key")) == {"home": "dir", "home/key": "whiteout"}


def test_a_name_that_does_not_exist_yet_is_masked_all_the_same(tmp_path: Path) -> None:
    assert _mask_layer(tmp_path, PathMask("home/later")) == {"home": "dir", "home/later": "whiteout"}


def test_a_directory_that_is_not_there_does_not_appear_because_something_in_it_is_masked(tmp_path: Path) -> None:
    assert _mask_layer(tmp_path, PathMask("home/.config/gh"), PathMask("home/.config/op")) == {"home": "dir", "home/.config": "whiteout"}


def test_a_kept_directory_is_emptied(tmp_path: Path) -> None:
    assert _mask_layer(tmp_path, PathMask("home/deep", keep=True)) == {"home": "dir", "home/deep": "opaque"}


def test_what_lies_below_a_wider_mask_needs_no_other(tmp_path: Path) -> None:
    assert _mask_layer(tmp_path, PathMask("home"), PathMask("home/key")) == {"home": "whiteout"}


def test_a_link_in_the_place_of_a_directory_with_something_to_hide_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChildEnded, match="a link has taken the place"):
        _mask_layer(tmp_path, PathMask("home/link/shadow"))


def test_a_mount_made_for_a_guest_is_in_no_other_namespace() -> None:
    def build() -> list[str]:
        if os.geteuid() != 0:
            namespaces.enter_own_user_namespace()
        namespaces.enter_private_mounts()
        sc.mount("marker", "/sys", "tmpfs")
        return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " marker " in line]

    assert in_child(build), "the control arm: inside, the mount is there"
    assert " marker " not in Path("/proc/self/mountinfo").read_text()
