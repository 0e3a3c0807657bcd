"""What is left to an egress process, tried from inside it: each refusal beside the same attempt before the confinement."""

from __future__ import annotations

import ctypes
import datetime
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox.egress import confinement
from agent_sandbox.kernel import landlock
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.ids import EGRESS_ID, FIRST_ID, IDS
from tests.kernel.children import ChildEnded, in_child

pytestmark = pytest.mark.skipif(sc.MACHINE not in ("x86_64", "aarch64"), reason=f"no system call table for {sc.MACHINE}")
_PTRACE = {"x86_64": 101, "aarch64": 117}.get(sc.MACHINE, 0)
_ATTACH, _DETACH = 16, 17


def outcome(attempt: Callable[[], object]) -> str:
    """Return "done", or the name of the error."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except MemoryError:
        return "MemoryError"
    return "done"


def both(attempt: Callable[[], object]) -> tuple[str, str]:
    """Return the outcome of an attempt in a child that is not confined, and in one that is."""

    def confined() -> str:
        confinement.confine()
        return outcome(attempt)

    return in_child(lambda: outcome(attempt)), in_child(confined)


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def make_socket(*kind: int) -> None:
    socket.socket(*kind).close()


def test_no_file_can_be_read_listed_or_written(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("secret")
    for path in (str(canary), "/etc/passwd", sys.executable):
        assert both(partial(read, path)) == ("done", "ENOENT")
    assert both(lambda: os.listdir("/")) in (("done", "EPERM"), ("done", "EACCES"))
    assert both(lambda: canary.write_text("changed"))[1] == "ENOENT"
    assert both(lambda: os.open("/made", os.O_CREAT | os.O_WRONLY))[1] in ("EROFS", "EACCES")
    assert both(lambda: os.mkdir(tmp_path / "made"))[1] == "EPERM"


@pytest.mark.skipif(landlock.abi() < landlock.FIRST_USABLE, reason="this kernel has no Landlock")
def test_a_directory_that_was_open_before_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("secret")

    def attempt(confine: bool) -> str:
        here = os.open(tmp_path, os.O_RDONLY)
        if confine:
            confinement.confine()
        return outcome(lambda: os.open("canary", os.O_RDONLY, dir_fd=here))

    assert (in_child(lambda: attempt(False)), in_child(lambda: attempt(True))) == ("done", "EACCES")


def test_no_program_can_be_started() -> None:
    assert both(lambda: subprocess.run(["/bin/true"], check=True)) == ("done", "EPERM")
    assert both(lambda: os.waitpid(os.fork() or os._exit(0), 0)) == ("done", "EPERM")

    def from_memory() -> None:
        image = os.memfd_create("true")
        with open("/bin/true", "rb") as file:
            os.sendfile(image, file.fileno(), 0, 1 << 20)
        if (child := os.posix_spawn(f"/proc/self/fd/{image}", ["true"], {})) and os.waitpid(child, 0)[1]:
            raise OSError(errno.EACCES, "it failed")

    assert both(from_memory) == ("done", "ENOENT")


def test_only_stream_sockets_of_the_internet_can_be_made() -> None:
    kinds = {
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, 0),
        "unix": (socket.AF_UNIX, socket.SOCK_STREAM, 0),
        "netlink": (socket.AF_NETLINK, socket.SOCK_RAW, 0),
    }
    for kind in kinds.values():
        assert both(partial(make_socket, *kind)) == ("done", "EPERM")
    assert both(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()) == ("done", "done"), (
        "the control: it must be able to dial"
    )


def test_it_has_no_capability_and_is_neither_root_nor_a_user_of_the_guests() -> None:
    def look(confine: bool) -> dict[str, list[str]]:
        with _waiting(confinement.confine if confine else None) as pid, open(f"/proc/{pid}/status") as file:
            return {name: value.split() for name, _, value in (line.partition(":") for line in file)}

    before, after = in_child(lambda: look(False)), in_child(lambda: look(True))
    assert before["Seccomp"] == ["0"] and before["NoNewPrivs"] == ["0"]
    assert after["Seccomp"] == ["2"] and after["NoNewPrivs"] == ["1"]
    assert all(int(after[name][0], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
    if os.geteuid() == 0:
        assert int(before["CapEff"][0], 16) != 0
        assert after["Uid"] == after["Gid"] == [str(EGRESS_ID)] * 4 and after["Groups"] == []
        assert not FIRST_ID <= EGRESS_ID < FIRST_ID + IDS
    else:
        assert after["Uid"] == [str(os.getuid())] * 4


@contextmanager
def _waiting(become: Callable[[], None] | None) -> Iterator[int]:
    """A child that has become something, and waits until the block ends."""
    (ready, told), (over, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        if become is not None:
            become()
        os.write(told, b"1")
        os.read(over, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_its_memory_is_bounded() -> None:
    assert both(lambda: bytearray(confinement.MEMORY_BYTES)) == ("done", "MemoryError")
    assert both(lambda: bytearray(confinement.MEMORY_BYTES // 4)) == ("done", "done")


def test_a_file_in_memory_is_bounded_too() -> None:
    def fill() -> None:
        os.ftruncate(os.memfd_create("large"), confinement.FILE_BYTES * 4)

    def confined() -> None:
        confinement.confine()
        fill()

    assert in_child(lambda: outcome(fill)) == "done"
    with pytest.raises(ChildEnded) as ended:  # SIGXFSZ, which Python ignores; the error is EFBIG then
        in_child(confined)
    assert ended.value.signal == signal.SIGXFSZ or "File too large" in str(ended.value)


def test_a_process_of_its_own_uid_cannot_trace_it_or_read_its_memory() -> None:
    uid = EGRESS_ID if os.geteuid() == 0 else os.getuid()

    def become_user() -> None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)

    def look(pid: int) -> tuple[str, str]:
        become_user()
        return outcome(lambda: open(f"/proc/{pid}/mem", "rb").close()), _trace(pid)

    def attempt(become: Callable[[], None]) -> tuple[str, str]:
        with _waiting(become) as pid:
            return in_child(partial(look, pid))

    assert in_child(lambda: attempt(become_user)) == ("done", "done")
    memory, traced = in_child(lambda: attempt(confinement.confine))
    assert traced == "EPERM" and memory in ("EACCES", "EPERM")


def _trace(pid: int) -> str:
    """Attach to a process and let it go again; return "done", or the name of the error."""
    ctypes.set_errno(0)
    if sc.libc.syscall(_PTRACE, _ATTACH, pid, 0, 0) != 0:
        return errno.errorcode[ctypes.get_errno()]
    os.waitpid(pid, 0)
    sc.libc.syscall(_PTRACE, _DETACH, pid, 0, 0)
    return "done"


def test_it_can_load_a_certificate_from_memory() -> None:
    pytest.importorskip("cryptography", reason="needs the extra `network`")
    from agent_sandbox.egress.authority import Authority

    def act() -> bool:
        authority = Authority(datetime.datetime.now(datetime.UTC))
        "localhost".encode("idna")
        authority.context_for("loaded.example")
        confinement.confine()
        return authority.context_for("good.example") is not None

    assert in_child(act)
