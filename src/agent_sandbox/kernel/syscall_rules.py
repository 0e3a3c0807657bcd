"""The system calls that a guest may make, the permitted arguments, and the numbers of all known calls. `seccomp` compiles this data.

Default deny: a call not named here is refused. The plain list is a subset of the default of container engines, and every conditional entry
is at least as tight as theirs; a test compares both with their list. Refused on purpose, although containers allow them:

- ptrace, process_vm_readv, process_vm_writev: a guest has no business in another process's memory. Debuggers do not work here.
- name_to_handle_at: the first half of bypassing a view by file handle. fanotify_mark: useless without fanotify_init.
- statmount, listmount: the whole mount API is refused, queries included.
- vmsplice, remap_file_pages, memfd_secret, modify_ldt, process_mrelease, uretprobe: bugs in the past, and no ordinary program needs them.
- io_setup and its kin: one number bounds them for the whole machine (fs.aio-max-nr), and nothing bounds one user. Databases fall back.
- seccomp filters and socket filters of the guest's own: their machine code counts against one number for the whole machine
  (net.core.bpf_jit_limit), and no memory limit sees it. Once it is used up, no unprivileged process gets a filter any more.
- huge pages: the machine has a fixed pool of them, which the memory limit does not count. Programs fall back to ordinary pages.
- adjtimex, clock_adjtime: the clock belongs to the host. get_thread_area, set_thread_area, epoll_*_old: not implemented by the kernels of
  these machines.

Calls that change ids stay: without capabilities they grant nothing, and package managers, `su` and `sshd` make them routinely.

The number table is our own because neither Python nor the C library provides the numbers, and headers may not be installed. The kernel
never reuses a number, so the table only grows at its end. A call newer than the table is not in it; the filter answers as an older kernel
would.
"""

from __future__ import annotations

import errno

from agent_sandbox._fast.values import dataclass
from agent_sandbox.kernel.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    CLONE_PARENT,
)

WHOLE = 0xFFFFFFFF_FFFFFFFF  # the whole register, for arguments that the kernel declares as long
# For arguments declared as int. The kernel ignores the upper half, so a check must too: otherwise garbage there bypasses the check.
INT = 0xFFFFFFFF


@dataclass(frozen=True)
class Condition:
    """A test of one argument: `argument & mask` is in `values`, or with `holds=False` not in them. Values fit in 32 bits."""

    argument: int
    mask: int
    values: tuple[int, ...]
    holds: bool = True

    def describe(self) -> str:
        mask = "" if self.mask == WHOLE else f" & {self.mask:#x}"
        return f"argument {self.argument}{mask} {'in' if self.holds else 'not in'} {{{', '.join(hex(value) for value in self.values)}}}"


Rule = tuple[tuple[Condition, ...], ...]  # allowed if all conditions of at least one group hold


_PLAIN = {
    "files and directories": """
        access cachestat chdir chmod chown close copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
        fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs
        fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat lchown lgetxattr link linkat listxattr listxattrat
        llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev
        pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename renameat rmdir sendfile setxattr setxattrat
        splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes
        write writev
    """,
    "waiting and events": """
        epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 inotify_add_watch inotify_init
        inotify_init1 inotify_rm_watch pause poll ppoll pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime timerfd_settime
    """,
    "memory": """
        brk madvise map_shadow_stack membarrier mincore mlock mlock2 mlockall mprotect mremap mseal msync munlock
        munlockall munmap pkey_alloc pkey_free pkey_mprotect
    """,
    "pipes, sockets once made, and the messages and shared memory of the guest's own ipc namespace": """
        accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend
        mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 recvfrom recvmmsg recvmsg semctl semget semop semtimedop sendmmsg sendmsg sendto
        shmat shmctl shmdt shutdown
    """,
    "processes, threads and signals; starting them is conditional, below": """
        exit exit_group futex futex_requeue futex_wait futex_waitv futex_wake get_robust_list getpgid getpgrp getpid getppid getsid gettid
        kill pidfd_open pidfd_send_signal restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
        rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo set_robust_list set_tid_address setpgid setsid sigaltstack tgkill tkill wait4
        waitid
    """,
    "identity, limits and scheduling": """
        capget capset getcpu getegid geteuid getgid getgroups getpriority getresgid getresuid getrlimit getrusage getuid ioprio_get
        sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
        sched_getscheduler sched_rr_get_interval sched_yield setfsgid
        setfsuid setgid setgroups setregid setresgid setresuid setreuid setuid sysinfo times uname
    """,
    "time and randomness": """
        alarm clock_getres clock_gettime clock_nanosleep getitimer getrandom gettimeofday nanosleep setitimer time timer_create
        timer_delete timer_getoverrun timer_gettime timer_settime
    """,
    "a guest may confine itself further: Landlock can only take away": """
        landlock_add_rule landlock_create_ruleset landlock_restrict_self
    """,
}
ALLOWED = frozenset(" ".join(_PLAIN.values()).split())

