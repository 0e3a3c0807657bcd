"""The mounts of a machine, read as a path lookup in the kernel would find them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mountinfo import Mount, MountTable, containing, parse, visible

MACHINE = b"""\
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755
26 24 0:24 / /dev/pts rw,relatime - devpts devpts rw,mode=600
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
29 26 0:26 / /dev/pts rw,relatime - devpts devpts rw,mode=620
40 27 254:0 /home/u /srv/u ro,nosuid shared:7 master:2 - ext4 /dev/vda rw
41 27 254:0 /home/u/.ssh/keys /srv/keys rw - ext4 /dev/vda rw
42 27 8:1 / /home/u/.gnupg/card rw - vfat /dev/sda1 rw
43 27 8:1 / /media/card rw - vfat /dev/sda1 rw
"""


def targets(mounts: tuple[Mount, ...]) -> dict[int, str]:
    return {mount.id: mount.target for mount in mounts}


def test_a_line_is_read_with_all_its_fields() -> None:
    mount = parse(MACHINE)[5]
    assert mount == Mount(
        id=40,
        parent=27,
        device="254:0",
        root="/home/u",
        target="/srv/u",
        options=frozenset({"ro", "nosuid"}),
        propagation=("shared:7", "master:2"),
        fstype="ext4",
        source="/dev/vda",
        super_options=("rw",),
    )


def test_escapes_an_empty_source_and_bytes_that_are_not_utf8_are_kept() -> None:
    (mount,) = parse(b"5 1 0:9 /a\\134b /x\\040y\\011\\012\xff rw - tmpfs  rw\n")
    assert mount.root == "/a\\b"
    assert os.fsencode(mount.target) == b"/x y\t\n\xff"
    assert mount.source == ""


@given(st.binary(min_size=1).filter(lambda name: b"\0" not in name and b"/" not in name))
def test_any_name_survives_the_kernels_escaping(name: bytes) -> None:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes((byte,)) for byte in name)
    (mount,) = parse(b"5 1 0:9 / /" + escaped + b" rw - tmpfs none rw\n")
    assert os.fsencode(mount.target) == b"/" + name


@pytest.mark.parametrize("line", [b"garbage", b"5 1 0:9 / /x rw tmpfs none rw", b"x 1 0:9 / /x rw - tmpfs none rw"])
def test_a_line_that_is_none_is_refused_and_not_guessed(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a line of mountinfo"):
        parse(line)


def test_of_mounts_stacked_on_one_target_only_the_top_is_visible() -> None:
    seen = targets(visible(parse(MACHINE)))
    assert 29 in seen and 26 not in seen
    assert 24 in seen  # control: the one below it in the path stays


def test_a_later_mount_on_a_parent_directory_hides_what_was_mounted_below() -> None:
    hidden = parse(MACHINE + b"50 27 0:40 / /srv rw - tmpfs none rw\n")
    assert not {40, 41} & targets(visible(hidden)).keys()
    assert {40, 41} <= targets(visible(parse(MACHINE))).keys()
    assert containing(hidden, "/srv/u/file").id == 50


@pytest.mark.parametrize(
    ("path", "mount"), [("/", 27), ("/srv", 27), ("/srv/u", 40), ("/srv/u/a/b", 40), ("/srv/user", 27), ("/dev/pts/0", 29)]
)
def test_a_path_lies_on_the_mount_that_a_lookup_ends_on(path: str, mount: int) -> None:
    assert containing(parse(MACHINE), path).id == mount


@pytest.mark.parametrize("path", ["relative", "", "/srv/../etc"])
def test_a_path_that_is_not_absolute_and_resolved_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        containing(parse(MACHINE), path)


def test_a_directory_bound_elsewhere_is_known_there_too() -> None:
    assert MountTable(parse(MACHINE)).aliases("/home/u/.aws") == ["/srv/u/.aws"]
    assert MountTable(parse(MACHINE)).aliases("/srv/u/.aws") == ["/home/u/.aws"]
    assert MountTable(parse(MACHINE)).aliases("/home/other") == []


def test_a_part_of_a_directory_bound_elsewhere_is_an_alias_of_the_whole() -> None:
    assert MountTable(parse(MACHINE)).aliases("/home/u/.ssh") == ["/srv/u/.ssh", "/srv/keys"]


def test_a_filesystem_mounted_inside_a_secret_is_known_where_else_it_is_mounted() -> None:
    assert "/media/card" in MountTable(parse(MACHINE)).aliases("/home/u/.gnupg")


def test_an_alias_that_another_mount_covers_is_none() -> None:
    covered = parse(MACHINE + b"50 40 0:40 / /srv/u/.aws rw - tmpfs none rw\n")
    assert MountTable(covered).aliases("/home/u/.aws") == []


@st.composite
def tables(draw: st.DrawFn) -> tuple[Mount, ...]:
    """Tables of a machine on which parts of few filesystems are mounted here and there, also over one another."""
    paths = st.lists(st.sampled_from("ab"), max_size=3).map(lambda parts: "/" + "/".join(parts))
    lines = [b"1 0 8:0 / / rw - ext4 x rw\n"]
    for number in range(2, draw(st.integers(2, 6))):
        parent, device = draw(st.integers(1, number - 1)), draw(st.integers(0, 2))
        lines.append(f"{number} {parent} 8:{device} {draw(paths)} {draw(paths)} rw - ext4 x rw\n".encode())
    return visible(parse(b"".join(lines)))


@given(tables(), st.lists(st.sampled_from("ab"), max_size=2), st.sampled_from("abc"))
def test_the_aliases_of_a_directory_are_those_of_its_entries_unless_it_says_otherwise(
    mounts: tuple[Mount, ...], parts: list[str], name: str
) -> None:
    table, directory = MountTable(mounts), "/" + "/".join(parts)
    shared = table.aliases_of_entries(directory)
    if shared is not None:
        assert sorted(os.path.join(alias, name) for alias in shared) == sorted(table.aliases(os.path.join(directory, name)))


def test_a_directory_says_when_its_entries_have_aliases_of_their_own() -> None:
    table = MountTable(parse(MACHINE))
    assert table.aliases_of_entries("/home/u") is None, "a card is mounted in it, and keys of it elsewhere"
    assert table.aliases_of_entries("/home/u/.aws") == ["/srv/u/.aws"]
    assert table.aliases_of_entries("/etc") == []


def test_this_machines_mounts_agree_with_what_stat_says() -> None:
    mounts = mountinfo.read()
    tried = 0
    for mount in visible(mounts):
        try:
            device = os.stat(mount.target).st_dev
        except OSError:  # another user's FUSE mount, say
            continue
        if mount.fstype in ("btrfs", "overlay"):  # which show files under a device of their own
            continue
        assert f"{os.major(device)}:{os.minor(device)}" == mount.device, mount
        assert containing(mounts, mount.target) == mount
        tried += 1
    assert tried > 0
