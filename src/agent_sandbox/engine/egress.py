"""The network of a run: an attachment that starts an egress process, gives it the doors of the guest, and records every flow.

The process starts early and loads while the view is built. It gets its orders and the doors when something arrives at one of them: a run
that uses no network costs it nothing, and leaves it to the next run. It resolves no names: it asks here, and what it asks is judged again,
because it reads bytes of the guest. If it ends before the run does, the network is gone: the doors close with it, the program inside gets
"connection refused", and the result says why.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.egress import frames, orders
from agent_sandbox.egress.orders import NO_EXCHANGES, ExchangeOrders, FlowRecord, Orders, RequestMade
from agent_sandbox.engine import trust
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.egress_zygote import EgressZygote
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.engine.questions import Questions, RequestAnswer
from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.doors import OWN_ADDRESS, Doors, proxy_port
from agent_sandbox.policy.hosts import canonical_host
from agent_sandbox.runtime.base import Argv, Script

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.exchange_records import ExchangeFiles, ExchangeOptions
    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.network_control import NetworkControl
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.ledger.event import Facts
    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.runtime.base import Completed, Confined, Guest, Hosted, Launch

SEND_SECONDS = 30  # that the process may take to read what it is sent
FINISH_SECONDS = 5.0  # that the process may take to report its last flows
RECORD_SECONDS = 90.0  # that it may take with the last exchanges of a run that is recorded
# The C library gives up a name after ten seconds by default. Ours always answers, but it may only be starting, on a machine that is busy.
RESOLVER = {"RES_OPTIONS": "timeout:30"}
MOST_FLOWS = 1000  # of one run, allowed and refused ones each, recorded one by one; then as many hosts with a count
MOST_REQUESTS = 2000  # of one run, different ones, that are told one by one
MOST_LOOKUPS = 16  # at once
MOST_ADDRESSES = 32  # of one name
PROXY_VARIABLES = frozenset(  # in lower case; programs read them in either
    (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "ftp_proxy",
        "pip_proxy",
        "npm_config_proxy",
        "npm_config_https_proxy",
        "npm_config_http_proxy",
    )
)


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
        control: NetworkControl | None = None,
        exchanges: ExchangeOptions | None = None,
        tell: bool = False,
    ) -> None:
        """With `turns`, the process serves until `release`, and each turn has the flows that ended during it.

        `control` changes the rules in force while the run goes on.
        With `tell`, the outcome has each request.
        """
        self._gate, self._zygote, self._project, self._turns = gate, zygote, project, turns
        self._provisions, self._control, self._wanted = provisions, control, exchanges
        self._exchanges: ExchangeFiles | None = None
        self._tell = tell
        self._rules = gate.policy.network
        self._process: EgressProcess | None = None

    def before(self, launch: Launch) -> Launch:
        """Start the process, and return the launch with doors, and with variables: the certificates to trust, and placeholders."""
        if self._rules.search.off:
            self._gate.note("network.unsearched", {"target": "every host", "allowed": True, "why": "the search of what leaves is off"})
        if self._wanted is not None:
            self._exchanges = self._wanted.opened()
            if self._wanted.replay:
                facts: Facts = {
                    "target": self._wanted.replay,
                    "allowed": True,
                    "why": "every answer comes from this record; nothing leaves",
                }
                self._gate.note("network.replayed", facts)
        try:
            orders = self._exchanges.orders if self._exchanges is not None else NO_EXCHANGES
            orders = replace(orders, tell=self._tell, hold=self._wanted is not None and self._wanted.hold)
            self._process = EgressProcess(self._gate, self._rules, self._zygote, self._provisions, self._exchanges, orders)
            self._process.questions.program = _described(launch.program)
        except BaseException:
            self._close_exchanges()
            raise
        listened = self._rules.listened
        if self._control is not None:
            self._control.attach(self._process, self._rules)
            listened = self._control.in_force(self._rules).listened
        placeholders = {each.name: each.placeholder for each in self._provisions.secrets}
        env = {**RESOLVER, **proxied(launch.env, self._rules.listened), **dict.fromkeys(trust.VARIABLES, trust.BUNDLE), **placeholders}
        view = trust.trusting(launch.root, self._project, launch.env, self._provisions.files)
        return replace(launch, network=listened, root=view, env=env, on_ready=(*launch.on_ready, self._open))

    def _open(self, guest: Confined) -> None:
        assert self._process is not None
        if self._control is not None:
            self._control.begin()
        self._process.open(guest)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add the flows of the run, or of one turn, and a note if the network was lost."""
        if self._process is None:
            return outcome
        if not self._turns:
            self._process.finish()
        if self._control is not None:
            self._control.record_expiry()
        flows, notes = self._process.taken()
        if self._exchanges is not None and not self._turns:
            notes = (*notes, *self._exchanges.finish())
        requests, untold = self._process.told()
        told = replace(outcome, requests=(*outcome.requests, *requests), untold=outcome.untold + untold)
        return replace(told, network=(*outcome.network, *flows), notes=(*outcome.notes, *notes))

    def release(self) -> None:
        """End the process. The record of a session of turns is put in its place."""
        if self._process is not None:
            if self._control is not None:
                self._control.detach(self._process)
            if self._exchanges is not None and self._turns:
                self._process.finish()
            self._process.close()
            self._process = None
        if self._exchanges is not None and self._turns:
            self._exchanges.finish()
        self._close_exchanges()

    def _close_exchanges(self) -> None:
        if self._exchanges is not None:
            self._exchanges.close()
            self._exchanges = None