# Answered with ENOSYS: their callers then fall back to another call. The filter cannot see clone3's flags, which are behind a pointer.
_ASYNCHRONOUS_IO = frozenset({"io_cancel", "io_destroy", "io_getevents", "io_pgetevents", "io_setup", "io_submit"})
ABSENT = frozenset({"clone3", "file_getattr", "file_setattr", "listmount", "statmount"}) | _ASYNCHRONOUS_IO

_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
# The kernel looks at the lower half of the register only. The upper half must be clear anyway, so that nothing depends on that.
_NEW_NAMESPACES = (
    WHOLE & ~INT | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)  # CLONE_NEWTIME is not a flag of clone: there its bit is part of the exit signal
_NO_NEW_NAMESPACE = Condition(0, _NEW_NAMESPACES, (0,))
# A thread shares the descriptors of its process. /proc/PID/fd then shows them all, and init counts them there.
_ONE_TABLE = Condition(0, _CLONE_FILES | _CLONE_THREAD, (_CLONE_THREAD,), holds=False)
_CLOSE_RANGE_UNSHARE = 2

_TIOCSETD, _TIOCSTI, _TIOCLINUX = 0x5423, 0x5412, 0x541C
_PR_SET_SECCOMP, _PR_SET_MM = 22, 35
_SECCOMP_SET_MODE_FILTER = 1
_RLIMIT_CORE = 4
_RENAME_WHITEOUT = 4

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_RAW, _SOCK_SEQPACKET = 1, 2, 3, 5
_SOCK_KIND = 0xF  # the bits above it in the same argument are SOCK_NONBLOCK and SOCK_CLOEXEC
_IPPROTO_IP, _IPPROTO_TCP, _IPPROTO_UDP, _IPPROTO_IPV6 = 0, 6, 17, 41
_SOL_SOCKET = 1
_SOCKET_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, SO_ATTACH_BPF, and the two for SO_REUSEPORT
_IPV6_FLOWLABEL_MGR = 32  # the machine has 4096 flow labels
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000

# Pid 1 is the guest's init and has the same user. Slowing it down or limiting its descriptors would blind the watch over the limits.
_NOT_INIT = Condition(0, INT, (1,), holds=False)
_NOT_WHOLE_USER = (Condition(0, INT, (0, 1)), Condition(1, INT, (1,), holds=False))  # setpriority: a process or a group, but not init
_NOT_WHOLE_USER_IO = (Condition(0, INT, (1, 2)), Condition(1, INT, (1,), holds=False))  # the same for ioprio_set, which counts from 1

_FILE_TYPE = 0o170000
_HARMLESS_TYPES = (0, 0o010000, 0o100000, 0o140000)  # unspecified (regular), fifo, regular, socket

# arch_prctl: the thread pointer, permission for wide registers (AMX), the shadow stack. Not ARCH_MAP_VDSO_*, not faulting cpuid.
_ARCH_CODES = (0x1001, 0x1002, 0x1003, 0x1004, *range(0x1021, 0x1026), *range(0x5001, 0x5006))

