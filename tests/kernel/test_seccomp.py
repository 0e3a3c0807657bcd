"""What the filter refuses. Each call is made so that the kernel itself would answer otherwise; a child without the filter shows it."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import seccomp, syscall_rules, syscalls
from tests.kernel.children import ChildEnded, answer, in_child

NUMBERS = syscall_rules.numbers(syscalls.MACHINE) if syscalls.MACHINE in syscall_rules.MACHINES else {}
pytestmark = pytest.mark.skipif(not NUMBERS, reason=f"no system call table for {syscalls.MACHINE}")
ROOT = os.geteuid() == 0
BAD = -1  # as a pointer, a descriptor, a length, a set of flags: never right
Call = tuple[int, ...]

# Case 31. With these arguments each fails at once (EFAULT, EBADF, EINVAL, ESRCH, ENOSYS) and changes nothing when it is not filtered.
DANGEROUS: dict[str, Call] = {
    name: arguments
    for names, arguments in (
        ("acct chroot swapoff delete_module uselib fsopen", (1, BAD)),
        ("mount pivot_root init_module add_key request_key", (1, 1, 1, BAD, BAD)),
        ("umount2 swapon sethostname setdomainname adjtimex memfd_secret sysfs ustat", (1, BAD)),
        ("fsconfig fsmount fspick open_tree move_mount mount_setattr open_tree_attr", (BAD, BAD, BAD, BAD, BAD)),
        (
            "name_to_handle_at open_by_handle_at fanotify_init fanotify_mark lookup_dcookie vmsplice remap_file_pages",
            (BAD, 1, BAD, BAD, BAD),
        ),
        ("ptrace process_vm_readv process_vm_writev kcmp move_pages migrate_pages", (BAD, BAD, BAD, BAD, BAD, BAD)),
        ("pidfd_getfd process_madvise process_mrelease", (BAD, BAD, BAD, BAD, BAD)),
        ("io_uring_setup", (1, 1)),
        ("io_uring_enter io_uring_register", (BAD, BAD, BAD, BAD)),
        ("bpf userfaultfd keyctl iopl ioperm modify_ldt reboot kexec_load kexec_file_load finit_module syslog", (BAD, BAD, BAD, BAD, BAD)),
        ("perf_event_open quotactl quotactl_fd clock_settime clock_adjtime settimeofday", (BAD, 1, BAD, BAD, BAD)),
        ("mbind set_mempolicy get_mempolicy set_mempolicy_home_node", (BAD, BAD, BAD, BAD, BAD, BAD)),
        ("lsm_get_self_attr lsm_set_self_attr lsm_list_modules", (BAD, 1, 1, BAD)),
        ("unshare setns", (BAD, BAD)),
        ("_sysctl create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg afs_syscall tuxcall security vserver", (1,)),
    )
    for name in names.split()
    if name in NUMBERS
}
NAMESPACES = {
    name: getattr(syscalls, name)
    for name in ("CLONE_NEWNS", "CLONE_NEWCGROUP", "CLONE_NEWUTS", "CLONE_NEWIPC", "CLONE_NEWUSER", "CLONE_NEWPID", "CLONE_NEWNET")
}


def filtered(*, processes: bool = True, execute: bool = True) -> None:
    seccomp.install(seccomp.compile_filter(processes=processes, execute=execute))


def answers(calls: Iterable[tuple[str, Call]], *, confine: Callable[[], None] | None) -> list[int]:
    """The errno of each call, made in one child, confined or as the control."""

    def act() -> list[int]:
        os.setsid()
        if confine:
            confine()
        return [answer(NUMBERS[name], *arguments) for name, arguments in calls]

    return in_child(act)


@pytest.mark.p0
def test_every_dangerous_call_is_refused_by_the_filter_and_not_by_the_kernel() -> None:
    assert len(DANGEROUS) >= 70
    confined = dict(zip(DANGEROUS, answers(DANGEROUS.items(), confine=filtered), strict=True))
    control = dict(zip(DANGEROUS, answers(DANGEROUS.items(), confine=None), strict=True))

    assert {name: errno.errorcode.get(code, code) for name, code in confined.items() if code != errno.EPERM} == {}
    proven = [name for name, code in control.items() if code != errno.EPERM]
    # Without root the kernel refuses some of them by itself, so the filter cannot be told apart there.
    assert set(DANGEROUS) - set(proven) <= ({"io_uring_setup"} if ROOT else set(DANGEROUS))
    assert len(proven) >= 35


@pytest.mark.p0
@pytest.mark.parametrize("flag", NAMESPACES.values(), ids=NAMESPACES.keys())
def test_no_new_namespace_can_be_made_by_clone_or_unshare(flag: int) -> None:
    with_user = flag | syscalls.CLONE_NEWUSER
    calls = [("clone", (with_user | signal.SIGCHLD,)), ("clone", (with_user | signal.SIGCHLD | 1 << 40,)), ("unshare", (with_user,))]
    alone = [("clone", (flag | signal.SIGCHLD,)), ("clone", (flag | 1 << 40 | signal.SIGCHLD,)), ("unshare", (flag,))]

    assert answers(calls + alone, confine=filtered) == [errno.EPERM] * 6
    control = answers(calls, confine=None)
    if ROOT or errno.EPERM not in control:  # some hosts forbid user namespaces to ordinary users
        assert control == [0, 0, 0], "the control makes namespaces, upper bits or not"


@pytest.mark.p0
def test_clone3_is_absent_so_that_libc_falls_back_and_plain_fork_works() -> None:
    calls = [("clone3", (1, 88)), ("clone", (signal.SIGCHLD,)), ("setns", (BAD, 0))]
    assert answers(calls, confine=filtered) == [errno.ENOSYS, 0, errno.EPERM]
    assert answers(calls, confine=None) == [errno.EFAULT, 0, errno.EBADF]


@pytest.mark.p0
def test_a_call_through_the_i386_door_ends_the_process() -> None:
    if syscalls.MACHINE != "x86_64":
        pytest.skip("needs x86_64")
    getpid_of_i386 = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret

    def enter(confine: bool) -> bool:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(getpid_of_i386)
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if confine:
            filtered()
        return bool(function() == os.getpid())

    try:
        assert in_child(lambda: enter(confine=False))
    except ChildEnded:
        pytest.skip("this kernel has no i386 calls")
    with pytest.raises(ChildEnded) as ended:
        in_child(lambda: enter(confine=True))
    assert ended.value.signal == signal.SIGSYS


@pytest.mark.p0
def test_x32_and_unknown_numbers_are_absent() -> None:
    newest = max(NUMBERS.values())
    x32 = 0x40000000
    numbers = [x32 | NUMBERS["getpid"], x32 | NUMBERS["ptrace"], x32 | 521, newest + 1, 0x7FFFFFFF]

    def act() -> list[int]:
        filtered()
        return [answer(number) for number in [*numbers, NUMBERS["getpid"]]]

    assert in_child(act) == [errno.ENOSYS] * len(numbers) + [0]


def test_a_filter_made_for_another_machine_lets_nothing_through() -> None:
    other = next(machine for machine in syscall_rules.MACHINES if machine != syscalls.MACHINE)
    with pytest.raises(ChildEnded) as ended:
        in_child(lambda: seccomp.install(seccomp.compile_filter(processes=True, machine=other)))
    assert ended.value.signal == signal.SIGSYS


def test_a_machine_without_a_table_is_an_error_that_says_what_is_missing() -> None:
    with pytest.raises(RuntimeUnavailable, match="sparc64") as raised:
        seccomp.compile_filter(processes=True, machine="sparc64")
    assert raised.value.missing == ("system call filter",)


@pytest.mark.p0
def test_sockets_are_of_the_families_named_and_no_others() -> None:
    stream, datagram, raw, packet, sequenced = (int(kind) for kind in (1, 2, 3, 10, 5))
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    good = [
        (1, stream | flags, 0),
        (1, sequenced, 0),
        (2, stream, 6),
        (2, datagram | flags, 17),
        (16, raw | flags, 0),
        (2 | 1 << 32, stream, 0),
    ]
    alg, key, vsock, xdp, tipc = 38, 15, 40, 44, 30
    bad = [
        *[(family, kind, 0) for family in (alg, key, vsock, xdp, tipc, 17, 31, 0, 63) for kind in (stream, datagram, raw, sequenced)],
        *[(16, raw, protocol) for protocol in (4, 6, 9, 12, 15, 16)],  # sock_diag, xfrm, audit, netfilter, kobject_uevent, generic
        *[(2, raw, 1), (10, raw, 58), (2, packet, 0), (2, raw | flags, 255), (1, raw, 0), (2, stream, 132), (2, stream, 262)],
        *[(alg | 1 << 32, sequenced, 0), (16, raw, 12 | 1 << 32)],
    ]
    calls = [("socket", call) for call in good + bad] + [("socketpair", (1, stream, 0, 1)), ("socketpair", (tipc, stream, 0, 1))]

    confined, control = answers(calls, confine=filtered), answers(calls, confine=None)
    assert confined[: len(good)] == control[: len(good)]
    assert 0 in control[: len(good)]
    assert set(confined[len(good) : -2]) == {errno.EPERM}
    assert confined[-2:] == [errno.EFAULT, errno.EPERM]
    if ROOT:
        assert errno.EPERM not in control


@pytest.mark.p0
def test_nothing_is_typed_into_a_terminal_whatever_the_upper_bits() -> None:
    reader, writer = os.pipe()
    requests = [request | garbage for request in (0x5412, 0x541C, 0x5423) for garbage in (0, 1 << 32, 0xDEADBEEF << 32)]
    calls = [("ioctl", (reader, request, 1)) for request in requests] + [("ioctl", (reader, 0x5413, 1))]

    assert answers(calls, confine=filtered) == [errno.EPERM] * len(requests) + [errno.ENOTTY]
    assert answers(calls, confine=None) == [errno.ENOTTY] * (len(requests) + 1)
    os.close(reader)
    os.close(writer)


def test_devices_and_forged_deletions_cannot_be_made_but_pipes_can(tmp_path: Path) -> None:
    kinds = (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFCHR | 1 << 16, stat.S_IFIFO, stat.S_IFREG, stat.S_IFSOCK, 0)

    def act(confine: bool) -> list[int]:
        if confine:
            filtered()
        got = []
        for kind in kinds:
            path = tmp_path / f"{confine}-{kind}"
            name = ctypes.create_string_buffer(bytes(path))
            got.append(answer(NUMBERS["mknodat"], syscalls.AT_FDCWD, ctypes.addressof(name), kind | 0o600, 0))
        return [*got, answer(NUMBERS["renameat2"], BAD, 1, BAD, 1, 4), answer(NUMBERS["renameat2"], BAD, 1, BAD, 1, 1)]

    refused = [errno.EPERM] * 3
    assert in_child(lambda: act(confine=True)) == [*refused, 0, 0, 0, 0, errno.EPERM, errno.EFAULT]
    control = in_child(lambda: act(confine=False))
    assert control[0] == control[2] == 0, "0:0 is the mark of a deletion and needs no privilege"
    assert control[-2] == errno.EFAULT


def test_threads_that_already_run_come_under_the_filter_too() -> None:
    def act() -> list[int]:
        go, seen = threading.Event(), []

        def work() -> None:
            seen.append(answer(NUMBERS["ptrace"], BAD))
            go.wait()
            seen.append(answer(NUMBERS["ptrace"], BAD))

        thread = threading.Thread(target=work)
        thread.start()
        filtered()
        go.set()
        thread.join()
        return seen[1:]

    assert in_child(act) == [errno.EPERM]


def test_the_description_says_what_the_filter_does() -> None:
    program = seccomp.compile_filter(processes=False, execute=False)
    lines = dict(line.split(": ", 1) for line in program.describe().splitlines())
    said = {name: lines[f"{name} ({number})"] for name, number in NUMBERS.items()}
    harmless = dict.fromkeys(("read", "write", "close", "fstat", "fsync", "openat", "getcwd", "setuid", "statx", "tgkill"), (BAD, BAD, BAD))
    sample: dict[str, Call] = {**DANGEROUS, **harmless, "clone3": (1, 88), "execve": (1, 1, 1), "listmount": (1,), "getpid": ()}

    control = answers(sample.items(), confine=None)
    confined = answers(sample.items(), confine=lambda: seccomp.install(program))
    for name, without, got in zip(sample, control, confined, strict=True):
        expected = without if said[name] == "allow" else getattr(errno, said[name])
        assert (name, got) == (name, expected)
    assert said["clone"].startswith("allow if ")
    assert lines["any other number"] == "ENOSYS"


@pytest.mark.p0
def test_what_is_allowed_is_a_subset_of_what_containers_allow_by_default(evaluation_file: Callable[[str], Path]) -> None:
    profile = json.loads(evaluation_file("moby_seccomp_default.json").read_text())["syscalls"]
    plain = {name for entry in profile if set(entry) == {"names", "action"} for name in entry["names"]}
    assert len(plain) == 361
    assert plain >= syscall_rules.ALLOWED | syscall_rules.STARTS_PROCESSES | syscall_rules.EXECUTES

    # Conditional there too, and compared by hand: see the reasons beside each rule.
    assert set(syscall_rules.CONDITIONAL) - plain == {"arch_prctl", "clone", "personality", "socket"}
    theirs = {(name, argument["value"]) for entry in profile for name in entry["names"] for argument in entry.get("args", ())}
    ours = {name: group for name, rule in syscall_rules.CONDITIONAL.items() for group in rule[:1]}
    assert {("personality", value) for value in ours["personality"][0].values} <= theirs
    ((_, forbidden),) = {(name, value) for name, value in theirs if name == "clone"}
    assert ours["clone"][0].mask & forbidden == forbidden
    assert {family for group in syscall_rules.CONDITIONAL["socket"] for family in group[0].values} == {1, 2, 10, 16}


def test_a_guest_adds_no_filters_whose_machine_code_the_whole_machine_pays_for() -> None:
    """The kernel itself says EFAULT to the program that cannot be read, and EBADF to the socket that is none."""
    filters = [("seccomp", (1, 0, 1)), ("seccomp", (1 | 1 << 32, 0, 1)), ("prctl", (22, 2, 1)), ("prctl", (22 | 1 << 32, 2, 1))]
    sockets = [("setsockopt", (BAD, level, name, 1, 8)) for level, name in ((1, 26), (1, 50), (1, 51), (1, 52), (41, 32))]
    others = [("seccomp", (2, 0, 1)), *[("setsockopt", (BAD, level, name, 1, 8)) for level, name in ((1, 7), (6, 26), (41, 26), (6, 1))]]
    calls = filters + sockets + others

    def permitted() -> None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)

    confined, control = answers(calls, confine=filtered), answers(calls, confine=permitted)
    assert confined == [errno.EINVAL] * 2 + [errno.EPERM] * 7 + [errno.EFAULT] + [errno.EBADF] * 4
    assert control == [errno.EFAULT] * 4 + [errno.EBADF] * 5 + [errno.EFAULT] + [errno.EBADF] * 4


def test_what_is_counted_for_the_whole_machine_is_not_handed_out() -> None:
    """Asynchronous input and output of the old kind, and pages of the machine's pool of huge ones."""
    requests = [("io_setup", (1, 1)), ("io_submit", (0, 0, 0)), ("io_destroy", (0,))]
    huge = [("mmap", (0, 0, 0, 0x40022, BAD, 0)), ("memfd_create", (0, 0x4)), ("shmget", (0, 0, 0o4000))]
    small = [("mmap", (0, 0, 0, 0x22, BAD, 0)), ("memfd_create", (0, 0)), ("shmget", (0, 0, 0))]
    confined, control = answers(requests + huge + small, confine=filtered), answers(requests + huge + small, confine=None)
    assert confined == [errno.ENOSYS] * 3 + [errno.EPERM] * 3 + [errno.EINVAL, errno.EFAULT, errno.EINVAL]
    assert not {errno.ENOSYS, errno.EPERM} & set(control)


