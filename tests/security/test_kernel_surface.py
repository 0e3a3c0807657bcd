"""Attacks on the kernel's interface: namespaces, forbidden and foreign system calls, socket families."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.kernel import seccomp, syscall_rules
from tests.security.conftest import Tell
from tests.security.harness import Box, case, outside, snapshot

x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers in this probe are those of x86_64")

CALLS = """
import ctypes, errno, json
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""

ESCAPE = (
    CALLS
    + """
import os
config = os.open(".git/config", os.O_RDWR)
steps = [call(272, 0x10000000 | 0x00020000)]  # unshare(NEWUSER|NEWNS)
if steps[0] == "ok":
    uid = os.getuid()
    steps.append(call(165, b"none", b"/", None, 0x44000, None))  # all mounts private
    steps.append(call(165, b"x", b"/mnt", b"tmpfs", 0, None))
os.write(config, b"planted")
print(json.dumps(steps))
"""
)


@x86_64
@case(13)
def test_no_namespace_can_be_nested_to_undo_the_view(number: int, box: Box, tell: Tell) -> None:
    (box.project / ".git/config").write_text("real\n")
    before = snapshot(box.project)
    assert box.probe(ESCAPE) == ["EPERM"]
    assert snapshot(box.project) == before
    control = outside(ESCAPE, cwd=box.project)
    assert control == ["ok"] * 3 and (box.project / ".git/config").read_text() == "planted"
    tell("EPERM at unshare; the real file is unchanged", control="without the filter the chain works, and the file is rewritten")


NAMESPACES = {"NEWNS": 0x20000, "NEWCGROUP": 0x2000000, "NEWUTS": 0x4000000, "NEWIPC": 0x8000000, "NEWUSER": 0x10000000} | {
    "NEWPID": 0x20000000, "NEWNET": 0x40000000, "NEWTIME": 0x80, "NEWUSER with garbage above": 0x10000000 + (1 << 40)
}  # fmt: skip


@x86_64
@case(29)
def test_no_kind_of_namespace_can_be_made_or_entered(number: int, box: Box, tell: Tell) -> None:
    probe = (
        CALLS
        + f"""
import os
pid = os.fork()
if pid == 0: os._exit(0)
os.waitpid(pid, 0)
found = {{}}
for name, flags in {NAMESPACES!r}.items():
    found["unshare " + name] = call(272, flags)
    if name != "NEWTIME":  # no flag of clone: its bits are the signal at exit
        pid = libc.syscall(ctypes.c_long(56), ctypes.c_long(flags | 17), 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        found["clone " + name] = "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()]
    found["setns " + name] = call(308, 0, flags & 0xffffffff)
for name, flags in {NAMESPACES!r}.items():
    arguments = (ctypes.c_uint64 * 11)(flags, 0, 0, 0, 17)
    pid = libc.syscall(ctypes.c_long(435), ctypes.byref(arguments), ctypes.c_long(88))
    if pid == 0: os._exit(0)
    found["clone3 " + name] = "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()]
print(json.dumps(found), flush=True)
"""
    )
    inside = box.probe(probe)
    assert {inside.pop(f"clone3 {name}") for name in NAMESPACES} == {"ENOSYS"}, "so that libc takes the older way"
    assert set(inside.values()) == {"EPERM"}, inside
    control = outside(probe, namespace=("--user", "--map-root-user"))
    assert control["unshare NEWNS"] == control["clone NEWNS"] == control["unshare NEWUTS"] == control["unshare NEWUSER"] == "ok"
    assert "EPERM" not in {control[f"setns {name}"] for name in ("NEWNS", "NEWUSER")}, (
        "no namespace behind descriptor 0, says the kernel itself"
    )
    tell(f"{len(inside)} ways: EPERM; clone3: ENOSYS; fork works", control="they work in a bare namespace")


