"""Probes on the kernel: few system calls, no new namespaces, no kernel settings, no input pushed into a terminal."""

from __future__ import annotations

import os

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Attempt, Box, Found
from agent_sandbox.selftest.probe import RUN, Probes, system_calls

SUBJECT = Probes("user namespaces", "namespaces", "seccomp")

_OWN = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")
NEW = {
    "user": sc.CLONE_NEWUSER,
    "mount": sc.CLONE_NEWNS,
    "network": sc.CLONE_NEWNET,
    "processes": sc.CLONE_NEWPID,
    "ipc": sc.CLONE_NEWIPC,
    "host name": sc.CLONE_NEWUTS,
    "cgroup": sc.CLONE_NEWCGROUP,
}
_FORBIDDEN = (
    *("add_key", "keyctl", "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "ptrace", "process_vm_writev", "kcmp"),
    *("mount", "umount2", "pivot_root", "fsopen", "open_tree", "move_mount", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("fanotify_init", "vmsplice", "quotactl", "memfd_secret"),
)
_TYPING = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}
_SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper")


@SUBJECT.probe(
    "own-namespaces",
    "It lives in namespaces of its own.",
    "compares its mounts, processes, network, ipc, host name, users and cgroup with those of verify",
)
def own_namespaces(bench: DecoyBench, box: Box) -> Found:
    theirs = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _OWN if os.path.exists(f"/proc/self/ns/{kind}")}
    return box.run(Attempt("kernel", "own_namespaces", {"theirs": theirs}))


@SUBJECT.probe("new-namespaces", "It can make no new namespace.", "unshares each kind of namespace")
def new_namespaces(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("kernel", "unshare", {"number": system_calls("unshare")["unshare"], "kinds": NEW}))


@SUBJECT.probe(
    "system-calls",
    "Rare and dangerous system calls do not reach the kernel.",
    "makes each of them with arguments that no kernel accepts, to see who answers",
)
def calls(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("kernel", "call_badly", {"numbers": system_calls(*_FORBIDDEN)}))


@SUBJECT.probe(
    "type-into-terminal",
    "Nothing can be typed into a terminal.",
    "pushes a key into its terminal, as if somebody had pressed it",
    boxes=(RUN,),
)
def type_into_terminal(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("kernel", "type_into_terminal", {"requests": _TYPING}, terminal=True))


@SUBJECT.probe(
    "kernel-settings",
    "Nothing of the machine can be set through /proc and /sys.",
    "opens settings by which the kernel starts programs or restarts, for writing, and writes nothing",
    excuse="you may not write any of them yourself",
)
def kernel_settings(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("kernel", "open_settings", {"paths": _SETTINGS}))
