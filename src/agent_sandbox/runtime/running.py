"""One run, as its supervisor sees it: a guest that waits for its program, gets it, is pumped, and ends.

Everything that crosses to the guest's side is here: the request (paths and limits) to init, the program to the guest alone, orders to init,
and its reports back. So is what takes the supervisor's own power: init is moved into its cgroup and, as root, given its ids.
"""

from __future__ import annotations

import math
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.errors import LaunchFailed
from agent_sandbox.kernel import cgroups, channel, ids, mounts
from agent_sandbox.kernel.protocol import GO, HERE, JAVASCRIPT, MAPPED, ORDER, PYTHON, READY, SCRIPTS, SIGNAL
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import DEVNULL, Argv, Completed, Exit, Hosted, JavaScriptCode, Launch, PythonCode, Reason, Script, Usage
from agent_sandbox.runtime.pump import Poller, Sink, Source
from agent_sandbox.runtime.zygote import Line, Zygote
from agent_sandbox.values import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from typing import Any

READY_SECONDS = 20.0  # far above the few milliseconds it takes; a host under heavy load must not fail runs
TICK = 0.05  # seconds between looks at the processor time of a cgroup, and at the layers
GRACE_SECONDS = 5.0  # how long after its own deadline init may take before we stop believing in it
SCRATCH = ("/tmp", "/run")  # writable in every view: private to the run
DEVICES = ("/dev", "/dev/shm")  # the same, and at the top even where the program's root is not


