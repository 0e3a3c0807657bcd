"""The daemon of one user: it performs command lines in workers that are ready (`server.worker`), and looks after them.

One process with one thread, which forks: a worker has what the daemon has loaded. Each connection is one command line. The daemon does not
read the request: it hands the connection to a worker, and from then on only watches it. A byte is a signal for the worker. The end of the
connection means that the client was killed, and the worker is, too. When the worker ends, the client gets its exit code.

No more than `most` command lines are performed at once, and none is begun while memory is short and others are under way. The rest waits in
the order in which it came; beyond `waiting` of them, new ones are refused. How many workers are ready follows their use.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from agent_sandbox.cli.errand import ENDED, PLACE, REFUSED, SOCKET, TAKEN
from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel import wire
from agent_sandbox.server import front, worker
from agent_sandbox.server.front import HttpDoor

LOCK, STATE_SOCKET, HTTP_SOCKET = "lock", "state", "http"
CORES = len(os.sched_getaffinity(0))
MOST, WAITING = 8 * CORES, 1000
SPARE, MOST_SPARE = 1, 2 * CORES
CALM_SECONDS = 60.0  # without a command line, one ready worker less
QUIET_SECONDS = 0.02  # without anything to do, before workers are made for the next ones
LEAST_SECONDS = 5.0  # that the process of the HTTP interface has to last to be started again
ENDING_SECONDS = 10.0  # for command lines under way when the daemon is asked to stop
SHORT_MEMORY = 256 << 20  # bytes: with less, nothing new is begun while others are under way
_ANSWER_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(eq=False)
class Worker:
    """A process that performs one command line, or waits for one."""

    pid: int
    ended: int  # a pidfd
    link: socket.socket
    client: socket.socket | None = None
    taken: bool = False  # it has become the client's
    abandoned: bool = False  # its client was killed


@dataclass
class Counts:
    """Counts of a daemon: command lines since it began, and those of now. `state_of` returns those of a daemon that runs."""

    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=time.time)
    performed: int = 0  # command lines that have ended
    refused: int = 0  # there were too many
    handed_back: int = 0  # the client had to perform it itself
    lost: int = 0  # ended with their client, which was killed
    performing: int = 0
    waiting: int = 0
    ready: int = 0  # workers that wait for a command line


class Daemon:
    """See the module. Make it, then `serve`. Raises `Busy` if another one serves the same directory of state."""

    def __init__(
        self,
        state: str,
        *,
        most: int = MOST,
        waiting: int = WAITING,
        http: bool = False,
        doors: Sequence[HttpDoor] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Begin to listen. With `http`, also for HTTP on a socket in the same place, and on those of `doors`."""
        self.counts = Counts()
        self._most, self._longest, self._say = most, waiting, say
        self._place = Path(state, PLACE)
        self._lock = _locked(self._place)
        self._listener, self._teller = _listening(self._place, SOCKET), _listening(self._place, STATE_SOCKET)
        self._doors = [HttpDoor(_listening(self._place, HTTP_SOCKET, blocking=True)), *doors] if http else []
        self._state = state
        self._front: tuple[int, int, float] | None = None  # pid, pidfd, and when it began
        self._poll = select.poll()
        self._ready: list[Worker] = []
        self._busy: dict[int, Worker] = {}  # by the pidfd, and by the client's descriptor
        self._queue: deque[socket.socket] = deque()
        self._spare = SPARE
        self._used = time.monotonic()
        self._stopping = False

    def serve(self) -> None:
        """Perform command lines until a signal asks to stop. Then those under way have some time to end; their callers perform new ones."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self._poll.register(woken, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._teller, select.POLLIN)
        try:
            worker.load_ahead()
            self._start_front()
            self._keep_spare()
            while not self._stopping:
                happened = self._poll.poll(self._patience())
                if not happened:
                    self._keep_spare()
                for descriptor, _ in happened:
                    if descriptor == woken:
                        os.read(woken, 4096)
                    elif descriptor == self._listener.fileno():
                        self._accept()
                    elif descriptor == self._teller.fileno():
                        self._tell_state()
                    elif self._front is not None and descriptor == self._front[1]:
                        self._replace_front()
                    else:
                        self._attend(descriptor)
                self._calm_down()
        finally:
            self._end()

    def _patience(self) -> float | None:
        """How long to wait for something to happen, in milliseconds. New workers are made in a quiet moment, not beside what is urgent."""
        if len(self._ready) < self._spare:
            return QUIET_SECONDS * 1000
        return None if self._spare == SPARE else CALM_SECONDS * 1000

    def _stop(self, *_: object) -> None:
        self._stopping = True

    # -- clients

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone, or we have no descriptors left: it waits in the kernel's queue
            return
        client.setblocking(False)
        if not _same_circumstances(client):
            client.close()  # the client performs it itself
            self.counts.handed_back += 1
        elif len(self._queue) >= self._longest:
            _tell(client, REFUSED)
            client.close()
            self.counts.refused += 1
        else:
            self._queue.append(client)
            self._assign()

    def _tell_state(self) -> None:
        """Answer one who asks for the state. Only this user can reach the socket."""
        try:
            asker, _ = self._teller.accept()
        except OSError:
            return
        now = replace(self.counts, performing=len(self._performing), waiting=len(self._queue), ready=len(self._ready))
        with asker:
            asker.setblocking(False)
            _tell(asker, json.dumps(asdict(now)).encode())

    def _assign(self) -> None:
        """Give waiting command lines to workers, as many as may be performed now."""
        while self._queue and len(self._performing) < self._most and not (self._performing and _memory_is_short()):
            client = self._queue.popleft()
            if not self._ready:
                self._spare = min(self._spare + 1, MOST_SPARE)
                self._ready.append(self._new_worker())
            one = self._ready.pop(0)
            self._used = time.monotonic()
            try:
                socket.send_fds(one.link, [b"c"], [client.fileno()])
            except OSError:  # killed while it waited
                self._queue.appendleft(client)
                self._forget(one)
                continue
            one.client = client
            self._busy[one.ended] = one
            self._poll.register(one.ended, select.POLLIN)
            self._busy[one.link.fileno()] = one
            self._poll.register(one.link, select.POLLIN)

    @property
    def _performing(self) -> list[Worker]:
        return [one for descriptor, one in self._busy.items() if descriptor == one.ended]

    def _attend(self, descriptor: int) -> None:
        """Look what a worker or its client says."""
        one = self._busy.get(descriptor)
        if one is None or one.client is None:
            return
        if descriptor == one.ended:
            self._finish(one)
        elif descriptor == one.link.fileno():  # it has read the request, or has ended
            try:
                said = one.link.recv(1)
            except BlockingIOError:  # the event was that of an earlier descriptor with this number
                return
            if said == TAKEN:
                one.taken = True
                self._busy[one.client.fileno()] = one
                self._poll.register(one.client, select.POLLIN)
            self._poll.unregister(one.link)
            del self._busy[descriptor]
        else:
            self._heed(one, one.client)

    def _heed(self, one: Worker, client: socket.socket) -> None:
        """Pass on a signal. A client that has gone was killed: so is what it started."""
        try:
            numbers = client.recv(64)
        except BlockingIOError:  # as above
            return
        except OSError:
            numbers = b""
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                os.kill(one.pid, number)  # not reaped yet, so nobody else has this number
        if not numbers:
            self.counts.lost += 1
            one.abandoned = True
            self._poll.unregister(client)
            del self._busy[client.fileno()]
            os.kill(one.pid, signal.SIGKILL)

    def _finish(self, one: Worker) -> None:
        """Tell the client how its command line ended."""
        _, status = os.waitpid(one.pid, 0)
        if one.client is not None:
            if one.taken:
                self.counts.performed += not one.abandoned
                code = os.waitstatus_to_exitcode(status)
                _tell(one.client, ENDED + bytes([code if code >= 0 else 128 - code]))
            else:
                self.counts.handed_back += 1
            if self._busy.pop(one.client.fileno(), None):
                self._poll.unregister(one.client)
            one.client.close()
        if self._busy.pop(one.link.fileno(), None):
            self._poll.unregister(one.link)
        del self._busy[one.ended]
        self._poll.unregister(one.ended)
        one.link.close()
        os.close(one.ended)
        self._assign()

    # -- the HTTP interface

    def _start_front(self) -> None:
        """Fork the process that serves the HTTP interface, if there is one."""
        if not self._doors:
            return
        pid = os.fork()
        if not pid:
            try:
                sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != self.counts.pid:  # it has ended meanwhile
                    os._exit(0)
                signal.set_wakeup_fd(-1)
                os.setsid()
                wire.close_others([door.socket.fileno() for door in self._doors])
                front.serve_doors(self._state, self._place, self._doors)
            finally:
                os._exit(1)
        self._front = pid, os.pidfd_open(pid), time.monotonic()
        self._poll.register(self._front[1], select.POLLIN)

    def _end_front(self) -> None:
        if self._front is None:
            return
        pid, process, _ = self._front
        self._front = None
        self._poll.unregister(process)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(process)

    def _replace_front(self) -> None:
        """Start another one if it has ended. One that ends at once is given up: command lines go on."""
        began = self._front[2] if self._front is not None else 0.0
        self._end_front()
        if time.monotonic() - began < LEAST_SECONDS:
            self._say("the process of the HTTP interface ended at once, and is not started again; command lines go on")
        else:
            self._start_front()

    # -- workers

    def _keep_spare(self) -> None:
        while len(self._ready) < self._spare and not self._queue:
            self._ready.append(self._new_worker())

    def _calm_down(self) -> None:
        """Keep fewer workers ready when nobody has needed them for a while."""
        if time.monotonic() - self._used > CALM_SECONDS and self._spare > SPARE:
            self._spare -= 1
            self._used = time.monotonic()
            if len(self._ready) > self._spare:
                self._forget(self._ready.pop())

    def _new_worker(self) -> Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pid = os.fork()
        if not pid:
            worker.serve_one(theirs, self.counts.pid)
        theirs.close()
        return Worker(pid, os.pidfd_open(pid), ours)

    def _forget(self, one: Worker) -> None:
        one.link.close()  # by which it ends
        os.waitpid(one.pid, 0)
        os.close(one.ended)

    def _end(self) -> None:
        """Stop listening, let what is under way end, and end the rest."""
        self._listener.close()
        for name in (SOCKET, HTTP_SOCKET):
            (self._place / name).unlink(missing_ok=True)
        for client in self._queue:
            client.close()
        self._queue.clear()
        for one in self._ready:
            self._forget(one)
        self._ready.clear()
        if under_way := len(self._performing):
            self._say(f"waiting up to {ENDING_SECONDS:.0f} s for {under_way} command lines that are under way")
        for number in (signal.SIGTERM, signal.SIGKILL, None):
            until = time.monotonic() + ENDING_SECONDS
            while self._performing and time.monotonic() < until:
                for descriptor, _ in self._poll.poll(max(0, until - time.monotonic()) * 1000):
                    self._attend(descriptor)
            for one in self._performing:
                if number is not None:
                    os.kill(one.pid, number)
        self._end_front()
        self._teller.close()
        (self._place / STATE_SOCKET).unlink(missing_ok=True)
        os.close(self._lock)


def state_of(state: str) -> Counts | None:
    """Return what the daemon of a directory of state says of itself; None if none runs. Raises `WorkspaceError` if it does not answer."""
    try:
        with _connection(Path(state, PLACE), STATE_SOCKET) as link:
            link.settimeout(_ANSWER_SECONDS)
            told = b""
            while part := link.recv(4096):
                told += part
            return Counts(**json.loads(told))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise WorkspaceError(f"the daemon does not answer: {error}", hint="stop it with: agent-sandbox serve --stop") from error


def stop(state: str) -> bool:
    """End the daemon of a directory of state, and wait until it has ended. False if none runs. What it performs has some time to end."""
    lock = Path(state, PLACE, LOCK)
    try:
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False  # nobody holds it
            except BlockingIOError:
                pass
            process = os.pidfd_open(int(file.read()))
            try:
                signal.pidfd_send_signal(process, signal.SIGTERM)
                fcntl.flock(file, fcntl.LOCK_SH)  # until it has ended
            finally:
                os.close(process)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError) as error:
        raise WorkspaceError(f"the daemon cannot be stopped: {error}", hint=f"look at {lock}") from error
    return True


def _locked(place: Path) -> int:
    """Return the lock that tells a second daemon that there is one. The kernel gives it back with its holder."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise WorkspaceError(f"{place} is not a directory of yours alone", hint=f"if it is yours: chmod 700 {place}")
        lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Busy("a daemon of this user runs already", hint="stop it with: agent-sandbox serve --stop") from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock
    except OSError as error:
        raise WorkspaceError(f"the daemon cannot use {place}: {error.strerror}", hint="look at that directory") from error