# All seven flags that unshare(2) and clone(2) share, in every combination, each also with bits that mean something else or nothing.
COMBINED = (
    CALLS
    + """
import itertools, os
KINDS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
found = {}
for size in range(1, len(KINDS) + 1):
    for flags in map(sum, itertools.combinations(KINDS, size)):
        for extra in (0, 0x200, 1 << 63):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if libc.syscall(ctypes.c_long(272), ctypes.c_ulong(flags | extra)) == 0 else ctypes.get_errno())
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            found[answer] = found.get(answer, 0) + 1
            made = libc.syscall(ctypes.c_long(56), ctypes.c_ulong(flags | extra | 17), 0, 0, 0, 0)
            if made == 0: os._exit(0)
            if made > 0: os.waitpid(made, 0)
            answer = 0 if made > 0 else ctypes.get_errno()
            found[answer] = found.get(answer, 0) + 1
print(json.dumps(found), flush=True)
"""
)


@x86_64
@pytest.mark.slow
@case(29)
def test_no_combination_of_flags_makes_a_namespace(number: int, box: Box, tell: Tell) -> None:
    inside = box.probe(COMBINED)
    assert set(inside) == {"1"}, f"EPERM, each time: {inside}"
    control = outside(COMBINED, namespace=("--user", "--map-root-user"))
    assert control["0"] > 100
    tell(f"{inside['1']} combinations: EPERM", control=f"{control['0']} of them work in a bare namespace")


# Called with arguments that no kernel accepts: EPERM then is the filter's answer.
_DANGEROUS = """
    ptrace syslog ustat uselib _sysctl modify_ldt swapon swapoff reboot sethostname setdomainname iopl ioperm create_module
    init_module delete_module get_kernel_syms query_module quotactl nfsservctl acct settimeofday mount umount2 pivot_root chroot
    adjtimex clock_settime lookup_dcookie kexec_load add_key request_key keyctl migrate_pages move_pages mbind set_mempolicy
    get_mempolicy vmsplice unshare perf_event_open fanotify_init name_to_handle_at open_by_handle_at clock_adjtime setns
    process_vm_readv process_vm_writev kcmp finit_module bpf userfaultfd kexec_file_load io_uring_setup io_uring_enter
    io_uring_register open_tree move_mount fsopen fsconfig fsmount fspick pidfd_getfd process_madvise mount_setattr quotactl_fd
    memfd_secret process_mrelease set_mempolicy_home_node vhangup remap_file_pages fanotify_mark open_tree_attr
"""
DANGEROUS = _DANGEROUS.split()


@x86_64
@case(31)
def test_dangerous_calls_are_refused_by_the_filter(number: int, box: Box, tell: Tell) -> None:
    numbers = {name: at for name, at, _ in seccomp.compile_filter(processes=True).answers}
    tried = {name: numbers[name] for name in DANGEROUS if name in numbers and name not in ("vhangup", "reboot")}
    probe = CALLS + f"print(json.dumps({{name: call(number, -1, -1, -1, -1, -1, -1) for name, number in {tried!r}.items()}}))"
    inside = box.probe(probe)
    assert set(inside.values()) == {"EPERM"}, {name: answer for name, answer in inside.items() if answer != "EPERM"}
    assert len(inside) > 60
    harmless = {
        name: at for name, at in tried.items() if name in ("bpf", "keyctl", "userfaultfd", "memfd_secret", "io_uring_setup", "mbind")
    }
    control = outside(CALLS + f"print(json.dumps({{name: call(number, -1, -1, -1, -1, -1, -1) for name, number in {harmless!r}.items()}}))")
    assert sum(answer != "EPERM" for answer in control.values()) >= 2, control
    tell(f"{len(inside)} calls: EPERM", control=f"outside the kernel answers {sorted(set(control.values()))}")


@case(31)
def test_nothing_is_allowed_that_containers_forbid(number: int, evaluation_file: Callable[[str], Path], tell: Tell) -> None:
    import json

    listed = json.loads(evaluation_file("moby_seccomp_default.json").read_text())["syscalls"]
    unconditional = {
        name
        for group in listed
        if group["action"] == "SCMP_ACT_ALLOW" and not group.get("args") and not group.get("includes", {}).get("caps")
        for name in group["names"]
    }
    assert syscall_rules.ALLOWED - unconditional == set()
    tell(
        f"{len(syscall_rules.ALLOWED)} of their {len(unconditional)}",
        control="what they allow and we do not: " + str(len(unconditional - syscall_rules.ALLOWED)),
    )


