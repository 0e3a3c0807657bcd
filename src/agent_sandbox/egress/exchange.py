"""An exchange: one request of a client is let through, carried to its host, and answered.

The client may speak HTTP/1.1 or HTTP/2: an `Requester` is one request of either, and the way to answer it. A failure of one exchange is an
answer to its client, or a broken connection if the answer has begun; it touches no other exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.consent import ClientGone, Consent
from agent_sandbox.egress.flows import Budgets, Flow, OverBudget, RequestRecord
from agent_sandbox.egress.http1 import Fields, MalformedHttp, RequestHead, ResponseHead
from agent_sandbox.egress.inspection import USUAL_METHODS
from agent_sandbox.egress.recorder import AskedRequest, ExchangeRecorder, RecordedAnswers, Recording
from agent_sandbox.egress.rules import FlowRefused, Origin, allowing_rule, overriding, rules_for
from agent_sandbox.egress.upstream import AnyUpstream, UpstreamConnection, Upstreams, said
from agent_sandbox.egress.web import Customs, Passage, refusal_response
from agent_sandbox.policy.intents import canonical_intent, known_intent
from agent_sandbox.policy.network import only_reads

LONGEST_PATH = 4000  # of a path that is told
_AGAIN = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"))  # a request with these can be sent twice without harm


class Requester(Protocol):
    """One request of a client, and the way to answer it."""

    head: RequestHead
    answered: bool  # the answer has begun
    http2: bool

    @property
    def alive(self) -> bool:
        """Whether the client still waits for an answer, as far as is known."""

    async def read(self) -> bytes:
        """Return the next piece of the request's body; nothing at its end. Raises `FlowRefused` if it breaks, whatever the cause."""

    def at_end(self) -> bool:
        """Return whether the whole body has arrived and been read, without waiting."""

    async def answer(self, head: ResponseHead) -> None:
        """Begin the answer. A length of None or -1 means that it is not known yet."""

    async def send(self, piece: bytes) -> None:
        """Send a piece of the answer's body."""

    async def finish(self, trailers: Fields = ()) -> None:
        """End the answer. Trailers are sent where the protocol has them."""


Switch = Callable[[Requester, Passage, UpstreamConnection, ResponseHead, Flow], Awaitable[None]]


@dataclass(eq=False)
class Exchanges:
    """The rules, budgets and connections that the exchanges of one run share."""

    customs: Customs
    upstreams: Upstreams
    budgets: Budgets
    switch: Switch  # carries on after the protocol has changed to WebSocket
    consent: Consent
    recorder: ExchangeRecorder | None = None
    replay: RecordedAnswers | None = None  # answers come from a record, and nothing leaves
    tell: Callable[[dict[str, Any]], Awaitable[None]] | None = None  # is told of each request
    hold: bool = False  # requests that may change something at their host are not sent

    async def carry(self, asking: Requester, origin: Origin, flow: Flow) -> None:
        """Carry one request. The answer is complete afterwards, unless this raises: then the client's connection is to be broken."""
        request = flow.begin(RequestRecord(method_of(asking.head, searched=False)))
        try:
            self.budgets.request(origin.name)
            passage = self.customs.admit(origin, asking.head)
        except OverBudget as error:
            await self.refuse(asking, flow, request, FlowRefused(429, str(error)))
            return
        except FlowRefused as error:
            await self.refuse(asking, flow, request, self._told(asking.head, request, error))
            return
        except Exception as error:  # what could not be judged or searched has not been cleared
            await self.refuse(asking, flow, request, _broken(error))
            return
        request.method = method_of(asking.head, searched=True)
        if not passage.notes:
            request.name_path(passage.judged.target)
        limit = None
        if passage.intent:
            request.intent = canonical_intent(passage.intent)
            flow.rule = flow.rule or allowing_rule(rules_for(passage.rules, passage.intent), origin.name)
            why = f"the intent {request.intent!r} has expired"
            seconds = known_intent(passage.rules, passage.intent).seconds
            limit = asyncio.get_running_loop().call_later(seconds, partial(setattr, passage, "lapsed", why))
        exchange = _Exchange(self, asking, origin, flow, request, passage)
        try:
            await exchange.run()
        except FlowRefused as error:
            await self.refuse(asking, flow, request, error)
        except OverBudget as error:
            await self.refuse(asking, flow, request, FlowRefused(429, str(error)))
        except ClientGone as error:
            flow.refuse(str(error))
            raise
        except OSError:
            raise  # the client has gone
        except Exception as error:
            await self.refuse(asking, flow, request, _broken(error))
        finally:
            if limit is not None:
                limit.cancel()
            flow.findings += [note for note in passage.notes if note not in flow.findings]
            flow.secrets += [name for name in passage.secrets if name not in flow.secrets]
            if self.tell is not None:
                await self.tell(exchange.facts())

    def _told(self, head: RequestHead, request: RequestRecord, why: FlowRefused) -> FlowRefused:
        """Record a request that was refused before it was searched, and return the refusal, both without found data."""
        clears = self.customs.inspection.clears
        if not why.withheld:
            if not clears(str(why).encode()):
                why = FlowRefused(why.status, "the request was refused; why is withheld, because it holds data that must not leave")
            if clears(head.method, head.target.partition(b"?")[0]):
                request.method = method_of(head, searched=True)
                request.name_path(head.target)
        return why

    async def refuse(self, asking: Requester, flow: Flow, request: RequestRecord, why: FlowRefused) -> None:
        """Answer a request with a refusal. Raises OSError if its answer has begun."""
        flow.refuse(str(why))
        flow.findings += [note for note in why.findings if note not in flow.findings]
        if asking.answered:
            raise ConnectionAbortedError(str(why))
        request.status = why.status
        head, text = refusal_response(why.status, str(why))
        await asking.answer(head)
        await asking.send(text if asking.head.method != b"HEAD" else b"")
        await asking.finish()


