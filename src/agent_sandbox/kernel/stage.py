"""The stage between fork and guest: three processes, each with less power than the one before.

    keeper   on the host side. Makes the cgroup and the namespaces, maps the guest's ids, waits, clears away. Dies last.
    init     pid 1 of the guest's namespaces. Builds the view while it still may, gives up every power, then watches and ends the run.
    guest    the program: own session, three descriptors, no capabilities, Landlock, seccomp. Only now does it learn what to run.

The request names paths, ids and limits. Code, environment and input travel on the payload socket, which only the guest reads: neither the
zygote nor init ever holds them. Everything here runs after fork in a process with one thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from agent_sandbox.kernel import accounting, capabilities, cgroup_sweep, cgroups, channel, landlock, mounts, namespaces, rlimits, seccomp
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.init import watch_over
from agent_sandbox.kernel.placing import Site
from agent_sandbox.values import dataclass

HOSTNAME = "sandbox"
DISK_TICK = 0.1  # seconds between looks at layers that have no size of their own
RESERVED_SIGNALS = (32, 33)  # of the C library; posix_spawn leaves them ignored in what it starts, and so in what that starts
READY = b"R"  # the guest's one byte: everything is in force


@dataclass(frozen=True)
class Seat:
    """The descriptors of one run, as the supervisor sent them."""

    control: socket.socket  # requests and signals in; readiness and the exit out
    payload: socket.socket  # to the guest alone
    supervisor: int  # pidfd: when the supervisor dies, so does the run
    stdio: tuple[int, ...]  # three, or none when init makes a terminal


@dataclass(frozen=True)
class Identity:
    """Who guests of this process will be: `userns` maps the machine's ids upwards by `shift`; without root, nothing is mapped."""

    root: bool
    hierarchies: tuple[cgroups.Hierarchy, ...] = ()
    shift: int = 0
    userns: int | None = None


def identify() -> Identity:
    """Prepare once per zygote what all its guests share: the id mapping, and where cgroups can be made."""
    hierarchies = cgroups.here()
    cgroup_sweep.sweep(hierarchies)  # what was killed before it could clear away
    if os.geteuid() != 0:
        return Identity(False, hierarchies)
    return Identity(True, hierarchies, namespaces.FIRST_ID, namespaces.make_id_mapping())


def keep(seat: Seat, identity: Identity, program: Callable[[socket.socket], NoReturn]) -> NoReturn:
    """Be the keeper of one run, in a process forked for it. Never returns and never raises."""
    status = 1
    try:
        os.setsid()  # a terminal's Ctrl-C is the supervisor's to forward
        request, _ = channel.receive(seat.control)
        status = _keep(seat, identity, program, request)
    except EOFError:
        pass  # the supervisor has gone before asking for anything
    except BaseException as error:
        _report(seat.control, {"kind": "failed", "why": _explain(error)})
    finally:
        os._exit(status)


def _keep(seat: Seat, identity: Identity, program: Callable[[socket.socket], NoReturn], request: dict[str, Any]) -> int:
    cgroup = cgroups.create(hierarchies=identity.hierarchies, memory_bytes=request["memory_bytes"], processes=request["processes"])
    try:
        if request["memory_hard"] and "memory" not in cgroup.enforces:
            raise OSError(errno.ENOTSUP, f"a hard memory limit was asked for: {cgroup.missing.get('memory', 'no cgroup')}")
        request["enforced"] = cgroup.enforces
        if not identity.root:
            namespaces.enter_own_user_namespace()
        sc.unshare(sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS)
        ours, theirs = socket.socketpair()  # also the death pipe: when the keeper goes, init sees its end close
        child = os.fork()
        if child == 0:
            ours.close()
            _become_init(seat, identity, program, request, theirs, cgroup)
        theirs.close()
        channel.close_all((*seat.stdio, seat.payload.detach()))
        full = False
        try:
            _receive_in_cgroup(cgroup, child)
            _map_when_asked(ours, identity, child)
            full = _outgrows_its_disk(child, request["layers"], request["disk_bytes"])
        finally:
            if full or sys.exc_info()[0] is not None:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        used = cgroup.usage()
        hit = [*sorted(cgroup.hit()), *(["disk"] if full else [])]
        _report(
            seat.control,
            {"kind": "end", "cpu": used.cpu_seconds, "memory": used.peak_memory_bytes, "oom": used.oom_kills, "hit": hit, "full": full},
        )
        return 0
    finally:
        cgroup.remove()


