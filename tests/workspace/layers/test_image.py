"""The image of a sandbox: made whole or not at all, attached once, no larger than was reserved, and put in order after a power cut."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import image_space, loop, mount_steps, namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.loop import MountedImage
from agent_sandbox.kernel.mount_plan import InImage
from agent_sandbox.kernel.mount_tools import Site
from agent_sandbox.workspace.layers import image
from agent_sandbox.workspace.layers.image import Growth, NoImage, NoRoom
from tests.kernel.children import in_child
from tests.leftovers import left_since, traces
from tests.workspace.layers.overlays import in_namespace

pytestmark = pytest.mark.needs_root
MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = traces()
    yield tmp_path / "image"
    assert left_since(before) == []


@pytest.fixture
def made(place: Path) -> Path:
    image.make(str(place), None)
    return place


def write(top: int, name: str, size: int) -> int:
    """How much of so many bytes can be written to a file. In a full filesystem there may be no room for its name either."""
    try:
        created = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=top)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return 0
    with open(created, "wb", buffering=0) as file:
        written = 0
        try:
            while written < size:
                written += file.write(bytes(MIB))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        return written


def reserved(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_what_is_written_is_there_when_it_is_opened_again_and_nothing_stays_attached(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        write(top, "file", MIB)
    with image.opened(str(made)) as (found, top):
        assert os.stat("file", dir_fd=top).st_size == MIB and not found.lost
    assert not made.with_name("image.new").exists()


def test_programs_devices_and_setuid_files_in_it_count_for_nothing(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        shutil.copy("/bin/true", f"/proc/self/fd/{top}/true")
        with pytest.raises(PermissionError):
            os.execv(f"/proc/self/fd/{top}/true", ["true"])
        flags = os.fstatvfs(top).f_flag
        assert flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_NOEXEC


def test_the_disk_has_reserved_all_that_can_be_written_and_no_more(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        in_use = reserved(made)
        assert image.ROOM < in_use < 2 * image.ROOM, "far less than it may grow to"
        written = write(top, "file", 8 * image.ROOM)
        os.fsync(top)
        assert image.ROOM - 8 * MIB <= written <= image.ROOM
        assert reserved(made) == in_use, "nothing was written where the disk had not promised a block"


def make_inodes(top: int) -> None:
    """Use inodes in every group of the filesystem: the kernel spreads directories over the groups."""
    for number in range(200):
        os.mkdir(f"d{number}", dir_fd=top)
        for other in range(5):
            os.close(os.open(f"d{number}/f{other}", os.O_WRONLY | os.O_CREAT, dir_fd=top))
    os.fsync(top)
    os.sync()


def test_every_inode_has_its_disk_block_before_it_can_be_used(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with image.opened(str(made)) as (_, top):
        in_use = reserved(made)
        make_inodes(top)
        assert reserved(made) == in_use
    image.make(str(other := made.with_name("other")), None)
    with monkeypatch.context() as patch:
        patch.setattr(image_space, "reserve", lambda *_: True)
        with image.opened(str(other)) as (_, top):
            in_use = reserved(other)
            make_inodes(top)
    assert reserved(other) > in_use, "the control arm: without the reservation the disk has to find blocks"


@pytest.mark.parametrize("limit", [None, 8 << 30, 64 * MIB], ids=["no limit", "default", "small"])
def test_at_rest_an_empty_one_takes_no_more_than_16_mib(place: Path, limit: int | None) -> None:
    image.make(str(place), limit)
    assert reserved(place) <= 16 * MIB
    with image.opened(str(place)):
        assert reserved(place) > image.ROOM, "the control arm: while it is in use"
    assert reserved(place) <= 16 * MIB


def test_at_rest_it_takes_what_it_holds_and_all_of_that_is_there(made: Path) -> None:
    content = os.urandom(20 * MIB)
    with image.opened(str(made)) as (_, top):
        make_inodes(top)
        Path(f"/proc/self/fd/{top}/kept").write_bytes(content)
        write(top, "removed", 100 * MIB)
        os.unlink("removed", dir_fd=top)
    assert reserved(made) <= len(content) + 20 * MIB
    checked = subprocess.run(["e2fsck", "-fn", made], capture_output=True, text=True)
    assert checked.returncode == 0, checked
    with image.opened(str(made)) as (_, top):
        assert Path(f"/proc/self/fd/{top}/kept").read_bytes() == content and len(os.listdir(top)) == 205


def test_a_small_limit_takes_no_more_at_rest_than_a_large_one(made: Path) -> None:
    """The ballast grows over blocks that the disk had reserved."""
    with image.opened(str(made)) as (attached, top):
        loop.restrict(top, 8 * MIB)
        Growth(attached, 8 * MIB).put_back(top)
    assert reserved(made) <= 16 * MIB


def test_much_that_was_freed_is_not_reserved_again(made: Path) -> None:
    with image.opened(str(made)) as (attached, top):
        growth = Growth(attached, None)
        for number in range(4):
            write(top, f"file-{number}", image.ROOM)
            growth(top)
        for number in range(4):
            os.unlink(f"file-{number}", dir_fd=top)
        os.sync()
    with image.opened(str(made)) as (_, top):
        assert reserved(made) < 2 * image.ROOM, "as if whoever wrote was killed, and did not put it back"


def test_a_kill_leaves_it_reserved_and_the_next_use_returns_that(made: Path) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with image.opened(str(made)):
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert reserved(made) > image.ROOM, "the control arm: nobody was left to return it"
    with image.opened(str(made)):
        pass
    assert reserved(made) <= 16 * MIB


def test_a_kill_while_it_is_put_to_rest_leaves_one_that_opens_with_all_reserved(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        in_use = reserved(made)
        write(top, "file", MIB)
    with made.open("r+b") as file:
        parts = image_space.unused(file.fileno())
        assert image_space.reserve(file.fileno(), (*parts.tables, *parts.free), 0)
        image_space.release(file.fileno(), parts.free[::2])  # and the others not
    with image.opened(str(made)) as (_, top):
        assert reserved(made) == in_use and os.stat("file", dir_fd=top).st_size == MIB


def test_one_in_use_is_never_put_to_rest(made: Path) -> None:
    with image.opened(str(made)):
        in_use = reserved(made)
        image.rest(str(made))
        assert reserved(made) == in_use
    assert reserved(made) < in_use, "the control arm"


def test_one_that_was_not_unmounted_is_never_put_to_rest(made: Path) -> None:
    copy = after_a_power_cut(made)
    with copy.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 400 * MIB)
    before = reserved(copy)
    image.rest(str(copy))
    assert reserved(copy) == before


def test_it_grows_while_it_is_written_to_and_stops_at_its_limit(made: Path) -> None:
    limit = image.ROOM + 64 * MIB
    with image.opened(str(made)) as (attached, top):
        growth = Growth(attached, limit)
        first = write(top, "first", 8 * image.ROOM)
        growth(top)
        second = write(top, "second", 8 * image.ROOM)
        growth(top)
        assert second > 32 * MIB and write(top, "third", MIB) == 0
        assert limit - 16 * MIB <= first + second <= limit and not growth.refused
        os.fsync(top)
        Growth(attached, None)(top)
        assert write(top, "fourth", MIB) == MIB, "the control arm: without a limit it goes on"
    assert reserved(made) < 3 * image.ROOM


def test_one_that_is_as_large_as_it_was_made_to_be_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "LEAST_CAPACITY", 512 * MIB)
    image.make(str(place), 512 * MIB)
    with image.opened(str(place)) as (attached, top):
        growth = Growth(attached, 8 << 30)
        while write(top, "file", 8 * image.ROOM) and not growth.refused:
            growth(top)
        growth(top)
        assert "no more" in growth.refused


def test_a_lower_limit_holds_although_more_was_reserved_and_can_be_lifted_again(made: Path) -> None:
    with image.opened(str(made)) as (attached, top):
        loop.restrict(top, 8 * MIB)
        assert 4 * MIB <= write(top, "file", 64 * MIB) <= 8 * MIB
        before = reserved(made)
        Growth(attached, 128 * MIB)(top)
        assert write(top, "more", 64 * MIB) == 64 * MIB and reserved(made) == before, "the disk had given it already"


def test_a_full_one_has_still_room_for_the_directories_of_a_view(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        write(top, "file", 8 * image.ROOM)
        with pytest.raises(OSError, match="No space"):
            for number in range(10_000):
                os.mkdir(f"{'x' * 200}{number}", dir_fd=top)
        loop.make_room_for_directories(top)
        os.mkdir("directory", dir_fd=top)
        loop.take_spare(top)
        assert write(top, "guest", MIB) == 0, "and nobody else gets it"


def free_on(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def on_a_small_disk(tmp_path: Path, body: Callable[[Path], None]) -> None:
    """Do something with a new image on a disk of 700 MiB."""

    def entered() -> None:
        small = tmp_path / "small"
        small.mkdir()
        sc.mount("tmpfs", str(small), "tmpfs", 0, f"size={700 * MIB}")
        image.make(str(small / "image"), None)
        body(small)

    in_namespace(entered)


def leave(small: Path, size: int) -> None:
    """Fill the disk until so much is left."""
    with (small / "fill").open("ab") as file:
        os.posix_fallocate(file.fileno(), file.tell(), free_on(small) - size)


def test_a_disk_without_room_says_so_and_nothing_is_given(tmp_path: Path) -> None:
    def body(small: Path) -> None:
        leave(small, image.LEAVE_THE_DISK + 150 * MIB)
        size = 0
        with image.opened(str(small / "image")) as (attached, top):
            growth = Growth(attached, None)
            for number in range(50):
                growth(top)
                size += write(top, f"file-{number}", image.ROOM)
                assert free_on(small) >= image.LEAVE_THE_DISK - MIB, "the disk keeps what it is to keep"
            assert "No space" in growth.refused and write(top, "more", MIB) == 0
            assert size > 16 * MIB, "the control arm: what there was, it got"
        with image.opened(str(small / "image"), reading=True) as (_, top):
            assert sum(os.stat(f"file-{number}", dir_fd=top).st_size for number in range(50)) == size, "the filesystem in it is whole"
        leave(small, image.LEAVE_THE_DISK + 32 * MIB)
        with pytest.raises(NoImage, match="too little room"):
            image.make(str(small / "another"), None)
        assert sorted(os.listdir(small)) == ["fill", "image"]

    on_a_small_disk(tmp_path, body)


def test_on_a_full_disk_it_can_be_read_and_not_written(tmp_path: Path) -> None:
    def body(small: Path) -> None:
        with image.opened(str(small / "image")) as (_, top):
            write(top, "file", MIB)
        leave(small, 8 * MIB)
        with image.opened(str(small / "image"), reading=True) as (attached, top):
            assert attached.read_only and os.stat("file", dir_fd=top).st_size == MIB
            with pytest.raises(OSError, match="Read-only"):
                os.mkdir("new", dir_fd=top)
        with pytest.raises(NoRoom, match="too little room"), image.opened(str(small / "image")):
            pass
        (small / "fill").unlink()
        with image.opened(str(small / "image")) as (_, top):
            assert write(top, "more", MIB) == MIB, "the control arm: with room it can be written"

    on_a_small_disk(tmp_path, body)


def test_two_who_open_it_at_once_use_the_same_device(made: Path) -> None:
    with image.opened(str(made)) as (first, top), image.opened(str(made)) as (second, other):
        assert first.loop.device == second.loop.device
        write(top, "file", MIB)
        assert os.stat("file", dir_fd=other).st_size == MIB


def test_the_device_outlives_the_first_of_two_and_ends_with_the_last(made: Path) -> None:
    first = image.attach(str(made))
    second = image.attach(str(made))
    first.close()
    still = loop.find(second.identity)
    assert still is not None and still.device == second.loop.device
    os.close(still.fd)
    second.close()


def test_whoever_is_killed_leaves_no_device_and_a_whole_filesystem(made: Path) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with image.opened(str(made)) as (_, top):
            write(top, "file", 8 * MIB)
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with image.opened(str(made)) as (found, top):
        assert not found.lost and os.stat("file", dir_fd=top).st_size == 8 * MIB


def after_a_power_cut(made: Path) -> Path:
    """What the disk holds when the machine stops while the image is in use: a copy of the file at such a moment."""
    with image.opened(str(made)) as (_, top):
        write(top, "synced", MIB)
        os.sync()
        write(top, "not synced", MIB)
        copy = made.with_name("copy")
        with made.open("rb") as old, copy.open("xb") as new:
            os.fchmod(new.fileno(), 0o600)
            while (start := _next_data(old.fileno(), old.tell())) is not None:
                end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
                for at in range(start, end, MIB):
                    os.pwrite(new.fileno(), os.pread(old.fileno(), min(MIB, end - at), at), at)
                old.seek(end)
            new.truncate(made.stat().st_size)
    return copy


def _next_data(fd: int, at: int) -> int | None:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        return None


def test_after_a_power_cut_it_is_put_in_order_and_said_once(made: Path) -> None:
    copy = after_a_power_cut(made)
    with image.opened(str(copy)) as (found, top):
        assert found.lost and os.stat("synced", dir_fd=top).st_size == MIB
    with image.opened(str(copy)) as (found, _):
        assert found.lost, "whoever only reads says nothing, and the next one still knows"
        image.acknowledge_loss(found)
    with image.opened(str(copy)) as (found, _):
        assert not found.lost


def test_errors_that_the_kernel_found_are_repaired_when_it_is_opened_next(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        write(top, "file", MIB)
    subprocess.run(["debugfs", "-w", "-R", "ssv state 2", made], check=True, capture_output=True)  # as the kernel marks it
    with image.opened(str(made)) as (found, top):
        assert found.lost and os.stat("file", dir_fd=top).st_size == MIB
    state = subprocess.run(["dumpe2fs", "-h", made], check=True, capture_output=True, text=True).stdout
    assert "Filesystem state:         clean\n" in state


@pytest.mark.parametrize("damage", ["superblock", "beyond repair", "empty"])
def test_a_damaged_one_is_refused_or_repaired_and_never_deleted(made: Path, damage: str) -> None:
    copy = after_a_power_cut(made)
    with copy.open("r+b") as file:
        if damage == "superblock":
            file.seek(1024)
            file.write(bytes(1024))
        elif damage == "beyond repair":
            for block in range(1, 300):
                file.seek(4096 * block)
                file.write(os.urandom(4096))
        else:
            file.truncate(0)
    size = copy.stat().st_size
    with pytest.raises(WorkspaceError) as refused, image.opened(str(copy)):
        pass
    assert "nothing was deleted" in refused.value.hint and copy.stat().st_size == size
    with image.opened(str(made)) as (_, top):
        assert os.stat("synced", dir_fd=top).st_size == MIB, "the control arm: the one it is a copy of"


def test_what_is_not_ours_is_not_attached(made: Path) -> None:
    made.chmod(0o622)
    with pytest.raises(WorkspaceError, match="others can write"):
        image.attach(str(made))
    made.chmod(0o600)
    made.rename(made.with_name("elsewhere"))
    made.symlink_to("elsewhere")
    with pytest.raises(WorkspaceError):
        image.attach(str(made))
    os.unlink(made)
    os.mkfifo(made)
    with pytest.raises(WorkspaceError):
        image.attach(str(made))


def test_without_tools_or_devices_there_is_no_image_and_it_says_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(image, "_SEARCH", ("/nowhere",))
        with pytest.raises(NoImage, match="mkfs"):
            image.make(str(place), None)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "CONTROL", "/nowhere")
        with pytest.raises(NoImage, match="loop device"):
            image.make(str(place), None)
    assert os.listdir(place.parent) == []


def test_layers_are_mounted_from_their_own_image_whatever_was_mounted_before_their_plan(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    image.make(str(other), None)
    for path in (made, other):
        with image.opened(str(path)) as (_, top):
            write(top, path.name, MIB)

    def shown(layers: InImage, ahead: MountedImage | None) -> set[str]:
        namespaces.enter_private_mounts()
        os.mkdir("u")
        mount_steps.perform_step(layers, Site(None, 0, userxattr=False, image=ahead))
        return set(os.listdir("u")) & {"image", "other"}

    with closing(image.attach(str(made))) as ours, closing(image.attach(str(other))) as another:
        layers = InImage(str(made), ours.loop.device, ours.identity, "1")
        for attached in (None, ours, another):
            ahead = None if attached is None else loop.mount_image(attached.loop.device, attached.identity)
            try:
                assert in_child(lambda ahead=ahead: shown(layers, ahead)) == {"image"}  # type: ignore[misc]
            finally:
                if ahead is not None:
                    os.close(ahead.mount)
        with pytest.raises(OSError, match="detached") as refused:
            loop.mount_image(ours.loop.device, another.identity)
        assert refused.value.errno == errno.ESTALE
        stale = InImage(str(made), another.loop.device, ours.identity, "1")
        with pytest.raises(OSError, match="detached"):
            mount_steps.perform_step(stale, Site(None, 0, userxattr=False))