class ProcessGuest:
    """One run, in two steps: `prepare` makes a confined guest that waits, `begin` gives it its program. Used once.

    `layers` is a descriptor of its upper layers, readable until `close`; None when the launch lets nothing be written.
    """

    def __init__(self, launch: Launch, keeper: Zygote) -> None:
        self.launch = launch
        self.notes: tuple[str, ...] = ()
        self.layers: int | None = None
        self._init = 0  # its pid; not another's before we are done with the run
        self._cgroup = cgroups.Cgroup()
        self.refused = ""  # why the program could not be started inside the view: not found, not executable, no such directory
        self._refused: int | None = None  # and the exit code for that
        self._messages: dict[str, dict[str, Any]] = {}
        self._terminal: int | None = None
        self._killed = ""
        self._waker: int | None = None
        self._full: int | None = None  # where the keeper says that the layers have outgrown their limit
        self._stdin: int | None = None
        self._outputs: dict[str, int] = {}
        self._began = time.monotonic()
        self.when_closed: Callable[[], None] = _nothing
        self._keeper = keeper
        self._line = self._begin_at(keeper)
        self._control, self._payload = self._line.control, self._line.payload

    def _begin_at(self, keeper: Zygote) -> Line:
        theirs: list[int] = []
        try:
            if not self.launch.terminal:
                self._make_pipes(theirs)
            return keeper.start(theirs)
        except BaseException as error:
            channel.close_all([*self._outputs.values(), *([] if self._stdin is None else [self._stdin])])
            if isinstance(error, OSError):
                why = error.strerror if keeper.alive else "the zygote has gone"
                raise LaunchFailed(f"the sandbox could not be built: {why}", hint="run: agent-sandbox doctor") from error
            raise
        finally:
            channel.close_all(theirs)

    def prepare(self) -> None:
        """Have the guest made and wait until every guarantee is in force. It then waits for its program, and ends itself if none comes."""
        try:
            self._make_cgroup()
            if watched := _watched(self.launch):
                self._full = self._keeper.watch(self._line.number, *watched)
            self._control.settimeout(READY_SECONDS)
            self._payload.settimeout(READY_SECONDS)
            channel.send(self._control, {**request_for(self.launch), "enforced": self._cgroup.enforces})
            self._await_readiness()
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
        )
        if Guarantee.MEMORY_HARD in self.launch.requires and "memory" not in self._cgroup.enforces:
            why = self._cgroup.missing.get("memory", "no limit was given")
            raise LaunchFailed(f"a hard memory limit was asked for, and cannot be set: {why}", hint="run: agent-sandbox doctor")

    @property
    def waiting(self) -> bool:
        """Whether it is still there: nothing is said on the control socket before it has a program, so anything to read means its end."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        return not poller.poll(0)

    def begin(self, launch: Launch) -> None:
        """Start the clock and hand over the program. `launch` is built for the same view and limits, wall time aside."""
        self.launch = launch
        self._began = time.monotonic()
        wall = launch.limits.wall_seconds
        try:
            # When the other side has gone it was ended meanwhile, by a limit or by us, and its exit says which. Any other failure leaves a
            # guest that waits for its program, or runs without its clock.
            with suppress(ConnectionError):
                self._hand_over()
                self._control.sendall(ORDER.pack(GO, math.inf if wall is None else wall))
        except OSError as error:
            raise LaunchFailed(f"the program could not be handed over: {error.strerror or error}", hint="try again") from error

    def _make_pipes(self, theirs: list[int]) -> None:
        """Make the guest's three streams. Its ends go into `theirs` one by one, to be closed even if we run out of descriptors."""
        if self.launch.stdin == DEVNULL:
            theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        else:
            reading, self._stdin = os.pipe2(os.O_CLOEXEC)
            theirs.append(reading)
        for name in ("stdout", "stderr"):
            self._outputs[name], writing = os.pipe2(os.O_CLOEXEC)
            theirs.append(writing)
        if os.geteuid() == 0:
            for fd in theirs:
                # A guest that opens /dev/stdin or /dev/stderr opens its pipe anew, and only the owner may: its own root, not the machine's.
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    with suppress(OSError):  # where these ids do not exist the launch fails anyway, and says so better
                        os.fchown(fd, ids.FIRST_ID, ids.FIRST_ID)

    def _await_readiness(self) -> None:
        if self._init_is_there():
            self._init = channel.credentials(self._control)
            self._cgroup.join(self._init)  # while it builds the view
        if self._init_is_there():
            self._control.recv(1)
            if os.geteuid() == 0:  # only we may write the map; rootless init writes its own
                whole = f"0 {ids.FIRST_ID} {ids.IDS}"
                ids.write_maps(self._init, uid_map=whole, gid_map=whole, deny_setgroups=False)
            self._control.send(MAPPED)
        message, descriptors = channel.receive(self._control)
        if message["kind"] == "failed":
            raise LaunchFailed(f"the sandbox could not be built: {message['why']}", hint="run: agent-sandbox doctor")
        if self.launch.writable:
            self.layers = descriptors.pop(0)
        self._terminal = descriptors.pop() if descriptors else None
        self.notes = tuple(message["notes"])
        answer = self._payload.recv(4096)
        if answer != READY:
            why = answer.decode(errors="replace") or "it ended before it was ready"
            raise LaunchFailed(f"the guest could not be confined: {why}", hint="run: agent-sandbox doctor")
        self._control.settimeout(None)

    def _init_is_there(self) -> bool:
        """Wait for init. When its byte does not come, what comes instead is a message that says what is wrong, or nothing at all."""
        return self._control.recv(1, socket.MSG_PEEK) == HERE

    def _hand_over(self) -> None:
        """Send the program. An empty answer will say that it has started, anything else why it could not."""
        program = self.launch.program
        message: dict[str, Any] = {"cwd": self.launch.cwd, "env": dict(self.launch.env)}
        match program:
            case Argv(words=words):
                message["argv"] = list(words)
            case Script(words=words, source=source, name=name, argv=arguments):
                message.update(argv=[*words, f"{SCRIPTS}/{name}", *arguments], file=name, source=source)
            case PythonCode(source=source, argv=arguments):
                message.update(file=PYTHON, source=source, arguments=list(arguments))
            case JavaScriptCode(source=source, argv=arguments):
                message.update(file=JAVASCRIPT, source=source, arguments=list(arguments))
            case _:
                assert_never(program)
        channel.send(self._payload, message)

    def _take_answer(self) -> None:
        with suppress(OSError):  # nothing has come: it was ended before it could answer
            self._payload.settimeout(0)
            answer = self._payload.recv(4096)
            if answer:
                code, _, why = answer.decode(errors="replace").partition(" ")
                self._refused = int(code) if code.isdigit() else 126
                self.refused = why or "it could not be started"

    @property
    def init(self) -> int:
        """The pid of its init, for whoever has to look into its namespaces while it runs."""
        return self._init

    @property
    def terminal(self) -> int | None:
        """The master side of the guest's terminal, to resize it."""
        return self._terminal

    def wake_on(self, fd: int) -> None:
        """Have `wait` also watch a non-blocking descriptor, the far end of `signal.set_wakeup_fd`, and read away what it holds.

        Python runs signal handlers between its own steps: one that comes just before a call that waits would be noticed only at its end.
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
        try:
            self._control.shutdown(socket.SHUT_WR)  # init sees the end of its orders, and ends everything; its report still reaches us
        except OSError:
            return

    def interrupt(self, number: int) -> None:
        """Forward a signal to the guest's main program and its process group."""
        try:
            self._control.send(ORDER.pack(SIGNAL, number))
        except OSError:
            return

    def wait(self) -> Completed:
        """Pump until nothing of the guest lives, then say how it ended. What may remain for an instant is our own clean-up."""
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
        stdout = sinks["stdout"]
        stderr = sinks.get("stderr")
        return Completed(self._exit(sinks), stdout.kept(), stderr.kept() if stderr else b"")

    def _pump(self, sinks: dict[str, Sink], poller: Poller) -> None:
        wall = self.launch.limits.wall_seconds
        deadline = self._began + wall + GRACE_SECONDS if wall is not None else None
        # Init watches what it can see; a cgroup also counts what lived too shortly to be seen. Where there is none its answer is 0.
        cpu = self.launch.limits.cpu_seconds
        used_before = self._cgroup.cpu_seconds() if cpu is not None else 0.0
        look_at = 0.0
        control = self._control.fileno()
        poller.add(control, self._take_message)
        for sink in sinks.values():
            poller.add(sink.fd, sink.take)
        if self._waker is not None:
            poller.add(self._waker, self._woken)
        look = self.launch.on_tick if self.layers is not None else None
        while control in poller and "exit" not in self._messages:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if cpu is not None or look is not None:
                timeout = TICK if timeout is None else min(timeout, TICK)
            if look is not None and self.layers is not None and time.monotonic() >= look_at:
                look(self.layers)
                look_at = time.monotonic() + TICK
            anything = poller.wait(timeout)
            if cpu is not None and self._cgroup.cpu_seconds() - used_before > cpu:
                self._end("cpu-limit")
            if not anything and deadline is not None and time.monotonic() >= deadline:
                self._end("timed-out")
                deadline = None
            if any(sink.overflowing for sink in sinks.values()):
                self._end("output-limit")
        if "exit" not in self._messages:
            self._await_the_end_of_init()
        self._take_answer()
        for sink in sinks.values():
            sink.drain()  # every writer has ended: what is in the pipe is all there will be

    def _await_the_end_of_init(self) -> None:
        """It was killed, and could not say that nothing of the guest lives; when it has gone, that is so. The kernel sees to it."""
        if not self._init:
            return
        try:
            handle = os.pidfd_open(self._init)
        except OSError:  # gone altogether
            return
        try:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll(GRACE_SECONDS * 1000)
        finally:
            os.close(handle)

    def _take_message(self) -> bool:
        try:
            message, descriptors = channel.receive(self._control)
        except (EOFError, OSError):
            return False
        channel.close_all(descriptors)
        self._messages[message["kind"]] = message
        return True

    def _exit(self, sinks: dict[str, Sink]) -> Exit:
        ended = self._messages.get("exit")  # from init, unless it was killed itself
        if "failed" in self._messages:
            raise LaunchFailed(f"the sandbox failed while it ran: {self._messages['failed']['why']}", hint="please report this")
        used = self._cgroup.usage()
        full = self._outgrown()
        hit = [*(ended["hit"] if ended else ()), *(["disk"] if full else [])]
        hit += sorted(used.hit.difference(hit))
        if any(sink.cut for sink in sinks.values()):
            hit.append("output")
        status = ended["status"] if ended else 9
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = 128 + number if number is not None else os.WEXITSTATUS(status)
        reason = Reason(ended["reason"]) if ended else Reason.KILLED
        if reason is Reason.EXITED and number is not None:
            reason = Reason.SIGNALLED
        if used.oom_kills and (number == 9 or not ended) and reason in (Reason.SIGNALLED, Reason.KILLED):
            reason = Reason.OUT_OF_MEMORY
        if full:
            reason = Reason.DISK_LIMIT
        if reason is Reason.KILLED and self._killed and self._killed != "killed":
            reason = Reason(self._killed)
        if reason is Reason.CPU_LIMIT and "cpu" not in hit:
            hit.append("cpu")
        if reason is Reason.OUT_OF_MEMORY and "memory" not in hit:
            hit.append("memory")
        usage = Usage(
            # Init knows best when it ended the run; but one that ends by itself may do so before init has heard that it began.
            wall_seconds=ended["wall"] if ended and reason is Reason.TIMED_OUT else time.monotonic() - self._began,
            cpu_seconds=used.cpu_seconds or (ended["cpu"] if ended else 0.0),
            peak_memory_bytes=used.peak_memory_bytes or (ended["memory"] if ended else 0),
        )
        if self._refused is not None and reason is Reason.EXITED:
            code = self._refused
        return Exit(code, reason, number, tuple(hit), usage)

    def _outgrown(self) -> bool:
        """Whether the keeper has ended the run because its layers hold more than they may."""
        if self._full is None:
            return False
        try:
            return os.read(self._full, 1) == b"f"
        except OSError:  # nothing was said
            return False

    def close(self) -> None:
        """Kill it if it runs, wait until it is gone, and free what it holds. Idempotent."""
        if self._control.fileno() < 0:
            return
        if "exit" not in self._messages:
            self._end("killed")
            self._control.settimeout(GRACE_SECONDS)
            with suppress(TimeoutError):
                while "exit" not in self._messages and self._take_message():
                    continue
            if "exit" not in self._messages:
                self._await_the_end_of_init()
        self._line.close()
        left = [fd for fd in (self.layers, self._full, self._terminal, self._stdin, *self._outputs.values()) if fd is not None]
        self.layers, self._full, self._terminal, self._stdin, self._outputs = None, None, None, None, {}
        channel.close_all(left)
        if not self._keeper.done(self._line.number):
            self._cgroup.remove()
        self.when_closed()

    def __enter__(self) -> ProcessGuest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    pass