CONDITIONAL: dict[str, Rule] = {
    "arch_prctl": ((Condition(0, INT, _ARCH_CODES),),),
    "clone": ((_NO_NEW_NAMESPACE, _ONE_TABLE),),
    "close_range": ((Condition(2, _CLOSE_RANGE_UNSHARE, (0,)),),),
    "ioprio_set": (_NOT_WHOLE_USER_IO,),
    # TIOCSTI and TIOCLINUX inject input into the terminal of its other users. TIOCSETD loads line disciplines, which are often buggy.
    "ioctl": ((Condition(1, INT, (_TIOCSTI, _TIOCLINUX, _TIOCSETD), holds=False),),),
    "memfd_create": ((Condition(1, _MFD_HUGETLB, (0,)),),),
    "mmap": ((Condition(3, _MAP_HUGETLB, (0,)),),),
    # Devices are refused, also the 0:0 character device: it needs no privilege and is an overlay's whiteout.
    "mknod": ((Condition(1, _FILE_TYPE, _HARMLESS_TYPES),),),
    "mknodat": ((Condition(2, _FILE_TYPE, _HARMLESS_TYPES),),),
    # PER_LINUX, PER_LINUX32 (`linux32`), each also with UNAME26; and 0xFFFFFFFF, the query for the present one.
    "personality": ((Condition(0, WHOLE, (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)),),),
    # PR_SET_MM changes the command line, environment and executable that /proc shows for a program.
    "prctl": ((Condition(0, INT, (_PR_SET_MM, _PR_SET_SECCOMP), holds=False),),),
    # A guest may read its limit on core files, not set it: see `usage`.
    "prlimit64": ((_NOT_INIT, Condition(1, INT, (_RLIMIT_CORE,), holds=False)), (_NOT_INIT, Condition(2, WHOLE, (0,)))),
    "setrlimit": ((Condition(0, INT, (_RLIMIT_CORE,), holds=False),),),
    # RENAME_WHITEOUT creates the same 0:0 device as mknod.
    "renameat2": ((Condition(4, _RENAME_WHITEOUT, (0,)),),),
    "sched_setaffinity": ((_NOT_INIT,),),
    "sched_setattr": ((_NOT_INIT,),),
    "sched_setparam": ((_NOT_INIT,),),
    "sched_setscheduler": ((_NOT_INIT,),),
    "seccomp": ((Condition(0, INT, (_SECCOMP_SET_MODE_FILTER,), holds=False),),),
    "setpriority": (_NOT_WHOLE_USER,),
    "setsockopt": (
        (Condition(1, INT, (_SOL_SOCKET, _IPPROTO_IPV6), holds=False),),
        (Condition(1, INT, (_SOL_SOCKET,)), Condition(2, INT, _SOCKET_FILTERS, holds=False)),
        (Condition(1, INT, (_IPPROTO_IPV6,)), Condition(2, INT, (_IPV6_FLOWLABEL_MGR,), holds=False)),
    ),
    "shmget": ((Condition(2, _SHM_HUGETLB, (0,)),),),
    # Allow-list of families and, for the internet, protocols: any other is kernel code that a mere socket() loads and reaches.
    "socket": (
        (Condition(0, INT, (_AF_UNIX,)), Condition(1, _SOCK_KIND, (_SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET))),
        (
            Condition(0, INT, (_AF_INET, _AF_INET6)),
            Condition(1, _SOCK_KIND, (_SOCK_STREAM, _SOCK_DGRAM)),
            Condition(2, INT, (_IPPROTO_IP, _IPPROTO_TCP, _IPPROTO_UDP)),
        ),
        # getaddrinfo(3) reads the machine's addresses through netlink. SOCK_RAW is the usual type here and grants nothing more.
        (
            Condition(0, INT, (_AF_NETLINK,)),
            Condition(1, _SOCK_KIND, (_SOCK_RAW, _SOCK_DGRAM)),
            Condition(2, INT, (_NETLINK_ROUTE,)),
        ),
    ),
    "socketpair": ((Condition(0, INT, (_AF_UNIX,)), Condition(1, _SOCK_KIND, (_SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET))),),
}

