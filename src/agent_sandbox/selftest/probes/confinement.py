"""Probes on single walls of the kernel's confinement, in a sandbox and each alone.

In a sandbox one wall often answers before the next is reached: what the seccomp filter would refuse, a missing capability refuses as well.
So the rules of Landlock and of the filter are also attacked alone, on the machine itself, in a process that only they confine. That shows
each rule; the probes in the sandbox show that the wall is there.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent_sandbox.kernel import cgroups, landlock, seccomp, syscall_rules
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.elf import loader_of
from agent_sandbox.selftest.bench import DecoyBench, listening, named, session_of
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Box, Found, NoAnswer
from agent_sandbox.selftest.probe import PRODUCT, Probes, WallAbsent, system_calls
from agent_sandbox.selftest.probes.kernel import NEW

SUBJECT = Probes("user namespaces", "seccomp", "Landlock", "control groups")

_SCOPES_SINCE = 6  # the first Landlock that keeps signals within a run
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000  # without others that belong to them they are invalid, so the kernel makes nothing
_NO_KIND, _NO_FAMILY, _NO_PROTOCOL = 15, 63, 999  # of sockets
_HUGE_PAGES = 0x40022  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB
_SOL_SOCKET, _IPPROTO_IPV6 = 1, 41
_FAMILIES = {"unix": 1, "internet": 2, "netlink": 16}
_PACKET_FILTERS = {"attach": 26, "attach program": 50, "share port": 51, "share port by program": 52}
_BAD = -1  # a pointer or a descriptor that is none
_AT_FDCWD = -100
_CORE = ("Max core file size", "1")
# Calls beyond those of `system-calls`. With -1 for every argument, no kernel does anything.
_MORE_CALLS = (
    *("acct", "clock_adjtime", "clock_settime", "delete_module", "fanotify_mark", "finit_module", "fsconfig", "fsmount", "fspick"),
    *("get_mempolicy", "io_uring_enter", "io_uring_register", "kexec_load", "lsm_get_self_attr", "mbind", "migrate_pages", "mount_setattr"),
    *("move_pages", "pidfd_getfd", "process_madvise", "process_mrelease", "process_vm_readv", "quotactl_fd", "reboot", "remap_file_pages"),
    *("set_mempolicy", "setdomainname", "sethostname", "settimeofday", "swapoff", "swapon", "syslog", "chroot", "adjtimex", "unshare"),
)


def _argument_calls() -> dict[str, tuple[str, list[int]]]:
    """Return calls that are allowed with other arguments, each by the rule that it breaks."""
    clones = {f"clone: new {kind}": ("clone", [flag | _CLONE_THREAD | _CLONE_FILES, 0, 0, 0, 0]) for kind, flag in NEW.items()}
    return {
        **clones,
        "clone: descriptors apart": ("clone", [_CLONE_THREAD, 0, 0, 0, 0]),
        "close_range: descriptors apart": ("close_range", [2, 1, 2]),
        "ioctl: type a key": ("ioctl", [_BAD, 0x5412, 0]),
        "ioctl: line discipline": ("ioctl", [_BAD, 0x5423, 0]),
        "ioctl: console": ("ioctl", [_BAD, 0x541C, 0]),
        "memfd_create: huge pages": ("memfd_create", [_BAD, 4]),
        "mmap: huge pages": ("mmap", [0, 0, 0, _HUGE_PAGES, _BAD, 0]),
        "shmget: huge pages": ("shmget", [0, 0, 0o4000]),
        "seccomp: a filter of calls": ("seccomp", [1, 0, _BAD]),
        "prctl: a filter of calls": ("prctl", [22, 2, _BAD]),
        **{f"setsockopt: {way}": ("setsockopt", [_BAD, _SOL_SOCKET, option, 0, 0]) for way, option in _PACKET_FILTERS.items()},
        "setsockopt: flow labels": ("setsockopt", [_BAD, _IPPROTO_IPV6, 32, 0, 0]),
        "arch_prctl: processor features": ("arch_prctl", [0x1011, 0]),
        "mknod: device": ("mknod", [_BAD, stat.S_IFCHR | 0o600, 0]),
        "mknodat: device": ("mknodat", [_AT_FDCWD, _BAD, stat.S_IFCHR | 0o600, 0]),
        "renameat2: whiteout": ("renameat2", [_AT_FDCWD, _BAD, _AT_FDCWD, _BAD, 4]),
        "personality: no randomisation": ("personality", [0x0040000]),
        "prctl: memory map": ("prctl", [35, 99, 0, 1, 1]),
        "setpriority: whole user": ("setpriority", [2, _BAD, 19]),
        "setpriority: init": ("setpriority", [0, 1, os.getpriority(os.PRIO_PROCESS, 1)]),  # the one it has
        "ioprio_set: whole user": ("ioprio_set", [3, _BAD, _BAD]),
        "ioprio_set: init": ("ioprio_set", [1, 1, _BAD]),
        "setrlimit: core": ("setrlimit", [4, _BAD]),
        "prlimit64: core": ("prlimit64", [0, 4, _BAD, 0]),
        "prlimit64: init": ("prlimit64", [1, 7, _BAD, 0]),
        "prlimit64: init, to read": ("prlimit64", [1, 99, 0, 0]),
        "sched_setaffinity: init": ("sched_setaffinity", [1, 8, _BAD]),
        "sched_setscheduler: init": ("sched_setscheduler", [1, _BAD, 0]),
        "sched_setparam: init": ("sched_setparam", [1, 0]),
        "sched_setattr: init": ("sched_setattr", [1, 0, 0]),
        "socketpair: packets": ("socketpair", [17, 1, 0, _BAD]),
        "socketpair: kind": ("socketpair", [1, _NO_KIND, 0, _BAD]),
        **{f"socket: kind of {way}": ("socket", [family, _NO_KIND, 0]) for way, family in _FAMILIES.items()},
        "socket: family": ("socket", [_NO_FAMILY, 1, 0]),
        "socket: family, raw": ("socket", [_NO_FAMILY, 3, 0]),
        "socket: protocol": ("socket", [2, 1, _NO_PROTOCOL]),
        "socket: packets": ("socket", [17, 3, 0]),
        "socket: kernel cryptography": ("socket", [38, 5, 0]),
        "socket: raw": ("socket", [2, 3, 255]),
        "socket: netlink of the audit": ("socket", [16, 3, 9]),
    }


@SUBJECT.probe(
    "seccomp-rules",
    "Each rule of the system call filter holds alone.",
    f"puts a process of the machine behind the filter only, and makes {len(_MORE_CALLS)} refused calls and "
    f"{len(_argument_calls())} with refused arguments",
    boxes=(PRODUCT,),
    own_control=True,
)
def seccomp_rules(bench: DecoyBench, product: object) -> Found:
    program = seccomp.compile_filter(processes=True, execute=True)
    unknown = [errno.EPERM, errno.ENOSYS]
    calls = {name: (number, [_BAD] * 6, unknown) for name, number in system_calls(*_MORE_CALLS).items()}
    for way, (name, words) in _argument_calls().items():
        with suppress(KeyError):  # a call that this kind of machine does not have
            calls[way] = (system_calls(name)[name], words, [syscall_rules.REFUSALS.get(name, errno.EPERM)])
    return _alone(bench, lambda: seccomp.install(program), lambda: Attempt("confinement", "call", {"calls": calls}))


@SUBJECT.probe(
    "landlock-rules",
    "Each rule of Landlock holds alone.",
    "puts a process of the machine behind Landlock only; it writes, removes, makes and moves files, makes devices, starts a program, "
    "uses a device, signals a process and connects to a socket outside its rules",
    boxes=(PRODUCT,),
    own_control=True,
)
def landlock_rules(bench: DecoyBench, product: object) -> Found:
    version = _landlock()
    scratch = tempfile.mkdtemp(prefix="scratch-", dir=bench.path)
    python = os.path.realpath(sys.executable)
    rules = landlock.plan(version=version, writable=[scratch], executable=[python, *loader_of(python)])
    mark = bench.mark()
    with bench.bystander(mark) as process, listening(socket.SOCK_STREAM, abstract=(socket.AF_UNIX, f"\0{mark}")):

        def attempt() -> Attempt:
            tree = _tree(bench, scratch)
            arguments = {"tree": tree, "scratch": scratch, "pid": process.pid, "name": mark}
            return Attempt("confinement", "against_rules", arguments)

        found = _alone(bench, lambda: landlock.enforce(landlock.open_ruleset(rules)), attempt)
    left_out = {way: seen for way, seen in found.reached.items() if way in rules.left_out}
    # A rule that this kernel lacks is no broken promise: `landlock` and `doctor` say which.
    return Found({way: seen for way, seen in found.reached.items() if way not in left_out}, found.refused)


def _tree(bench: DecoyBench, scratch: str) -> str:
    """Make a new tree to be attacked, and remove what an earlier attack left in the scratch directory."""
    tree = bench.tree()
    for name in os.listdir(scratch):
        os.unlink(f"{scratch}/{name}")
    Path(scratch, "moved").write_text("moved\n")
    os.mkdir(f"{tree}/directory")
    shutil.copy(shutil.which("true") or "/bin/true", f"{tree}/program")
    with suppress(OSError):  # only root can make it; the others attack every rule but this one
        os.mknod(f"{tree}/null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    return tree


def _alone(bench: DecoyBench, wall: Callable[[], None], attempt: Callable[[], Attempt]) -> Found:
    """Make an attempt without the wall and behind it. Only ways that succeed without it count as refused by it."""
    without = bench.bare.run(attempt())
    behind = bench.behind(wall).run(attempt())
    if not without.reached:
        raise NoAnswer("none of it succeeds without the wall either")
    refused = {way: why for way, why in behind.refused.items() if way in without.reached}
    return Found({way: seen for way, seen in behind.reached.items() if way in without.reached}, refused)


@SUBJECT.probe(
    "landlock",
    "Landlock confines the guest.",
    "signals its init, which is outside the rules and of the same user: only Landlock refuses that. The signal has no effect",
)
def in_force(bench: DecoyBench, box: Box) -> Found:
    version = _landlock()
    if version < _SCOPES_SINCE:
        raise WallAbsent(
            f"the Landlock of this kernel is version {version}; from inside it can be told apart from other walls since {_SCOPES_SINCE}"
        )
    return box.run(Attempt("confinement", "signal_parent"))


def _landlock() -> int:
    version = landlock.abi()
    if version < landlock.FIRST_USABLE:
        raise WallAbsent("this kernel has no usable Landlock: the second wall behind the view is not there")
    return version


@SUBJECT.probe(
    "other-architecture",
    "System calls of another architecture do not get around the filter.",
    "asks for its process id as a 32-bit program does, by int 0x80",
    excuse="this machine runs no system calls of 32-bit programs",
)
def other_architecture(bench: DecoyBench, box: Box) -> Found:
    if sc.MACHINE != "x86_64":
        raise WallAbsent(f"on {sc.MACHINE} there is no such way")
    ran = box.run(Attempt("confinement", "call_of_another_architecture", may_end=True))
    return Found(ran.reached, ran.refused if ran.answered else {"int 0x80": f"it was ended: {ran.ended}"})


@SUBJECT.probe(
    "init",
    "The init of a sandbox keeps its memory, environment and descriptors to itself.",
    "opens them in /proc of its parent, which is of the same user",
)
def read_init(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("confinement", "read_parent"))


@SUBJECT.probe(
    "session",
    "A guest is in a session of its own, without the caller's terminal.",
    "compares its session with that of verify",
)
def session(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("confinement", "share_session", {"theirs": session_of(os.getpid())}, session=True))


@SUBJECT.probe(
    "control-group",
    "A guest is in a control group of its own, which bounds all its processes together.",
    "stays while verify reads from outside which control groups it is in",
)
def control_group(bench: DecoyBench, box: Box) -> Found:
    made = cgroups.create(memory_bytes=1 << 30, processes=64, unique=bench.mark())
    enforces = made.enforces
    made.remove()
    if not enforces:
        raise WallAbsent("no control group can be made here: limits hold for each process and by init's watch, not for all together")
    own = Path("/proc/self/cgroup").read_text().splitlines()
    (theirs,) = _watched(bench, box, lambda pid: Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return Found({"group": "that of verify"} if own == theirs else {}, {} if own == theirs else {"group": "its own"})


@SUBJECT.probe(
    "core-dumps",
    "A crash in a sandbox starts no program of the machine.",
    "stays while verify reads from outside how large its core files may be: the kernel starts a helper for all but 1 byte",
)
def core_dumps(bench: DecoyBench, box: Box) -> Found:
    (lines,) = _watched(bench, box, lambda pid: Path(f"/proc/{pid}/limits").read_text().splitlines())
    name, most = _CORE
    values = next(line for line in lines if line.startswith(name)).removeprefix(name).split()[:2]
    loose = values != [most, most]
    return Found({"core": f"soft and hard: {' '.join(values)}"} if loose else {}, {} if loose else {"core": "1 byte"})


@SUBJECT.probe(
    "private-mounts",
    "What a sandbox mounts does not appear on the machine.",
    "stays while verify reads from outside which of its mounts are shared with other places",
    excuse="no mount of this machine is shared, so there is nothing to be kept apart from",
)
def private_mounts(bench: DecoyBench, box: Box) -> Found:
    (lines,) = _watched(bench, box, lambda pid: Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    shared = [line.split()[4] for line in lines if " shared:" in line.partition(" - ")[0]]
    return Found({"shared": f"{len(shared)}, {shared[0]} among them"} if shared else {}, {} if shared else {"shared": "none"})


def _watched(bench: DecoyBench, box: Box, read: Callable[[int], list[str]]) -> list[list[str]]:
    """Let a process stay in the box, and return what can be read about it from outside. Raises `NoAnswer` if it is not found."""
    mark = bench.mark()
    seen: list[list[str]] = []
    ran: AttemptResult = box.run(
        Attempt("kernel", "take_name", {"name": mark}, watch=lambda: seen.extend(read(pid) for pid in named(mark)[:1]))
    )
    if not seen or not ran.reached:
        raise NoAnswer("it was not found among the processes of the machine")
    return seen