def _receive_in_cgroup(cgroup: cgroups.Cgroup, child: int) -> None:
    """Move init into the cgroup while it builds the view: the kernel may wait for all CPUs before it moves a process."""
    try:
        cgroup.join(child)
    except ProcessLookupError:
        return  # init has failed already and said so itself


def _map_when_asked(ours: socket.socket, identity: Identity, child: int) -> None:
    """Init asks for its ids once the view is built. As root it is we who may write the map; rootless init writes its own."""
    if not ours.recv(1):
        return  # init has failed and said so itself
    if identity.root:
        whole = f"0 {identity.shift} {namespaces.IDS}"
        namespaces.write_maps(child, uid_map=whole, gid_map=whole, deny_setgroups=False)
    ours.sendall(b"m")


def _outgrows_its_disk(init: int, layers: str | None, limit: int | None) -> bool:
    """Wait until init ends, or until layers on disk have outgrown their limit. Here, because only the host side can read all of them."""
    handle = os.pidfd_open(init)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    pause = None if layers is None or limit is None else DISK_TICK
    while not poller.poll(pause and pause * 1000):
        began = time.monotonic()
        used = _disk_bytes(layers or "")
        if limit is not None and used > limit:
            return True
        # A large layer takes long to measure: never spend more than a tenth of the time on it.
        pause = max(DISK_TICK, 10 * (time.monotonic() - began))
    os.close(handle)
    return False


def _disk_bytes(path: str) -> int:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return accounting.disk_bytes(directory)
    finally:
        os.close(directory)


