"""The supervisor's handle of one guest. The guest waits for its program, receives it, runs while we pass its input and output, and ends.

All messages to and from the guest's side are here: the request (paths and limits) to init, the program to the guest alone, orders to init,
and reports of init. So are two steps that need the supervisor's privileges: it moves init into a cgroup and, as root, writes init's id
maps.
"""

from __future__ import annotations

import math
import os
import select
import time

from agent_sandbox._fast.contexts import ExitStack, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, replace
from agent_sandbox.errors import LaunchFailed, Overtaken, RuntimeUnavailable
from agent_sandbox.kernel import cgroups, ids, mount_plan, wire
from agent_sandbox.kernel.wire import DECLINED, GO, HERE, JAVASCRIPT, MAPPED, ORDER, PYTHON, SCRIPTS, SIGNAL
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import Argv, Completed, Exit, ExitReason, JavaScriptCode, Launch, PythonCode, Script, Usage
from agent_sandbox.runtime.process.guest_request import SCRATCH, counted, request_for, watched
from agent_sandbox.runtime.process.pump import GuestReport, Poller, Reply, Sink, Source, exit_of, make_pipes, parsed
from agent_sandbox.runtime.process.zygote import GuestLine, Zygote

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from agent_sandbox.kernel.doors import Doors
    from agent_sandbox.runtime.guest_rpc.server import Conversation
    from agent_sandbox.runtime.observe.observer import Observer
    from agent_sandbox.runtime.process.checkpoints import Checkpoints
    from agent_sandbox.runtime.process.departure import Departed
else:
    from agent_sandbox._fast import sockets as socket


READY_SECONDS = 60.0  # a guard against a host that hangs. A guest is ready in milliseconds, but heavy load must not make runs fail
TICK = 0.05  # seconds between two checks of a cgroup's processor time, and between two calls of `on_tick`
MOMENT = 0.005  # seconds after which init is told to watch the time of a turn
GRACE_SECONDS = 5.0  # seconds after the deadline within which init must end the run; after that we end it


class HelperDeclined(Exception):
    """The setup helper cannot make this guest. Nothing has run, and the reference in `guest_setup` makes it or says why not."""


