"""Which calls are told to a listener: those fail (ENOSYS) when nobody holds it any more, and no other does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agent_sandbox.kernel import notify, seccomp, syscall_rules, syscalls
from tests.kernel.children import answer, in_child

NUMBERS = syscall_rules.numbers(syscalls.MACHINE) if syscalls.MACHINE in syscall_rules.MACHINES else {}
pytestmark = pytest.mark.skipif(not NUMBERS, reason=f"no system call table for {syscalls.MACHINE}")
BAD = -1
# With bad arguments each of these is harmless, and known to every kernel that we run on.
UNTOLD = ("read", "write", "newfstatat", "faccessat", "readlinkat", "getdents64", "fstat", "lseek", "dup", "listen", "accept4", "fchdir")


def unheard(*calls: tuple[str, tuple[int, ...]]) -> list[bool]:
    """Whether each call fails for want of a listener, in a child under the filter."""

    def act() -> list[bool]:
        os.close(seccomp.install_observer(seccomp.compile_observer(notify.CALLS)))
        return [answer(NUMBERS[name], *arguments) == errno.ENOSYS for name, arguments in calls]

    return in_child(act)


def test_every_call_that_is_to_be_told_is_told_and_others_are_not() -> None:
    told = [name for name in notify.CALLS if name in NUMBERS]
    assert len(told) > 25
    arguments = (BAD, BAD, BAD, BAD, BAD, BAD)
    assert unheard(*((name, arguments) for name in told)) == [True] * len(told)
    assert not any(unheard(*((name, arguments) for name in UNTOLD)))


def test_what_is_sent_without_an_address_is_not_told_whatever_half_of_the_register_holds_it() -> None:
    assert unheard(*(("sendto", (BAD, 0, 0, 0, address, 0)) for address in (0, 1, 1 << 32, 1 << 63))) == [False, True, True, True]


def test_the_refusals_of_the_other_filter_come_first() -> None:
    def act() -> list[int]:
        os.close(seccomp.install_observer(seccomp.compile_observer(notify.CALLS)))
        seccomp.install(seccomp.compile_filter(processes=False, execute=False))
        return [answer(NUMBERS[name], BAD, BAD, BAD) for name in ("execve", "mkdirat")]

    assert in_child(act) == [errno.EPERM, errno.ENOSYS]


@pytest.mark.parametrize("text", ["", "nameserver\n", "nameserver not-an-address\nsearch\n", "\0" * 9000, "nameserver 1.2.3.4.5\n# x"])
def test_settings_that_say_nothing_useful_are_no_settings(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text(text)
    monkeypatch.setattr(notify, "_RESOLV_CONF", str(tmp_path / "resolv.conf"))
    assert notify.configured() == ([], ())


def test_settings_are_read_as_the_c_library_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text(
        "domain old.example\nnameserver 192.0.2.1\nnameserver 2001:db8::53\nsearch Corp.Example. .\n"
        "nameserver 192.0.2.2\nnameserver 192.0.2.3\noptions ndots:5\n"
    )
    monkeypatch.setattr(notify, "_RESOLV_CONF", str(tmp_path / "resolv.conf"))
    assert notify.configured() == (["192.0.2.1", "2001:db8::53", "192.0.2.2"], ("corp.example",))
