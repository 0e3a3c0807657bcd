"""The zygote: a small process that has imported what guests will need, and forks them.

It never sees code, environment or input, and does not even read the requests: it passes descriptors to a forked keeper, which reads for
itself. So nothing of one guest can be found in the memory of the next. One thread, no network, no
descriptors but its two and, at times, its own image.

What guests of one zygote do share: the address-space layout and the seed of string hashes. Neither is a wall here.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from agent_sandbox.errors import LaunchFailed, PolicyError
from agent_sandbox.kernel import cgroup_sweep, channel, seccomp, stage
from agent_sandbox.runtime import guest

# Numeric libraries start a thread per core on import; a fork has only one thread, and the next product of two matrices would wait for ever.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", **_ONE_THREAD}
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from agent_sandbox.runtime.zygote import main; main()"
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START_SECONDS = 60.0  # importing pandas from a cold disk takes a while


class Zygote:
    """The supervisor's side of one zygote process."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Start it and wait until it is ready. Raises PolicyError when a module to preload is not there, LaunchFailed on anything else."""
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me = os.pidfd_open(os.getpid())
        packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        image, surroundings = _sealed_image(os.path.realpath(sys.executable))
        try:
            with theirs:
                # Our own interpreter on our own module, with a complete environment; nothing of it comes from a guest.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, _PACKAGE_ROOT, str(theirs.fileno()), str(me), os.pathsep.join(packages), *preload],
                    executable=f"/proc/self/fd/{image}" if image is not None else None,
                    env=_ENVIRONMENT | surroundings,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), me, *([] if image is None else [image])),
                    cwd="/",
                    start_new_session=True,
                )
        finally:
            channel.close_all([me] if image is None else [me, image])
        self._link.settimeout(_START_SECONDS)
        try:
            answer = self._link.recv(4096).decode(errors="replace")
        except TimeoutError:
            answer = "it did not answer in time"
        self._link.settimeout(None)
        if answer != "ready":
            self.close()
            if answer.startswith("preload "):
                raise PolicyError(f"cannot {answer}", hint="install the module for this interpreter, or leave it out of preload")
            raise LaunchFailed(f"the zygote did not start: {answer or 'it ended at once'}", hint="run: agent-sandbox doctor")

    def spawn(self, descriptors: Sequence[int]) -> None:
        """Fork a keeper that owns these descriptors: control, payload, a pidfd of the supervisor, and three for stdio or none."""
        with self._lock:
            try:
                _send(self._link, descriptors)
            except OSError as error:
                raise LaunchFailed(f"the zygote has gone: {error.strerror}", hint="try again: the next run starts another") from error

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it. Its guests go on: each has its own keeper."""
        self._link.close()
        self._process.wait()


def _send(link: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors to the zygote, also while guests of ours have as many on the way as our own limit allows a user."""
    try:
        socket.send_fds(link, [b"fork"], list(descriptors))
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        # The kernel compares with the sender's limit (see `rlimits.make_room_for_descriptors`), so ours is wider for this one call.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            socket.send_fds(link, [b"fork"], list(descriptors))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _sealed_image(interpreter: str) -> tuple[int | None, dict[str, str]]:
    """What to execute instead of an interpreter that belongs to us, and the variables that this needs.

    A forked guest reaches the very file that the zygote was executed from, as /proc/self/exe and past its view. With our uid it could
    change the mode of that file, and on some kernels its content, if it were ours. Root's guests have other ids, and most files are root's.
    """
    if os.geteuid() == 0 or os.stat(interpreter).st_uid != os.geteuid():
        return None, {}
    image = os.memfd_create("python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(interpreter, "rb") as file:
        while os.sendfile(image, file.fileno(), None, 1 << 30):
            continue
    fcntl.fcntl(image, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    # Some interpreters find their shared library relative to where they are.
    return image, {"LD_LIBRARY_PATH": os.path.join(os.path.dirname(os.path.dirname(interpreter)), "lib")}


def main() -> None:
    """The zygote program. Ends when the supervisor closes the link or dies."""
    root, link_fd, supervisor_fd, packages, *preload = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    link, supervisor = socket.socket(fileno=int(link_fd)), int(supervisor_fd)
    with open("/proc/self/comm", "w") as comm:  # executed from a descriptor, we would be called by its number
        comm.write(os.path.basename(sys.executable))
    os.set_inheritable(supervisor, False)
    link.set_inheritable(False)
    try:
        identity = stage.identify()
        for processes in (True, False):
            seccomp.compile_filter(processes=processes, execute=processes)
    except OSError as error:
        link.send((error.strerror or str(error)).encode(errors="replace")[:4096])
        return
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:
            link.send(f"preload {name}: {error}".encode(errors="replace")[:4096])
            return
    gc.collect()
    gc.freeze()  # a collection in a guest would touch, and so copy, every object of the zygote
    link.send(b"ready")
    _serve(link, supervisor, identity)


def _serve(link: socket.socket, supervisor: int, identity: stage.Identity) -> None:
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poller = select.poll()
    for fd in (woken, link.fileno(), supervisor):
        poller.register(fd, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if woken in ready:
            os.read(woken, 4096)
        if _reap():
            cgroup_sweep.sweep(identity.hierarchies)
        if link.fileno() in ready:
            message, descriptors = channel.receive_descriptors(link, 16)
            if not message:
                return
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                channel.close_all((woken, waker, link.detach(), supervisor))
                keep_from_descriptors(descriptors, identity)
            channel.close_all(descriptors)
        elif supervisor in ready:
            return


def _reap() -> bool:
    """Collect keepers that have ended. Whether one was killed: it has not cleared away its cgroup."""
    killed = False
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return killed
            killed = killed or os.WIFSIGNALED(status)
    except ChildProcessError:
        return killed


def keep_from_descriptors(descriptors: Sequence[int], identity: stage.Identity) -> None:
    """In a freshly forked process: become the keeper of a run. Never returns."""
    control, payload, supervisor, *stdio = descriptors
    seat = stage.Seat(socket.socket(fileno=control), socket.socket(fileno=payload), supervisor, tuple(stdio))
    stage.keep(seat, identity, guest.run)
