"""The first process inside a machine. It prepares the machine for one run, passes the program's streams, and reports its end.

It starts while the template is made, and forks the *seat*: the process that becomes the program. Then the machine is saved. A restored
machine goes on from there: the agent sets the clock, reseeds the kernel's random numbers, mounts the view and private directories, and
lets the seat confine itself as any other guest does.

The program cannot leave the machine through us: the agent holds no secret, and the driver outside believes nothing that it says.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from agent_sandbox.kernel import landlock, mount_plan, namespaces, seccomp, usage, wire
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mount_steps import seal_proc, sized
from agent_sandbox.kernel.wire import READY, REFUSAL_BYTES
from agent_sandbox.runtime.guest import entry
from agent_sandbox.runtime.microvm import frames
from agent_sandbox.runtime.microvm.frames import PortReader
from agent_sandbox.runtime.microvm.inner_doors import InnerDoors

MODULES = "/modules"  # names of the files of kernel modules, one per line, in order
VIEW, SHOWN, EXACT, GROUPS = "/view", "/shown", "/exact", "/groups"
TAG, EXACT_TAG = "view", "exact"  # of the 9p devices: both show the view
# Files are cached inside the machine, which has the view for itself. 64 KiB a message was the fastest under emulation.
OPTIONS = "trans=virtio,version=9p2000.L,msize=65536,cache=loose"
# Where the program writes what is promoted. The names of a hard link are one file to a kernel that caches, and several to the layers of a
# run, of which each gets what is written to it. Without the cache a name is looked up each time, which is slower.
EXACT_OPTIONS = "trans=virtio,version=9p2000.L,msize=65536,cache=mmap"
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
_CHUNK = 32768
_LAST_WORDS_SECONDS = 2.0  # for what an ended program has sent and the driver has not
_ABOVE = 64  # descriptors from here on are in nobody's way
_IDLE_SECONDS = 0.1  # after which a machine that is ready has time to rehearse
_REHEARSED = {"cwd": "/", "env": {}, "arguments": (), "source": "print(1)"}
_SCRATCH_FLAGS = sc.MS_NOSUID | sc.MS_NODEV


def main() -> None:
    """Boot, wait for the order to prepare a run, and serve it. Arguments: the search path of modules, then the modules to preload."""
    path, *preload = sys.argv[1:]
    port = -1
    try:
        _boot()
        port = _open_port()
        sys.path[:] = path.split(os.pathsep)
        for name in preload:
            importlib.import_module(name)
        for processes, execute in ((True, True), (False, True), (False, False)):
            seccomp.compile_filter(processes=processes, execute=execute)  # now: a restored machine then finds it compiled
        seat = ProgramSeat()
        frames.write(port, frames.BOOTED)  # the machine is saved here, and restored machines go on from here
        Service(port, seat).serve()
    except BaseException as error:
        if port >= 0:
            frames.write(port, frames.FAILED, f"{type(error).__name__}: {error}".encode(errors="replace")[:REFUSAL_BYTES])
        while True:  # the machine is ended from outside; without its first process its kernel would panic
            time.sleep(3600)


def _boot() -> None:
    for name, kind in (("dev", "devtmpfs"), ("proc", "proc"), ("sys", "sysfs")):
        os.makedirs(f"/{name}", exist_ok=True)
        sc.mount(name, f"/{name}", kind)
    with open(MODULES) as names:
        for name in names.read().split():
            with open(name, "rb") as module:
                sc.load_module(module.fileno(), name)
    for directory in (VIEW, SHOWN, EXACT, GROUPS):
        os.mkdir(directory)
    sc.mount("groups", GROUPS, "cgroup2")
    with open(f"{GROUPS}/cgroup.subtree_control", "w") as control:
        control.write("+memory +pids")
    os.mkdir(f"{GROUPS}/run")
    namespaces.raise_loopback()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)


def _open_port() -> int:
    for _ in range(2000):
        for name in os.listdir("/dev"):
            if name.startswith("vport") and name.endswith("p1"):
                return os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.01)
    raise TimeoutError("the serial port does not appear")


class ProgramSeat:
    """The process that becomes the program, and our ends of its streams."""

    def __init__(self) -> None:
        inside, self.stdin = os.pipe2(os.O_CLOEXEC)
        self.stdout, out = os.pipe2(os.O_CLOEXEC)
        self.stderr, err = os.pipe2(os.O_CLOEXEC)
        self.payload, payload = socket.socketpair()
        orders, self._orders = os.pipe2(os.O_CLOEXEC)
        gc.collect()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            self._sit((inside, out, err), payload, orders)
        for fd in (inside, out, err, orders):
            os.close(fd)
        payload.close()
        self.payload.recv(1)  # it sits: a machine that is saved now need not do that again
        os.set_blocking(self.stdin, False)

    def begin(self, setup: bytes) -> None:
        """Let the process confine itself and receive its program."""
        os.write(self._orders, struct.pack("!I", len(setup)) + setup)
        os.close(self._orders)

    def _sit(self, streams: tuple[int, int, int], payload: socket.socket, orders: int) -> NoReturn:
        try:
            os.setsid()
            kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in (*streams, payload.detach(), orders)]
            for number, fd in enumerate(kept):
                os.dup2(fd, number, inheritable=number < 3)
            sc.close_range(len(kept), 0xFFFFFFFF)
            payload = socket.socket(fileno=3)
            payload.sendall(b" ")
            with open(4, "rb", buffering=0) as file:
                (length,) = struct.unpack("!I", file.read(4))
                setup = marshal.loads(file.read(length))
            _confine(setup)
        except BaseException as error:
            with suppress(OSError):
                payload.sendall(f"125 {error}".encode(errors="replace")[:REFUSAL_BYTES])
            os._exit(125)
        entry.run(payload, setup["python"], lambda: payload.sendall(READY))


def _confine(setup: dict[str, Any]) -> None:
    """Enter the view and give up every power over this machine, as `kernel.guest_setup` does for a guest of the process runtime."""
    sc.unshare(sc.CLONE_NEWNS)
    os.chdir(VIEW)
    sc.mount(".", "/", None, _MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    with suppress(OSError):
        socket.sethostname(setup["hostname"])
    os.umask(0o022)
    usage.apply_rlimits(open_files=setup["open_files"])
    rules = landlock.open_ruleset(landlock.plan(version=landlock.abi(), writable=setup["scratch"], executable=setup["executables"]))
    os.setgroups([])
    os.setresgid(setup["gid"], setup["gid"], setup["gid"])
    sc.prctl(_PR_SET_KEEPCAPS, 1)
    os.setresuid(setup["uid"], setup["uid"], setup["uid"])
    if setup["uid"]:
        sc.capset(1 << namespaces.CAPABILITIES["SETPCAP"])  # changing the user has cleared what `drop_capabilities` needs
    namespaces.drop_capabilities()
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    namespaces.assert_capabilities(())
    landlock.enforce(rules)
    seccomp.install(seccomp.compile_filter(processes=setup["may_fork"], execute=setup["may_exec"]))


_MS_MOVE, _PR_SET_KEEPCAPS = 8192, 8


def _prepare(setup: dict[str, Any]) -> None:
    """Set the clock, reseed the random numbers, limit the run, and mount its view."""
    time.clock_settime(time.CLOCK_REALTIME, setup["time"])
    _reseed(setup["entropy"])
    for name, value in (("memory.max", setup["memory_bytes"]), ("pids.max", setup["processes"])):
        if value is not None:
            _write(f"{GROUPS}/run/{name}", str(value))
    sc.mount(TAG, VIEW, "9p", sc.MS_NOSUID | sc.MS_NODEV | (0 if setup["writable"] else sc.MS_RDONLY), OPTIONS)
    if setup["exact"]:
        sc.mount(EXACT_TAG, EXACT, "9p", sc.MS_NOSUID | sc.MS_NODEV, EXACT_OPTIONS)
        for target in setup["exact"]:
            sc.mount(EXACT + target, VIEW + target, None, sc.MS_BIND)
    sc.mount(VIEW, SHOWN, None, sc.MS_BIND | sc.MS_REC)
    for target, size, mode in setup["private"]:
        owner = f"uid={setup['uid']},gid={setup['gid']}"
        sc.mount("private", VIEW + target, "tmpfs", _SCRATCH_FLAGS, f"{sized(size)},mode={mode:o},{owner}")
    for target in setup["shown_in_private"]:
        _show_again(target, setup["writable"])
    sc.mount("proc", f"{VIEW}/proc", "proc", _SCRATCH_FLAGS | sc.MS_NOEXEC)
    # The program may be user 0, who may set what the kernel starts with all capabilities, such as the handler of core files.
    seal_proc(f"{VIEW}/proc", shared=False, nothing="/dev/null")
    _make_devices(f"{VIEW}/dev", setup["shm_bytes"])


def _show_again(target: str, writable: bool) -> None:
    """Show a path of the view that a private directory of this machine covers."""
    source, place = SHOWN + target, VIEW + target
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), place)
        return
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    flags = sc.MS_BIND | sc.MS_NOSUID | sc.MS_NODEV
    sc.mount(source, place, None, flags)
    if not writable:
        sc.mount("", place, None, flags | sc.MS_REMOUNT | sc.MS_RDONLY)


def _reseed(entropy: bytes) -> None:
    with open("/dev/urandom", "wb", buffering=0) as device:
        fcntl.ioctl(device, _RNDADDENTROPY, struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy)
        fcntl.ioctl(device, _RNDRESEEDCRNG)


def _make_devices(place: str, shm_bytes: int) -> None:
    sc.mount("dev", place, "tmpfs", sc.MS_NOSUID | sc.MS_NOEXEC, "size=64k,mode=755")
    for name, number in mount_plan.DEVICES.items():
        os.mknod(f"{place}/{name}", stat.S_IFCHR, os.makedev(*number))
        os.chmod(f"{place}/{name}", 0o666)
    for name, to in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")):
        os.symlink(to, f"{place}/{name}")
    for name, kind, options in (("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"), ("shm", "tmpfs", f"size={shm_bytes},mode=1777")):
        os.mkdir(f"{place}/{name}")
        sc.mount(kind, f"{place}/{name}", kind, sc.MS_NOSUID | sc.MS_NOEXEC, options)
    sc.mount("", place, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)


class Service:
    """Serves one run: passes streams between the seat and the port until the program has ended."""

    def __init__(self, port: int, seat: ProgramSeat) -> None:
        self._port, self._seat = port, seat
        self._frames = PortReader()
        self._pending = b""  # input that the program has not taken yet: at most `frames.WINDOW` bytes
        self._input_ends = False
        self._poller = select.poll()
        self._readers = {seat.stdout: frames.OUTPUT, seat.stderr: frames.ERRORS, seat.payload.fileno(): frames.SAID}
        self._writable = True
        self._rehearses = False  # once the machine is ready, and until it has, or its program has come
        self._doors: InnerDoors | None = None  # of a run with a network
        self._at_doors: dict[int, int] = {}  # events that are waited for, by descriptor

    def serve(self) -> NoReturn:
        """Prepare the run when the order comes, and serve it to its end."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, the kernel keeps it from the first process
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for fd in (self._port, woken, *self._readers):
            self._poller.register(fd, select.POLLIN)
        while True:
            ready = self._await(_IDLE_SECONDS if self._rehearses else None)
            if not ready:
                self._rehearse()
            if woken in ready:
                os.read(woken, 4096)
            for fd in [fd for fd in self._readers if fd in ready]:
                self._pass_on(fd)
            if self._seat.stdin in ready:
                self._write_input()
            self._take(ready)
            if (ended := self._reap()) is not None:
                self._finish(*ended)

    def _await(self, seconds: float | None = None) -> dict[int, int]:
        """Wait until something is ready, and return it."""
        if self._doors is not None:
            wanted = self._doors.wanted()
            for fd in self._at_doors.keys() - wanted.keys():
                self._poller.unregister(fd)
            for fd, events in wanted.items():
                self._poller.register(fd, events)
            self._at_doors = wanted
        return dict(self._poller.poll(None if seconds is None else seconds * 1000))

    def _take(self, ready: dict[int, int]) -> None:
        """Pass on what is ready at the doors, and carry out the driver's orders."""
        if self._doors is not None:
            self._doors.serve(ready)
        if ready.get(self._port, 0) & select.POLLIN:
            self._frames.feed(os.read(self._port, 65536))
            while (each := self._frames.next()) is not None:
                self._obey(*each)

    def _obey(self, kind: bytes, content: bytes) -> None:
        if kind == frames.SETUP:
            setup = marshal.loads(content)
            _prepare(setup)
            self._writable = setup["writable"]
            if setup["network"]:
                self._doors = InnerDoors(setup["network"], partial(frames.write, self._port))
            _write(f"{GROUPS}/run/cgroup.procs", str(self._seat.pid))
            self._seat.begin(content)
        elif kind == frames.PAYLOAD:
            self._rehearses = False
            with suppress(OSError):  # the program has closed it
                self._seat.payload.sendall(content)
        elif kind == frames.PAYLOAD_END:
            with suppress(OSError):
                self._seat.payload.shutdown(socket.SHUT_WR)
        elif kind == frames.INPUT:
            self._pending += content
            self._write_input()
        elif kind == frames.INPUT_END:
            self._input_ends = True
            self._write_input()
        elif kind == frames.SIGNAL:
            with suppress(OSError):
                os.killpg(self._seat.pid, content[0])
        elif self._doors is not None:
            self._doors.obey(kind, content)

    def _write_input(self) -> None:
        stdin = self._seat.stdin
        if stdin < 0:
            frames.write(self._port, frames.TAKEN, frames.COUNT.pack(len(self._pending)))
            self._pending = b""
            return
        with suppress(KeyError):
            self._poller.unregister(stdin)
        try:
            taken = os.write(stdin, self._pending) if self._pending else 0
        except BlockingIOError:
            taken = 0
        except OSError:  # the program has closed its input
            taken, self._input_ends = len(self._pending), True
        self._pending = self._pending[taken:]
        if taken:
            frames.write(self._port, frames.TAKEN, frames.COUNT.pack(taken))
        if self._pending:
            self._poller.register(stdin, select.POLLOUT)
        elif self._input_ends:
            os.close(stdin)
            self._seat.stdin = -1

    def _pass_on(self, fd: int) -> bool:
        """Pass on what is there. Return False at the end of the stream."""
        try:
            data = os.read(fd, _CHUNK)
        except OSError:
            data = b""
        if data:
            frames.write(self._port, self._readers[fd], data)
            self._rehearses = data == READY
            return True
        self._poller.unregister(fd)
        if self._readers.pop(fd) == frames.SAID:
            frames.write(self._port, frames.SAID_END)
        return False

    def _rehearse(self) -> None:
        """Run a program of ours to its end and count, while nobody waits: an emulated processor translates each piece of code once.

        It is a fork of the agent and ends before the program comes. What it says goes nowhere.
        """
        self._rehearses = False
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                nowhere = os.open("/dev/null", os.O_RDWR)
                for number in range(3):
                    os.dup2(nowhere, number)
                os.chroot(VIEW)
                entry.run(theirs, True, lambda: None)
            finally:
                os._exit(1)
        theirs.close()
        with ours:
            wire.send(ours, _REHEARSED)
            os.waitpid(child, 0)
        self._count_all()

    def _reap(self) -> tuple[int, float] | None:
        """Reap all ended processes. Return status and processor time of the main program if it is among them."""
        ended = None
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid == self._seat.pid:
                ended = status, used.ru_utime + used.ru_stime

    def _finish(self, status: int, seconds: float) -> NoReturn:
        """End what the program left behind, pass on its last output, write cached files back, and report the end."""
        while True:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        for fd in list(self._readers):
            while self._pass_on(fd):
                continue
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._doors is not None and self._doors.unread and (left := deadline - time.monotonic()) > 0:
            self._take(self._await(left))
        if self._writable:
            os.sync()
        limits, peak = self._count_all()
        frames.write(self._port, frames.EXIT, frames.ENDED.pack(status, seconds, peak, limits))
        while True:
            time.sleep(3600)

    def _count_all(self) -> tuple[int, int]:
        """Return the limits that were met, and the peak of memory."""
        limits = (frames.OUT_OF_MEMORY if _count("memory.events", "oom_kill") else 0) | (
            frames.OUT_OF_PROCESSES if _count("pids.events", "max") else 0
        )
        with open("/proc/vmstat") as counters:  # the machine itself may have been too small
            if any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in counters):
                limits |= frames.OUT_OF_MEMORY
        with open(f"{GROUPS}/run/memory.peak") as file:
            return limits, int(file.read())


def _count(file: str, name: str) -> int:
    with open(f"{GROUPS}/run/{file}") as events:
        return next((int(line.split()[1]) for line in events if line.startswith(f"{name} ")), 0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