class EgressProcess:
    """One egress process, the thread that serves its messages, and the record of its flows."""

    def __init__(
        self,
        gate: Gate,
        rules: NetworkRules,
        zygote: EgressZygote,
        provisions: Provisions = NO_PROVISIONS,
        exchanges: ExchangeFiles | None = None,
        exchange_orders: ExchangeOrders = NO_EXCHANGES,
    ) -> None:
        """Ask for a process, which then gets ready. Raises `LaunchFailed`."""
        self._gate, self._rules, self._provisions, self._zygote = gate, rules, provisions, zygote
        self._exchanges, self._exchange_orders = exchanges, exchange_orders
        self._requests: dict[RequestMade, int] = {}
        self._untold = 0
        try:
            self._fork = zygote.fork(provisions)
        except OSError as error:
            raise LaunchFailed(f"the egress process cannot be started: {error.strerror}", hint="run: agent-sandbox doctor") from error
        self._link = self._fork.link
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._doors: Doors | None = None  # until the process has its orders
        self._ordered = self._settled = self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._obeying = threading.Condition()
        self._revision = self._obeyed = 0  # of the rules: the last that was sent, and the last that is in force there
        self._gone = False
        self._lookups = threading.BoundedSemaphore(MOST_LOOKUPS)
        self._flows: dict[object, FlowRecord] = {}
        self._recorded = {False: 0, True: 0}  # by whether it was refused
        self._uncounted = 0
        self._notes: list[str] = []
        self._finishing = False
        self._thread: threading.Thread | None = None
        self.questions = Questions(gate, self._reply, run=os.urandom(4).hex())

    @property
    def pid(self) -> int:
        """The number of the process, known once it is ready."""
        return self._fork.pid

    def open(self, guest: Confined) -> None:
        """Watch the doors of a guest, and give the guest the certificate of the process's authority. Raises `LaunchFailed`."""
        if guest.doors is None:
            raise RuntimeUnavailable("this runtime has no doors", missing=("egress-only",), hint='use runtime="process"')
        self._doors = guest.doors
        try:
            roots = trust.system_roots()
            self._fork.await_authority()
            trust.write_trust(guest.doors.trust, roots, self._fork.certificate, self._provisions.files)
        except OSError as error:
            raise LaunchFailed(f"the network could not be opened: {error.strerror or error}", hint="run: agent-sandbox doctor") from error
        if not roots:
            self._notes.append("no certificates of the system were found, so no server can be verified")
        self._thread = threading.Thread(target=self._attend, name="agent-sandbox-network", daemon=True)
        self._thread.start()

    def _await_arrival(self, doors: Doors) -> None:
        """Wait until something arrives at a door, and give the process its orders; or until the run has ended.

        Raises `LaunchFailed`, OSError, EOFError.
        """
        poller = select.poll()
        for each in (*doors.sockets, self._wake):
            poller.register(each, select.POLLIN)
        poller.register(self._link, select.POLLRDHUP)
        if self._link.fileno() in dict(poller.poll()):
            with self._sending:
                self._fork.await_readiness()  # which it may have failed to reach, and then says why
            raise EOFError("it has gone")
        with self._sending:
            if not self._finishing:
                self._order()

    def _order(self) -> None:
        """Give the process its orders and the doors, unless it has them or the doors are shut. `_sending` is held.

        It is confined by then. Raises `LaunchFailed` and OSError.
        """
        if self._doors is None:
            return
        self._fork.await_readiness()
        given, doors = self._provisions, self._doors
        secrets = (*given.secrets, *given.indexes)
        what = Orders(self._rules, len(doors.resolvers), secrets, given.own, given.tables, given.roots, self._exchange_orders)
        self._ordered = True  # also if only a part of it arrives
        try:
            frames.send(self._link, what.encoded(), doors.sockets)
        finally:
            self._shut()

    def _shut(self) -> None:
        """Close our copies of the doors. `_sending` is held, or nobody else is there."""
        if self._doors is not None:
            self._doors.close()
            self._doors = None

    def obey(self, rules: NetworkRules) -> None:
        """Judge every request from now on by these rules, and end the flows that they forbid. Raises OSError if the process has gone.

        Returns once they are in force there: what the program inside does afterwards is judged by them. They may be wider than before; a
        port at which the run has no door stays closed.
        """
        with self._sending:  # the last rules here are the last there
            self._rules = rules
            if not self._ordered:  # they go with the orders
                return
            self._revision += 1
            revision = self._revision
            frames.send(self._link, {"kind": "rules", "rules": orders.encode_rules(rules), "revision": revision})
        with self._obeying:
            if not self._obeying.wait_for(lambda: self._obeyed >= revision or self._gone, SEND_SECONDS):
                self._end()  # it would go on under rules that hold no longer

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

    def told(self) -> tuple[tuple[RequestMade, ...], int]:
        """Return the requests that were told since the last call, and how many more were made."""
        with self._lock:
            requests, self._requests = self._requests, {}
            untold, self._untold = self._untold, 0
        return tuple(replace(each, times=times) for each, times in requests.items()), untold

    def finish(self) -> None:
        """Let the process report its last flows and end. One that had nothing to do is not asked. The guest's processes have gone."""
        if self._thread is None:
            return
        self.questions.close()
        with self._sending:
            self._finishing = True
            try:
                if self._doors is not None and _waits_at(self._doors):  # what the guest did last is recorded too
                    self._order()
            except (OSError, LaunchFailed) as error:
                self._end()
                self._lose(error.message if isinstance(error, LaunchFailed) else f"the egress process ended: {error}")
            self._shut()
        os.eventfd_write(self._wake, 1)
        if self._ordered:
            with suppress(OSError):
                self._send({"kind": "finish"})
            self._thread.join(RECORD_SECONDS if self._exchanges and self._exchanges.writer else FINISH_SECONDS)

    def close(self) -> None:
        """End the process, and wait until it has ended, or has said that its flows have. Without orders, it is left to the next run.

        Idempotent.
        """
        if self._closed:
            return
        self._closed = self._finishing = True
        self.questions.close()
        if self._ordered:
            self._end()  # and with it whoever waits for it to read what it was sent
        with self._sending:
            self._shut()  # from now on it gets no orders
        if self._ordered:
            self._end()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)
        if not self._ordered:
            self._zygote.take_back(self._fork)
            return
        if self._settled:
            self._zygote.let_go(self._fork)
        else:
            self._fork.ended()
        self._zygote.keep_ready()

    def _end(self) -> None:
        self._fork.end()

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. A process that takes none any more is ended, so that nobody waits for it. Raises OSError."""
        with self._sending:
            try:
                frames.send(self._link, message, descriptors)
            except BlockingIOError:
                self._end()
                raise

    def _attend(self) -> None:
        """Wait until the network is used, then serve the messages of the process, until it has gone."""
        why = "the egress process ended"
        try:
            if (doors := self._doors) is not None:
                self._await_arrival(doors)
            while self._ordered:
                message, extra = frames.receive(self._link)
                wire.close_all(extra)
                if self._finishing and message["kind"] == "ended":
                    self._settled = True
                    break
                self._hear(message)
        except EOFError:
            pass
        except OSError as error:
            why = f"the egress process ended: {error}"
        except LaunchFailed as error:
            why = error.message
        except SandboxError as error:  # what cannot be recorded is not done
            why = f"its flows cannot be recorded: {error.message}"
        except Exception as error:
            why = f"the egress process sent nonsense ({type(error).__name__})"
        if self._ordered:
            self._end()
        try:
            if not (self._settled or self._closed) and (self._ordered or not self._finishing):
                self._lose(why)  # before the program inside can notice
        finally:
            with self._sending:
                self._shut()
            with self._obeying:
                self._gone = True
                self._obeying.notify_all()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "resolve":
            self._look_up(int(message["number"]), str(message["name"]))
        elif message["kind"] == "flow":
            self._keep(FlowRecord.decoded(message))
        elif message["kind"] == "ask":
            number, action, again = orders.decode_question(message)
            self.questions.hear(self._rules.at(time.monotonic()).declarable(), number, action, again=again)
        elif message["kind"] == "obeyed":
            with self._obeying:
                self._obeyed = int(message["revision"])
                self._obeying.notify_all()
        elif message["kind"] == "withdraw":
            self.questions.withdraw(int(message["number"]))
        elif message["kind"] == "request" and self._exchange_orders.tell:
            self._count(RequestMade.decoded(message))
        elif message["kind"] == "lost":
            with self._lock:
                self._uncounted += int(message["count"])
        elif message["kind"] in ("recorded", "unrecorded", "replay"):
            self._exchange(message)
        elif message["kind"] == "failed":
            raise ConnectionError(str(message.get("why", "")))

    def _count(self, made: RequestMade) -> None:
        with self._lock:
            if made in self._requests or len(self._requests) < MOST_REQUESTS:
                self._requests[made] = self._requests.get(made, 0) + 1
            else:
                self._untold += 1

    def _exchange(self, message: dict[str, Any]) -> None:
        """Write down a piece of an exchange, or look one up. Raises ValueError for what this run has no record for."""
        writer = self._exchanges.writer if self._exchanges else None
        replay = self._exchanges.replay if self._exchanges else None
        if message["kind"] == "replay" and replay is not None:
            self._send({"kind": "replayed", "number": int(message["number"]), "exchange": replay.answer(str(message["key"]))})
        elif message["kind"] == "recorded" and writer is not None:
            writer.take(message)
        elif message["kind"] == "unrecorded" and writer is not None:
            writer.skip(str(message["why"]))
        else:
            raise ValueError("it was told to record nothing")

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
            if self._exchanges is not None and self._exchanges.replay is not None:
                self._answer(number, (), "this run is answered from a record")
            else:
                rules = self._rules.at(time.monotonic()).declarable()
                self._answer(number, *resolved(rules, name, self.questions.may_resolve))
        finally:
            self._lookups.release()

    def _reply(self, number: int, answer: RequestAnswer) -> None:
        with suppress(OSError):  # the process has gone meanwhile
            self._send({"kind": "answered", "number": number, **vars(answer)})

    def _answer(self, number: int, addresses: tuple[str, ...], why: str) -> None:
        with suppress(OSError):  # the process has gone meanwhile
            self._send({"kind": "resolved", "number": number, "addresses": list(addresses), "why": why})


def _waits_at(doors: Doors) -> bool:
    """Return whether a connection or a query waits at a door."""
    poller = select.poll()
    for each in doors.sockets:
        poller.register(each, select.POLLIN)
    return bool(poller.poll(0))


def proxied(env: Mapping[str, str], ports: tuple[int, ...]) -> dict[str, str]:
    """Return variables of which those that name a proxy name ours, in a network of these ports.

    Programs need no proxy here, and the one of the caller could not be reached.
    """
    ours = f"http://{OWN_ADDRESS}:{proxy_port(ports)}"
    return {name: ours if name.lower() in PROXY_VARIABLES and value else value for name, value in env.items()}


def resolved(rules: NetworkRules, name: str, agreed: Callable[[str], bool] = lambda name: False) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a name, and else why there are none. No resolver is asked for a name that the rules do not allow.

    `agreed` returns whether a person has agreed to a name that the rules ask for.
    """
    try:
        if canonical_host(name) != name:
            return (), "it is not in its canonical form"
    except PolicyError as error:
        return (), error.message
    if (why := rules.objection(name)) and not (rules.asks_for(name) and agreed(name)):
        return (), why
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), f"it cannot be resolved: {error.strerror or error}"
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))[:MOST_ADDRESSES], ""


def _described(program: Argv | Hosted | Script) -> str:
    """Return the program of a run for whoever is asked about its network."""
    from shlex import join  # few runs have a network

    return join(program.words) if isinstance(program, Argv | Script) else f"code of {type(program).__name__.removesuffix('Code')}"


def facts_of(flow: FlowRecord) -> Facts:
    """Return the facts of a flow for the ledger."""
    facts: dict[str, Any] = {"target": flow.target, "how": flow.how, "allowed": not flow.refused}
    if flow.refused:
        facts["why"] = flow.refused
    more = {key: value for key, value in (("findings", flow.findings), ("secrets", flow.secrets)) if value}
    return {**facts, "sent": flow.sent, "received": flow.received, "requests": flow.requests, **more}
