"""The network of a run: an attachment that starts an egress process, gives it the doors of the guest, and records every flow.

The process starts early and loads while the view is built. It resolves no names: it asks here, and what it asks is judged again, because
it reads bytes of the guest. If it ends before the run does, the network is gone: the kernel closes the doors with it, the program inside
gets "connection refused", and the result says why.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from weakref import WeakMethod, finalize

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.egress import orders
from agent_sandbox.egress.orders import FlowRecord, Orders
from agent_sandbox.engine import trust
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.kernel import wire
from agent_sandbox.policy.hosts import canonical_host
from agent_sandbox.runtime.process.zygote import argv_for, packages

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.ledger.event import Facts
    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.runtime.base import Completed, Confined, Guest, Launch

READY_SECONDS = 60.0  # a guard against a host that hangs
FINISH_SECONDS = 5.0  # that the process may take to report its last flows
MOST_FLOWS = 1000  # of one run, allowed and refused ones each, recorded one by one; then as many hosts with a count
MOST_LOOKUPS = 16  # at once
MOST_ADDRESSES = 32  # of one name
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
_PROGRAM = "agent_sandbox.egress.process"


class Network(Attachment):
    """The network of one run or of a session of turns, as its policy allows it."""

    def __init__(
        self,
        gate: Gate,
        zygote: EgressZygote,
        project: str | None = None,
        *,
        turns: bool = False,
        provisions: Provisions = NO_PROVISIONS,
    ) -> None:
        """With `turns`, the process serves until `release`, and each turn has the flows that ended during it."""
        self._gate, self._zygote, self._project, self._turns = gate, zygote, project, turns
        self._provisions = provisions
        self._rules = gate.policy.network
        self._process: EgressProcess | None = None

    def before(self, launch: Launch) -> Launch:
        """Start the process, and return the launch with doors, and with variables: the certificates to trust, and placeholders."""
        if self._rules.search.off:
            self._gate.note("network.unsearched", {"target": "every host", "allowed": True, "why": "the search of what leaves is off"})
        self._process = EgressProcess(self._gate, self._rules, self._zygote, self._provisions)
        placeholders = {each.name: each.placeholder for each in self._provisions.secrets}
        env = {**launch.env, **dict.fromkeys(trust.VARIABLES, trust.BUNDLE), **placeholders}
        view = trust.trusting(launch.root, self._project, launch.env)
        return replace(launch, network=self._rules.listened, root=view, env=env, on_ready=(*launch.on_ready, self._open))

    def _open(self, guest: Confined) -> None:
        assert self._process is not None
        self._process.open(guest)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add the flows of the run, or of one turn, and a note if the network was lost."""
        if self._process is None:
            return outcome
        if not self._turns:
            self._process.finish()
        flows, notes = self._process.taken()
        return replace(outcome, network=(*outcome.network, *flows), notes=(*outcome.notes, *notes))

    def release(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


class EgressZygote:
    """A loaded egress program, from which the process of each run is forked. Safe to use from many threads, and on both sides of a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_afresh()
        start_afresh = WeakMethod(self._start_afresh)
        os.register_at_fork(after_in_child=lambda: (method := start_afresh()) and method())  # the one that runs belongs to the parent

    def _start_afresh(self) -> None:
        self._control: socket.socket | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def fork(self, provisions: Provisions) -> socket.socket:
        """Return the link to a new egress process, which gets ready meanwhile. Starts the zygote if there is none. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before the process sends its first byte
        with theirs, self._lock:
            try:
                if self._control is None:
                    self._start(provisions)
                try:
                    self._ask(theirs)
                except (BrokenPipeError, ConnectionError):  # somebody killed it
                    self._end()
                    self._start(provisions)
                    self._ask(theirs)
            except BaseException:
                ours.close()
                raise
        return ours

    def _ask(self, link: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"+"], [link.fileno()])

    def _start(self, provisions: Provisions) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me, compiled = os.pidfd_open(os.getpid()), provisions.open_compiled()
        with theirs:
            try:
                self._pid = _spawn(theirs.fileno(), me, trust.system_roots(), compiled)
            except BaseException:
                control.close()
                raise
            finally:
                wire.close_all([me] if compiled is None else [me, compiled])
        self._control = control
        self._dropped = finalize(self, _dismiss, control, self._pid)  # the zygote ends with whoever could use it
        self._dropped.atexit = False  # it ends with this process anyway

    def _end(self) -> None:
        if self._control is not None:
            self._control = None
            self._dropped()

    def close(self, *, leaving: bool = False) -> None:
        """End the zygote; with `leaving`, without waiting for it. The processes of runs go on. The next `fork` starts another."""
        with self._lock:
            if leaving and self._control is not None:
                self._dropped.detach()
                self._control.close()
                self._control = None
            self._end()


