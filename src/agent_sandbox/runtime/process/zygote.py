"""The supervisor's side of a zygote: a warm interpreter from which every run is forked. It is also the keeper, which cleans up after a run.

Usually a zygote is a new process of our interpreter (see `zygote_program`). For native programs, a caller with one thread may fork itself
instead: that takes a twentieth of the time. If the caller forks early, before it has loaded much, the fork gets ready while the caller goes
on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not `signal`, which is slow to load
import _thread
import errno
import itertools
import marshal
import os
import select
import sys

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.functions import cached_property
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.kernel import forks, wire
from agent_sandbox.kernel.mount_plan import InImage
from agent_sandbox.kernel.wire import DONE, MOUNT, REST, STAGE, START, WATCH
from agent_sandbox.runtime.process.mask_shelf import MaskShelf

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any

    from agent_sandbox.kernel.cgroups import Hierarchy
    from agent_sandbox.kernel.mount_plan import Layers, MountPlan
    from agent_sandbox.runtime.process.script_shelf import ScriptShelf
else:
    from agent_sandbox._fast import sockets as socket

# Numeric libraries start a thread per core on import. A fork has only one thread, so a product of two matrices would wait there for ever.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", **ONE_THREAD}
STEPS_MODULE = "agent_sandbox.runtime.guest.steps"  # in the guest of a timeline; preloaded, because its view may not show our package
# A state of a timeline is a copy of the guest. The C library asks the kernel for huge pages for its large memory, of which the kernel then
# copies one entry instead of 512: a state of a program with a gigabyte costs a tenth. Only in such guests: a small one would get larger.
_OF_TIMELINES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_PROGRAM = "agent_sandbox.runtime.process.zygote_program"
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main()"
_PACKAGE_ROOT = os.path.abspath(__file__).removesuffix("/agent_sandbox/runtime/process/zygote.py")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of this namespace, the same on every machine (PROC_PID_INIT_INO)
RISEN = wire.RISEN.decode()
UNUSABLE = ("compiled-module",)  # missing, if a zygote finds the files of its runtime damaged
_START_SECONDS = 60.0  # importing pandas from a cold disk takes a while


@dataclass(frozen=True)
class GuestLine:
    """The sockets to one run: `control` to its init, `payload` to its guest. `number` is the run's number in the zygote."""

    number: int
    control: socket.socket
    payload: socket.socket

    def close(self) -> None:
        """Close both sockets. An init that waits for its request then ends itself."""
        self.control.close()
        self.payload.close()


