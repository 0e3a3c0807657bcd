"""Probes: try kernel features as this user, each in a short-lived child, so that this process does not change and nothing remains.

A version number or a file in /proc says what should work. Only a try shows what does work: a distribution, a container engine or a security
module may have switched a feature off. Probes never raise. They fork, so call them from a process with one thread.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from agent_sandbox._fast.values import dataclass
from agent_sandbox.kernel import cgroups, forks, landlock, namespaces, seccomp
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.socket_memory import ALL, SocketMeter

_PATIENCE_MS = 10_000
MEMORY_BYTES, PROCESSES = 64 << 20, 16  # arbitrary: nothing runs under these limits


@dataclass(frozen=True)
class Trial:
    """The result of a probe: whether the feature worked, and either a finding or the kernel's error as text."""

    worked: bool
    said: str


def attempt(deed: Callable[[], str]) -> Trial:
    """Run `deed` in a child and return its result or error as a `Trial`. The child is gone when this returns."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = forks.fork()
    if child == 0:
        status = 1
        try:
            said = deed()
            status = 0
        except BaseException as error:
            said = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        try:
            os.write(writing, said.encode(errors="replace")[:4096])
        finally:
            os._exit(status)
    os.close(writing)
    try:
        poller = select.poll()
        poller.register(reading, select.POLLIN)
        if not poller.poll(_PATIENCE_MS):
            os.kill(child, signal.SIGKILL)
            said = "it did not end in time"
        else:
            said = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    return Trial(status == 0, said)


def user_namespace() -> Trial:
    """Try a user namespace with mapped ids and working capabilities. On Ubuntu the namespace may be made and yet not work."""

    def deed() -> str:
        namespaces.enter_own_user_namespace()
        sc.unshare(sc.CLONE_NEWNS)
        return "ids mapped, capabilities inside it"

    return attempt(deed)


def own_namespaces() -> Trial:
    """Try new pid, network, ipc, uts and cgroup namespaces."""

    def deed() -> str:
        _become_able()
        sc.unshare(sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWCGROUP)
        namespaces.raise_loopback()
        return "pid, net, ipc, uts, cgroup"

    return attempt(deed)


def mount_api() -> Trial:
    """Try to attach a copy of a mount elsewhere with other attributes: open_tree, mount_setattr, move_mount."""

    def deed() -> str:
        _become_able()
        namespaces.enter_private_mounts()
        os.mkdir("copy")
        tree = sc.open_tree("/usr", sc.OPEN_TREE_CLONE)
        sc.mount_setattr(tree, set_flags=sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID)
        sc.move_mount(tree, "copy")
        return "open_tree, mount_setattr, move_mount"

    return attempt(deed)


def overlay() -> Trial:
    """Try to mount an overlay of /usr in the way a run mounts overlays, and write a file to it."""

    def deed() -> str:
        root = os.geteuid() == 0
        _become_able()
        namespaces.enter_private_mounts()
        for name in ("upper", "work", "merged"):
            os.mkdir(name)
        sc.mount("overlay", "merged", "overlay", 0, f"lowerdir=/usr,upperdir=upper,workdir=work{'' if root else ',userxattr'}")
        with open("merged/agent-sandbox-probe", "w"):
            pass
        return "as root" if root else "in a user namespace, without root"

    return attempt(deed)


def idmapped_root() -> Trial:
    """As root, try an idmapped copy of the root filesystem: every file has another owner, so a guest is never the machine's root."""

    def deed() -> str:
        userns = namespaces.make_id_mapping()
        sc.unshare(sc.CLONE_NEWNS)
        tree = sc.open_tree("/", sc.OPEN_TREE_CLONE)
        sc.mount_setattr(tree, set_flags=sc.MOUNT_ATTR_IDMAP | sc.MOUNT_ATTR_RDONLY, userns=userns)
        return f"root's files appear as user {os.fstat(tree).st_uid}"

    return attempt(deed)


def own_proc() -> Trial:
    """Try to mount a /proc that shows only the processes of its own pid namespace."""

    def deed() -> str:
        _become_able()
        sc.unshare(sc.CLONE_NEWPID)
        child = os.fork()  # the first child is the first process of the new namespace
        if child == 0:
            try:
                namespaces.enter_private_mounts()
                os.mkdir("proc")
                sc.mount("proc", "proc", "proc")
                os._exit(0 if sum(name.isdigit() for name in os.listdir("proc")) == 1 else 3)
            except OSError as error:
                os._exit(100 + (error.errno or 0) if (error.errno or 0) < 100 else 2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OSError(code - 100, os.strerror(code - 100)) if code > 100 else OSError(code, "it does not show what it should")
        return "only its own processes are in it"

    return attempt(deed)


def system_call_filter() -> Trial:
    """Try to install the guest's seccomp filter, then make a call that the filter must refuse."""

    def deed() -> str:
        program = seccomp.compile_filter(processes=False, execute=False)
        seccomp.install(program)
        try:
            sc.unshare(sc.CLONE_NEWUSER)
        except OSError:
            return f"default deny, {sum(answer.rule is None for _, _, answer in program.answers)} calls allowed without condition"
        raise OSError(1, "the filter was accepted and does not filter")

    return attempt(deed)


def landlock_rules() -> Trial:
    """Try to enforce Landlock rules, then try a write that the rules must refuse."""

    def deed() -> str:
        version = landlock.abi()
        if version == 0:
            raise OSError(95, "this kernel has no Landlock, or it is switched off")
        landlock.restrict(writable=["/dev"], executable=None)
        try:
            os.close(os.open("/tmp", os.O_TMPFILE | os.O_WRONLY))
        except PermissionError:
            return f"ABI {version}"
        except OSError:
            return f"ABI {version}, and /tmp cannot be written anyway"
        raise OSError(95, f"ABI {version} is too old to be used")

    return attempt(deed)


def process_handles() -> Trial:
    """Try pidfd_open: a handle that can never refer to another process."""

    def deed() -> str:
        os.close(os.pidfd_open(os.getpid()))
        return "pidfd_open"

    return attempt(deed)


def safe_opening() -> Trial:
    """Try openat2: it opens below a directory without following links that a guest may have planted."""

    def deed() -> str:
        directory = os.open("/", os.O_PATH | os.O_DIRECTORY)
        os.close(sc.openat2(directory, "proc", os.O_PATH, resolve=sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS))
        return "openat2"

    return attempt(deed)


def socket_buffers() -> Trial:
    """Try to have the kernel tell what the sockets of a new network namespace hold, as init does where no cgroup counts it."""

    def deed() -> str:
        _become_able()
        sc.unshare(sc.CLONE_NEWNET)
        if unseen := SocketMeter(ALL).unseen():
            raise OSError(95, f"this kernel does not tell what sockets hold: {', '.join(unseen)}")
        return "sock_diag tells what TCP, UDP and unix sockets hold"

    return attempt(deed)


def control_group() -> tuple[frozenset[str], dict[str, str]]:
    """Return which of "memory" and "processes" a cgroup made here enforces, and the reason for each that it does not. Does not fork."""
    group = cgroups.create(memory_bytes=MEMORY_BYTES, processes=PROCESSES, unique="probe")
    try:
        return group.enforces, dict(group.missing)
    finally:
        group.remove()


def _become_able() -> None:
    """Gain the right to make namespaces: without root, by entering a user namespace, as a run does."""
    if os.geteuid() != 0:
        namespaces.enter_own_user_namespace()