def request_for(launch: Launch) -> dict[str, Any]:
    """What init is told: paths, limits and permissions, never code, environment or input."""
    limits = launch.limits
    native = not isinstance(launch.program, Hosted)
    return {
        "plan": mounts.encode(launch.root),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "processes": None if limits.processes is None else limits.processes + 1,  # init is one of them, and not the guest's
        "open_files": limits.open_files,
        "sized": not isinstance(launch.root.layers, mounts.OnDisk),
        "in_memory": isinstance(launch.root.layers, mounts.ThrowAway),
        "file_bytes": max((value for value in (limits.disk_bytes, limits.memory_bytes) if value is not None), default=None),
        "may_fork": launch.processes,
        "may_exec": launch.processes or native,
        "system": launch.system,
        "python": not native,
        "readable": launch.writable,  # whether anybody will ask what was written
        "farewell": launch.farewell,
        "scratch": None if launch.writable else [*(launch.beneath + path for path in SCRATCH), *DEVICES],
        "tmp": f"{launch.beneath}/tmp",
        "executables": None if launch.processes or not native else list(launch.executables),
        "terminal": (launch.terminal.rows, launch.terminal.columns) if launch.terminal else None,
    }


def _watched(launch: Launch) -> tuple[str, int] | None:
    """Layers that the keeper has to measure, and what they may hold: those on disk have no size of their own."""
    if isinstance(launch.root.layers, mounts.OnDisk) and launch.limits.disk_bytes is not None:
        return launch.root.layers.path, launch.limits.disk_bytes
    return None