def _dismiss(control: socket.socket, pid: int) -> None:
    """End a zygote, and wait for its end."""
    control.close()
    with suppress(ChildProcessError):  # the application may wait for all its children; and in its forks, this is nobody's child
        os.waitpid(pid, 0)


class EgressProcess:
    """One egress process, the thread that serves its messages, and the record of its flows."""

    def __init__(self, gate: Gate, rules: NetworkRules, zygote: EgressZygote, provisions: Provisions = NO_PROVISIONS) -> None:
        """Ask for a process, which then gets ready. Raises `LaunchFailed`."""
        self._gate, self._rules, self._provisions = gate, rules, provisions
        try:
            self._link = zygote.fork(provisions)
        except OSError as error:
            raise LaunchFailed(f"the egress process cannot be started: {error.strerror}", hint="run: agent-sandbox doctor") from error
        self.pid = 0  # known once it has said its first byte
        self._process: int | None = None  # its pidfd
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._lookups = threading.BoundedSemaphore(MOST_LOOKUPS)
        self._flows: dict[object, FlowRecord] = {}
        self._recorded = {False: 0, True: 0}  # by whether it was refused
        self._uncounted = 0
        self._notes: list[str] = []
        self._finishing = False
        self._thread: threading.Thread | None = None

    def open(self, guest: Confined) -> None:
        """Give the process the doors of a guest, and the guest the certificate of the process's authority. Raises `LaunchFailed`."""
        if guest.doors is None:
            raise RuntimeUnavailable("this runtime has no doors", missing=("egress-only",), hint='use runtime="process"')
        try:
            roots = trust.system_roots()
            certificate = self._await_readiness()
            trust.write_trust(guest.doors.trust, roots, certificate)
            given = self._provisions
            what = Orders(self._rules, len(guest.doors.resolvers), given.secrets, given.own, given.tables)
            self._send(what.encoded(), guest.doors.sockets)
        except OSError as error:
            raise LaunchFailed(f"the network could not be opened: {error.strerror or error}", hint="run: agent-sandbox doctor") from error
        finally:
            guest.doors.close()
        if not roots:
            self._notes.append("no certificates of the system were found, so no server can be verified")
        self._thread = threading.Thread(target=self._attend, name="agent-sandbox-network", daemon=True)
        self._thread.start()

    def _await_readiness(self) -> bytes:
        """Return the certificate of the process's authority. The process is confined by then."""
        self._link.settimeout(READY_SECONDS)
        try:
            self.pid = wire.credentials(self._link)
            message, _ = orders.receive(self._link)
        except (EOFError, TimeoutError, ValueError) as error:
            raise LaunchFailed(f"the egress process did not start: {error}", hint="run: agent-sandbox doctor") from error
        self._link.settimeout(None)
        if message["kind"] != "ready":
            why = str(message.get("why", ""))
            hint = "install it: pip install '.[network]'" if "ModuleNotFoundError" in why else "run: agent-sandbox doctor"
            raise LaunchFailed(f"the egress process could not get ready: {why}", hint=hint)
        self._process = os.pidfd_open(self.pid)  # a process that is ready waits for its orders, so this is the one
        return str(message["certificate"]).encode("ascii")

    def narrow(self, rules: NetworkRules) -> None:
        """Judge every request from now on by these rules. Raises OSError if the process has gone."""
        self._rules = rules
        self._send({"kind": "rules", "rules": orders.encode_rules(rules)})

    def taken(self) -> tuple[tuple[FlowRecord, ...], tuple[str, ...]]:
        """Return the flows recorded since the last call, and notes."""
        with self._lock:
            flows, self._flows = self._flows, {}
            notes, self._notes = self._notes, []
            if self._uncounted:
                notes.append(f"{self._uncounted:,} more flows were not recorded one by one")
            self._uncounted = 0
        for flow in flows.values():
            if flow.times > 1:  # the first was recorded when it came
                self._gate.note("network.repeated", {**facts_of(flow), "times": flow.times})
        refused = [flow for flow in flows.values() if flow.refused]
        found = dict.fromkeys(f"found: {each}, to {flow.target}" for flow in flows.values() if not flow.refused for each in flow.findings)
        said = (*(f"refused: {flow.target}: {flow.refused}" for flow in refused[:5]), *tuple(found)[:5])
        return tuple(flows.values()), (*notes, *said)

    def finish(self) -> None:
        """Let the process report its last flows and end."""
        if self._thread is None:
            return
        self._finishing = True
        with suppress(OSError):
            self._send({"kind": "finish"})
        self._thread.join(FINISH_SECONDS)

    def close(self) -> None:
        """End the process, and wait until it has ended. Idempotent."""
        if self._link.fileno() < 0:
            return
        self._finishing = True
        self._end()
        if self._thread is not None:
            self._thread.join()
        self._link.close()  # a process that has not said a word yet ends by that
        if self._process is not None:
            poller = select.poll()
            poller.register(self._process, select.POLLIN)
            poller.poll()
            os.close(self._process)
            self._process = None

    def _end(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        with self._sending:
            orders.send(self._link, message, descriptors)

    def _attend(self) -> None:
        """Serve the messages of the process, until it has gone."""
        why = "the egress process ended"
        try:
            while True:
                message, extra = orders.receive(self._link)
                wire.close_all(extra)
                if self._finishing and message["kind"] == "ended":
                    break
                self._hear(message)
        except EOFError:
            pass
        except OSError as error:
            why = f"the egress process ended: {error}"
        except SandboxError as error:  # what cannot be recorded is not done
            why = f"its flows cannot be recorded: {error.message}"
        except Exception as error:
            why = f"the egress process sent nonsense ({type(error).__name__})"
        self._end()
        if not self._finishing:
            self._lose(why)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "resolve":
            self._look_up(int(message["number"]), str(message["name"]))
        elif message["kind"] == "flow":
            self._keep(FlowRecord.decoded(message))
        elif message["kind"] == "lost":
            with self._lock:
                self._uncounted += int(message["count"])
        elif message["kind"] == "failed":
            raise ConnectionError(str(message.get("why", "")))

    def _lose(self, why: str) -> None:
        with self._lock:
            self._notes.append(f"the network was lost during the run: {why}")
        with suppress(SandboxError):
            self._gate.note("network.lost", {"target": "every host", "allowed": False, "why": why})

    def _keep(self, flow: FlowRecord) -> None:
        """Record a flow. Equal refusals are recorded once, and counted; and so are the flows with one host, once there are very many.

        Refusals do not use up the room of what was allowed: a program can cause any number of them.
        """
        refused = bool(flow.refused)
        with self._lock:
            key: object = (flow.name, flow.port, flow.how, flow.refused, flow.requests, flow.findings) if refused else object()
            if self._recorded[refused] >= MOST_FLOWS and key not in self._flows:
                key, flow = (flow.name, flow.port, flow.how, refused), replace(flow, requests=())
            if (known := self._flows.get(key)) is not None:
                self._flows[key] = replace(
                    known, times=known.times + 1, sent=known.sent + flow.sent, received=known.received + flow.received
                )
                return
            if self._recorded[refused] >= 2 * MOST_FLOWS:
                self._uncounted += 1
                return
            self._recorded[refused] += 1
            self._flows[key] = flow
        self._gate.note("network.flow", facts_of(flow))

    def _look_up(self, number: int, name: str) -> None:
        if not self._lookups.acquire(blocking=False):
            self._answer(number, (), "too many names are looked up at once")
            return
        threading.Thread(target=self._resolve, args=(number, name), name="agent-sandbox-lookup", daemon=True).start()

    def _resolve(self, number: int, name: str) -> None:
        try:
            self._answer(number, *resolved(self._rules, name))
        finally:
            self._lookups.release()

    def _answer(self, number: int, addresses: tuple[str, ...], why: str) -> None:
        with suppress(OSError):  # the process has gone meanwhile
            self._send({"kind": "resolved", "number": number, "addresses": list(addresses), "why": why})


def resolved(rules: NetworkRules, name: str) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a name, and else why there are none. No resolver is asked for a name that the rules do not allow."""
    try:
        if canonical_host(name) != name:
            return (), "it is not in its canonical form"
    except PolicyError as error:
        return (), error.message
    if why := rules.objection(name):
        return (), why
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), f"it cannot be resolved: {error.strerror or error}"
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))[:MOST_ADDRESSES], ""


def facts_of(flow: FlowRecord) -> Facts:
    """Return the facts of a flow for the ledger."""
    facts: dict[str, Any] = {"target": flow.target, "how": flow.how, "allowed": not flow.refused}
    if flow.refused:
        facts["why"] = flow.refused
    more = {key: value for key, value in (("findings", flow.findings), ("secrets", flow.secrets)) if value}
    return {**facts, "sent": flow.sent, "received": flow.received, "requests": flow.requests, **more}


def _spawn(control: int, supervisor: int, roots: bytes, compiled: int | None) -> int:
    """Start our interpreter with the egress program, with these descriptors and a fixed environment. Return its pid."""
    memory = os.memfd_create("roots", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(roots)
        os.lseek(memory, 0, os.SEEK_SET)
        passed = (control, supervisor, memory, *([] if compiled is None else [compiled]))
        kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in passed]  # each onto itself, so that exec does not close it
        nothing = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
        argv = argv_for(_PROGRAM, str(control), str(supervisor), str(memory), "" if compiled is None else str(compiled), packages())
        return os.posix_spawn(sys.executable, argv, _ENVIRONMENT, file_actions=[*kept, *nothing], setsid=True)
    finally:
        os.close(memory)
