"""The image of a sandbox: made whole or not at all, attached once, no larger than was reserved, and put in order after a power cut."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import loop
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.workspace.layers import image
from agent_sandbox.workspace.layers.image import Growth, NoImage
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
    """How much of so many bytes can be written to a file."""
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=top), "wb", buffering=0) as file:
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
    at_first = reserved(made)
    assert image.ROOM < at_first < 2 * image.ROOM, "far less than it may grow to"
    with image.opened(str(made)) as (_, top):
        written = write(top, "file", 8 * image.ROOM)
        os.fsync(top)
    assert image.ROOM - 8 * MIB <= written <= image.ROOM
    assert reserved(made) == at_first, "nothing was written where the disk had not promised a block"


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


def test_a_disk_without_room_says_so_and_nothing_is_given(made: Path, tmp_path: Path) -> None:
    def body() -> None:
        small = tmp_path / "small"
        small.mkdir()
        sc.mount("tmpfs", str(small), "tmpfs", 0, f"size={700 * MIB}")
        image.make(str(small / "image"), None)
        os.posix_fallocate(os.open(small / "fill", os.O_RDWR | os.O_CREAT), 0, 200 * MIB)
        with image.opened(str(small / "image")) as (attached, top):
            size = write(top, "file", 8 * image.ROOM)
            growth = Growth(attached, None)
            growth(top)
            assert "No space" in growth.refused and write(top, "more", MIB) == 0
        with image.opened(str(small / "image")) as (_, top):
            assert os.stat("file", dir_fd=top).st_size == size, "the filesystem in it is whole"
        with pytest.raises(NoImage, match="too little room"):
            image.make(str(small / "another"), None)
        assert sorted(os.listdir(small)) == ["fill", "image"]

    in_namespace(body)


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
