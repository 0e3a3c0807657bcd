"""Published ports of a run: an attachment that listens on the machine's loopback and leads requests to servers of the sandbox.

The ports are taken before the guest exists, so that one in use refuses the run. A thread of this process serves them (`egress.inbound`)
from the moment the guest is confined until it ends. It parses bytes of the guest strictly and within bounds, and does nothing with them
but pass them on, which is why it needs no process of its own, and no package beyond Python's.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.egress.inbound import Inbound
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.policy.publications import HOST, Publication

if TYPE_CHECKING:
    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.ledger.event import Facts
    from agent_sandbox.runtime.base import Completed, Confined, Guest, Launch

MOST_REASONS = 100  # for which requests were turned away, recorded one by one
_SHOWN_REASONS = 5
_BACKLOG = 128


@dataclass(frozen=True)
class PublishedRecord:
    """How a published port was used: requests that reached the sandbox, requests that were turned away, and bytes into it and out of it."""

    port: int
    inner: int
    requests: int = 0
    turned_away: int = 0
    received: int = 0
    sent: int = 0


class PublishedPorts(Attachment):
    """The published ports of one run or of a session of turns."""

    def __init__(self, gate: Gate, publications: tuple[Publication, ...], announce: Callable[[Publication], None], *, turns: bool) -> None:
        """`announce` is called when a port is open. With `turns`, the ports stay open until `release`."""
        self._gate, self._publications, self._announce, self._turns = gate, publications, announce, turns
        self._listeners: list[socket.socket] = []
        self._service: InboundService | None = None

    def before(self, launch: Launch) -> Launch:
        """Take the ports, and return the launch with a way in. Raises `PolicyError` for a port that is in use."""
        try:
            for each in self._publications:
                self._listeners.append(_listen(each))
        except BaseException:
            self._close_listeners()
            raise
        return replace(launch, inward=True, on_ready=(*launch.on_ready, self._open))

    def _open(self, guest: Confined) -> None:
        if guest.inward is None:
            raise RuntimeUnavailable("this runtime has no way in", missing=("inward",), hint='use runtime="process"')
        with ExitStack() as undone:
            link = undone.enter_context(socket.socket(fileno=guest.inward))
            for each in self._publications:
                self._gate.note("network.published", {"target": each.address, "allowed": True, "port": each.inner})
            self._service, self._listeners = InboundService(self._gate, self._publications, self._listeners, link), []
            undone.pop_all()
        for each in self._publications:
            self._announce(each)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add how the ports were used. After a single run they are closed."""
        if self._service is None:
            return outcome
        if not self._turns:
            self._service.close()
        records, notes = self._service.taken()
        return replace(outcome, published=(*outcome.published, *records), notes=(*outcome.notes, *notes))

    def release(self) -> None:
        """Close the ports."""
        self._close_listeners()
        if self._service is not None:
            self._service.close()
            self._service = None

    def _close_listeners(self) -> None:
        for each in self._listeners:
            each.close()
        self._listeners = []


class InboundService:
    """The thread that serves published ports, and the record of their use."""

    def __init__(self, gate: Gate, publications: tuple[Publication, ...], listeners: list[socket.socket], link: socket.socket) -> None:
        self._gate, self._publications = gate, publications
        self._inbound = Inbound(publications, self._hear)
        self._lock = threading.Lock()
        self._reasons: dict[tuple[Publication, str], int] = {}
        self._told: dict[Publication, PublishedRecord] = {}
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        serving = self._inbound.serve(listeners, link, self._stop)
        self._thread = threading.Thread(target=self._run, args=(serving,), name="agent-sandbox-published", daemon=True)
        self._thread.start()

    def _run(self, serving: Coroutine[None, None, None]) -> None:
        try:
            self._loop.run_until_complete(serving)
        finally:
            self._loop.close()

    def _hear(self, publication: Publication, why: str) -> None:
        """Record why a request was turned away: equal reasons once, and counted."""
        with self._lock:
            key = (publication, why)
            new = key not in self._reasons
            if new and len(self._reasons) >= MOST_REASONS:
                return
            self._reasons[key] = self._reasons.get(key, 0) + 1
        if new:
            try:
                self._gate.note("network.turned-away", {"target": publication.address, "allowed": False, "why": why})
            except SandboxError:  # what cannot be recorded is not done
                self._stop.set()

    def taken(self) -> tuple[tuple[PublishedRecord, ...], tuple[str, ...]]:
        """Return how the ports were used since the last call, and notes."""
        records = []
        for each in self._publications:
            visits, before = self._inbound.visits[each], self._told.get(each, PublishedRecord(each.port, each.inner))
            now = PublishedRecord(each.port, each.inner, visits.requests, visits.turned_away, visits.received, visits.sent)
            self._told[each] = now
            records.append(_since(before, now))
        with self._lock:
            reasons, self._reasons = self._reasons, {}
        for used in records:
            counts: Facts = {"requests": used.requests, "turned_away": used.turned_away, "received": used.received, "sent": used.sent}
            self._gate.note("network.visited", {"target": f"{HOST}:{used.port}", "allowed": True, "port": used.inner, **counts})
        said = tuple(f"turned away at {where.address}: {why}" for where, why in tuple(reasons)[:_SHOWN_REASONS])
        return tuple(records), said

    def close(self) -> None:
        """Close the ports and every connection, and wait until that is done. Idempotent."""
        with suppress(RuntimeError):  # it has closed them already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _since(before: PublishedRecord, now: PublishedRecord) -> PublishedRecord:
    return replace(
        now,
        requests=now.requests - before.requests,
        turned_away=now.turned_away - before.turned_away,
        received=now.received - before.received,
        sent=now.sent - before.sent,
    )


def _listen(publication: Publication) -> socket.socket:
    """Return a listener on a port of this machine's loopback. Raises `PolicyError` if somebody else has the port."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run that are still closing do not count
        sock.bind((HOST, publication.port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            hint = f"end that program, or publish another port: {_other(publication.port)}:{publication.inner}"
            raise PolicyError(f"port {publication.port} of this machine is in use", hint=hint) from None
        raise LaunchFailed(f"port {publication.port} of this machine cannot be opened: {error.strerror}", hint="try another") from error
    return sock


def _other(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