def _become_init(
    seat: Seat,
    identity: Identity,
    program: Callable[[socket.socket], NoReturn],
    request: dict[str, Any],
    keeper: socket.socket,
    cgroup: cgroups.Cgroup,
) -> NoReturn:
    try:
        cgroup = cgroup.opened()
        # Python catches SIGINT. A pid 1 that catches nothing is one that its own namespace cannot signal.
        _default_signals()
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        request["open_files"] = rlimits.make_room_for_descriptors(request["open_files"])  # while root still may
        settings = os.open("/proc/sys/user", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # the view's own will be read-only
        notes, layers = _build_view(identity, request)
        notes += _missing_from_landlock(request)
        _give_up_identity(identity, keeper)
        namespaces.bound_kernel_objects(settings)
        _give_up_power(request)
        master, stdio = _open_terminal(request["terminal"]) if request["terminal"] else (None, seat.stdio)
        program_filter = seccomp.compile_filter(processes=request["may_fork"], execute=request["may_exec"], system=request["system"])
        guest = os.fork()
        if guest == 0:
            _become_guest(seat, program, request, stdio, program_filter)
        channel.close_all((*stdio, seat.payload.detach()))
        handed = [layers] + ([master] if master is not None else [])
        channel.send(seat.control, {"kind": "ready", "notes": notes}, handed)
        if master is not None:
            os.close(master)
        sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        watch_over(guest, seat.control, keeper, seat.supervisor, layers, cgroup, request)
    except BaseException as error:
        _report(seat.control, {"kind": "failed", "why": _explain(error)})
    finally:
        os._exit(1)


def _build_view(identity: Identity, request: dict[str, Any]) -> tuple[list[str], int]:
    """Build what the guest will see, and enter it. Returns what could not be shown, and a descriptor of the layers."""
    namespaces.enter_private_mounts()
    site = Site(identity.userns, identity.shift, userxattr=not identity.root)
    mounts.decode(request["plan"]).perform(site)
    # Kept open across the pivot: the supervisor reads from here what the run has changed, after the namespace has gone.
    layers = os.open("u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    namespaces.enter_root()
    namespaces.raise_loopback()
    socket.sethostname(HOSTNAME)
    return site.notes, layers


def _missing_from_landlock(request: dict[str, Any]) -> list[str]:
    """Landlock is the second wall behind the view. What this kernel's lacks is said, never left out in silence."""
    rules = landlock.plan(version=landlock.abi(), writable=request["scratch"], executable=request["executables"])
    return [f"the Landlock of this kernel does not enforce: {', '.join(rules.left_out)}"] if rules.left_out else []


def _give_up_identity(identity: Identity, keeper: socket.socket) -> None:
    """Enter the guest's own user namespace, inside the one that owns its mounts, its network and its processes."""
    uid, gid = (0, 0) if identity.root else (os.getuid(), os.getgid())
    sc.unshare(sc.CLONE_NEWUSER)
    keeper.sendall(b"?")
    if not keeper.recv(1):
        raise OSError(errno.ESRCH, "the keeper has gone")
    sc.unshare(sc.CLONE_NEWCGROUP)  # only now are we in our cgroup, which becomes the root of what /proc/self/cgroup tells
    if identity.root:
        os.setgroups([])
    else:
        namespaces.write_maps("self", uid_map=f"{uid} {uid} 1", gid_map=f"{gid} {gid} 1", deny_setgroups=True)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _give_up_power(request: dict[str, Any]) -> None:
    # A change of ids clears the parent-death signal. Not dumpable: a guest of the same uid must not reach us through /proc/1.
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    rlimits.apply(
        processes=None if "processes" in request["enforced"] else request["processes"],
        data_bytes=None if "memory" in request["enforced"] else request["memory_bytes"],
        # One file cannot outgrow everything between two looks; and memory in a memfd is in nobody's account but its size.
        file_bytes=None if "memory" in request["enforced"] and request["layers"] is None else request["file_bytes"],
        cpu_seconds=request["cpu_seconds"],
    )
    if request["system"]:
        capabilities.keep_only(capabilities.PACKAGE_MANAGER)
    else:
        capabilities.drop_all()


def _open_terminal(size: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
    """A terminal of the guest's own devpts. The caller's terminal is never within its reach."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    return master, (slave, os.dup(slave), os.dup(slave))


def _become_guest(
    seat: Seat,
    program: Callable[[socket.socket], NoReturn],
    request: dict[str, Any],
    stdio: tuple[int, ...],
    program_filter: seccomp.Program,
) -> NoReturn:
    try:
        os.setsid()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (*stdio, seat.payload.fileno())]
        for number, fd in enumerate(high[:3]):
            os.dup2(fd, number)
        os.dup2(high[3], 3, inheritable=False)
        sc.close_range(4, 0xFFFFFFFF)
        if request["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        payload = socket.socket(fileno=3)
        _default_signals()
        os.umask(0o022)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(writable=request["scratch"], executable=request["executables"])
        rlimits.apply(open_files=request["open_files"])  # not earlier: putting the descriptors in order takes high numbers
        capabilities.assert_at_most(capabilities.PACKAGE_MANAGER if request["system"] else ())
        seccomp.install(program_filter)
        payload.sendall(READY)
    except BaseException as error:
        try:
            os.write(3, _explain(error).encode(errors="replace")[:4096])
        finally:
            os._exit(125)
    program(payload)


def _default_signals() -> None:
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    for reserved in RESERVED_SIGNALS:
        sc.rt_sigaction_default(reserved)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _report(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the supervisor may have gone: then there is nobody to tell
        channel.send(control, message)
