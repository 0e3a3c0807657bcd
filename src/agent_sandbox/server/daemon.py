"""The daemon of one user: it performs command lines in workers that are ready (`server.worker`), and looks after them.

One process with one thread, which forks: a worker has what the daemon has loaded. Each connection is one command line. The daemon does not
read the request: it hands the connection to a worker, and from then on only watches it. A byte is a signal for the worker. The end of the
connection means that the client was killed, and the worker is, too. When the worker ends, the client gets its exit code; or sooner, if the
worker goes on as the process that holds a detached sandbox. Such workers, and holders that workers started, are owned by the daemon: they
end with it.

No more than `most` command lines are performed at once, and none is begun while memory is short and others are under way. The rest waits in
the order in which it came; beyond `waiting` of them, new ones are refused. How many workers are ready follows their use.

Where no process or descriptor is left for a worker, what is under way goes on, and callers perform new command lines themselves.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agent_sandbox.cli.errand import ENDED, PLACE, REFUSED, SOCKET, TAKEN
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel import wire
from agent_sandbox.server import background, front, messages, units, worker
from agent_sandbox.server.admission import memory_is_short
from agent_sandbox.server.circumstances import Circumstances, is_in, own_circumstances
from agent_sandbox.server.daemon_place import HTTP_SOCKET, STATE_SOCKET, Counts, listening, locked
from agent_sandbox.server.event_log import silent
from agent_sandbox.server.front import HttpDoor

CORES = len(os.sched_getaffinity(0))
MOST, WAITING = 8 * CORES, 1000
SPARE, MOST_SPARE = 1, 2 * CORES
CALM_SECONDS = 60.0  # without a command line, one ready worker less
LONG_SECONDS = 0.1  # of a command line under way, after which the worker for the next one is made beside it, and not when it has ended
LEAST_SECONDS = 5.0  # that the process of the HTTP interface has to last to be started again
FRONT_SECONDS = 2.0  # for that process to end when it is asked to
TAKING_SECONDS = 20.0  # for a worker to take a command line; one that is stopped never does, and its client performs it itself
ENDING_SECONDS = 10.0  # for command lines under way when the daemon is asked to stop
MOST_SILENT = 64  # connections that have not said yet what they want; the oldest of more is closed
HELD_SECONDS = 30.0  # the same for sandboxes in the background: more than their programs have before they are killed


@dataclass(eq=False)
class Worker:
    """A process that performs one command line, or waits for one."""

    pid: int
    ended: int  # a pidfd
    link: socket.socket
    client: socket.socket | None = None
    given: float = 0.0  # when it got its client, by the monotonic clock
    taken: bool = False  # it has become the client's
    performed: bool = False  # its client was told how it ended
    abandoned: bool = False  # its client was killed
    holds: bool = False  # its client was answered, and it goes on with a detached sandbox


class Daemon:
    """See the module. Make it, then `serve`. Raises `Busy` if another one serves the same directory of state."""

    def __init__(
        self,
        state: str,
        *,
        keys: str = "",
        most: int = MOST,
        waiting: int = WAITING,
        http: bool = False,
        doors: Sequence[HttpDoor] = (),
        say: Callable[[str], None] = lambda text: None,
        log: Callable[..., None] = silent,
    ) -> None:
        """Begin to listen. With `http`, also for HTTP on a socket in the same place, and on those of `doors`.

        `keys` is the directory of the ledger's keys, if it is not the one that a chosen directory of state has.
        """
        self.counts = Counts()
        # A client that waits has one descriptor, a worker three. All of them fit, so that there is always one for who comes next.
        self._most, self._longest, self._say = most, min(waiting, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2), say
        self._log = log
        self._place = Path(state, PLACE)
        self._lock = locked(self._place)
        self._listener, self._teller = listening(self._place, SOCKET), listening(self._place, STATE_SOCKET)
        self._doors = [HttpDoor(listening(self._place, HTTP_SOCKET, blocking=True)), *doors] if http else []
        self._state, self._keys = state, keys
        self._front: tuple[int, int, float] | None = None  # pid, pidfd, and when it began
        self._poll = select.poll()
        self._ready: list[Worker] = []
        self._busy: dict[int, Worker] = {}  # by the pidfd, and by the client's descriptor
        self._silent: dict[int, socket.socket] = {}  # clients that have not sent their request yet, by descriptor
        self._owned: set[int] = set()  # holders that are no workers, by their pidfds
        self._queue: dict[int, socket.socket] = {}  # those that wait for a worker, in their order
        self._spare = SPARE
        self._used = time.monotonic()
        self._circumstances: Circumstances = ()  # those of the workers that are ready
        self._directory = b""  # where the last program was run: new workers rehearse there
        self._just_ended = False  # a command line, since the last look
        self._short = False  # the last worker could not be made
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
                if self._just_ended:
                    self._keep_spare(1)
                self._just_ended = False
                self._end_stuck()
                self._calm_down()
        finally:
            self._end()

    def _patience(self) -> float | None:
        """How long to wait for something to happen, in milliseconds.

        Workers for the next command lines are made when one has ended, because its caller needs longer to come back than a worker to be
        ready; beside one that lasts, some time after it has begun. Made at once, they would take a processor from it.
        """
        if len(self._ready) < self._spare:
            return LONG_SECONDS * 1000
        if any(not one.taken for one in self._performing):
            return TAKING_SECONDS * 1000
        return None if self._spare == SPARE else CALM_SECONDS * 1000

    def _stop(self, *_: object) -> None:
        self._stopping = True

    # -- clients

    def _accept(self) -> None:
        if (client := messages.accepted(self._listener)) is None:
            return
        client.setblocking(False)
        if not is_in(self._circumstances, client):
            client.close()  # the client performs it itself
            self.counts.handed_back += 1
            self._log("handed back", why="other circumstances")
        elif len(self._queue) >= self._longest:
            _tell(client, REFUSED)
            client.close()
            self.counts.refused += 1
            self._log("refused", waiting=len(self._queue))
        else:  # it gets a worker when it has said something: one that only connects keeps nobody else waiting
            if len(self._silent) >= MOST_SILENT:
                self._leave(self._silent, next(iter(self._silent))).close()
            self._silent[client.fileno()] = client
            self._poll.register(client, select.POLLIN)

    def _leave(self, crowd: dict[int, socket.socket], descriptor: int) -> socket.socket:
        """Take a client out of those that are silent or wait."""
        self._poll.unregister(descriptor)
        return crowd.pop(descriptor)

    def _tell_state(self) -> None:
        """Answer one who asks for the state. Only this user can reach the socket."""
        if (asker := messages.accepted(self._teller)) is None:
            return
        performing, ready = len(self._performing), len(self._ready)
        now = replace(self.counts, performing=performing, waiting=len(self._queue), ready=ready, held=len(self._held) + len(self._owned))
        with asker:
            asker.setblocking(False)
            _tell(asker, json.dumps(asdict(now)).encode())

    def _assign(self) -> None:
        """Give waiting command lines to workers, as many as may be performed now."""
        while self._queue and len(self._performing) < self._most and not (self._performing and memory_is_short()):
            descriptor, client = next(iter(self._queue.items()))
            if not self._ready:
                self._spare = min(self._spare + 1, MOST_SPARE)
                if (made := self._new_worker()) is None:
                    self._hand_back_all()
                    return
                self._ready.append(made)
            one = self._ready.pop(0)
            self._used = time.monotonic()
            try:
                socket.send_fds(one.link, [worker.PERFORM], [client.fileno()])
            except OSError:  # killed while it waited
                self._forget(one)
                continue
            self._leave(self._queue, descriptor)
            one.client, one.given = client, self._used
            self._busy[one.ended] = one
            self._poll.register(one.ended, select.POLLIN)
            self._busy[one.link.fileno()] = one
            self._poll.register(one.link, select.POLLIN)

    def _hand_back_all(self) -> None:
        """Let those that wait perform their command lines themselves, unless one that is under way will end, and with it this shortage."""
        while self._queue and not self._performing:
            self._leave(self._queue, next(iter(self._queue))).close()
            self.counts.handed_back += 1
            self._log("handed back", why="no worker")

    @property
    def _performing(self) -> list[Worker]:
        return [one for descriptor, one in self._busy.items() if descriptor == one.ended and not one.holds]

    @property
    def _held(self) -> list[Worker]:
        return [one for descriptor, one in self._busy.items() if descriptor == one.ended and one.holds]

    def _attend(self, descriptor: int) -> None:
        """Look what a worker or its client says."""
        if descriptor in self._silent:
            self._queue[descriptor] = self._leave(self._silent, descriptor)
            self._poll.register(descriptor, select.POLLRDHUP)
            self._assign()
            return
        if descriptor in self._queue:  # it has gone; its streams, which came with the request, must not stay open
            self._leave(self._queue, descriptor).close()
            return
        if descriptor in self._owned:
            self._disown(descriptor)
            return
        one = self._busy.get(descriptor)
        if one is None:
            return
        if descriptor == one.ended:
            self._finish(one)
        elif descriptor == one.link.fileno():
            self._hear(one)
        elif one.client is not None:
            self._heed(one, one.client)

    def _hear(self, one: Worker) -> bool:
        """Hear a worker: it has read its request, has started a holder, goes on as one, or is done. Return whether it said anything."""
        try:
            said, descriptors = wire.receive_descriptors(one.link, worker.LONGEST_MESSAGE)
        except BlockingIOError:  # the event was that of an earlier descriptor with this number
            return False
        except OSError:
            said, descriptors = b"", []
        for process in descriptors:
            self._owned.add(process)
            self._poll.register(process, select.POLLIN)
        if said == TAKEN and one.client is not None:
            one.taken = True
            self._busy[one.client.fileno()] = one
            self._poll.register(one.client, select.POLLIN)
        elif said[:1] == background.HELD and one.client is not None and not one.abandoned:
            one.holds = True
            self._perform(one, said[1], holds=True)
            self._assign()
        elif said[:1] == ENDED and one.client is not None and not one.abandoned:
            self._directory = said[2:] or self._directory
            self._perform(one, said[1])  # its process has nothing more to do than to end, which takes some milliseconds
        elif not said:
            self._poll.unregister(one.link)
            del self._busy[one.link.fileno()]
        return bool(said)

    def _perform(self, one: Worker, code: int, **facts: object) -> None:
        """Note that a command line was performed, and tell its client."""
        one.performed = self._just_ended = True
        self.counts.performed += 1
        self._answer(one, ENDED + bytes([code]))
        self._log("performed", worker=one.pid, exit=code, seconds=round(time.monotonic() - one.given, 3), **facts)

    def _answer(self, one: Worker, what: bytes) -> None:
        """Tell the client of a worker something, and take leave of it."""
        if one.client is None:
            return
        if what:
            _tell(one.client, what)
        if self._busy.pop(one.client.fileno(), None):
            self._poll.unregister(one.client)
        one.client.close()
        one.client = None

    def _disown(self, process: int) -> None:
        """Forget a holder that has ended."""
        self._owned.discard(process)
        self._poll.unregister(process)
        os.close(process)
        self.counts.held_ended += 1

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
        while one.link.fileno() in self._busy and self._hear(one):  # what it said last
            continue
        if self._busy.pop(one.link.fileno(), None):
            self._poll.unregister(one.link)
        code = os.waitstatus_to_exitcode(status)
        if one.holds:
            self.counts.held_ended += 1
        elif one.abandoned:
            self._log("lost", worker=one.pid, exit=code, seconds=round(time.monotonic() - one.given, 3))
            self._answer(one, b"")
        elif one.taken and not one.performed:  # something killed it
            self._perform(one, code if code >= 0 else 128 - code)
        elif not one.taken:
            self.counts.handed_back += 1
            self._log("handed back", why="not taken", worker=one.pid)
            self._answer(one, b"")
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
                front.serve_doors(self._state, self._keys, self._place, self._doors, self._log)
            finally:
                os._exit(1)
        self._front = pid, _descriptor_of(pid), time.monotonic()
        self._poll.register(self._front[1], select.POLLIN)

    def _end_front(self) -> None:
        if self._front is None:
            return
        pid, process, _ = self._front
        self._front = None
        self._poll.unregister(process)
        os.kill(pid, signal.SIGTERM)
        if not select.select([process], [], [], FRONT_SECONDS)[0]:  # it is stopped, or busy
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(process)

    def _replace_front(self) -> None:
        """Start another one if it has ended. One that ends at once is given up: command lines go on."""
        began = self._front[2] if self._front is not None else 0.0
        self._end_front()
        self._log("HTTP interface ended", seconds=round(time.monotonic() - began, 3))
        if time.monotonic() - began < LEAST_SECONDS:
            self._say("the process of the HTTP interface ended at once, and is not started again; command lines go on")
            return
        try:
            self._start_front()
        except OSError as error:
            self._say(f"the process of the HTTP interface cannot be started again: {error.strerror}; command lines go on")

    # -- workers

    def _keep_spare(self, most: int = MOST_SPARE) -> None:
        """Make workers for the next command lines, and let each rehearse where the last program was run: the next one may be, too."""
        wanted = min(self._spare, len(self._ready) + most)
        while len(self._ready) < wanted and not self._queue and (made := self._new_worker()) is not None:
            self._ready.append(made)
            if self._directory:
                _tell(made.link, worker.REHEARSE + self._directory)

    def _end_stuck(self) -> None:
        """End workers that do not take what they were given. Nothing of it has been performed."""
        for one in self._performing:
            if not one.taken and time.monotonic() - one.given > TAKING_SECONDS:
                os.kill(one.pid, signal.SIGKILL)

    def _calm_down(self) -> None:
        """Keep fewer workers ready when nobody has needed them for a while."""
        if time.monotonic() - self._used > CALM_SECONDS and self._spare > SPARE:
            self._spare -= 1
            self._used = time.monotonic()
            if len(self._ready) > self._spare:
                self._forget(self._ready.pop())

    def _new_worker(self) -> Worker | None:
        """Fork a worker. None if no process, descriptor or memory is left for one."""
        try:
            made = self._forked_worker()
        except OSError as error:
            if not self._short:
                self._log("no worker", why=error.strerror)
            self._short = True
            return None
        self._short = False
        return made

    def _forked_worker(self) -> Worker:
        now = own_circumstances()
        if now != self._circumstances:  # somebody has changed ours: workers that were forked before have others
            self._circumstances = now
            while self._ready:
                self._forget(self._ready.pop())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            pid = os.fork()
            if not pid:
                worker.serve_one(theirs, self.counts.pid)
            return Worker(pid, _descriptor_of(pid), ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _forget(self, one: Worker) -> None:
        one.link.close()
        os.kill(one.pid, signal.SIGKILL)  # it performs nothing, and may be stopped
        os.waitpid(one.pid, 0)
        os.close(one.ended)

    def _end(self) -> None:
        """Stop listening, let what is under way end, and end the rest."""
        self._log("stopping", performing=len(self._performing), waiting=len(self._queue))
        units.notify("STOPPING=1")
        self._listener.close()
        for name in (SOCKET, HTTP_SOCKET):
            (self._place / name).unlink(missing_ok=True)
        for crowd in (self._silent, self._queue):
            for descriptor in list(crowd):
                self._leave(crowd, descriptor).close()
        for one in self._ready:
            self._forget(one)
        self._ready.clear()
        if held := len(self._held) + len(self._owned):
            self._say(f"ending {held} sandboxes and sessions that go on in the background; what they changed is kept")
        self._signal_held(signal.SIGTERM)  # they end in order: their programs are asked to end, their changes and ends recorded
        if under_way := len(self._performing):
            self._say(f"waiting up to {ENDING_SECONDS:.0f} s for {under_way} command lines that are under way")
        for number in (signal.SIGTERM, signal.SIGKILL, None):
            self._attend_until(time.monotonic() + ENDING_SECONDS, lambda: not self._performing)
            for one in self._performing:
                if number is not None:
                    os.kill(one.pid, number)
        self._attend_until(time.monotonic() + HELD_SECONDS, lambda: not (self._held or self._owned))
        self._signal_held(signal.SIGKILL)
        self._attend_until(time.monotonic() + ENDING_SECONDS, lambda: not (self._held or self._owned))
        self._end_front()
        self._teller.close()
        (self._place / STATE_SOCKET).unlink(missing_ok=True)
        os.close(self._lock)

    def _attend_until(self, end: float, done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < end:
            for descriptor, _ in self._poll.poll(max(0, end - time.monotonic()) * 1000):
                self._attend(descriptor)

    def _signal_held(self, number: int) -> None:
        for process in (*(one.ended for one in self._held), *self._owned):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)


def _descriptor_of(child: int) -> int:
    """Return a pidfd of a child just forked. Without one it could not be looked after, so the child is ended."""
    try:
        return os.pidfd_open(child)
    except OSError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _tell(client: socket.socket, what: bytes) -> None:
    with suppress(OSError):  # it has gone
        client.send(what)
