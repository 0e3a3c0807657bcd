"""Guest setup, from fork to the guest's program: two processes, each with fewer privileges than the one before.

    init     pid 1 of the guest's namespaces, a child of the keeper. Builds the view, drops all privileges, then watches and ends the run.
    guest    the program: own session, three descriptors, no capabilities, Landlock, seccomp. Only now does it receive the program to run.

The request names paths, ids and limits. Code, environment and input travel on the payload socket, which only the guest reads: init never
holds them. Everything here runs after fork in a process with one thread.

Init sends one byte, whose credentials tell the supervisor init's pid. The supervisor moves init into the run's cgroup while init builds the
view, because the kernel may wait for all CPUs before it moves a process. It writes init's id map when init asks for the map.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not `signal`: its enums cost each init 50 pages
import errno
import fcntl
import marshal
import os
import struct
import termios

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import (
    cgroups,
    doors,
    ids,
    landlock,
    loop,
    mount_plan,
    mount_steps,
    mountinfo,
    namespaces,
    notify,
    seccomp,
    usage,
    wire,
)
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.init import Family, Watch, watch_over
from agent_sandbox.kernel.mask_layers import MaskLayers
from agent_sandbox.kernel.mount_tools import MountedBelow, Scene, Site
from agent_sandbox.kernel.wire import HERE, LARGEST_ORDER, MAPPED, READY, REFUSAL_BYTES, STAGED

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Collection
    from typing import Any, NoReturn

    from agent_sandbox.kernel.setup_helper import Handover

    Program = Callable[[socket.socket, bool, Callable[[], None]], NoReturn]  # payload, whether it is Python code, callback that sends READY
else:
    import _signal as signal  # without the enumerations of `signal`

    from agent_sandbox._fast import sockets as socket

HOSTNAME = namespaces.HOSTNAME
RESERVED_SIGNALS = (32, 33)  # of the C library; posix_spawn leaves them ignored in its child and all descendants

_handled_signals: list[int] = []  # signals without the default action in the keeper, and so in a new init


@dataclass(frozen=True)
class Seat:
    """The sockets, pipes and other descriptors with which the init of one run starts."""

    control: socket.socket  # in: the request and orders; out: readiness and the exit
    payload: socket.socket  # to the guest alone
    supervisor: int  # pidfd: the run ends with the supervisor
    keeper: int  # a pipe that closes when the keeper ends
    stdio: tuple[int, ...]  # three, or none if init makes a terminal


@dataclass(frozen=True)
class Identity:
    """The user and group ids of a keeper's guests, and the cgroup hierarchies that this keeper found.

    For a keeper that is root, `userns` maps the machine's ids upwards by `shift`. Without root, guests have the uid and gid in `ids`.
    """

    root: bool
    hierarchies: tuple[cgroups.Hierarchy, ...] = ()
    shift: int = 0
    userns: int | None = None
    ids: tuple[int, int] = (0, 0)


def note_signals() -> None:
    """Record which signals have handlers, so that each new init can reset them. Called once, in the keeper.

    Signals that the C library reserves are reset here, and every init inherits that.
    """
    catchable = [int(number) for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    _handled_signals[:] = [number for number in catchable if signal.getsignal(number) is not signal.SIG_DFL]
    for reserved in RESERVED_SIGNALS:
        sc.rt_sigaction_default(reserved)


def handled_signals() -> int:
    """Return the recorded signals, a bit for each: the lowest for signal 1."""
    return sum(1 << number - 1 for number in _handled_signals)


def await_seat(link: socket.socket, supervisor: int, keeper: int, identity: Identity, program: Program) -> NoReturn:
    """Wait for the sockets and streams of a run that is not ordered yet, then act as its init. Never returns, never raises.

    An order to mount comes before: the image with the layers of the run, which takes as long as to plan the rest of the view.
    """
    try:
        _default_signals()
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        userns = () if identity.userns is None else (identity.userns,)
        wire.close_others({link.fileno(), supervisor, keeper, *userns})
        image, (message, descriptors) = None, wire.receive_descriptors(link, LARGEST_ORDER)
        while message and not descriptors:
            _, _, device, backing = marshal.loads(message)
            with suppress(OSError):  # the run tries it again, and reports the reason
                image = loop.mount_image(device, backing)
            message, descriptors = wire.receive_descriptors(link, LARGEST_ORDER)
        control, payload, *stdio = descriptors  # none, and so no init, once the keeper has gone
        seat = Seat(socket.socket(fileno=control), socket.socket(fileno=payload), supervisor, keeper, tuple(stdio))
    except BaseException:
        os._exit(1)
    become_init(seat, identity, program, image)


def become_init(seat: Seat, identity: Identity, program: Program, image: loop.MountedImage | None = None) -> NoReturn:
    """Act as the init of one run, in a new child of the keeper that is pid 1 of its namespaces. Never returns, never raises."""
    try:
        _default_signals()
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        userns = () if identity.userns is None else (identity.userns,)
        mounted = () if image is None else (image.mount,)
        ours = {seat.control.fileno(), seat.payload.fileno(), seat.supervisor, seat.keeper, *seat.stdio}
        wire.close_others({*ours, *userns, *mounted, *_kept_open(program)})
        seat.control.send(HERE)
        _make_guest(seat, identity, program, *wire.receive(seat.control), image)
    except EOFError:
        pass  # the supervisor has gone
    except BaseException as error:
        report_failure(seat.control, error)
    finally:
        os._exit(1)


def become_guest_of_helper(handover: Handover, program: Program) -> NoReturn:
    """Receive and run the program, in a guest that the setup helper has confined. Never returns, never raises."""
    try:
        _default_signals()
        payload = socket.socket(fileno=wire.PAYLOAD_FD)
        program(payload, bool(handover.python), lambda: payload.sendall(READY))
    except BaseException as error:
        _refuse(error)


def become_init_of_helper(handover: Handover, seat: Seat, identity: Identity, program: Program) -> NoReturn:
    """Go on as an init that the setup helper has started: with a request that is no script, or with a run that takes longer. Never returns,
    never raises."""
    try:
        _default_signals()
        if handover.in_run:
            request, private = marshal.loads(handover.notes)
            watch = Watch(request, handover.layers, private, None)
            since = (handover.began, handover.deadline)
            watch_over(watch, Family(handover.guest), seat.control, seat.keeper, seat.supervisor, since=since)
        request = marshal.loads(wire.exactly(seat.control, handover.length))
        _make_guest(seat, identity, program, request, handover.descriptors, None)
    except EOFError:
        pass  # the supervisor has gone
    except BaseException as error:
        report_failure(seat.control, error)
    finally:
        os._exit(1)


def _make_guest(
    seat: Seat, identity: Identity, program: Program, request: dict[str, Any], masks: list[int], image: loop.MountedImage | None
) -> NoReturn:
    """Build the view, give up all powers, fork the guest, and watch over it. `masks` are the descriptors that came with the request."""
    mounted = () if image is None else (image.mount,)
    request["open_files"] = usage.make_room_for_descriptors(request["open_files"])  # before root is given up: only root may raise it
    settings = os.open("/proc/sys/user", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # read-only in the view
    ourselves = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # read-only too, if /proc is shared
    family = _family_with_checkpoints() if request["checkpoints"] else Family
    plan = mount_plan.decode(request["plan"])
    stage = seat.control if request["checkpoints"] else None
    site, layers, shared = _build_view(identity, plan, MaskLayers.asked(request["masks"], masks), stage, image)
    wire.close_all(mounted)
    notes = site.notes
    outlets = _open_doors(request)
    answered = request["observe"] and not request["network"]  # with a network, the resolver of the egress answers
    nameservers = notify.open_nameservers(notes) if answered else notify.Nameservers()
    rules = _rules(request, plan, site)
    notes += rules.gaps()  # the second wall behind the view: always reported
    _give_up_identity(identity, seat.control, ourselves, as_root=bool(request["outer"]))
    namespaces.bound_kernel_objects(settings)
    _give_up_power(request)
    master, stdio = _open_terminal(request["terminal"]) if request["terminal"] else (None, seat.stdio)
    farewell_reader, farewell_writer = _open_farewell(signals=request["agent"]) if request["farewell"] else (None, None)
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if request["inward"] else (None, None)
    private = [step.target for step in plan.steps if isinstance(step, mount_plan.Tmpfs)]
    watch = Watch(request, layers, private, farewell_reader, asked)
    inward = [] if asking is None else [asking.detach()]
    opened = [*nameservers.sockets, *outlets.all, *inward, *([] if master is None else [master])]
    ready = wire.pack(
        {
            "kind": "ready",
            "notes": notes,
            "asked": len(nameservers.sockets),
            "search": nameservers.search,
            "doors": outlets.counts,
            "shares_proc": site.shares_proc,
            "masks": site.masks.report(),
        }
    )
    confinement = landlock.open_ruleset(rules)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    # A fork makes every page of init a shared one, which costs a fault and a copy to write to: so as little as possible follows it.
    guest = os.fork()
    if guest == 0:
        _become_guest(seat, program, request, stdio, farewell_writer, confinement, gated=plan.code is not None)
    left = (*stdio, seat.payload.detach(), *([] if farewell_writer is None else [farewell_writer]))
    wire.close_all([*left, *([] if confinement is None else [confinement])])
    wire.send_packed(seat.control, ready, [*shared, *([layers] if request["readable"] else []), *opened])
    wire.close_all([*shared, *opened])
    watch_over(watch, family(guest), seat.control, seat.keeper, seat.supervisor)


def _rules(request: dict[str, Any], plan: mount_plan.MountPlan, site: Site) -> landlock.Ruleset:
    """Return the Landlock rules for the view just entered. Raises OSError if the kernel cannot restrict execution to named programs.

    A rule binds a directory, not its name, and a checkpoint exchanges directories: with checkpoints no rule is about files. An outer
    program with capabilities gets no rules at all: the kernel refuses to mount anything under Landlock.
    """
    if request["checkpoints"] or request["outer"]:
        return landlock.plan(version=landlock.abi(), writable=None, executable=None)
    if plan.code is None:
        return landlock.plan(version=landlock.abi(), writable=request["scratch"], executable=request["executables"])
    executable = request["executables"]
    if executable is None and request["may_exec"]:
        executable = site.programs
    # Skip links: one that an earlier run left in its layers could lead to /proc.
    contents = [entry.path for entry in os.scandir("/") if entry.name != "proc" and not entry.is_symlink()]
    rules = landlock.plan(version=landlock.abi(), writable=request["scratch"], executable=executable, contents=contents)
    if missing := {"EXECUTE", "WRITE_FILE"}.intersection(rules.left_out):
        names = " and ".join(sorted(missing))
        raise OSError(errno.ENOSYS, f"only some programs are allowed, and this kernel cannot keep to that: its Landlock lacks {names}")
    return rules


def _build_view(
    identity: Identity, plan: mount_plan.MountPlan, masks: MaskLayers, stage: socket.socket | None, image: loop.MountedImage | None
) -> tuple[Site, int, list[int]]:
    """Build the guest's view of the file system and enter it.

    Return the `Site` it was built with, a descriptor of the upper layers, and one of the mask layers if they are to be shared. With
    `stage`, the run has checkpoints: wait at this socket for the stagehand, which needs the view before its root is entered. `image` was
    mounted before, for layers that are in it.
    """
    namespaces.enter_private_mounts()
    scenes: list[Scene] | None = None if stage is None else []
    site = Site(identity.userns, identity.shift, userxattr=not identity.root, masks=masks, scenes=scenes, image=image)
    mount_steps.perform(plan, site)
    if stage is not None:
        _let_stagehand_in(stage, site)
    shared = site.masks.hand_over()
    # Kept open across pivot_root: the supervisor reads the run's changes through it after the namespace has gone.
    layers = os.open("u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    namespaces.enter_root()
    namespaces.raise_loopback()
    try:
        socket.sethostname(HOSTNAME)
    except PermissionError:  # by the filter of a container engine; the name around us is shown then
        site.notes.append("the host name is that of the machine: this container refuses to set another")
    return site, layers, [] if shared is None else [shared]


def _family_with_checkpoints() -> type[Family]:
    from agent_sandbox.kernel.kept_processes import KeptProcesses  # few runs have checkpoints; later the view may not show our files

    return KeptProcesses


def _let_stagehand_in(control: socket.socket, site: Site) -> None:
    """Wait until the stagehand has entered this namespace. Raises OSError if the layers of this view cannot be exchanged."""
    if site.shares_proc:
        raise OSError(errno.ENOTSUP, "a timeline needs a /proc of the run's own, and this machine refuses one")
    scenes = site.scenes or []
    top = os.path.join(os.getcwd(), "r")
    shown = [mount.target.removeprefix(top) for mount in mountinfo.read() if mount.target.startswith(f"{top}/")]
    for scene in scenes:
        if inner := [path for path in shown if path.startswith(f"{scene.target.rstrip('/')}/")]:
            raise OSError(errno.ENOTSUP, f"a timeline cannot keep {inner[0]}, which lies in {scene.target}: use a path elsewhere")
    wire.send(control, {"kind": "staged", "scenes": [tuple(vars(scene).values()) for scene in scenes]})
    if control.recv(1) != STAGED:
        raise EOFError("the supervisor has gone")


def _open_doors(request: dict[str, Any]) -> doors.Doors:
    if not request["network"]:
        return doors.Doors()
    return doors.open_doors(request["network"], doors.make_trust_directory(request["inner_root"]))


def _give_up_identity(identity: Identity, control: socket.socket, ourselves: int, *, as_root: bool) -> None:
    """Enter the guest's own user namespace, which owns nothing: the mounts, network and processes belong to the namespace around it.

    `ourselves` is a descriptor of this process in /proc, and is closed here. With `as_root`, a rootless user is user 0 inside: a program
    that user 0 executes keeps its capabilities. Raises EOFError if the supervisor has gone.
    """
    uid, gid = identity.ids
    outside = identity.ids
    if as_root:
        uid = gid = 0
    sc.unshare(sc.CLONE_NEWUSER)
    control.send(HERE)
    if control.recv(1) != MAPPED:
        raise EOFError("the supervisor has gone")
    sc.unshare(sc.CLONE_NEWCGROUP)  # not earlier: only now are we in our cgroup, which becomes the root in /proc/self/cgroup
    if identity.root:
        os.setgroups([])
    else:
        ids.write_maps(f"self/fd/{ourselves}", uid_map=f"{uid} {outside[0]} 1", gid_map=f"{gid} {outside[1]} 1", deny_setgroups=True)
    os.close(ourselves)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _give_up_power(request: dict[str, Any]) -> None:
    # Changing ids cleared the parent-death signal. Not dumpable: a guest of the same uid must not reach us through /proc/1.
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    usage.apply_rlimits(
        processes=None if "processes" in request["enforced"] else request["processes"],
        # Keeps one file from outgrowing every limit between two checks. A memfd's memory is charged to no process; only its size bounds it.
        file_bytes=None if "memory" in request["enforced"] and request["sized"] else request["file_bytes"],
        cpu_seconds=request["cpu_seconds"],
    )
    if kept := _kept_capabilities(request):
        namespaces.keep_capabilities(kept)
    else:
        namespaces.drop_capabilities()


def _kept_capabilities(request: dict[str, Any]) -> Collection[str]:
    """Return the capabilities that the guest has in its own user namespace, which owns nothing that the guest starts with."""
    return request["outer"] or (namespaces.PACKAGE_MANAGER if request["system"] else ())


def _open_farewell(*, signals: bool) -> tuple[int, int]:
    """Return init's and the guest's end of what the guest reports its end on. With `signals`, init sends the numbers of signals there."""
    if not signals:
        return os.pipe2(os.O_CLOEXEC)
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def _open_terminal(size: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
    """Open a terminal on the guest's own devpts. Return the master, and three descriptors for the guest's standard streams."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    return master, (slave, os.dup(slave), os.dup(slave))