FOREIGN = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <errno.h>
int main(void) {
    int status;
    if (fork() == 0) { long answer; __asm__ volatile("int $0x80" : "=a"(answer) : "a"(20)); _exit(answer > 0 ? 42 : 43); }
    wait(&status);
    printf("int80 %s %d\n", WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    unsigned char *code = mmap((void *)0x10000000, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    unsigned char body[] = {0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80};  /* mov eax, 1; mov ebx, 42; int 0x80: exit of i386 */
    memcpy(code, body, sizeof body);
    if (fork() == 0) { __asm__ volatile("pushq $0x23; pushq $0x10000000; lretq"); _exit(43); }
    wait(&status);
    printf("far jump %s %d\n", WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    long answer = syscall(0x40000000 | 39);
    printf("x32 %ld %d\n", answer < 0 ? -1L : 0L, answer < 0 ? errno : 0);
    return 0;
}
"""


# How other kernels than the machine's end a process that makes such a call.
KILLED = {"gvisor": ("exit 1", "exit 1"), "microvm": ("signal 31", "signal 9")}


@x86_64
@case(32)
def test_system_calls_of_other_architectures_do_not_go_around_the_filter(number: int, box: Box, tell: Tell) -> None:
    source, program = box.project / "foreign.c", box.project / "foreign"
    source.write_text(FOREIGN)
    subprocess.run(["cc", "-o", program, source], check=True)
    inside = box.run("./foreign").stdout.decode().splitlines()
    int80, jump = KILLED.get(box.runtime.traits.name, ("signal 31", "signal 31"))
    assert inside == [f"int80 {int80}", f"far jump {jump}", "x32 -1 38"], "killed with SIGSYS; ENOSYS"
    control = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    # A kernel without these doors ends the process with another signal.
    assert control[0] != inside[0] and control[1] != inside[1]
    tell("int 0x80, also after a far jump: killed; x32: ENOSYS", control=f"outside: {', '.join(control)}")


FAMILIES = """
import errno, json, socket
found = {}
for name, family, kind, protocol in (
    ("ALG", 38, 5, 0), ("PACKET", 17, 3, 0x300), ("NETLINK audit", 16, 3, 9), ("NETLINK generic", 16, 3, 16), ("NETLINK uevent", 16, 3, 15),
    ("VSOCK", 40, 1, 0), ("XDP", 44, 3, 0), ("KEY", 15, 3, 2), ("raw IPv4", 2, 3, 1), ("raw IPv6", 10, 3, 58), ("SCTP", 2, 1, 132),
    ("MPTCP", 2, 1, 262), ("ICMP", 2, 2, 1), ("BLUETOOTH", 31, 3, 1), ("CAN", 29, 3, 1), ("TIPC", 30, 2, 0),
    ("RDS", 21, 5, 0), ("SMC", 43, 1, 0),
    ("INET stream", 2, 1, 0), ("UNIX stream", 1, 1, 0), ("NETLINK route", 16, 3, 0),
):
    try:
        socket.socket(family, kind, protocol).close()
        found[name] = "ok"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
print(json.dumps(found))
"""


@case(34)
def test_only_named_socket_families_exist(number: int, box: Box, tell: Tell) -> None:
    inside = box.probe(FAMILIES)
    useful = [inside.pop(name) for name in ("INET stream", "UNIX stream", "NETLINK route")]
    assert useful == ["ok"] * 3, "what programs need works"
    assert set(inside.values()) == {"EPERM"}, inside
    control = outside(FAMILIES, namespace=("--user", "--map-root-user", "--net"))
    reachable = [name for name in inside if control[name] != "EPERM"]
    assert {"PACKET", "raw IPv4", "NETLINK audit", "NETLINK generic"} <= {name for name in reachable if control[name] == "ok"}
    tell(f"{len(inside)} kinds: EPERM", control=f"outside {sum(control[name] == 'ok' for name in inside)} of them open")