@dataclass(eq=False)
class _Exchange:
    shared: Exchanges
    asking: Requester
    origin: Origin
    flow: Flow
    request: RequestRecord
    passage: Passage
    _recording: Recording | None = None
    _complete: bool = False  # all of the request has been read
    _left: bool = False  # something of it has been sent on

    async def run(self) -> None:
        """Carry the request and its answer. Raises `FlowRefused`, `OverBudget`, and what a broken client connection raises."""
        recorder, passage = self.shared.recorder, self.passage
        if self.shared.replay is not None:
            await self._answer_from(self.shared.replay)
            return
        path = self._said[1]
        methods = (self._said[0], *overriding(self.asking.head.fields))
        if self.shared.hold and (passage.judged.websocket or not all(only_reads(each, path) for each in methods)):
            await self._read_all()
            raise FlowRefused(403, f"a simulation does not send {self._said[0]}, which may change something at {self.origin}; --send would")
        await self._ask_for_host()
        if recorder is None or passage.judged.websocket:
            if recorder is not None:
                recorder.skip("WebSocket")
            await self._carry()
            return
        asked = self.asking.head
        coding = b", ".join(asked.values(b"content-encoding"))
        self._recording = recorder.begin(self.origin, asked.method, passage.written, asked.fields, coding)
        try:
            await self._carry()
        except BaseException:
            if not self._recording.ended:
                recorder.skip("an exchange that was refused, or broke off")
            raise
        finally:
            self._recording.drop()

    async def _answer_from(self, replay: RecordedAnswers) -> None:
        """Answer from a record. Raises `FlowRefused` for what is not in it."""
        if self.passage.judged.websocket:
            raise FlowRefused(403, "this run is answered from a record, and WebSocket is not recorded")
        asked = replay.asked(self.origin, self.asking.head.method, self.passage.written)
        await self._read_all(asked)
        found = await replay.ask(asked.key())
        what = f"{asked.method} {asked.origin}{self.passage.written.partition(b'?')[0].decode('ascii')}"
        if found is None:
            raise FlowRefused(403, f"this run is answered from a record, which holds no further {what} with this query and body")
        body = found.body if found.body is not None or found.received else b""
        if body is None:
            raise FlowRefused(403, f"this run is answered from a record, which does not hold the body of {what}: {found.why}")
        back = self.passage.response(ResponseHead(found.status, found.answered, len(body)))
        self.request.status = found.status
        self._count(received=len(body))
        await self.asking.answer(back)
        await self.asking.send(self.passage.receive(body) + self.passage.received())
        await self.asking.finish(self.passage.trailers(found.trailers))

    async def _read_all(self, asked: AskedRequest | None = None) -> None:
        """Read and search the body of a request that is not sent."""
        while self.asking.head.length != 0 and (piece := await self.asking.read()):
            self._count(sent=len(piece))
            self.passage.feed(piece)
            if asked is not None:
                asked.feed(piece)
        self.passage.finish()

    @property
    def _said(self) -> tuple[str, str]:
        """The method, and the path without the query."""
        return self.passage.judged.method.decode("ascii"), self.passage.written.partition(b"?")[0].decode("ascii")

    @property
    def _shown(self) -> tuple[str, bytes]:
        """The method and the target, for whoever is asked. A target in which something was found is withheld."""
        return self.asking.head.method.decode("ascii"), b"" if self.passage.notes else self.passage.judged.target

    def facts(self) -> dict[str, Any]:
        """Return what is told of this request."""
        method, path = self._said
        told = "" if self.passage.notes or len(path) > LONGEST_PATH else path
        where = {"name": self.origin.name, "port": self.origin.port, "tls": self.origin.tls}
        return {**where, "method": method[:40], "path": told, "left": self._left, "secrets": self.passage.secrets[:20]}

    async def _carry(self) -> None:
        first, ended = await self._beginning()
        again = ended and self.asking.head.method in _AGAIN
        upstream = self.shared.upstreams.waiting(self.origin, http2=self.asking.http2)
        if upstream is not None:
            try:
                await self._through(upstream, first, ended)
                return
            except _Stale as stale:
                if not again:
                    raise FlowRefused(502, str(stale)) from None
        upstream = await self.shared.upstreams.open(self.origin, http2=self.asking.http2)
        try:
            await self._through(upstream, first, ended)
        except _Stale as stale:
            raise FlowRefused(stale.status, str(stale)) from None

    async def _beginning(self) -> tuple[bytes, bool]:
        """Return what may go on of the body as soon as something may, and whether that is all of it."""
        await self._ask_about_findings()
        if self.asking.head.length == 0:
            self._complete = True
            return b"", True
        if self.passage.flows:
            return b"", False
        while True:
            piece = await self._read()
            if not piece:
                first, ended = self.passage.finish(), True
            elif first := self.passage.feed(piece):
                ended = self._complete = self.asking.at_end()
                first += self.passage.finish() if ended else b""
            else:
                continue
            await self._ask_about_findings()
            return first, ended

    async def _ask_for_host(self) -> None:
        """Wait until the host may be reached. Raises `FlowRefused`."""
        method, target = self._shown
        under = partial(rules_for, declared=self.passage.intent)
        self.passage.still = await self.shared.consent.host(
            self.origin.name, self.origin.port, lambda: self.asking.alive, method=method, target=target, under=under
        )

    async def _ask_about_findings(self) -> None:
        """Wait until what was found so far may leave. Raises `FlowRefused`."""
        for finding in self.passage.questions():
            try:
                await self.shared.consent.data(self.origin, *self._shown, finding, lambda: self.asking.alive)
            except FlowRefused as error:
                why = f"{finding.partition(' in ')[2]} holds data that somebody was asked about: {finding}; {error}"
                raise FlowRefused(error.status, why, withheld=True, findings=(f"ask: {finding}",)) from None

    async def _through(self, upstream: AnyUpstream, first: bytes, ended: bool) -> None:
        """Send the request on one connection beyond, and its answer back. Raises `_Stale` if no answer came."""
        upload: asyncio.Task[None] | None = None
        keep = False
        watching = None
        if (still := self.passage.still) is not None:
            watching = asyncio.ensure_future(self.shared.consent.watch(still, lambda why: self._withdraw(upstream, why)))
        try:
            self.passage.check_rules(self.shared.customs.rules)  # they may have changed while the host was dialled
            try:
                self._left = True
                upstream.begin(self.passage, first, len(first) if ended else self.asking.head.length, ended=ended)
                if not ended:
                    upload = asyncio.ensure_future(self._upload(upstream))
                head = await self._answer_of(upstream, upload)
            except TimeoutError:
                raise _Stale(504, f"{self.origin} did not answer in time") from None
            except MalformedHttp as error:
                raise _Stale(502, f"the answer of {self.origin} is malformed: {error}") from None
            except OSError as error:
                raise _Stale(502, f"{self.origin} closed the connection before it answered: {said(error)}") from None
            if head.status == 101:
                await self._switch(upstream, head)
                return
            keep = head.minor == 1 and b"close" not in b",".join(head.values(b"connection")).lower() and head.length != -1
            try:
                await self._back(upstream, head)
            except FlowRefused:
                if upload is not None and upload.done() and (cause := upload.exception()) and not isinstance(cause, _Sink):
                    raise cause from None  # the body was refused while the answer came
                raise
            if upload is not None:
                keep = keep and upload.done() and upload.exception() is None
        except BaseException:
            keep = False
            raise
        finally:
            if watching is not None:
                watching.cancel()
            if upload is not None:
                if not upload.done():
                    upload.cancel()
                    keep = False
                with suppress(asyncio.CancelledError, Exception):
                    await upload
            if not keep:
                upstream.whole = False
            self.shared.upstreams.put_back(upstream, keep=keep, http2=self.asking.http2)

    def _withdraw(self, upstream: AnyUpstream, why: str) -> None:
        """End an exchange in the middle: its approval was taken back."""
        self.flow.refuse(why)
        upstream.channel.abort()

    async def _answer_of(self, upstream: AnyUpstream, upload: asyncio.Task[None] | None) -> ResponseHead:
        """Return the answer's head. What refuses the body while it is sent is raised at once."""
        method, patience = self.passage.judged.method, self.shared.upstreams.patience
        if upload is None:
            return await upstream.response(method, patience.response)
        answer = asyncio.ensure_future(upstream.response(method, patience.tunnel))
        try:
            await asyncio.wait((answer, upload), return_when=asyncio.FIRST_COMPLETED)
            if upload.done() and (not answer.done() or answer.exception() is not None):
                error = upload.exception()
                if error is not None and not isinstance(error, _Sink):
                    raise error
            return await answer
        finally:
            answer.cancel()

    async def _upload(self, upstream: AnyUpstream) -> None:
        """Send the rest of the request's body."""
        while True:
            try:
                piece = await self._read()
                onward = self.passage.feed(piece) if piece else self.passage.finish()
                await self._ask_about_findings()
            except (FlowRefused, OverBudget):
                upstream.channel.abort()  # what was sent of it never becomes a whole request
                raise
            try:
                if onward or not piece:
                    await upstream.send(onward, last=not piece)
            except (OSError, TimeoutError, MalformedHttp) as error:
                raise _Sink from error
            if not piece:
                return

    async def _read(self) -> bytes:
        """Return the next piece of the request's body; nothing at its end."""
        piece = await self.asking.read()
        self._count(sent=len(piece))
        self._complete = not piece
        if self._recording is not None and piece:
            self._recording.sent(piece)
        return piece

    async def _back(self, upstream: AnyUpstream, head: ResponseHead) -> None:
        """Send the answer back."""
        back = self.passage.response(head)
        self.request.status = head.status
        if self._recording is not None:
            self._recording.answer(back)
        await self.asking.answer(back)
        while piece := await self._piece(upstream):
            self._count(received=len(piece))
            await self._give(self.passage.receive(piece))
        await self._give(self.passage.received())
        trailers = self.passage.trailers(upstream.trailers)
        await self.asking.finish(trailers)
        if self._recording is None:
            return
        if self._complete:
            await self._recording.end(trailers)
        elif self.shared.recorder is not None:
            self.shared.recorder.skip("an answer that came before the end of its request")

    async def _give(self, piece: bytes) -> None:
        if not piece:
            return
        if self._recording is not None:
            self._recording.received(piece)
        await self.asking.send(piece)

    async def _piece(self, upstream: AnyUpstream) -> bytes:
        try:
            return await upstream.read()
        except (TimeoutError, MalformedHttp, OSError) as error:
            raise FlowRefused(502, f"{self.origin} broke off in the middle of its answer: {said(error)}") from None

    async def _switch(self, upstream: AnyUpstream, head: ResponseHead) -> None:
        if not self.passage.judged.websocket or not isinstance(upstream, UpstreamConnection):
            raise FlowRefused(502, f"{self.origin} changed to another protocol, and was not asked to")
        self.request.status = 101
        await self.shared.switch(self.asking, self.passage, upstream, head, self.flow)

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        self.flow.sent += sent
        self.flow.received += received
        self.request.sent += sent
        self.request.received += received
        self.shared.budgets.count(self.origin.name, sent=sent, received=received)


def method_of(head: RequestHead, *, searched: bool) -> str:
    """Return the method of a request for a record. It may be any word, so one that was not searched is only named if it is usual."""
    return head.method[:20].decode("ascii") if searched or head.method in USUAL_METHODS else "(withheld)"


def _broken(error: Exception) -> FlowRefused:
    return FlowRefused(500, f"the request could not be judged, because the egress failed: {type(error).__name__}")


class _Stale(Exception):
    """A connection beyond gave no answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Sink(Exception):
    """The host beyond does not take the rest of a body. It may answer all the same."""


async def copy(source: SocketChannel, sink: SocketChannel, seconds: float, onward: Callable[[bytes], bytes]) -> None:
    """Pass bytes on until the source ends. `onward` returns what may pass, or raises."""
    while piece := await source.read(seconds):
        sink.write(onward(piece))
        await sink.drain(seconds)
    sink.write_end()