def _become_guest(
    seat: Seat,
    program: Program,
    request: dict[str, Any],
    stdio: tuple[int, ...],
    farewell: int | None,
    rules: int | None,
    *,
    gated: bool,
) -> NoReturn:
    try:
        os.setsid()
        ours = [seat.payload.fileno(), *([] if farewell is None else [farewell])]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (*stdio, *ours)]
        ruleset = None if rules is None else fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, 64)
        for number, fd in enumerate(high):
            os.dup2(fd, number, inheritable=number < 3)
        if not request["outer"]:
            landlock.enforce(ruleset)  # as soon as a refusal can be sent, and before its descriptor is closed
        wire.close_others({*range(3, len(high)), *_kept_open(program)})
        if request["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        payload = socket.socket(fileno=3)
        os.umask(0o022)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        namespaces.assert_capabilities(_kept_capabilities(request))
        if request["outer"]:
            namespaces.enter_owned_mounts()
        if request["observe"]:
            notify.begin(payload)
        elif request["checkpoints"]:
            notify.begin(payload, notify.REACHING)
        filtered = seccomp.compile_filter(
            processes=request["may_fork"] or request["checkpoints"],
            execute=request["may_exec"],
            system=request["system"],
            gated=gated,
            forks=request["checkpoints"],
            outer=bool(request["outer"]),
        )
        # Not earlier: reordering the descriptors needs high numbers; and init, the fork of a caller that may be large, needs memory.
        usage.apply_rlimits(
            open_files=request["open_files"], data_bytes=None if "memory" in request["enforced"] else request["memory_bytes"]
        )
        seccomp.install(filtered)
    except BaseException as error:
        _refuse(error)
    if request["inside"]:
        program.take(request)  # type: ignore[attr-defined]  # of a runtime that is built on this one
    program(payload, request["python"], lambda: payload.sendall(READY))


def _kept_open(program: Program) -> tuple[int, ...]:
    """Return the descriptors of the zygote that its guests keep: those of sealed memory."""
    kept: tuple[int, ...] = getattr(program, "descriptors", ())
    return kept


def _refuse(error: BaseException) -> NoReturn:
    try:
        os.write(3, f"125 {_explain(error)}".encode(errors="replace")[:REFUSAL_BYTES])
    finally:
        os._exit(125)


def _default_signals() -> None:
    # Processes of its namespace can send pid 1 only signals for which pid 1 has a handler. Python has one for SIGINT.
    for number in _handled_signals:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.set_wakeup_fd(-1)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def report_failure(control: socket.socket, error: BaseException) -> None:
    """Send the supervisor the reason why no guest could be made. Ignores OSError."""
    with suppress(OSError):  # the supervisor may have gone
        wire.send(control, {"kind": "failed", "why": _explain(error), "overtaken": isinstance(error, MountedBelow)})