class ProcessGuest:
    """A guest, made in two steps: `prepare` makes a confined guest that waits, and `begin` gives the guest its program. Used once.

    `layers` is a descriptor of the guest's upper layers, readable until `close`; None if the guest cannot write.
    """

    def __init__(self, launch: Launch, keeper: Zygote, inner_root: str = "") -> None:
        self.launch = launch
        self._inner_root = inner_root
        self.notes: tuple[str, ...] = ()
        self.layers: int | None = None
        self._init = 0  # the pid of init; no other process gets this pid before `Zygote.done`
        self._cgroup = cgroups.Cgroup()
        self._guest = 0  # the pid of the guest, if it can be seen leaving
        self._departure: Departed | None = None
        self.irrevocable = False  # whether a tool was called, which a second run must not repeat
        self.refused = ""  # why the program could not be started inside the view: not found, not executable, no such directory
        self._refused: int | None = None  # the exit code of a program that could not be started
        self._messages: dict[str, dict[str, Any]] = {}
        self._terminal: int | None = None
        self.doors: Doors | None = None  # until somebody takes them
        self.inward: int | None = None  # likewise
        self._killed = ""
        self._waker: int | None = None
        self._talk: Conversation | None = None
        self._observer: Observer | None = None
        self.checkpoints: Checkpoints | None = None
        self._clocked = True  # whether init is watching the time
        self._used_before: float | None = None  # seconds of processor time that the cgroup had used when the program began
        self._full: int | None = None  # a pipe on which the keeper reports that the layers exceed their limit
        self._stdin: int | None = None
        self._outputs: dict[str, int] = {}
        self._began = time.monotonic()
        self._waited = self._granted = 0.0  # seconds since `_began` in which the guest waited for its host; and those that init knows of
        self._stopped: float | None = None
        self.when_closed: Callable[[], None] = _nothing
        self.when_departed: Callable[[int], None] = os.close  # is given the pidfd of a departed guest, which has not ended yet
        self._keeper = keeper
        self._line = self._begin_at(keeper)
        self._control, self._payload = self._line.control, self._line.payload
        self._answer, self._said = Reply(self._payload), GuestReport()

    def _begin_at(self, keeper: Zygote) -> GuestLine:
        theirs: list[int] = []
        try:
            if not self.launch.terminal:
                make_pipes(self.launch.stdin, self._outputs, theirs)
                self._stdin = self._outputs.pop("stdin", None)
            return keeper.start(theirs)
        except BaseException as error:
            wire.close_all([*self._outputs.values(), *([] if self._stdin is None else [self._stdin])])
            if isinstance(error, OSError):
                why = error.strerror if keeper.alive else "the zygote has gone"
                raise LaunchFailed(f"the sandbox could not be built: {why}", hint="run: agent-sandbox doctor") from error
            raise
        finally:
            wire.close_all(theirs)

    def prepare(self, *, by_reference: bool = False) -> None:
        """Make the guest, and return when every guarantee is in force. The guest then waits for its program, and ends if none comes.

        Raises `HelperDeclined` if the setup helper cannot make it, unless `by_reference`.
        """
        try:
            self._make_cgroup()
            if layers := watched(self.launch):
                self._full = self._keeper.watch(self._line.number, *layers)
            if isinstance(kept := self.launch.root.layers, mount_plan.InImage):
                self._keeper.put_to_rest(self._line.number, kept.path, kept.backing)
            self._control.settimeout(READY_SECONDS)
            self._payload.settimeout(READY_SECONDS)
            if self.launch.observe or self.launch.checkpoints:
                self._payload.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel then attaches the sender's credentials
            request = {**request_for(self.launch, self._inner_root), "enforced": self._cgroup.enforces}
            self._keeper.send_request(self._control, request, self.launch.root, by_reference=by_reference)
            self._await_readiness()
            self._find_guest()
        except (EOFError, TimeoutError, ConnectionError) as error:
            why = str(error) or "it took too long"
            raise LaunchFailed(f"the sandbox could not be built: {why}", hint="run: agent-sandbox doctor") from error
        except OSError as error:
            raise LaunchFailed(f"the sandbox could not be built: {error.strerror or error}", hint="run: agent-sandbox doctor") from error

    def _make_cgroup(self) -> None:
        limits = self.launch.limits
        self._cgroup = cgroups.create(
            memory_bytes=limits.memory_bytes,
            processes=None if limits.processes is None else limits.processes + 1,  # init is one of them, and not the guest's
            keeper=self._keeper.pid,
            unique=str(self._line.number),
            hierarchies=self._keeper.hierarchies,
            ahead=self._keeper.makes_ahead(self._line.number),
        )
        if Guarantee.MEMORY_HARD in self.launch.requires and "memory" not in self._cgroup.enforces:
            why = self._cgroup.missing.get("memory", "no limit was given")
            raise LaunchFailed(f"a hard memory limit was asked for, and cannot be set: {why}", hint="run: agent-sandbox doctor")

    @property
    def waiting(self) -> bool:
        """Whether the guest lives and waits for its program or turn. If its control socket is readable, it has ended, or a state has."""
        if self._control.fileno() < 0:  # closed
            return False
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while poller.poll(0):
            if self.checkpoints is None or not self._take_message() or "exit" in self._messages:
                return False
        return True

    def begin(self, launch: Launch) -> None:
        """Start the clock and send the program. `launch` must have the view and limits that the guest was made with, except wall time."""
        self.launch = launch
        self._began = time.monotonic()
        if self._observer is not None:
            self._observer.begin()
        wall = launch.limits.wall_seconds
        try:
            # A ConnectionError means that the guest has ended, by a limit or by us; its exit says why. After any other error the guest may
            # wait for its program, or run without a time limit, so the launch fails.
            with suppress(ConnectionError):
                self._hand_over()
                self._allow(wall)
        except OSError as error:
            raise LaunchFailed(f"the program could not be handed over: {error.strerror or error}", hint="try again") from error

    def _start_clock(self) -> None:
        """Send init the deadline, so that it ends the run even if this process dies. A very short turn is over before this is called."""
        if not self._clocked:
            self._clocked, wall = True, self.launch.limits.wall_seconds
            with suppress(OSError):  # init has ended, and its report follows
                self._allow(None if wall is None else self._left(wall))

    def _deadline(self, wall: float) -> float:
        """Return the time at which the run must end. Time during which the program waited for the host does not count."""
        talk = self.launch.talk
        return min(self._began + self._waited + wall, math.inf if talk is None else talk.clock.ends)

    def _left(self, wall: float) -> float:
        self._granted = self._waited
        return max(self._deadline(wall) - time.monotonic(), 0.001)

    def _stop_clock(self) -> None:
        self._stopped = time.monotonic()
        if self.launch.talk is not None and self.launch.talk.clock.patient:
            with suppress(OSError):
                self._allow(self._left(math.inf))

    def _resume_clock(self) -> None:
        """Resume the wall clock. Init is sent the new deadline only after a longer pause, because each message wakes it."""
        talk, wall = self.launch.talk, self.launch.limits.wall_seconds
        if self._stopped is None or talk is None:
            return
        self._waited += time.monotonic() - self._stopped
        self._stopped = None
        if wall is not None and self._clocked and (talk.clock.patient or self._waited - self._granted > MOMENT):
            with suppress(OSError):
                self._allow(self._left(wall))

    def _allow(self, wall: float | None) -> None:
        """Tell init to end the run in `wall` seconds from now; never, if None."""
        self._control.sendall(ORDER.pack(GO, math.inf if wall is None else wall))

    def _await_readiness(self) -> None:
        if self._init_is_there():
            self._init = wire.credentials(self._control)
            self._cgroup.join(self._init)  # while it builds the view
            if self.launch.checkpoints:
                from agent_sandbox.runtime.process.checkpoints import Checkpoints  # few runs have any

                self.checkpoints = Checkpoints(self, self._keeper.stage(self._line.number))
        if self._init_is_there():
            self._control.recv(1)
            if os.geteuid() == 0:  # only root may write this map; a rootless init writes its own map
                whole = f"0 {ids.FIRST_ID} {ids.IDS}"
                ids.write_maps(self._init, uid_map=whole, gid_map=whole, deny_setgroups=False)
            self._control.send(MAPPED)
        self._look_for_decline(self._control.recv(1, socket.MSG_PEEK))
        message, descriptors = wire.receive(self._control)
        if message["kind"] == "failed":
            failure = Overtaken if message["overtaken"] else LaunchFailed
            raise failure(f"the sandbox could not be built: {message['why']}", hint="run: agent-sandbox doctor")
        self._keeper.masks.take_answer(self.launch.root, message["masks"], descriptors)
        if self.launch.writable:
            self.layers = descriptors.pop(0)
        asked, descriptors = descriptors[: message["asked"]], descriptors[message["asked"] :]
        if self.launch.network:
            from agent_sandbox.kernel.doors import Doors  # few runs have a network

            self.doors = Doors.received(message["doors"], descriptors)
        self.inward = descriptors.pop(0) if self.launch.inward else None
        self._terminal = descriptors.pop() if descriptors else None
        self.notes = tuple(message["notes"])
        if self.launch.observe:
            from agent_sandbox.runtime.observe.observer import observe  # loads `threading`, and few runs are observed

            self._observer = observe(self._payload, asked, message["search"])
        if self.checkpoints is not None:
            self.checkpoints.guard()
        if (why := self._answer.refusal()) is not None:
            raise LaunchFailed(f"the guest could not be confined: {why}", hint="run: agent-sandbox doctor")
        if message["shares_proc"] and Guarantee.PROCESSES_INVISIBLE in self.launch.requires:
            why = "the policy requires that other processes are invisible, and this machine refuses a /proc of its own"
            raise RuntimeUnavailable(why, missing=(Guarantee.PROCESSES_INVISIBLE.value,), hint="run: agent-sandbox doctor")
        self._control.settimeout(None)

    def _init_is_there(self) -> bool:
        """Wait for init's first byte. Returns False if an error message or the end of the stream comes instead."""
        first = self._control.recv(1, socket.MSG_PEEK)
        self._look_for_decline(first)
        return first == HERE

    def _look_for_decline(self, first: bytes) -> None:
        if first == DECLINED:
            raise HelperDeclined

    def _hand_over(self) -> None:
        """Send the guest its program, and begin the conversation if the launch has one."""
        program = self.launch.program
        message: dict[str, Any] = {"cwd": self.launch.cwd, "env": dict(self.launch.env)}
        match program:
            case Argv(words=words):
                message["argv"] = list(words)
            case Script(words=words, source=source, name=name, argv=arguments):
                message.update(argv=[*words, f"{SCRIPTS}/{name}", *arguments], file=name, source=source)
            case PythonCode(source=source, argv=arguments, file=script):
                message.update(file=PYTHON, source=source, arguments=list(arguments), **counted(self.launch))
                if script is not None:
                    message["script"] = dict(vars(script))
            case JavaScriptCode(source=source, argv=arguments):
                message.update(file=JAVASCRIPT, source=source, arguments=list(arguments), **counted(self.launch))
            case _:
                assert_never(program)
        if self.launch.outer is not None:
            message.update(files=self.launch.outer.files, kept=self.launch.outer.agent)
        if (talk := self.launch.talk) is not None:
            message["talk"] = dict(talk.offer)
        wire.send(self._payload, message)
        if talk is not None:
            talk.clock.stop, talk.clock.resume = self._stop_clock, self._resume_clock
            from agent_sandbox.runtime.guest_rpc.server import Conversation  # few programs converse with their host

            self._talk = Conversation(self._payload, talk, self._start_clock)

    @property
    def init(self) -> int:
        """The pid of the guest's init, through which its namespaces can be inspected while it runs."""
        return self._init

    @property
    def terminal(self) -> int | None:
        """The master side of the guest's terminal; None if it has no terminal."""
        return self._terminal

    def wake_on(self, fd: int) -> None:
        """Make `wait` also watch and drain this non-blocking descriptor: the reading end of the pipe given to `signal.set_wakeup_fd`.

        Python runs signal handlers between its bytecodes. Without this descriptor, a signal just before a blocking call is handled only
        after the call returns.
        """
        self._waker = fd

    def _woken(self) -> bool:
        assert self._waker is not None
        os.read(self._waker, 4096)
        return True

    def kill(self) -> None:
        """End the run at once, from any thread."""
        self._end("killed")

    def _end(self, why: str) -> None:
        self._killed = self._killed or why
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # init sees the end of its orders, and ends everything; its report still reaches us

    def interrupt(self, number: int) -> None:
        """Forward a signal to the guest's main program and its process group."""
        with suppress(OSError):
            self._control.send(ORDER.pack(SIGNAL, number))

    def wait(self) -> Completed:
        """Pass input and output until no process of the guest lives, and return its end. Our own clean-up may take a moment longer."""
        limit = self.launch.limits.output_bytes
        poller = Poller()
        source: Source | None
        if self._terminal is not None:
            sinks = {"stdout": Sink("stdout", self._terminal, limit, self.launch)}
            source = Source(self.launch.stdin, os.dup(self._terminal), poller)
        else:
            sinks = {name: Sink(name, fd, limit, self.launch) for name, fd in self._outputs.items()}
            source = Source(self.launch.stdin, self._stdin, poller) if self._stdin is not None else None
        self._outputs, self._stdin, self._terminal = {}, None, None
        try:
            self._pump(sinks, poller)
        finally:
            if source is not None:
                source.close()
            for sink in sinks.values():
                sink.close()
        return self._with_observed(replace(_completed(self._exit(sinks), sinks), inputs=self._said.inputs))

    def _with_observed(self, completed: Completed) -> Completed:
        """Return `completed` with the attempts that were observed since the last call."""
        if self._observer is None:
            return completed
        observed, said = self._observer.taken()
        self.notes = (*self.notes, *(note for note in said if note not in self.notes))
        return replace(completed, observed=observed)

    def turn(self, work: bytes, launch: Launch, *, idle: float | None) -> tuple[Completed, bytes | None]:
        """Give the guest its next turn, with the limits and callbacks of `launch`, and pass its output until it asks for another.

        Return the output and the request for the next turn. If the guest ended during the turn, return its end and None. Between turns we
        read nothing from the guest, and it is ended after `idle` seconds. Call this for one turn at a time.
        """
        assert self._talk is not None
        self.launch, self._began = launch, time.monotonic()
        self._waited = self._granted = 0.0
        wire.close_all([] if self._stdin is None else [self._stdin])
        self._stdin = None
        sinks = {name: Sink(name, fd, launch.limits.output_bytes, launch) for name, fd in self._outputs.items()}
        self._talk.give(work)
        if self._clocked:  # init still has the deadline of the launch, not of this turn
            self._clocked = False
            self._start_clock()
        said = self._pump(sinks, Poller())
        if said is None:
            return self._with_observed(_completed(self._exit(sinks), sinks)), None
        if self._clocked:
            self._clocked = False
            with suppress(OSError):
                self._allow(idle)
        for sink in sinks.values():
            sink.take_what_is_there()
        hit = ("output",) if any(sink.cut for sink in sinks.values()) else ()
        end = Exit(0, limits_hit=hit, usage=Usage(wall_seconds=time.monotonic() - self._began))
        return self._with_observed(_completed(end, sinks)), said

    def _pump(self, sinks: dict[str, Sink], poller: Poller) -> bytes | None:
        """Pass input and output until no process of the guest lives, or the guest asks for its next turn. Return that request, or None."""
        wall = self.launch.limits.wall_seconds
        late = False
        talk = self._talk
        # Init counts the processor time of processes that it sees. A cgroup also counts processes that lived too shortly to be seen.
        # Without a cgroup, `cpu_seconds` returns 0.
        cpu = self.launch.limits.cpu_seconds
        if cpu is not None and self._used_before is None:
            self._used_before = self._cgroup.cpu_seconds()
        look_at = 0.0
        control = self._control.fileno()
        poller.add(control, self._take_message)
        for sink in sinks.values():
            poller.add(sink.fd, sink.take)
        if self._waker is not None:
            poller.add(self._waker, self._woken)
        if self.launch.watch_inputs:  # the report may be larger than the socket's buffer
            poller.add(self._payload.fileno(), self._answer.take)
        ticks = self.launch.on_tick
        may_depart = self._guest and self.launch.leaves_nothing
        if talk is not None:
            talk.join(poller)
        while control in poller and "exit" not in self._messages:
            if talk is not None and talk.said is not None and not self._killed:  # one that was killed has no next turn, whatever it says
                return talk.said
            if talk is not None and talk.lost:
                self._end("garbled")
            deadline = None if wall is None or late else self._deadline(wall) + GRACE_SECONDS
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if cpu is not None or ticks or (talk is not None and talk.hung_up):
                timeout = TICK if timeout is None else min(timeout, TICK)
            if ticks and time.monotonic() >= look_at:
                for tick in ticks:
                    tick()
                look_at = time.monotonic() + TICK
            if not self._clocked:
                timeout = MOMENT if timeout is None else min(timeout, MOMENT)
            anything = poller.wait(timeout)
            if not self._clocked and time.monotonic() - self._began >= MOMENT:
                self._start_clock()
            if cpu is not None and self._cgroup.cpu_seconds() - (self._used_before or 0.0) > cpu:
                self._end("cpu-limit")
            if not anything and deadline is not None and time.monotonic() >= deadline:
                self._end("timed-out")
                late = True
            if any(sink.overflowing for sink in sinks.values()):
                self._end("output-limit")
            if may_depart and not any(sink.fd in poller for sink in sinks.values()):
                may_depart = False
                self._await_departure()
        if "exit" not in self._messages:
            self._await_end_of_init()
        self._said = self._answer.said() if talk is None else parsed(talk.last_words())
        self.refused, self._refused = self._said.why, self._said.refused
        for sink in sinks.values():
            sink.drain()  # every writer has ended, so the pipe holds all the remaining output
        self.irrevocable = talk is not None and talk.answered
        return None

    def _find_guest(self) -> None:
        launch = self.launch  # an engine that hosts the program inside says goodbye in another way
        if launch.leaves_nothing and not self._inner_root and isinstance(launch.program, PythonCode):
            if not isinstance(launch.root.layers, mount_plan.ThrowAway):
                return
            from agent_sandbox.runtime.process import departure  # only Python code departs

            self._guest = departure.find_guest(self._cgroup, self._init)

    def _await_departure(self) -> None:
        if not self._killed and "exit" not in self._messages:
            from agent_sandbox.runtime.process import departure

            self._departure = departure.await_departure(self._cgroup, self._init, self._guest, SCRATCH[0])
            if self._departure is not None:
                self._messages["exit"] = self._departure.report()

    def _take_message(self) -> bool:
        try:
            message, descriptors = wire.receive(self._control)
        except (EOFError, OSError):
            return False
        wire.close_all(descriptors)
        self._messages[message["kind"]] = message
        return True

    def _exit(self, sinks: dict[str, Sink]) -> Exit:
        if "failed" in self._messages:
            raise LaunchFailed(f"the sandbox failed while it ran: {self._messages['failed']['why']}", hint="please report this")
        wall, said = time.monotonic() - self._began, self._messages.get("exit")
        if said is not None and self._granted:  # init measures the time since it last received a deadline
            said = {**said, "wall": wall - self._waited}
        end = exit_of(
            said,
            self._cgroup.usage() if self._departure is None else self._departure.used,
            full=self._outgrown(),
            cut=any(sink.cut for sink in sinks.values()),
            killed=self._killed,
            fuel=self.launch.limits.fuel,
            wall=wall,
        )
        if end.reason is ExitReason.GARBLED:
            self.refused = self._talk.lost if self._talk is not None else ""
        return replace(end, code=self._refused) if self._refused is not None and end.reason is ExitReason.EXITED else end

    def _outgrown(self) -> bool:
        """Return whether the keeper has ended the run because its layers exceed their limit."""
        if self._full is None:
            return False
        try:
            return os.read(self._full, 1) == b"f"
        except OSError:  # the keeper has sent nothing
            return False

    @property
    def memory_kills(self) -> int:
        """How many processes the kernel has killed so far because the memory limit was reached; 0 without a cgroup."""
        used = self._cgroup.usage()
        return used.oom_kills if "memory" in used.hit else 0

    def settle(self) -> None:
        """Kill the guest if it runs, and wait until all its processes have ended. Its layers can still be read."""
        if "exit" in self._messages or self._control.fileno() < 0:
            return
        self._end("killed")
        self._control.settimeout(GRACE_SECONDS)
        with suppress(TimeoutError):
            while "exit" not in self._messages and self._take_message():
                continue
        if "exit" not in self._messages:
            self._await_end_of_init()

    def _await_end_of_init(self) -> None:
        from agent_sandbox.runtime.process import departure

        departure.await_end_of(self._init, GRACE_SECONDS)

    def ended(self) -> Exit:
        """Return the end of a guest that ended between two turns."""
        self.settle()
        return self._exit({})

    def close(self) -> None:
        """Kill the guest if it runs, wait until it has ended, and free its resources; with forks, after the last of them. Idempotent."""
        if self._control.fileno() < 0 or (self.checkpoints is not None and self.checkpoints.close_after_forks(self.close)):
            return
        with ExitStack() as ends:  # from the last to the first; an interrupt in one step, such as a second Ctrl-C, leaves out no other
            ends.callback(self.when_closed)
            ends.callback(self._release)
            ends.callback(self._close_descriptors)
            ends.callback(self._line.close)  # init then ends everything, if it has not
            if self.checkpoints is not None:
                ends.callback(self.checkpoints.close)
            if self._observer is not None:
                ends.callback(self._observer.close)
            self.settle()

    def _close_descriptors(self) -> None:
        if self.doors is not None:
            self.doors.close()
        left = (self.layers, self._full, self._terminal, self._stdin, self.inward, *self._outputs.values())
        self.layers, self._full, self._terminal, self._stdin, self.inward, self._outputs = None, None, None, None, None, {}
        wire.close_all([fd for fd in left if fd is not None])

    def _release(self) -> None:
        if self._departure is not None:
            self.when_departed(self._departure.process)
        if not self._keeper.done(self._line.number):
            self._cgroup.remove()

    def __enter__(self) -> ProcessGuest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    pass


def _completed(end: Exit, sinks: dict[str, Sink]) -> Completed:
    return Completed(end, sinks["stdout"].kept(), sinks["stderr"].kept() if "stderr" in sinks else b"")
