"""An exchange: one request of a client is let through, carried to its host, and answered.

The client may speak HTTP/1.1 or HTTP/2: an `Requester` is one request of either, and the way to answer it. A failure of one exchange is an
answer to its client, or a broken connection if the answer has begun; it touches no other exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.flows import Budgets, Flow, OverBudget, RequestRecord
from agent_sandbox.egress.http1 import Fields, MalformedHttp, RequestHead, ResponseHead
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.upstream import AnyUpstream, UpstreamConnection, Upstreams, said
from agent_sandbox.egress.web import Customs, Passage, refusal_response

_AGAIN = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"))  # a request with these can be sent twice without harm


class Requester(Protocol):
    """One request of a client, and the way to answer it."""

    head: RequestHead
    answered: bool  # the answer has begun
    http2: bool

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

    async def carry(self, asking: Requester, origin: Origin, flow: Flow) -> None:
        """Carry one request. The answer is complete afterwards, unless this raises: then the client's connection is to be broken."""
        request = flow.begin(RequestRecord(asking.head.method[:20].decode("ascii")))
        try:
            self.budgets.request(origin.name)
            passage = self.customs.admit(origin, asking.head)
        except OverBudget as error:
            await self.refuse(asking, flow, request, FlowRefused(429, str(error)))
            return
        except FlowRefused as error:
            if not error.withheld:
                request.name_path(asking.head.target)
            await self.refuse(asking, flow, request, error)
            return
        except Exception as error:  # what could not be judged or searched has not been cleared
            await self.refuse(asking, flow, request, _broken(error))
            return
        if not passage.notes:
            request.name_path(passage.judged.target)
        try:
            await _Exchange(self, asking, origin, flow, request, passage).run()
        except FlowRefused as error:
            await self.refuse(asking, flow, request, error)
        except OverBudget as error:
            await self.refuse(asking, flow, request, FlowRefused(429, str(error)))
        except OSError:
            raise  # the client has gone
        except Exception as error:
            await self.refuse(asking, flow, request, _broken(error))
        finally:
            flow.findings += [note for note in passage.notes if note not in flow.findings]
            flow.secrets += [name for name in passage.secrets if name not in flow.secrets]

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

    async def run(self) -> None:
        """Carry the request and its answer. Raises `FlowRefused`, `OverBudget`, and what a broken client connection raises."""
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
        if self.asking.head.length == 0:
            return b"", True
        if self.passage.flows:
            return b"", False
        while True:
            piece = await self.asking.read()
            self._count(sent=len(piece))
            if not piece:
                return self.passage.finish(), True
            if first := self.passage.feed(piece):
                return (first + self.passage.finish(), True) if self.asking.at_end() else (first, False)

    async def _through(self, upstream: AnyUpstream, first: bytes, ended: bool) -> None:
        """Send the request on one connection beyond, and its answer back. Raises `_Stale` if no answer came."""
        upload: asyncio.Task[None] | None = None
        keep = False
        try:
            try:
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
            if upload is not None:
                if not upload.done():
                    upload.cancel()
                    keep = False
                with suppress(asyncio.CancelledError, Exception):
                    await upload
            if not keep:
                upstream.whole = False
            self.shared.upstreams.put_back(upstream, keep=keep, http2=self.asking.http2)

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
                piece = await self.asking.read()
                self._count(sent=len(piece))
                onward = self.passage.feed(piece) if piece else self.passage.finish()
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

    async def _back(self, upstream: AnyUpstream, head: ResponseHead) -> None:
        """Send the answer back."""
        back = self.passage.response(head)
        self.request.status = head.status
        await self.asking.answer(back)
        while piece := await self._piece(upstream):
            self._count(received=len(piece))
            if piece := self.passage.receive(piece):
                await self.asking.send(piece)
        if rest := self.passage.received():
            await self.asking.send(rest)
        await self.asking.finish(self.passage.trailers(upstream.trailers))

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
