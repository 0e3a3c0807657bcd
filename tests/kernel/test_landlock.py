"""What Landlock takes away from a process, each with what it could do before."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.kernel import landlock, syscall_rules, syscalls
from tests.kernel.children import in_child

VERSION = landlock.abi()


def needs(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(version > VERSION, reason=f"needs Landlock ABI {version}; this kernel has {VERSION}")


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def outcomes(acts: list[Callable[[], object]], *, writable: list[str] | None = None, executable: list[str] | None = None) -> list[str]:
    def act() -> list[str]:
        landlock.restrict(writable=writable, executable=executable)
        return [outcome(each) for each in acts]

    return in_child(act)


def control(acts: list[Callable[[], object]]) -> list[str]:
    return in_child(lambda: [outcome(each) for each in acts])


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A scratch directory and another one, with the same in them."""
    for name in ("scratch", "other"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "empty").mkdir()
        (tmp_path / name / "file").write_text("old")
        (tmp_path / name / "doomed").write_text("old")
    return tmp_path / "scratch", tmp_path / "other"


def changes(place: Path) -> list[Callable[[], object]]:
    """Every way to change something beneath a directory."""
    return [
        lambda: (place / "file").write_text("new"),
        lambda: os.truncate(place / "file", 1),
        lambda: (place / "made").write_text("x"),
        lambda: (place / "directory").mkdir(),
        lambda: (place / "link").symlink_to("file"),
        lambda: os.mkfifo(place / "fifo"),
        lambda: os.mknod(place / "socket", stat.S_IFSOCK | 0o600),
        lambda: (place / "file").rename(place / "inner" / "file"),
        lambda: (place / "doomed").unlink(),
        lambda: (place / "empty").rmdir(),
    ]


@needs(3)
def test_with_writable_directories_nothing_else_can_be_changed(places: tuple[Path, Path]) -> None:
    scratch, other = places
    everything = [*changes(scratch), *changes(other)]
    got = outcomes(everything, writable=[str(scratch)])
    assert got[:10] == ["done"] * 10
    assert set(got[10:]) <= {"EACCES", "EXDEV"}
    assert control(changes(other)) == ["done"] * 10


@needs(2)
def test_a_file_cannot_be_moved_or_linked_out_of_a_writable_directory(places: tuple[Path, Path]) -> None:
    scratch, other = places
    acts: list[Callable[[], object]] = [
        lambda: os.link(other / "file", scratch / "taken"),
        lambda: os.rename(scratch / "file", other / "given"),
    ]
    assert set(outcomes(acts, writable=[str(scratch)])) <= {"EACCES", "EXDEV"}
    assert control(acts) == ["done", "done"]


@needs(2)
def test_without_the_lists_a_guest_reads_writes_moves_and_executes_everywhere(places: tuple[Path, Path]) -> None:
    scratch, other = places
    acts: list[Callable[[], object]] = [
        lambda: os.rename(scratch / "file", other / "moved"),
        lambda: os.link(other / "file", scratch / "linked"),
        *changes(other)[2:7],
        lambda: Path("/etc/passwd").read_bytes(),
        lambda: subprocess.run(["/bin/true"], check=True),
        lambda: Path("/dev/null").write_text("x"),
    ]
    assert outcomes(acts) == ["done"] * len(acts)


@needs(2)
def test_the_devices_stay_writable_in_a_read_only_view() -> None:
    acts: list[Callable[[], object]] = [lambda: Path("/dev/null").write_text("x"), lambda: Path("/dev/shm/landlock-test").write_text("x")]
    assert outcomes([*acts, lambda: os.unlink("/dev/shm/landlock-test")], writable=[]) == ["done"] * 3


@needs(2)
def test_device_nodes_cannot_be_made_anywhere(tmp_path: Path) -> None:
    acts: list[Callable[[], object]] = [
        lambda: os.mknod(tmp_path / "character", stat.S_IFCHR | 0o600, 0),  # 0:0, which needs no privilege
        lambda: os.mknod(tmp_path / "fifo", stat.S_IFIFO | 0o600),
    ]
    assert outcomes(acts, writable=[str(tmp_path)]) == ["EACCES", "done"]
    (tmp_path / "fifo").unlink()
    assert outcomes(acts) == ["EACCES", "done"]
    (tmp_path / "fifo").unlink()
    assert control(acts) == ["done", "done"]


@needs(5)
@pytest.mark.needs_root
def test_devices_outside_dev_take_no_commands(tmp_path: Path) -> None:
    node = tmp_path / "null"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    try:
        os.close(os.open(node, os.O_RDWR))
    except PermissionError:
        pytest.skip(f"{tmp_path} is mounted nodev")
    number = syscall_rules.numbers(syscalls.MACHINE)["ioctl"]

    def command(path: str) -> Callable[[], object]:
        return lambda: syscalls.check(
            syscalls.libc.syscall(number, os.open(path, os.O_RDWR), ctypes.c_ulong(0xB701), 0), "ioctl"
        )  # 0xB701: no command of any driver here

    acts = [command(str(node)), command("/dev/null")]
    assert outcomes(acts) == ["EACCES", "ENOTTY"]
    assert control(acts) == ["ENOTTY", "ENOTTY"]


