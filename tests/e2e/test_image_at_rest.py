"""The keeper returns the disk room of an image after a run: who comes meanwhile waits, a kill loses nothing, a full disk breaks nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words
from tests.patience import until

pytestmark = pytest.mark.needs_root
MIB = 1 << 20

# The program, whose keeper does something in place of its n-th call to return a part of the room.
KEEPER = """
import os, signal, sys, time
from agent_sandbox.kernel import image_space
act, when, place = sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv.pop(1)
main, release, calls = os.getpid(), image_space.release, [0]

def instead(image, parts):
    for part in parts:
        if os.getpid() != main and calls[0] == when:
            open(place, "x").close()
            if act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while os.path.exists(place):
                time.sleep(0.01)
        calls[0] += os.getpid() != main
        release(image, (part,))

image_space.release = instead
from agent_sandbox.cli.main import program
program()
"""


def run_with(shell: Shell, act: str, when: int, mark: Path, line: str) -> None:
    """Run a line in the sandbox. Return when the keeper is at the place: it has been killed there, or waits until the mark is removed."""
    command = [sys.executable, "-c", KEEPER, act, str(when), str(mark), "run", line]
    done = subprocess.run(command, cwd=shell.cwd, env=shell.environment, capture_output=True, check=False)
    assert done.returncode == 0, words(done)
    assert until(mark.exists)


def image_of(shell: Shell) -> Path:
    (found,) = Path(shell.environment["AGENT_SANDBOX_STATE"]).glob("sandboxes/*/image")
    return found


def at_rest(shell: Shell) -> bool:
    return image_of(shell).stat().st_blocks * 512 <= 16 * MIB


@pytest.mark.parametrize("line", [("promote", "--yes"), ("diff",), ("run", "cat new")], ids=lambda line: line[0])
def test_a_verb_right_after_a_run_waits_until_the_room_is_returned(shell: Shell, tmp_path: Path, line: tuple[str, ...]) -> None:
    mark = tmp_path / "mark"
    run_with(shell, "wait", 1, mark, "echo x > new")
    with shell.start(*line) as waiting:
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert b"waiting for another process" in said and waiting.poll() is None
        mark.unlink()
        out, rest = waiting.communicate()
    assert waiting.returncode == 0 and b"locked" not in rest, rest
    if line[0] == "promote":
        assert (shell.cwd / "new").read_text() == "x\n" and b"still holds" not in rest
    else:
        assert b"x" in out


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_keeper_killed_while_it_returns_room_loses_nothing(shell: Shell, tmp_path: Path, when: int) -> None:
    run_with(shell, "kill", when, tmp_path / "mark", "echo precious > canary; head -c 3000000 /dev/zero > zeros")
    assert not at_rest(shell), "the control arm: the room was not returned"
    checked = subprocess.run(["e2fsck", "-fn", image_of(shell)], capture_output=True, text=True)
    assert checked.returncode == 0, checked
    done = shell("run", "cat canary; wc -c < zeros")
    assert done.stdout == b"precious\n3000000\n" and "may be lost" not in words(done), words(done)
    assert until(lambda: at_rest(shell)) and shell("promote", "--yes").returncode == 0
    assert (shell.cwd / "canary").read_text() == "precious\n"


def test_prune_returns_the_room_that_a_killed_keeper_left_reserved(shell: Shell, tmp_path: Path) -> None:
    run_with(shell, "kill", 0, tmp_path / "mark", "echo precious > canary")
    assert not at_rest(shell)
    done = shell("prune", "--yes")
    assert done.returncode == 0 and "freed" in words(done) and at_rest(shell)
    assert shell("run", "cat canary").stdout == b"precious\n"


@pytest.fixture
def small(shell: Shell, tmp_path: Path) -> Iterator[tuple[Shell, Path]]:
    """A shell whose state directory is on an ext4 filesystem of 900 MiB of its own, and that directory."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", memory], check=True)
    try:
        with (memory / "disk").open("xb") as file:
            file.truncate(900 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", memory / "disk"], check=True)
        subprocess.run(["mount", "-o", "loop", memory / "disk", disk], check=True)
        try:
            yield Shell(shell.cwd, {"AGENT_SANDBOX_STATE": str(disk / "state")}), disk
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
    finally:
        subprocess.run(["umount", "-l", memory], check=True)


def free_on(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def fill(directory: Path) -> None:
    """Fill a filesystem to the last block."""
    with (directory / "fill").open("ab", buffering=0) as file:
        for size in (MIB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


WRITES = """
import errno, os, sys
print("up", flush=True)
sys.stdin.readline()
kept = 0
try:
    with open("big", "wb", buffering=0) as file:
        for number in range(2000):
            kept += file.write(bytes([number % 251]) * (1 << 20))
            os.fsync(file.fileno())
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
with open("big", "rb") as file:
    for number in range(kept >> 20):
        assert file.read(1 << 20) == bytes([number % 251]) * (1 << 20), number
print("whole", kept >> 20)
"""


@pytest.mark.parametrize("full", ["by the guest", "by another program during the run"])
def test_a_disk_that_gets_full_under_a_run_gives_enospc_and_never_breaks_the_image(small: tuple[Shell, Path], full: str) -> None:
    shell, disk = small
    (shell.cwd / "writes.py").write_text(WRITES)
    assert shell("run", "echo precious > canary").returncode == 0
    meanwhile = full != "by the guest"
    with shell.start("run", "--", "python3", "writes.py", stdin=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        if meanwhile:
            fill(disk)
        out, said = running.communicate(b"\n")
    found = re.fullmatch(rb"ENOSPC\nwhole (\d+)\n", out)
    assert running.returncode == 0 and found is not None and int(found[1]) > 32, (out, said)
    assert b"Input/output" not in said
    if not meanwhile:
        assert free_on(disk) >= 200 * MIB, "the disk keeps what it is to keep"
    (disk / "fill").unlink(missing_ok=True)
    assert until(lambda: subprocess.run(["e2fsck", "-fn", image_of(shell)], capture_output=True).returncode == 0)
    after = shell("run", "cat canary")
    assert after.stdout == b"precious\n" and "may be lost" not in words(after), words(after)