def test_a_thread_has_the_descriptors_of_its_process() -> None:
    """Those in a table of its own would not be in /proc/PID/fd, where init counts them."""
    thread, files, memory, handlers = 0x10000, 0x400, 0x100, 0x800
    # Invalid together, so that none is made: a thread must share the signal handlers, and whoever shares those the memory.
    calls: list[tuple[str, Call]] = [("clone", (thread | extra,)) for extra in (0, memory, handlers, 1 << 32 | handlers, files | handlers)]
    unshared: list[tuple[str, Call]] = [("close_range", (9, 8, flags)) for flags in (2, 2 | 1 << 32, 6, 0, 4)]
    confined, control = answers(calls + unshared, confine=filtered), answers(calls + unshared, confine=None)
    assert confined == [errno.EPERM] * 4 + [errno.EINVAL] + [errno.EPERM] * 3 + [errno.EINVAL] * 2
    assert control == [errno.EINVAL] * 10


def test_where_programs_are_named_there_are_no_files_in_memory() -> None:
    call = [("memfd_create", (0, 0))]  # a name that cannot be read: the kernel itself says EFAULT
    gated = answers(call, confine=lambda: seccomp.install(seccomp.compile_filter(processes=True, gated=True)))
    assert (gated, answers(call, confine=filtered)) == ([errno.ENOSYS], [errno.EFAULT])


def test_a_filter_is_compiled_once_however_its_arguments_are_spelt() -> None:
    """A zygote compiles it for its guests. Compiling it in each of them took more time than all else that they do."""
    plain = seccomp.compile_filter(processes=False, execute=False)
    assert seccomp.compile_filter(execute=False, processes=False, system=False, gated=False, machine=syscalls.MACHINE) is plain
    assert seccomp.compile_filter(processes=False, execute=False, gated=True) is not plain