@needs(2)
def test_only_the_listed_programs_are_executed() -> None:
    true, other = os.path.realpath("/bin/true"), os.path.realpath("/bin/cat")
    loader = next(os.path.realpath(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/ld-" in line)
    acts: list[Callable[[], object]] = [
        lambda: subprocess.run([true], check=True),
        lambda: subprocess.run([other, "/dev/null"], check=True),
        lambda: Path(other).read_bytes(),
    ]
    assert outcomes(acts, executable=[true, loader]) == ["done", "EACCES", "done"]
    assert outcomes(acts, executable=[]) == ["EACCES", "EACCES", "done"]
    assert control(acts) == ["done", "done", "done"]


@needs(6)
def test_signals_and_abstract_sockets_stay_within_the_run() -> None:
    outside = os.getpid()
    name = f"\0landlock-test-{outside}"

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        acts: list[Callable[[], object]] = [connect, lambda: os.kill(outside, 0), lambda: os.kill(os.getpid(), 0)]
        assert outcomes(acts) == ["EPERM", "EPERM", "done"]
        assert control(acts) == ["done", "done", "done"]


@needs(2)
def test_a_directory_that_is_not_there_is_an_error_and_restricts_nothing(tmp_path: Path) -> None:
    def act() -> tuple[str, str]:
        failure = outcome(lambda: landlock.restrict(writable=[str(tmp_path / "missing")], executable=None))
        return failure, outcome(lambda: (tmp_path / "file").write_text("x"))

    assert in_child(act) == ("ENOENT", "done")


@pytest.mark.parametrize("version", range(8))
def test_each_right_waits_for_the_abi_that_has_it_and_what_is_left_out_is_named(version: int) -> None:
    ruleset = landlock.plan(version=version, writable=["/tmp"], executable=["/bin/true"])
    wanted = {*landlock.RIGHTS, *landlock.SCOPES} - {"READ_FILE", "READ_DIR"}  # a guest's reading is never restricted
    enforced = {*ruleset.handled, *ruleset.scoped}
    assert enforced | set(ruleset.left_out) | {"REFER"} == wanted
    assert not enforced & set(ruleset.left_out)
    floors = {name: floor for name, (_, floor) in (landlock.RIGHTS | landlock.SCOPES).items()}
    assert all(floors[name] <= version for name in enforced)
    assert version < 6 or not ruleset.left_out
    assert "MAKE_CHAR" not in "".join(grant.describe() for grant in ruleset.grants)


def test_a_kernel_without_landlock_is_left_unrestricted_and_says_so() -> None:
    ruleset = landlock.plan(version=0, writable=None, executable=None)
    assert ruleset.left_out == ("MAKE_CHAR", "MAKE_BLOCK", "IOCTL_DEV", "ABSTRACT_UNIX_SOCKET", "SIGNAL")
    landlock.enforce(landlock.open_ruleset(ruleset))  # nothing to enforce: harmless, even here


def test_the_plan_can_be_read_before_it_happens() -> None:
    assert landlock.plan(version=6, writable=None, executable=None).describe().splitlines() == [
        "forbid MAKE_CHAR MAKE_BLOCK IOCTL_DEV REFER",
        "permit REFER beneath /",
        "permit IOCTL_DEV beneath /dev",
        "keep within the run: ABSTRACT_UNIX_SOCKET SIGNAL",
        "not enforced here: ",
    ]


@needs(3)
def test_what_files_hold_can_be_changed_beneath_named_directories_only_and_names_anywhere(places: tuple[Path, Path]) -> None:
    scratch, other = places
    acts: list[Callable[[], object]] = [
        lambda: (scratch / "file").write_text("new"),
        lambda: (other / "file").write_text("new"),
        lambda: os.truncate(other / "file", 0),
        lambda: (other / "directory").mkdir(),
        lambda: (other / "doomed").rename(other / "inner" / "moved"),
        lambda: open("/proc/self/mem", "r+b").close(),
    ]

    def act() -> list[str]:
        landlock.enforce(landlock.open_ruleset(landlock.plan(version=VERSION, writable=None, executable=None, contents=[str(scratch)])))
        return [outcome(each) for each in acts]

    assert in_child(act) == ["done", "EACCES", "EACCES", "done", "done", "EACCES"]
    (other / "inner" / "moved").rename(other / "doomed")
    (other / "directory").rmdir()
    assert control(acts) == ["done"] * len(acts)