class Zygote:
    """The link to one zygote. The first `start` waits until it is ready. Safe to use from many threads."""

    def __init__(self, words: Sequence[str] | None = (), *, program: str = _PROGRAM) -> None:
        """Start a zygote with these words, usually modules to preload. With None, fork the caller instead, which must have one thread."""
        self._link, theirs = wire.message_pair()
        me = wire.above_streams(os.pidfd_open(os.getpid()))
        try:
            self.pid = _fork(theirs, me) if words is None else _execute(theirs.fileno(), me, words, program)
            self._process = os.pidfd_open(self.pid)
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
            os.close(me)
        self._lock = _thread.allocate_lock()
        self._numbers = itertools.count(wire.FIRST_RUN)
        self._ahead = words is None
        self._open: set[int] = set()
        self._failure: SandboxError | None = None  # why the zygote never came up, for all threads that wait for it
        self.came_up = self._closing = False
        self.masks = MaskShelf(lasting=words is not None)
        self._scripts: ScriptShelf | None = None  # of a keeper with the setup helper

    @cached_property
    def hierarchies(self) -> tuple[Hierarchy, ...]:
        """The cgroup hierarchies in which this zygote's runs can be placed."""
        from agent_sandbox.kernel import cgroups  # not before the first run: a zygote is forked early

        return cgroups.here()

    def start(self, streams: Sequence[int]) -> GuestLine:
        """Fork an init that waits for its request. `streams` are the guest's three standard streams, or none if init makes a terminal.

        Raises PolicyError if a module to preload is missing, LaunchFailed if the zygote could not start, OSError if it has ended or there
        are no descriptors left.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self.came_up:
                self._await_readiness()
            return self._order(streams)

    def _order(self, streams: Sequence[int]) -> GuestLine:
        number = next(self._numbers)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            for _ in ("control", "payload"):
                pairs.append(socket.socketpair())
            line = GuestLine(number, pairs[0][0], pairs[1][0])
            line.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before init says its first byte
            _send(self._link, marshal.dumps((START, number)), [*(theirs.fileno() for _, theirs in pairs), *streams])
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._open.add(number)
        return line

    def send_request(self, control: socket.socket, request: dict[str, Any], plan: MountPlan, *, by_reference: bool) -> None:
        """Send init its request, with the mask layers of the plan. Raises OSError.

        It is a setup script if the helper can perform it, unless `by_reference`.
        """
        with self.masks.offer(plan) as (masks, given):
            script = None if by_reference or self._scripts is None else self._scripts.find(request, plan, masks)
            if script is None:
                wire.send(control, {**request, "masks": masks}, given)
            else:
                wire.send_script(control, script, given)

    def note_decline(self, plan: MountPlan) -> None:
        """Send no script for runs of this plan for a while: the setup helper has declined it."""
        if self._scripts is not None:
            self._scripts.decline(plan)

    def makes_ahead(self, number: int) -> bool:
        """Return whether the keeper makes the init and the cgroup of this run before it is ordered."""
        return self._ahead and number == wire.FIRST_RUN

    def expect(self, layers: Layers) -> None:
        """Tell the init that was made ahead which layers the first run will have. It mounts them while the rest of the view is planned."""
        if self._ahead and isinstance(layers, InImage):
            with suppress(OSError):  # the run mounts them then
                self._link.send(marshal.dumps((MOUNT, wire.FIRST_RUN, layers.device, layers.backing)))

    def watch(self, number: int, layers: str, limit: int) -> int:
        """Make the keeper measure the layers of a run, and end the run if they exceed `limit` bytes.

        Returns the reading end of a pipe, which gets a byte when that happens. Raises OSError.
        """
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _send(self._link, marshal.dumps((WATCH, number, layers, limit)), [tell])
        except OSError:
            os.close(told)
            raise
        finally:
            os.close(tell)
        return told

    def stage(self, number: int) -> socket.socket:
        """Make the keeper start the stagehand of a run with checkpoints. Returns the link to it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _send(self._link, marshal.dumps((STAGE, number)), [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def put_to_rest(self, number: int, image: str, backing: tuple[int, int]) -> None:
        """Make the keeper return the unused disk blocks of an image to the disk, after the run that uses it. Raises OSError."""
        self._link.send(marshal.dumps((REST, number, image, *backing)))

    def _await_readiness(self) -> None:
        self._link.settimeout(_START_SECONDS)
        try:
            answer = self._link.recv(4096).decode(errors="replace")
        except TimeoutError:
            answer = "it did not answer in time"
        except OSError as error:
            answer = error.strerror or ""
        if answer.startswith(f"{RISEN} "):
            from agent_sandbox.runtime.process.script_shelf import ScriptShelf  # a keeper of a command line has no helper

            self._scripts = ScriptShelf(int(answer.partition(" ")[2]))
        elif answer != RISEN:
            self._end()
            self._failure = LaunchFailed(f"the zygote did not start: {answer or 'it ended at once'}", hint="run: agent-sandbox doctor")
            if answer.startswith("preload "):
                hint = "install the module for this interpreter, or leave it out of preload"
                self._failure = PolicyError(f"cannot {answer}", hint=hint)
            if answer.startswith("unusable "):
                why = f"the runtime's own files cannot be used: {answer.partition(' ')[2]}"
                self._failure = RuntimeUnavailable(why, missing=UNUSABLE, hint="run: agent-sandbox setup")
            raise self._failure
        self._link.settimeout(None)
        self.came_up = True

    def done(self, number: int) -> bool:
        """Release a run and its cgroup: the keeper may reap its init and clean up.

        Return False if the zygote has ended. Then its runs have ended, too, and the caller must clean up.
        """
        with self._lock:
            self._open.discard(number)
            try:
                self._link.send(marshal.dumps((DONE, number)))
                told = True
            except OSError:
                told = False
            if self._closing and not self._open:
                self._end()
            return told

    @property
    def alive(self) -> bool:
        """Whether the zygote can still fork."""
        return self._process >= 0 and not self._ends_within(0)

    def close(self, *, leaving: bool = False) -> None:
        """Make the zygote end after the last of its runs. With `leaving`, this process is about to exit and does not wait for it."""
        with self._lock:
            self._closing = True
            if not self._open or not self.alive:
                self._end(wait=not (leaving and _orphans_are_reaped()))

    def _end(self, *, wait: bool = True) -> None:
        if self._process < 0:
            return
        self._link.close()
        self.masks.close()
        if wait:
            self._ends_within(None)
        os.close(self._process)
        self._process = -1
        if not wait:
            return
        with suppress(ChildProcessError):  # the application may have set SIGCHLD to be ignored, or wait for all its children
            os.waitpid(self.pid, 0)

    def _ends_within(self, milliseconds: int | None) -> bool:
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        return bool(poller.poll(milliseconds))


def _send(link: socket.socket, order: bytes, descriptors: Sequence[int]) -> None:
    """Send descriptors to the zygote. If this user has too many descriptors in flight, try once more with a higher limit."""
    try:
        socket.send_fds(link, [order], list(descriptors))
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        import resource  # hardly ever needed

        # The kernel compares the number with the sender's limit (see `rlimits.make_room_for_descriptors`), so we raise ours for this call.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            socket.send_fds(link, [order], list(descriptors))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_ready: list[Zygote] = []  # forked ahead, by a process that knows that it will need one


def keep_ready() -> None:
    """Fork a zygote ahead of its use. The caller must have one thread."""
    _ready.append(Zygote(None))


def forked() -> Zygote:
    """Return a zygote that is a fork of the caller, which must have one thread: the one that is ready, or a new one."""
    return _ready.pop() if _ready else Zygote(None)


def end_ready() -> None:
    """End what was forked ahead, for a process that will not need it."""
    while _ready:
        _ready.pop().close()


def argv_for(program: str, *words: str) -> list[str]:
    """Return a command that runs `main` of one of our modules. Its arguments are the directory of our package, then `words`.

    It does not use `-m`: the application may have imported us, or packages, through its own `sys.path`.
    """
    return [sys.executable, "-P", "-c", _BOOT.format(program), _PACKAGE_ROOT, *words]


def packages() -> str:
    """Return the directories of installed packages in `sys.path`, as one string, for a process that does not have them."""
    return os.pathsep.join(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))


def _execute(link: int, supervisor: int, words: Sequence[str], program: str) -> int:
    """Start our interpreter with one of our modules, and a fixed environment. Return its pid."""
    image, surroundings = _sealed_image(os.path.realpath(sys.executable))
    argv = argv_for(program, str(link), str(supervisor), packages(), *words)
    environment = _ENVIRONMENT | surroundings | (_OF_TIMELINES if STEPS_MODULE in words else {})
    kept = [
        (os.POSIX_SPAWN_DUP2, fd, fd) for fd in (link, supervisor, *([] if image is None else [image]))
    ]  # each onto itself, so that exec does not close it
    nothing = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
    executed = sys.executable if image is None else f"/proc/self/fd/{image}"
    try:
        # If the application ignores SIGCHLD, so would the zygote, and the kernel would collect its children before it could.
        defaults = (_signal.SIGCHLD,)
        return os.posix_spawn(executed, argv, environment, file_actions=[*kept, *nothing], setsid=True, setsigdef=defaults)
    except OSError as error:
        raise LaunchFailed(f"the zygote cannot be started: {error.strerror}", hint="run: agent-sandbox doctor") from error
    finally:
        wire.close_all([] if image is None else [image])


def _fork(link: socket.socket, supervisor: int) -> int:
    """Fork the caller, as the keeper. Return its pid. The fork inherits only the caller's memory.

    The fork closes all descriptors of the caller. With a copy of the writing end of a guest's input, that input would not end; with a copy
    of a lock file, the lock would stay held; with a copy of the caller's output, its reader would wait for the fork.
    """
    child = forks.fork()
    if child:
        return child
    try:
        os.setsid()  # the supervisor forwards the terminal's Ctrl-C
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        wire.close_others((link.fileno(), supervisor))
        from agent_sandbox.kernel import keeper, seccomp  # here, because the supervisor does not wait for the fork
        from agent_sandbox.runtime.guest import native

        seccomp.compile_filter(processes=True, execute=True, system=False)
        keeper.serve(link, supervisor, native.run, ahead=True)
    finally:
        os._exit(0)


def _orphans_are_reaped() -> bool:
    """Return whether process 1 is the machine's init, which reaps orphans. In a container it may be any program."""
    return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE


def _sealed_image(interpreter: str) -> tuple[int | None, dict[str, str]]:
    """Return a sealed copy of an interpreter that this user owns, and environment variables for it; None and {} if no copy is needed.

    A forked guest reaches the file that the zygote was executed from, as /proc/self/exe, although its view does not show the file. If our
    uid owns the file, the guest can change its mode and, on some kernels, its content. Guests of root have other ids than root.
    """
    if os.geteuid() == 0 or os.stat(interpreter).st_uid != os.geteuid():
        return None, {}
    image = wire.above_streams(os.memfd_create("python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    with open(interpreter, "rb") as file:
        while os.sendfile(image, file.fileno(), None, 1 << 30):
            continue
    wire.seal(image)
    # Some interpreters find their shared library relative to where they are.
    return image, {"LD_LIBRARY_PATH": os.path.join(os.path.dirname(os.path.dirname(interpreter)), "lib")}