# The one call with which a state of a session makes a fork: all namespaces in which forks could meet, and init as the parent. A filter that
# permits it is installed together with one that asks the supervisor each time: see `checkpoint_guard`.
_SIGCHLD = 17
FORK_FLAGS = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_PARENT
FORKS_A_STATE = Condition(0, WHOLE, (FORK_FLAGS | _SIGCHLD,))

# Without permission for processes, threads stay allowed: clone with CLONE_THREAD creates nothing else.
THREADS_ONLY: Rule = ((_NO_NEW_NAMESPACE, Condition(0, _CLONE_FILES | _CLONE_THREAD, (_CLONE_FILES | _CLONE_THREAD,))),)
# Callers that tell "this kernel cannot" from "you may not" go on without a filter of their own after EINVAL.
REFUSALS = {"seccomp": errno.EINVAL}
STARTS_PROCESSES = frozenset({"fork", "vfork"})
# What an outer program needs to make walls of its own for the guest (see `runtime.base.OuterProgram`): mounts, namespaces, filters, a look
# into its children's memory. Each works on namespaces that belong to the guest's user namespace. Some are conditional for other guests.
_WALLS = """
    chroot clone mount mount_setattr move_mount open_tree personality pivot_root prctl process_vm_readv process_vm_writev ptrace seccomp
    setdomainname sethostname setns umount2 unshare
"""
MAKES_WALLS = frozenset(_WALLS.split())
EXECUTES = frozenset({"execve", "execveat"})
# Answered with ENOSYS, as by an older kernel, if only named files may be executed. The sysctl vm.memfd_noexec stops execve of a memfd, but
# not a loader that maps it.
FILES_IN_MEMORY = frozenset({"memfd_create"})

_SINCE_5_1 = """
    pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount fspick pidfd_open
    clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset
    landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2
    map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
    setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr
"""  # since 5.1 a new call has the same number on every machine; the last one here came with 6.17

# For each machine: runs of consecutive calls in the order of their numbers, each after the number of its first call.
_RUNS: dict[str, tuple[tuple[int, str], ...]] = {
    "x86_64": (
        (
            0,
            """
    read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn ioctl pread64
    pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise shmget shmat shmctl dup dup2 pause nanosleep
    getitimer alarm setitimer getpid sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname
    getpeername socketpair setsockopt getsockopt clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd
    msgrcv msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
    symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid syslog getgid
    setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid
    getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack
    utime mknod uselib personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler
    sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
    modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2 swapon swapoff reboot
    sethostname setdomainname iopl ioperm create_module init_module delete_module get_kernel_syms query_module quotactl nfsservctl
    getpmsg putpmsg afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr
    llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area
    io_setup io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old
    remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime
    timer_getoverrun timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
    vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid
    add_key request_key keyctl ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat
    mknodat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare
    set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create eventfd
    fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
    rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime
    syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
    getrandom memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
    pkey_alloc pkey_free statx io_pgetevents rseq
            """,
        ),
        (335, "uretprobe uprobe"),
        (424, _SINCE_5_1),
    ),
    "aarch64": (
        (
            0,
            """
    io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr
    flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl
    inotify_init1 inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat
    renameat umount2 mount pivot_root nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod
    fchmodat fchownat fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
    pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync sync_file_range
    timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit exit_group waitid set_tid_address
    unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module timer_create
    timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace
    sched_setparam sched_setscheduler sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority reboot setregid
    setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups
    setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid
    getppid getuid geteuid getgid getegid gettid sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget
    msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect
    getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key
    request_key keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise
    remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4 recvmmsg
            """,
        ),
        (
            260,
            """
    wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns sendmmsg process_vm_readv
    process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd
    membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
            """,
        ),
        (424, _SINCE_5_1),
    ),
}

MACHINES = tuple(_RUNS)


def numbers(machine: str) -> dict[str, int]:
    """Return the number of every known system call of a machine, by name. Raises KeyError for a machine not in `MACHINES`."""
    return {name: first + place for first, run in _RUNS[machine] for place, name in enumerate(run.split())}
