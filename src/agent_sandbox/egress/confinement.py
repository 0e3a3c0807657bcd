"""The confinement of an egress process: no files, no programs, no privileges, bounded memory; stream sockets outward and no other.

It reads bytes of a guest, so it is confined as if it were one. It keeps the machine's network, because it dials; and it holds the secrets
that it brokers. Both are what it is for. Everything else is gone before it receives its orders.
"""

from __future__ import annotations

import os
import socket
from functools import cache

from agent_sandbox.kernel import landlock, namespaces, seccomp, usage
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.ids import EGRESS_ID
from agent_sandbox.kernel.syscall_rules import INT, Condition, Rule

MEMORY_BYTES = 768 << 20
OPEN_FILES = 2048  # two for each of 512 connections, and some
FILE_BYTES = 1 << 20  # of a file in memory: a certificate with its key
_KIND = 0xF  # of the type of a socket, without its flags

# All that an event loop with TLS calls. Not `open` alone: the one file to open is a certificate in memory, see `authority`.
_CALLS = """
    read write readv writev pread64 close fstat newfstatat lseek openat ioctl fcntl dup ftruncate memfd_create
    mmap munmap mprotect mremap madvise brk futex membarrier rseq set_robust_list
    accept4 connect bind getsockname getpeername getsockopt setsockopt sendto recvfrom sendmsg recvmsg shutdown
    epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select pselect6 eventfd2 pipe2
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom
    getpid gettid getppid getuid geteuid getgid getegid getrusage sched_yield sched_getaffinity sysinfo uname
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall tgkill exit exit_group
"""
_RULES: dict[str, Rule | None] = {
    **dict.fromkeys(_CALLS.split()),
    "socketpair": ((Condition(0, INT, (int(socket.AF_UNIX),)),),),  # with which an event loop wakes itself
    "socket": ((Condition(0, INT, (int(socket.AF_INET), int(socket.AF_INET6))), Condition(1, _KIND, (int(socket.SOCK_STREAM),))),),
}


@cache
def compiled() -> seccomp.Program:
    """Return the filter of system calls."""
    return seccomp.compile_only(_RULES)


def confine() -> None:
    """Give up everything that passing connections on does not need, for good. The process must have one thread. Raises OSError."""
    root = os.geteuid() == 0
    if not root:
        namespaces.enter_own_user_namespace()
    _enter_empty_root()
    sc.unshare(sc.CLONE_NEWIPC | sc.CLONE_NEWUTS)
    if root:
        os.setgroups([])
        os.setresgid(EGRESS_ID, EGRESS_ID, EGRESS_ID)
        namespaces.keep_capabilities(("SETUID",))
        os.setresuid(EGRESS_ID, EGRESS_ID, EGRESS_ID)  # and with it, the kernel drops the last capability
    else:
        namespaces.drop_capabilities()
    namespaces.assert_capabilities(())
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    usage.apply_rlimits(open_files=OPEN_FILES, file_bytes=FILE_BYTES, data_bytes=MEMORY_BYTES)
    landlock.enforce(landlock.open_ruleset(_nothing(landlock.abi())))
    seccomp.install(compiled())


def _enter_empty_root() -> None:
    """Make an empty, read-only directory the root. Only our own descriptors are there, because a certificate is loaded by a path."""
    namespaces.enter_private_mounts()
    os.mkdir("r")
    quiet = sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
    sc.mount("empty", "r", "tmpfs", quiet, "size=16k,nr_inodes=8,mode=755")
    os.makedirs("r/proc/self/fd")
    sc.mount("/proc/self/fd", "r/proc/self/fd", None, sc.MS_BIND)
    sc.mount("", "r", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | quiet)
    namespaces.enter_root()


def _nothing(version: int) -> landlock.Ruleset:
    """Return rules that grant no right on any file, and keep signals and abstract sockets within this process."""
    if version < landlock.FIRST_USABLE:
        return landlock.Ruleset((), (), (), ())
    handled = tuple(name for name, (_, floor) in landlock.RIGHTS.items() if floor <= version)
    return landlock.Ruleset(handled, (), tuple(name for name, (_, floor) in landlock.SCOPES.items() if floor <= version), ())