def _listening(place: Path, name: str, *, blocking: bool = False) -> socket.socket:
    """Return a socket that only this user can connect to. One that a killed daemon has left is replaced: we have its lock."""
    try:
        (place / name).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{name}")  # the path itself may be longer than an address can be
        finally:
            os.close(directory)
        os.chmod(place / name, 0o600)
        listener.listen(1024)
        listener.setblocking(blocking)
        return listener
    except OSError as error:
        raise WorkspaceError(f"the daemon cannot listen in {place}: {error.strerror}", hint="look at that directory") from error


def _connection(place: Path, name: str) -> socket.socket:
    directory = os.open(place, os.O_PATH | os.O_DIRECTORY)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(f"/proc/self/fd/{directory}/{name}")
    except BaseException:
        link.close()
        raise
    finally:
        os.close(directory)
    return link


def _tell(client: socket.socket, what: bytes) -> None:
    with suppress(OSError):  # it has gone
        client.send(what)


def _same_circumstances(client: socket.socket) -> bool:
    """Whether a process of ours is to the machine what the client is: the same user, rights, namespaces, root, limits and priority.

    Otherwise the daemon would lend a process what it has given up, or spare it what it was put under. Control groups are not compared: what
    the daemon performs counts as the daemon's.
    """
    pid, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        return False
    try:
        return _circumstances(str(pid)) == _circumstances("self")
    except OSError:
        return False


def _circumstances(process: str) -> tuple[object, ...]:
    spaces = [os.stat(f"/proc/{process}/ns/{name}").st_ino for name in ("mnt", "user", "pid", "net", "ipc", "uts", "cgroup")]
    root = os.stat(f"/proc/{process}/root")
    wanted = (b"Uid:", b"Gid:", b"Groups:", b"CapPrm:", b"CapEff:", b"CapBnd:", b"CapAmb:", b"NoNewPrivs:", b"Seccomp:")
    status = Path(f"/proc/{process}/status").read_bytes().splitlines()
    limits = Path(f"/proc/{process}/limits").read_bytes()
    try:
        label = Path(f"/proc/{process}/attr/current").read_bytes()
    except OSError:  # no security module has labels
        label = b""
    number = 0 if process == "self" else int(process)
    order = os.getpriority(os.PRIO_PROCESS, number), os.sched_getaffinity(number)
    return spaces, (root.st_dev, root.st_ino), [line for line in status if line.startswith(wanted)], limits, label, order


def _memory_is_short() -> bool:
    for line in Path("/proc/meminfo").read_bytes().splitlines():
        if line.startswith(b"MemAvailable:"):
            return int(line.split()[1]) << 10 < SHORT_MEMORY
    return False
