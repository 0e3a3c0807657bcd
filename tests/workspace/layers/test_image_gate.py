"""The gate of an image: one process after the other opens it, puts it in order or returns its room, and each may be killed at any step."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.kernel import image_space, loop
from agent_sandbox.workspace.layers import image
from agent_sandbox.workspace.layers.image import Growth
from tests.leftovers import left_since, traces

pytestmark = pytest.mark.needs_root
MIB = 1 << 20
CONTENT = b"kept\n" * 1000


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    before = traces()
    place = tmp_path / "image"
    image.make(str(place), None)
    with image.opened(str(place)) as (_, top):
        Path(f"/proc/self/fd/{top}/kept").write_bytes(CONTENT)
    yield place
    assert left_since(before) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a minute were over after three looks."""
    monkeypatch.setattr(image, "_STILL_WRITING", 3)
    monkeypatch.setattr(image, "_SILENT_LOOKS", 50)


@contextmanager
def other_process(body: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """Do something in another process, which is given a function that stops it. Yields, once it has stopped, a function that resumes it."""
    stopped, stop = os.pipe()
    resumed, resume = os.pipe()

    def halt() -> None:
        os.write(stop, b"x")
        os.read(resumed, 1)

    def go_on() -> None:
        os.write(resume, b"x")

    child = os.fork()
    if child == 0:
        code = 1
        try:
            body(halt)
            code = 0
        finally:
            os._exit(code)
    try:
        assert os.read(stopped, 1) == b"x"
        yield go_on
    finally:
        go_on()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for fd in (stopped, stop, resumed, resume):
            os.close(fd)


def slow_rest(path: Path) -> Callable[[Callable[[], None]], None]:
    """Return the room of an image, and stop in the middle of it."""

    def body(halt: Callable[[], None]) -> None:
        release = image_space.release

        def slow(image: int, parts: tuple[tuple[int, int], ...]) -> None:
            halt()
            image_space.release = release
            release(image, parts)

        image_space.release = slow
        image.rest(str(path))

    return body


def test_whoever_opens_it_waits_for_one_that_returns_room_and_says_so(made: Path, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with other_process(slow_rest(made)) as resume:

        def tell(message: str) -> None:
            said.append(message)
            resume()

        monkeypatch.setattr(image, "_tell", tell)
        with image.opened(str(made)) as (_, top):
            assert Path(f"/proc/self/fd/{top}/kept").read_bytes() == CONTENT
    assert len(said) == 1 and "returns its disk space" in said[0]


def test_a_lock_of_another_program_is_refused_after_a_while(made: Path, impatient: None) -> None:
    with made.open("rb") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="locked by another process"):
            image.attach(str(made))
    image.attach(str(made)).close()


def devices_of(path: Path) -> list[str]:
    """All loop devices of a file."""
    found = []
    for name in sorted(os.listdir("/sys/block")):
        backing = Path(f"/sys/block/{name}/loop/backing_file")
        if backing.exists() and backing.read_text().strip() == str(path):
            found.append(name)
    return found


def test_the_device_of_one_that_is_put_in_order_is_not_shared(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise whoever puts it in order attaches it a second time, and two devices on one file destroy it."""
    monkeypatch.setattr(image, "_SILENT_LOOKS", 50)

    def body(halt: Callable[[], None]) -> None:
        reserve = image._reserve_the_rest

        def slow(file: int, least: int, leave_bytes: int) -> bool:
            top = image._mounted_for_us(file)
            halt()
            os.close(top)
            return reserve(file, least, leave_bytes)

        image._reserve_the_rest = slow
        with image.opened(str(made)):
            assert len(devices_of(made)) == 1
            halt()

    with other_process(body) as resume:
        assert len(devices_of(made)) == 1, "the control arm: there is one that could be shared"
        monkeypatch.setattr(image, "_tell", lambda _: resume())
        attached = image.attach(str(made))
        try:
            assert devices_of(made) == [os.path.basename(attached.loop.device)]
        finally:
            attached.close()


def killed_at(step: int, body: Callable[[], object]) -> bool:
    """Do something in another process that is killed in place of its n-th call of flock, fcntl or ioctl. Return whether there was one."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def instead(*given: object) -> object:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*given)

            return instead

        for name in ("flock", "fcntl", "ioctl"):
            setattr(fcntl, name, counted(getattr(fcntl, name)))
        body()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_kill_at_any_step_of_returning_room_loses_nothing(made: Path) -> None:
    with image.opened(str(made)):
        in_use = made.stat().st_blocks
    steps = 0
    while True:
        attached = image.attach(str(made))  # all reserved, and nobody to return it
        attached.close()
        assert made.stat().st_blocks == in_use
        if not killed_at(steps, lambda: image.rest(str(made))):
            break
        steps += 1
        with made.open("rb") as file:
            assert image_space.condition(file.fileno()) == image_space.SOUND
        with image.opened(str(made)) as (found, top):
            assert not found.lost and made.stat().st_blocks == in_use
            assert Path(f"/proc/self/fd/{top}/kept").read_bytes() == CONTENT
    assert steps >= 4, "the gate, the lock, and at least two parts"
    assert made.stat().st_blocks * 512 <= 16 * MIB, "the control arm: without a kill the room is returned"
    checked = subprocess.run(["e2fsck", "-fn", made], capture_output=True, text=True)
    assert checked.returncode == 0, checked


def test_a_directory_outside_the_image_is_left_alone(made: Path, tmp_path: Path) -> None:
    """The guest's side sends the descriptor. Whatever it is, the ballast of the image never fills another disk."""
    outside = tmp_path / "outside"
    outside.mkdir()
    with image.opened(str(made)) as (attached, top):
        growth = Growth(attached, None)
        wrong = os.open(outside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for act in (growth, growth.put_back):
                with pytest.raises(WorkspaceError, match="not in"):
                    act(wrong)
        finally:
            os.close(wrong)
        growth(top)
        growth.put_back(top)
    assert os.listdir(outside) == []


def test_in_one_that_a_guest_has_filled_our_own_work_has_room(made: Path) -> None:
    with image.opened(str(made)) as (_, top):
        with pytest.raises(OSError, match="No space"), open(f"/proc/self/fd/{top}/all", "wb", buffering=0) as file:
            while file.write(bytes(MIB)):
                pass
        with pytest.raises(OSError, match="No space"):
            for number in range(10_000):
                os.mkdir(f"{'x' * 200}{number}", dir_fd=top)
        loop.take_spare(top)
    with image.opened(str(made)) as (_, top):
        for number in range(100):
            os.mkdir(f"generation-{number}", dir_fd=top)
